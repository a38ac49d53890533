"""A GroupedLinear in training: when it asks, what it casts, caches, accumulates, recomputes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.modules.grouped_linear_cases import (
    EXPERTS,
    K,
    N,
    assert_equal,
    bound_loop,
    data,
    make,
    planes_seen,
    run,
    run_loop,
)
from tests.recipes import ALL, PLAIN, emulated

SPLIT = [5, 0, 33, 1]
_ASKED = []


def recording(role):
    _ASKED.append(role)
    return factories.mxfp8_factory(role)


def test_factory_is_asked_per_expert_in_order_and_never_again():
    """te-features §1.4, with our expert_index: the global one."""
    _ASKED.clear()
    module, (x, grad) = make(first_expert=8), data(SPLIT)
    module.output_quantizer_role = boundary = dfg.QuantizerRole("linear", "input", "next")
    for _ in range(3):
        run(module, x, SPLIT, emulated(recording), grad)

    def role(kind, expert):
        return dfg.QuantizerRole("grouped_linear", kind, "demo.fc1", expert)

    forward = [r for g in range(8, 12) for r in (role("input", g), role("weight", g), boundary)]
    assert _ASKED == forward + [r for g in range(8, 12) for r in (role("grad_output", g), None)]
    slots = module.get_quantizer_slots()
    assert [s.role for s in slots] == _ASKED
    assert [s.position for s in slots] == [*range(24, 36), *range(16, 24)]


def test_without_gradients_only_forward_slots_are_asked_and_rows_cast(monkeypatch):
    """Bug case 13: a column plane is made when it is first needed."""
    _ASKED.clear()
    module, (x, grad) = make(), data(SPLIT)
    recipe = emulated(recording)
    wanted = run(make(), x, SPLIT, recipe, grad)
    _ASKED.clear()
    seen = planes_seen(monkeypatch)
    module.eval()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        for first in (True, False):
            module(x, SPLIT, is_first_microbatch=first)
    assert len(_ASKED) == 3 * EXPERTS
    assert set(seen) == {("input", "rowwise"), ("weight", "rowwise")}
    module.train()
    assert_equal(run(module, x, SPLIT, recipe, grad, is_first_microbatch=False), wanted)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "current"])
def test_frozen_weights_make_no_columns_of_tokens(name, monkeypatch):
    """Bug cases 17 and 18, both directions."""
    (x, grad), recipe = data(SPLIT), emulated(ALL[name])
    wanted = run(make(), x, SPLIT, recipe, grad)
    module, seen = make(), planes_seen(monkeypatch)
    for weight in module.weights:
        weight.requires_grad_(False)
    got = run(module, x, SPLIT, recipe, grad)
    assert ("input", "columnwise") not in seen and ("grad_output", "columnwise") not in seen
    assert torch.equal(got[1], wanted[1]) and got[2:] == [None] * EXPERTS
    seen.clear()
    module = make()
    with dfg.autocast(recipe=recipe):
        module(x, SPLIT).backward(grad)  # x needs no gradient
    assert ("weight", "columnwise") not in seen and ("grad_output", "rowwise") not in seen
    assert_equal([w.grad for w in module.weights], wanted[2:])


def test_one_frozen_expert():
    (x, grad), recipe = data(SPLIT), emulated(factories.mxfp8_factory)
    wanted = run(make(), x, SPLIT, recipe, grad)
    module = make(fuse_wgrad_accumulation=True)
    module.weight2.requires_grad_(False)
    for weight in module.weights:
        if weight.requires_grad:
            weight.main_grad = torch.zeros(N, K)
    run(module, x, SPLIT, recipe, grad)
    for e, weight in enumerate(module.weights):
        assert e == 2 or torch.equal(weight.main_grad, wanted[2 + e])
    assert not hasattr(module.weight2, "main_grad")


@pytest.mark.parametrize("name", ["delayed", "delayed_children"])
def test_delayed_state_equals_a_loop_of_linears_over_steps(name):
    """One slot per expert and tensor; an expert without tokens keeps its input's history."""
    module = make()
    layers = bound_loop(module, *_first(SPLIT), ALL[name], data(SPLIT)[1])
    recipe = emulated(ALL[name])
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD([*module.parameters(), *parameters], lr=0.1)
    for step, split in enumerate((SPLIT, [0, 8, 8, 8], SPLIT, [2, 2, 2, 2])):
        x, grad = data(split, seed=step)
        x = x * 10**step
        assert_equal(run(module, x, split, recipe, grad), run_loop(layers, x, split, recipe, grad))
        optimizer.step()
    states = dict(module._delayed)
    assert len(states) == EXPERTS * (5 if name == "delayed" else 10)  # boundaries too
    for e, layer in enumerate(layers):
        for (direction, position, *rest), theirs in layer._delayed.items():
            per_expert = 3 if direction == "forward" else 2
            ours = states[direction, per_expert * e + position, *rest]
            assert torch.equal(ours.history, theirs.history), (e, direction, position)
            assert torch.equal(ours.scale, theirs.scale)
    kept = states["forward", 3, "input", *next(k[3:] for k in states)]
    assert kept.history.count_nonzero() == 2  # expert 1 had tokens in two of the steps


def _first(split):
    return data(split)[0], split


@pytest.mark.parametrize("name", sorted(ALL))
def test_cached_weights_equal_uncached_ones(name):
    (x, grad), recipe = data(SPLIT), emulated(ALL[name])
    cached, fresh = make(), make()
    for first in (True, False, False):
        got = run(cached, x, SPLIT, recipe, grad, is_first_microbatch=first)
        assert_equal(got, run(fresh, x, SPLIT, recipe, grad))
    torch.optim.SGD(cached.parameters(), lr=1.0).step()
    got = run(cached, x, SPLIT, recipe, grad, is_first_microbatch=False)
    assert not torch.equal(got[0], run(fresh, x, SPLIT, recipe, grad)[0])
    assert_equal(got[:1], run(cached, x, SPLIT, recipe, grad)[:1])


@pytest.mark.parametrize("name", ["identity", "mxfp8", "nvfp4", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_main_grad_adds_up_over_microbatches(name, dtype):
    """Bug case 19: accumulated in FP32, the flag set, then overwritten."""
    recipe = emulated(PLAIN[name])
    module, plain = make(fuse_wgrad_accumulation=True), make()
    for weight in module.weights:
        weight.main_grad = torch.zeros(N, K, dtype=dtype)
        weight.grad_added_to_main_grad = False
    wanted = [torch.zeros(N, K, dtype=dtype) for _ in module.weights]
    for seed in range(4):
        x, grad = data(SPLIT, seed=seed)
        for weight in module.weights:
            weight.grad, weight.grad_added_to_main_grad = None, False
        got = run(module, x, SPLIT, recipe, grad)
        assert all(w.grad_added_to_main_grad for w in module.weights)
        assert not any(g.any() for g in got[2:])
        for total, gradient in zip(wanted, run(plain, x, SPLIT, recipe, grad)[2:], strict=True):
            total.copy_(total + gradient)
    assert_equal([w.main_grad for w in module.weights], wanted)
    for weight in module.weights:
        weight.overwrite_main_grad = True
    run(module, x, SPLIT, recipe, grad)
    assert_equal([w.main_grad for w in module.weights], [w.grad.to(dtype) for w in plain.weights])


@pytest.mark.parametrize("name", sorted(ALL))
def test_delayed_weight_gradients_equal_immediate_ones(name):
    recipe, late, now = emulated(ALL[name]), make(delay_wgrad_compute=True), make()
    total = [torch.zeros(N, K) for _ in range(EXPERTS)]
    for seed in (1, 2):
        x, grad = data(SPLIT, seed=seed)
        total = [t + g for t, g in zip(total, run(now, x, SPLIT, recipe, grad)[2:], strict=True)]
        with dfg.autocast(recipe=recipe):
            late(x, SPLIT).backward(grad)
    assert all(w.grad is None for w in late.weights)
    late.backward_dw(), late.backward_dw()
    assert_equal([w.grad for w in late.weights], total)
    with pytest.raises(RuntimeError, match="backward_dw"):
        late.backward_dw()


@pytest.mark.parametrize("name", sorted(set(ALL) - {"delayed", "delayed_children"}))
def test_saving_the_original_input_changes_nothing(name):
    (x, grad), recipe = data(SPLIT), emulated(ALL[name])
    got = run(make(save_original_input=True), x, SPLIT, recipe, grad)
    assert_equal(got, run(make(), x, SPLIT, recipe, grad))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "guide", "current", "delayed", "identity"])
def test_recomputation_outside_of_autocast_uses_the_recipe_of_the_step(name, reentrant):
    """Bug cases 14 and 15."""
    from torch.utils.checkpoint import checkpoint

    recipe, (x, grad) = emulated(ALL[name]), data(SPLIT)
    plain, module = make(), make()
    for _ in range(2):
        wanted = run(plain, x, SPLIT, recipe, grad)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with dfg.autocast(recipe=recipe):
            y = checkpoint(module, leaf, SPLIT, use_reentrant=reentrant)
        y.backward(grad)
        assert_equal([y.detach(), leaf.grad, *(w.grad for w in module.weights)], wanted)
        torch.optim.SGD([*plain.parameters(), *module.parameters()], lr=0.1).step()
    for ours, theirs in zip(module._delayed.values(), plain._delayed.values(), strict=True):
        assert torch.equal(ours.history, theirs.history)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "guide", "identity", "block"])
def test_saved_tensors_hooks_see_every_buffer(name):
    """Bug case 40: packed to copies, with other memory in between."""
    recipe, (x, grad) = emulated(ALL[name]), data(SPLIT)
    wanted, module = run(make(), x, SPLIT, recipe, grad), make()
    packed = []

    def pack(t):
        packed.append(t)
        return t.clone()

    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with dfg.autocast(recipe=recipe):
            y = module(leaf, SPLIT)
    y.backward(grad)
    assert packed
    assert_equal([y.detach(), leaf.grad, *(w.grad for w in module.weights)], wanted)


@pytest.mark.parametrize("name", ["mxfp8", "delayed", "guide"])
def test_copies_train_alone(name):
    """Bug case 29: deepcopy and pickle after steps; the original does not move."""
    (x, grad), recipe = data(SPLIT), emulated(ALL[name])
    module = make()
    run(module, x, SPLIT, recipe, grad)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    before = copy.deepcopy(module.state_dict())
    twins = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    scales = {k: s.scale.clone() for k, s in module._delayed.items()}
    assert_equal(*(run(twin, x, SPLIT, recipe, grad) for twin in twins))
    torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=0.1).step()
    assert all(torch.equal(scales[k], s.scale) for k, s in module._delayed.items())
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


def test_state_dict_holds_the_experts_parameters():
    """Bug case 22: names of Transformer Engine, strict both ways."""
    module = make(bias=True)
    names = [f"{what}{e}" for what in ("weight", "bias") for e in range(EXPERTS)]
    assert list(module.state_dict()) == names
    other = dfg.GroupedLinear(EXPERTS, K, N)
    other.load_state_dict(module.state_dict(), strict=True)
    assert_equal(other.parameters(), module.parameters())


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_few_steps_learn(name):
    """Six steps with changing splits, the loss of each expert's targets falls."""
    torch.manual_seed(1)
    module, target = make(bias=True), torch.randn(EXPERTS, N, K) / 10
    optimizer, losses = torch.optim.Adam(module.parameters(), lr=2e-2), []
    for step in range(12):
        split = [[32, 0, 20, 12], [1, 40, 3, 20]][step % 2]
        x, _ = data(split, seed=step % 2)
        wanted = torch.cat([part @ w.t() for part, w in zip(x.split(split), target, strict=True)])
        optimizer.zero_grad()
        with dfg.autocast(recipe=emulated(ALL[name])):
            loss = (module(x, split) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[1] and losses[-2] < 0.7 * losses[0]
