"""Ranks that do unlike things in a step: no tokens, a skipped module, no work at all."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.distributed as dist

import dist_finegrain as dfg
from tests.distributed.launch import run_ranks
from tests.recipes import PLAIN, emulated

H = 64
NEVER = 99  # a step that is not reached

# Ranks that hash differently: lists of slots must be ordered alike all the same.
run_ranks = functools.partial(run_ranks, fresh=True)


def scales(module) -> dict:
    """Slot → (scale, history) of delayed scaling."""
    return {k: (s.scale.tolist(), s.history.tolist()) for k, s in module._delayed.items()}


def rows_of(rank_rows: int, factor: float) -> torch.Tensor:
    return torch.full((rank_rows, H), factor, requires_grad=True)


def one_rank_has_no_tokens():
    """Replicas of a Linear and of experts; rank 1 gets rows in the last step only."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    torch.manual_seed(0)
    linear = dfg.Linear(H, H, bias=False, name="fc")
    experts = dfg.GroupedLinear(2, H, H, bias=False, name="experts")
    parameters = [*linear.parameters(), *experts.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    found = []
    for step in range(3):
        rows = 8 if rank == 0 or step == 2 else 0
        x = rows_of(rows, 2.0**step)
        optimizer.zero_grad()
        with dfg.autocast(recipe=emulated(PLAIN["delayed"]), amax_reduction_group=group):
            y, z = linear(x), experts(x, [rows, 0])
        torch.autograd.backward([y, z], [torch.ones(rows, H), torch.ones(rows, H)])
        optimizer.step()
        empty = rows == 0 and not any(p.grad.count_nonzero() for p in parameters)
        is_right = (y.shape == z.shape == (rows, H)) and empty == (rows == 0)
        found.append((is_right, scales(linear), scales(experts)))
    return found


def test_rank_without_tokens_has_the_scales_of_the_others():
    """Bug case 3, across ranks: shapes, zero gradients, one history on both."""
    first, second = run_ranks(one_rank_has_no_tokens, 2)
    assert first == second and all(is_right for is_right, *_ in first)
    _, linear, experts = first[-1]
    assert linear["forward", 0, "input", "both", "e4m3"][1] == [0, 1, 2, 4]
    histories = [history for key, (_, history) in experts.items() if key[2] == "input"]
    assert histories == [[0, 1, 2, 4], [0, 0, 0, 0]]


def one_rank_skips_a_module(first_step):
    """Rank 1 runs ``fc`` from the first step on, and ``rare`` from ``first_step`` on."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    torch.manual_seed(0)
    layers = {name: dfg.Linear(H, H, bias=False, name=name) for name in ("fc", "rare")}
    parameters = [p for layer in layers.values() for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    results = []
    for step in range(4):
        with dfg.autocast(recipe=emulated(PLAIN["delayed"]), amax_reduction_group=group):
            y = layers["fc"](rows_of(16, 2.0**step))
            if rank == 0 or step >= first_step:
                x = torch.linspace(-3, 3, 16 * H).reshape(16, H).requires_grad_()
                y = y + layers["rare"](x * 2.0**step)
                results.append(y.detach().clone())
        y.sum().backward()
        optimizer.step()
    return [scales(layer) for layer in layers.values()], results[-1]


@pytest.mark.parametrize("first_step", [1, 3])
def test_module_that_a_rank_first_runs_later_starts_from_the_common_scale(first_step):
    """Its result is the one of the rank that ran it all along; scales and histories too."""
    (first, result_0), (second, result_1) = run_ranks(one_rank_skips_a_module, 2, first_step)
    assert first == second and torch.equal(result_0, result_1)
    assert first[1]["forward", 0, "input", "both", "e4m3"][1] == [3, 6, 12, 24]


def only_rank_zero_ever_runs_it():
    """What is kept of a module that rank 1 does not have goes when the module goes."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    fc = dfg.Linear(H, H, bias=False, name="fc")
    other = dfg.Linear(H, H, bias=False, name="other") if rank == 0 else None
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.0)
    kept, agreements = [], []
    for step in range(4):
        dfg.comm_report(reset=True)
        with dfg.autocast(recipe=emulated(PLAIN["delayed"]), amax_reduction_group=group):
            y = fc(rows_of(16, 1.0))
            if other is not None and step < 2:
                y = y + other(rows_of(16, 1.0))
        y.sum().backward()
        if step == 2:
            del other, y
            other = None
        optimizer.step()
        kept.append(len(dfg.stepping._steps.absent))
        agreements.append(dfg.comm_report().select(what="object").collectives)
    return kept, agreements


def test_lists_are_exchanged_only_when_they_change():
    """Once when a module appears, once when it is gone; not in each step between."""
    (none, first), (kept, second) = run_ranks(only_rank_zero_ever_runs_it, 2)
    assert none == [0, 0, 0, 0] and kept == [5, 5, 0, 0]
    assert first == second == [1, 0, 1, 0]


def only_rare_is_delayed(role):
    return PLAIN["delayed" if role is not None and role.name == "rare" else "mxfp8"](role)


def one_rank_knows_no_delayed_scale(first_step):
    """Rank 1 runs the only module with delayed scaling from ``first_step`` on."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    torch.manual_seed(0)
    layers = {name: dfg.Linear(H, H, bias=False, name=name) for name in ("fc", "rare")}
    optimizer = torch.optim.SGD([p for m in layers.values() for p in m.parameters()], lr=0.0)
    dfg.comm_report(reset=True)
    for step in range(4):
        with dfg.autocast(recipe=emulated(only_rare_is_delayed), amax_reduction_group=group):
            y = layers["fc"](rows_of(16, 1.0))
            if step >= (0 if rank == 0 and first_step != NEVER else first_step):
                y = y + layers["rare"](rows_of(16, 2.0**step))
        y.sum().backward()
        optimizer.step()
    return scales(layers["rare"]), dfg.comm_report()


@pytest.mark.parametrize("first_step", [1, 3, 4])
def test_rank_that_knows_no_delayed_scale_joins_the_reduction(first_step):
    (first, _), (second, report) = run_ranks(
        one_rank_knows_no_delayed_scale, 2, first_step, timeout=60
    )
    assert first["forward", 0, "input", "both", "e4m3"][1] == [1, 2, 4, 8]
    assert second == (first if first_step < 4 else {})
    assert report.select(what="object").collectives == 1


def test_where_no_rank_has_a_delayed_scale_only_that_is_agreed_on():
    for scales_, report in run_ranks(one_rank_knows_no_delayed_scale, 2, NEVER):
        assert not scales_
        assert {(r.kind, r.what): r.collectives for r in report.rows} == {("agreement", "hash"): 4}


def steps_of_unlike_ranks():
    """Ends of steps that each rank reaches from elsewhere; what is reduced, step by step."""
    groups, rank = [dist.new_group([0, 1]) for _ in range(2)], dist.get_rank()
    names = ("fc", "rare", "other")
    layers = {name: dfg.Linear(H, H, bias=False, name=name) for name in names}
    optimizer = torch.optim.SGD([p for m in layers.values() for p in m.parameters()], lr=0.0)
    kinds = []

    def step(*runs):
        dfg.comm_report(reset=True)
        for name, group in runs:
            with dfg.autocast(recipe=emulated(only_rare_is_delayed), amax_reduction_group=group):
                layers[name](rows_of(16, 1.0)).sum().backward()
        optimizer.step()
        kinds.append({(r.kind, r.what): r.collectives for r in dfg.comm_report().rows})

    first, second = groups
    both = [("fc", first), ("other", second)]
    step(*both[:: 1 if rank == 0 else -1])
    step(*both * (rank == 0))  # rank 1 has no data
    step(*both[rank:])
    step(*[("rare", first)] * rank, ("fc", first))
    step(("fc", None), ("other", None), *[("rare", None)] * rank)  # what left the groups
    step(*both, *[("rare", first)] * rank)
    layers.clear()  # what rank 0 was told of rare goes with its own modules
    gc.collect()
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    plain = torch.nn.Parameter(torch.ones(1))
    plain.grad = torch.ones(1)
    torch.optim.SGD([plain], lr=0.0).step()
    return kinds


def test_every_rank_ends_every_step_while_its_modules_live():
    """With data or without, in groups of the same ranks, and after the groups have gone."""
    for kinds in run_ranks(steps_of_unlike_ranks, 2, timeout=60):
        hashes = [found.get(("agreement", "hash"), 0) for found in kinds]
        assert hashes == [2, 2, 2, 2, 0, 2], kinds


def two_groups_one_idle():
    """Tensor-parallel groups {0, 1} and {2, 3} inside a group of all four; half of them rests."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 1, 2, 3])]
    rank = dist.get_rank()
    torch.manual_seed(0)
    layer = dfg.Linear(
        H, H, parallel_mode="column", tp_group=groups[rank // 2], sequence_parallel=True,
        bias=False, name="fc",
    )  # fmt: skip
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    alone = dfg.Linear(
        H, H, parallel_mode="row", tp_group=groups[rank // 2], bias=False, name="alone"
    )
    idle = torch.optim.SGD(alone.parameters(), lr=0.0)
    recipe = emulated(PLAIN["delayed"])
    # A module that two of the ranks never run, of which they know nothing.
    if rank < 2:
        with dfg.autocast(recipe=recipe):
            alone(torch.ones(16, H // 2, requires_grad=True)).sum().backward()
    idle.step()
    # A module that all have run, of which two skip a step.
    for step in range(3):
        if step != 1 or rank < 2:
            with dfg.autocast(recipe=recipe, amax_reduction_group=groups[2]):
                layer(rows_of(8, (1 + rank) * 2.0**step)).sum().backward()
        optimizer.step()
    return scales(layer), scales(alone)


def test_groups_at_rest_do_not_stop_the_others():
    """Groups {0, 1} active while {2, 3} are idle: it ends, with one scale on all four."""
    reports = run_ranks(two_groups_one_idle, 4, timeout=60)
    assert all(layer == reports[0][0] for layer, _ in reports)
    assert reports[0][0]["forward", 0, "input", "both", "e4m3"][1] == [0, 4, 2 * 2, 4 * 4]
    assert reports[0][1] == reports[1][1] and reports[0][1]
    assert not reports[2][1] and not reports[3][1]
