"""What ranks must agree on: factories, delayed scales, groups; and what refuses to start."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.distributed.launch import run_ranks
from tests.recipes import PLAIN, emulated


def message_of(function) -> str:
    """Type and text of what ``function`` raises; "" when it returns."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def column_linear(group, name="decoder.0.fc1", **options):
    torch.manual_seed(0)
    return dfg.Linear(
        64, 64, parallel_mode="column", tp_group=group, bias=False, name=name, **options
    )


def forward(module, factory, training=True, **autocast):
    x = torch.ones(16, 64, requires_grad=training)
    with torch.set_grad_enabled(training), dfg.autocast(recipe=emulated(factory), **autocast):
        return module(x)


def answers_by_rank(role, forward_differs):
    """E4M3, except on rank 1, where one direction's slots get E5M2."""
    is_gradient = role is not None and role.tensor_type == "grad_output"
    is_input = role is not None and role.tensor_type == "input"
    differs = dist.get_rank() == 1 and (is_input if forward_differs else is_gradient)
    dtype = torch.float8_e5m2 if differs else torch.float8_e4m3fn
    return dfg.Float8CurrentScalingQuantizer(dtype)


def raises_on_rank_one(role):
    if dist.get_rank() == 1:
        raise KeyError("no rule for this role")
    return dfg.IdentityQuantizer()


def disagreeing_ranks():
    group = dist.new_group([0, 1])
    results = []
    for forward_differs in (True, False):
        factory = functools.partial(answers_by_rank, forward_differs=forward_differs)
        results.append(message_of(lambda f=factory: forward(column_linear(group), f)))
    inference = functools.partial(answers_by_rank, forward_differs=False)
    results.append(message_of(lambda: forward(column_linear(group), inference, training=False)))
    results.append(message_of(lambda: forward(column_linear(group), raises_on_rank_one)))
    results.append(message_of(lambda: forward(column_linear(group), factories.mxfp8_factory)))
    return results


def test_ranks_whose_factories_answer_differently_all_raise():
    for rank, messages in enumerate(run_ranks(disagreeing_ranks, 2)):
        for message in messages[:2]:
            assert message.startswith("ValueError: the ranks of module 'decoder.0.fc1' resolved")
            assert "e4m3" in message and "e5m2" in message
        assert "linear|input|decoder.0.fc1" in messages[0]
        assert "linear|grad_output|decoder.0.fc1" in messages[1]
        assert messages[2] == ""
        assert ("KeyError: 'no rule" in messages[3]) and (
            messages[3].startswith("KeyError" if rank == 1 else "ValueError")
        )
        assert messages[4] == ""


def refusals():
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    alone = [dist.new_group([r]) for r in (0, 1)][rank]
    local = functools.partial(factories.delayed_scaling_factory, reduce_amax=False)
    delayed = PLAIN["delayed"]
    twins = torch.nn.ModuleList([column_linear(group), column_linear(group)])
    forward(twins[0], delayed)
    row = dfg.Linear(64, 64, parallel_mode="row", sequence_parallel=True, tp_group=group, name="r")
    return [
        message_of(lambda: forward(column_linear(group), local)),
        message_of(lambda: forward(column_linear(group, name=None), delayed)),
        message_of(lambda: forward(twins[1], delayed)),
        message_of(lambda: forward(column_linear(group), delayed, amax_reduction_group=alone)),
        message_of(lambda: row(torch.randn(7, 32))),
        message_of(
            lambda: dfg.Linear(64, 64, tp_group=group, parallel_mode="row")(torch.ones(2, 64))
        ),
    ]


def test_wrong_groups_names_and_shapes_are_refused_before_any_collective():
    """Bug case 30 (the wrong group is refused) and 42."""
    for messages in run_ranks(refusals, 2):
        for message, word in zip(
            messages,
            (
                "reduce_amax=False in a group of 2",
                "needs named modules",
                "two modules have the name",
                "amax_reduction_group has ranks",
                "multiple of that",
                "must be 32",
            ),
            strict=True,
        ):
            assert word in message


def delayed_training(extra_on_rank_zero):
    """Histories of a column-parallel Linear whose shards have different amaxes."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    module = column_linear(group)
    extra = None
    if extra_on_rank_zero and rank == 0:
        extra = dfg.Linear(8, 8, name="only.here")
        extra.quantization_group = lambda: None
    with torch.no_grad():
        module.weight.mul_(1 + 7 * rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(3):
        forward(module, PLAIN["delayed"]).sum().backward()
        if extra is not None:
            with dfg.autocast(recipe=emulated(PLAIN["delayed"])):
                extra(torch.ones(2, 8)).sum().backward()
            for slot in extra._delayed.values():
                slot.group = group  # as if this rank held one more module of the group
        optimizer.step()
    state = {k: (s.scale.tolist(), s.history.tolist()) for k, s in module._delayed.items()}
    return state, module.weight.abs().max().item()


@pytest.mark.parametrize("extra_on_rank_zero", [False, True])
def test_delayed_amaxes_agree_even_when_slot_lists_differ(extra_on_rank_zero):
    (first, amax_0), (second, amax_1) = run_ranks(delayed_training, 2, extra_on_rank_zero)
    assert first == second and amax_0 < amax_1
    key = next(k for k in first if k[2] == "weight")
    assert first[key][1] == [0.0, *[pytest.approx(amax_1)] * 3]


def copies_with_a_group():
    """Bug case 29 with a process group attached."""
    group = dist.new_group([0, 1])
    module = column_linear(group)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    forward(module, PLAIN["delayed"]).sum().backward()
    optimizer.step()
    before = {k: s.scale.clone() for k, s in module._delayed.items()}
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    (forward(twin, PLAIN["delayed"]) * 1000).sum().backward()
    optimizer.step()
    unchanged = all(torch.equal(s.scale, before[k]) for k, s in module._delayed.items())
    moved = any(not torch.equal(s.scale, before[k]) for k, s in twin._delayed.items())
    loaded = pickle.loads(pickle.dumps(module))
    without = message_of(lambda: forward(loaded, PLAIN["delayed"]))
    loaded.set_tensor_parallel_group(group)
    same = torch.equal(forward(loaded, PLAIN["delayed"]), forward(module, PLAIN["delayed"]))
    return twin.tp_group is group, unchanged, moved, without, same


def test_copies_share_the_group_and_pickles_drop_it():
    for shared, unchanged, moved, without, same in run_ranks(copies_with_a_group, 2):
        assert shared and unchanged and moved and same
        assert "set_tensor_parallel_group" in without


def evaluation_without_the_group():
    """Training reduces over a group; a validation forward names none; training goes on."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    module = dfg.Linear(64, 64, bias=False, name="decoder.0.fc1")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x = torch.full((16, 64), 1.0 + 9.0 * rank)
    recipe = emulated(PLAIN["delayed"])
    for _ in range(2):
        with dfg.autocast(recipe=recipe, amax_reduction_group=group):
            module(x).sum().backward()
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            module(x)
        optimizer.step()
    return {k: s.scale.item() for k, s in module._delayed.items()}


def test_evaluation_without_the_group_does_not_switch_the_reduction_off():
    first, second = run_ranks(evaluation_without_the_group, 2)
    assert first == second
    assert first["forward", 0, "input", "both", "e4m3"] == pytest.approx(44.8)


def one_rank_skips_its_forward():
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    module = dfg.Linear(64, 64, bias=False, name="decoder.0.fc1")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for step in range(3):
        if step != 1 or rank == 0:
            with dfg.autocast(recipe=emulated(PLAIN["delayed"]), amax_reduction_group=group):
                module(torch.full((16, 64), 2.0**step)).sum().backward()
        optimizer.step()
    return {k: s.history.tolist() for k, s in module._delayed.items()}


def test_rank_without_a_forward_joins_the_reduction():
    first, second = run_ranks(one_rank_skips_its_forward, 2)
    assert first == second
    assert first["forward", 0, "input", "both", "e4m3"] == [0, 1, 2, 4]


def copy_on_one_rank():
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    module = column_linear(group)
    average = copy.deepcopy(module) if rank == 0 else None
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    with torch.no_grad():
        twin.weight.mul_(1 + 9 * rank)
    for _ in range(2):
        forward(twin, PLAIN["delayed"]).sum().backward()
        optimizer.step()
    return {k: s.scale.item() for k, s in twin._delayed.items()}, average is None


def test_copy_that_one_rank_keeps_does_not_part_the_scales():
    (first, _), (second, _) = run_ranks(copy_on_one_rank, 2)
    assert first == second


def marks_and_mesh_bias():
    """Megatron's attributes after copies and moves; bias gradients of a DTensor Linear under SP."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group, rank = mesh["tp"].get_group(), dist.get_rank()
    options = {"parallel_mode": "row", "sequence_parallel": True, "name": "fc"}
    module = dfg.Linear(64, 64, tp_group=group, **options)
    meta = dfg.Linear(64, 64, tp_group=group, device="meta", **options).to_empty(device="cpu")
    marks = [(vars(m.weight), vars(m.bias)) for m in (module, copy.deepcopy(module), meta)]
    over_mesh = dfg.Linear(64, 64, tp_mesh=mesh["tp"], **options)
    y = over_mesh(torch.randn(16, 32))
    y.backward(torch.full_like(y, 1.0 + rank))
    return marks, over_mesh.bias.grad.to_local().unique().tolist()


def test_marks_survive_copies_and_mesh_biases_get_whole_gradients():
    for marks, bias_gradient in run_ranks(marks_and_mesh_bias, 2):
        for weight, bias in marks:
            assert weight["tensor_model_parallel"] and weight["partition_dim"] == 1
            assert bias == {"sequence_parallel": True}
        assert bias_gradient == [8 * 1.0 + 8 * 2.0]


def other_options_by_rank(role):
    length = 4 + dist.get_rank()
    return dfg.DelayedScalingRequest(amax_history_len=length)


def disagreeing_options():
    group = dist.new_group([0, 1])
    module = column_linear(group)

    def with_seed():
        recipe = emulated(factories.mxfp8_factory, rounding_seed=dist.get_rank())
        with dfg.autocast(recipe=recipe):
            module(torch.ones(16, 64))

    return [message_of(lambda: forward(module, other_options_by_rank)), message_of(with_seed)]


def test_ranks_with_other_requests_or_seeds_raise():
    for messages in run_ranks(disagreeing_options, 2):
        assert "amax_history_len=4" in messages[0] and "amax_history_len=5" in messages[0]
        assert "rounding_seed=0" in messages[1] and "rounding_seed=1" in messages[1]


def mesh_and_group():
    """A Linear over a DeviceMesh against the same over its process group."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results = []
    for mode in ("column", "row"):
        options = {"parallel_mode": mode, "name": "fc", "bias": mode == "row"}
        over_mesh = dfg.Linear(64, 64, tp_mesh=mesh["tp"], **options)
        over_group = dfg.Linear(64, 64, tp_group=mesh["tp"].get_group(), **options)
        with torch.no_grad():
            over_group.weight.copy_(over_mesh.weight.to_local())
        x = torch.randn(16, over_mesh.local_in_features)
        outputs = []
        for module in (over_mesh, over_group):
            with dfg.autocast(recipe=emulated(PLAIN["current"])):
                y = module(x)
            y.sum().backward()
            outputs.append(y)
        placements = [str(p) for p in over_mesh.weight.placements]
        grad = over_mesh.weight.grad
        results.append(
            (
                placements,
                tuple(over_mesh.weight.shape),
                isinstance(grad, DTensor),
                torch.equal(*outputs),
                torch.equal(grad.to_local(), over_group.weight.grad),
            )
        )
    return results


def test_tp_mesh_makes_dtensors_with_the_same_numbers():
    for column, row in run_ranks(mesh_and_group, 2):
        assert column[1:] == row[1:] == ((64, 64), True, True, True)
        assert "Shard(dim=0)" in column[0][0] or column[0][0] == "S(0)"
        assert "Shard(dim=1)" in row[0][0] or row[0][0] == "S(1)"
