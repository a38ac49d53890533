"""Activation recompute: recompute() and torch.utils.checkpoint give the bits of a run without."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.modules.training_cases import KINDS, Block, assert_same, data, gradients, states, step
from tests.recipes import ALL, PLAIN, emulated

FUNCTIONS = {"recompute": dfg.recompute, "checkpoint": checkpoint}
FORMATS = ("identity", "delayed", "delayed_children", "nvfp4_stochastic", "guide", "block")
_ASKED = []


def recording(role):
    _ASKED.append(role)
    return factories.mxfp8_factory(role)


def under(torch_autocast):
    """torch.autocast of BF16, or nothing."""
    if not torch_autocast:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def three_steps(plain, block, call, recipe, *, inside, torch_autocast=False):
    """Three SGD steps of both with gradients x1000, compared; ``inside``: backward in autocast.

    Both in the same steps: stochastic rounding draws by the step.
    """
    optimizer = torch.optim.SGD([*plain.parameters(), *block.parameters()], lr=1e-5)
    for seed in range(3):
        (x, grad), results = data(seed), []
        for module, run in ((plain, plain), (block, call)):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            with under(torch_autocast), dfg.autocast(recipe=recipe):
                y = run(leaf)
                if inside:
                    y.backward(1000 * grad.to(y.dtype))
            if not inside:
                y.backward(1000 * grad.to(y.dtype))
            results.append({"y": y.detach(), "dx": leaf.grad, **gradients(module)})
        assert_same(*reversed(results))
        optimizer.step()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensors"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_those_without(kind, name, function, reentrant, inside):
    """Bug case 14: y, dX, dW, scales and histories; history advances once per step."""
    recipe, plain, block = emulated(ALL[name]), Block(kind), Block(kind)
    call = functools.partial(FUNCTIONS[function], block, use_reentrant=reentrant)
    three_steps(plain, block, call, recipe, inside=inside)
    theirs = states(plain)
    assert bool(theirs) == name.startswith("delayed")
    assert_same(states(block), theirs)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensors"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["identity", "delayed", "mxfp8_fwd_nvfp4_bwd"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_autocast_around_is_restored_too(kind, name, function, reentrant):
    """Bug case 15: both contexts are left before backward; the nn.Linear inside stays BF16."""
    recipe, plain, block = emulated(ALL[name]), Block(kind), Block(kind)
    seen = []
    block.inner.register_forward_hook(lambda module, args, y: seen.append(y.detach().clone()))
    call = functools.partial(FUNCTIONS[function], block, use_reentrant=reentrant)
    three_steps(plain, block, call, recipe, inside=False, torch_autocast=True)
    assert_same(states(block), states(plain))
    assert len(seen) == 6 and all(y.dtype == torch.bfloat16 for y in seen)
    assert all(torch.equal(*seen[i : i + 2]) for i in (0, 2, 4))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_recompute_keeps_its_recipe_whatever_is_open_in_backward(kind, reentrant):
    """Bug case 15: two recipes in one step, the high-precision path, another autocast outside."""
    quantized, other = emulated(PLAIN["mxfp8"]), emulated(PLAIN["nvfp4"])
    (x, grad), wanted = data(), {}
    for recipe in (quantized, other, None):
        wanted[recipe] = step(Block(kind), x, grad, recipe)
    block = Block(kind)
    for recipe in (quantized, other, None):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        with dfg.autocast(recipe=other):  # the module runs under every recipe in this step
            block(x)
        if recipe is None:
            y = dfg.recompute(block, leaf, use_reentrant=reentrant)
        else:
            with dfg.autocast(recipe=recipe):
                y = dfg.recompute(block, leaf, use_reentrant=reentrant)
        with dfg.autocast(recipe=quantized if recipe is other else other):
            y.backward(grad)
        assert_same({"y": y.detach(), "dx": leaf.grad, **gradients(block)}, wanted[recipe])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_disabled_region_inside_stays_disabled(function):
    """An autocast that the checkpointed function opens itself is its own affair."""
    block, (x, grad) = Block("linear"), data()
    recipe = emulated(PLAIN["mxfp8"])
    wanted = step(Block("linear"), x, grad, None)

    def in_high_precision(x):
        with dfg.autocast(enabled=False):
            return block(x)

    call = functools.partial(FUNCTIONS[function], in_high_precision, use_reentrant=False)
    assert_same(step(block, x, grad, recipe, call), wanted)


def test_recomputation_in_another_thread():
    """autocast belongs to its thread; the one of recompute() follows the graph."""
    block, (x, grad) = Block("linear"), data()
    recipe, leaf = emulated(PLAIN["mxfp8"]), x.clone().requires_grad_()
    wanted = step(Block("linear"), x, grad, recipe)
    with dfg.autocast(recipe=emulated(PLAIN["nvfp4"])):
        block(x)
    with dfg.autocast(recipe=recipe):
        y = dfg.recompute(block, leaf)
    thread = threading.Thread(target=y.backward, args=(grad,))
    thread.start()
    thread.join()
    assert_same({"y": y.detach(), "dx": leaf.grad, **gradients(block)}, wanted)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensors"])
def test_recomputation_changes_no_context_and_asks_nothing_again(reentrant):
    from dist_finegrain.context import current_frame

    _ASKED.clear()
    block, (x, grad) = Block("linear"), data()
    call = functools.partial(dfg.recompute, block, use_reentrant=reentrant)
    for _ in range(3):
        step(block, x, grad, emulated(recording), call)
    assert len(_ASKED) == 5
    assert current_frame().is_default


def test_no_autocast_and_a_disabled_one_are_one_recipe():
    """Both are the high-precision path: what is checkpointed there has only one to use."""
    block, (x, grad) = Block("linear"), data()
    wanted = step(Block("linear"), x, grad, None)
    with dfg.autocast(enabled=False):
        block(x)
    dfg.recompute(block, x.requires_grad_()).backward(grad)
    call = functools.partial(checkpoint, block, use_reentrant=False)
    assert_same(step(block, x, grad, None, call), wanted)


def test_arguments_are_torchs():
    block, (x, _) = Block("linear"), data()
    recipe, contexts = emulated(PLAIN["mxfp8"]), []

    def context_fn():
        contexts.append(1)
        return contextlib.nullcontext(), contextlib.nullcontext()

    with dfg.autocast(recipe=recipe):
        y = dfg.recompute(
            block, x, is_first_microbatch=True, context_fn=context_fn, preserve_rng_state=False
        )
    y.sum().backward()
    assert contexts and block.layer._weight_cache is not None
    with pytest.raises(TypeError, match="function is None; accepted: a callable"):
        dfg.recompute(None, x)
    with pytest.raises(ValueError, match="context_fn"):
        dfg.recompute(block, x, use_reentrant=True, context_fn=context_fn)
