"""Orders of steps that broke others: experts used twice, nested, tied, evaluated between."""

from __future__ import annotations

import io

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.context import current_frame
from tests.modules.grouped_linear_cases import (
    EXPERTS,
    K,
    N,
    assert_equal,
    data,
    make,
    planes_seen,
    run,
)
from tests.recipes import ALL, PLAIN, emulated

SPLIT = [5, 0, 33, 1]
STATELESS = sorted(set(ALL) - {"delayed", "delayed_children"})


@pytest.mark.parametrize("name", STATELESS)
def test_validation_before_training_leaves_no_half_cached_weight(name):
    """Bug case 13: the missing direction is made on demand, the other one is not made again."""
    recipe, (x, grad) = emulated(ALL[name]), data(SPLIT)
    module, wanted = make(), run(make(), x, SPLIT, recipe, grad)
    module.eval()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        for first in (True, False):
            module(x, SPLIT, is_first_microbatch=first)
    module.train()
    with pytest.MonkeyPatch.context() as patch:
        seen = planes_seen(patch)
        got = run(module, x, SPLIT, recipe, grad, is_first_microbatch=False)
    assert_equal(got, wanted)
    assert ("weight", "columnwise") in seen and ("weight", "rowwise") not in seen


def test_shared_experts_nesting_and_exceptions():
    """Bug case 16: one layer twice in a region, nested enabled=False, an exception inside."""
    module, (x, _) = make(bias=True, n=K), data(SPLIT)
    recipe, plain = emulated(factories.mxfp8_factory), make(bias=True, n=K)(x, SPLIT)
    alone = run(make(bias=True, n=K), x, SPLIT, recipe, torch.ones(sum(SPLIT), K))
    for _ in range(3):
        module.zero_grad()
        with pytest.raises(ZeroDivisionError), dfg.autocast(recipe=recipe):
            quantized = module(x, SPLIT)
            with dfg.autocast(enabled=False):
                assert torch.equal(module(x, SPLIT), plain)
                with dfg.autocast():
                    assert torch.equal(module(x, SPLIT), quantized)
            (module(x, SPLIT) + module(x, SPLIT)).sum().backward()
            module(module(x, SPLIT), SPLIT)
            raise ZeroDivisionError
        assert not current_frame().enabled and current_frame().recipe is None
        assert torch.equal(module(x, SPLIT), plain)
        assert torch.equal(quantized, alone[0])
        assert_equal([w.grad for w in module.weights], [2 * g for g in alone[2 : 2 + EXPERTS]])
    assert not torch.equal(quantized, plain)


def test_amax_of_experts_used_twice_is_the_maximum_of_both_calls():
    """Bug case 16: the larger of two uses in a step; an expert may run in one of them only."""
    module, (x, grad) = make(), data(SPLIT)
    second = [0, 6, 33, 0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with dfg.autocast(recipe=emulated(PLAIN["delayed"])):
        y = module(x, SPLIT), module(5 * x, second)
    torch.cat(y).backward(torch.cat((grad, grad)))
    optimizer.step()
    slots = [s for k, s in sorted(module._delayed.items()) if k[2] == "input"]
    parts = zip(x.split(SPLIT), (5 * x).split(second), strict=True)
    for slot, pair in zip(slots, parts, strict=True):
        assert slot.history[-1] == torch.cat(pair).abs().max()


@pytest.mark.parametrize("name", STATELESS)
def test_eval_and_train_alternate_while_rows_change(name):
    """Bug case 37, without torch.compile: no direction, size or recipe of the call before stays."""
    module, recipe = make(), emulated(ALL[name])
    for step, split in enumerate(([16, 0, 8, 8], [16, 16, 0, 16], [0, 0, 48, 0], [8, 8, 8, 8])):
        x, grad = data(split, seed=step)
        wanted = run(make(), x, split, recipe, grad)
        module.eval()
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            assert torch.equal(module(x, split), wanted[0])
        assert_equal(run(module, x, split, recipe, grad), wanted)  # eval(), with gradients
        module.train()
        assert_equal(run(module, x, split, recipe, grad), wanted)
        with dfg.autocast(enabled=False):
            assert torch.equal(module(x, split), make()(x, split))


# Tied weights.
def two_formats(role):
    is_a = role is not None and role.name == "a"
    return factories.mxfp8_factory(role) if is_a else factories.row_scaling_factory(role)


def test_layers_that_share_experts_add_their_gradients():
    """Bug case 20: two formats of one Parameter; caches refresh after the step; one after load."""
    a, b = make(name="a"), make(name="b")
    for e, weight in enumerate(a.weights):
        setattr(b, f"weight{e}", weight)
    recipe, (x, grad) = emulated(two_formats), data(SPLIT)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.5)
    for first in (True, False):
        singles = [run(m, x, SPLIT, recipe, grad)[2:] for m in (a, b)]
        a.zero_grad()
        with dfg.autocast(recipe=recipe):
            y = [m(x, SPLIT, is_first_microbatch=first) for m in (a, b)]
        assert_equal(y, [run(m, x, SPLIT, recipe, grad)[0] for m in (a, b)])
        a.zero_grad()
        torch.cat(y).backward(torch.cat((grad, grad)))
        for weight, *both in zip(a.weights, *singles, strict=True):
            torch.testing.assert_close(weight.grad, both[0] + both[1])
        optimizer.step()
    model, file = torch.nn.ModuleDict({"a": a, "b": b}), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    values = [w.detach().clone() for w in a.weights]
    with torch.no_grad():
        for weight in a.weights:
            weight.zero_()
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_equal(b.weights, values)
    assert all(p is q for p, q in zip(a.weights, b.weights, strict=True))
    model.double().float()
    assert all(p is q for p, q in zip(a.weights, b.weights, strict=True))
    assert_equal(a.weights, values)


@pytest.mark.parametrize("name", ["identity", "mxfp8", "row", "block", "nvfp4"])
def test_experts_of_one_layer_may_be_tied(name):
    """Bug case 20: two experts with one Parameter get the sum of their gradients."""
    (x, grad), recipe = data([5, 4, 33, 1]), emulated(PLAIN[name])
    apart, tied = make(), make()
    with torch.no_grad():
        apart.weight3.copy_(apart.weight1)
    tied.weight3 = tied.weight1
    wanted = run(apart, x, [5, 4, 33, 1], recipe, grad)
    got = run(tied, x, [5, 4, 33, 1], recipe, grad)
    assert_equal(got[:2], wanted[:2])
    torch.testing.assert_close(tied.weight1.grad, wanted[3] + wanted[5])
    assert len(list(tied.parameters())) == EXPERTS - 1


# main_grad.
@pytest.mark.parametrize("name", ["mxfp8", "row", "block"])
@pytest.mark.parametrize("delay", [False, True])
def test_every_microbatch_reaches_main_grad(name, delay):
    """Bug case 19: the flag is cleared once per step and never read as "added already"."""
    recipe = emulated(PLAIN[name])
    dtype = torch.bfloat16
    module, plain = (
        make(dtype, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay),
        make(dtype),
    )
    for weight in module.weights:
        weight.main_grad = torch.zeros(N, K)
        weight.grad_added_to_main_grad = False
    for seed in range(4):
        x, grad = data(SPLIT, dtype, seed=seed)
        run(module, x, SPLIT, recipe, grad)
        if delay:
            module.backward_dw()
    exact = [torch.zeros(N, K, dtype=torch.float64) for _ in module.weights]
    for seed in range(4):
        x, grad = data(SPLIT, dtype, seed=seed)
        wide = make().requires_grad_()
        with torch.no_grad():
            for mine, theirs in zip(wide.weights, plain.weights, strict=True):
                mine.copy_(theirs)
        gradients = run(wide, x.float(), SPLIT, recipe, grad.float())[2:]  # not rounded to BF16
        exact = [total + g.double() for total, g in zip(exact, gradients, strict=True)]
    for weight, wanted in zip(module.weights, exact, strict=True):
        assert weight.grad_added_to_main_grad
        assert (weight.main_grad.double() - wanted).norm() <= 1e-5 * wanted.norm()
