"""Orders of steps that broke others: a module used twice, nested, tied, evaluated between steps."""

from __future__ import annotations

import io

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.context import current_frame
from tests.modules.layernorm_cases import MODULES, H, assert_same, make, run
from tests.recipes import ALL, PLAIN, emulated

STATELESS = sorted(set(ALL) - {"delayed", "delayed_children"})


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("kind", MODULES)
def test_validation_before_training_leaves_no_half_cached_weight(kind, name):
    """Bug case 13: the missing direction of each weight is made on demand."""
    recipe, x = emulated(ALL[name]), torch.randn(40, H)
    module, wanted = make(kind), run(make(kind), x, recipe)
    module.eval()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        for first in (True, False):
            assert torch.equal(module(x, is_first_microbatch=first), wanted["y"])
    module.train()
    assert_same(run(module, x, recipe, is_first_microbatch=False), wanted)


def test_shared_layer_nesting_and_exceptions():
    """Bug case 16: one MLP twice in a region, nested enabled=False, an exception inside."""
    module, x = make("mlp"), torch.randn(16, H)
    recipe, plain = emulated(factories.mxfp8_factory), make("mlp")(x)
    alone = run(make("mlp"), x, recipe)
    for _ in range(3):
        module.zero_grad()
        with pytest.raises(ZeroDivisionError), dfg.autocast(recipe=recipe):
            assert torch.equal(module(x), alone["y"])
            with dfg.autocast(enabled=False):
                assert torch.equal(module(x), plain)
                with dfg.autocast():
                    assert torch.equal(module(x), alone["y"])
            (module(x) + module(x)).sum().backward()
            module(module(x))
            raise ZeroDivisionError
        assert not current_frame().enabled and current_frame().recipe is None
        assert torch.equal(module(x), plain)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, 2 * alone[name])
    assert not torch.equal(alone["y"], plain)


@pytest.mark.parametrize("kind", MODULES)
def test_amax_of_a_module_used_twice_is_the_maximum_of_both_calls(kind):
    """Bug case 16: of what the norm gives, in a step with two uses."""
    module, x = make(kind, normalization="RMSNorm", eps=1.0), torch.randn(16, H)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with dfg.autocast(recipe=emulated(PLAIN["delayed"])):
        (module(5 * x) + module(x)).sum().backward()
    optimizer.step()
    first = module.fc1 if kind == "mlp" else module
    slot = next(s for k, s in first._delayed.items() if k[2] == "input")
    amaxes = [
        torch.nn.functional.rms_norm(v, (H,), module.layer_norm_weight, 1.0).abs().max()
        for v in (x, 5 * x)
    ]
    assert slot.history[-1] == amaxes[1] > amaxes[0]


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("kind", MODULES)
def test_eval_and_train_alternate_while_rows_change(kind, name):
    """Bug case 37, without torch.compile: no direction, size or recipe of the call before stays."""
    module, recipe = make(kind), emulated(ALL[name])
    for rows in (32, 48, 32, 17):
        x = torch.randn(rows, H)
        wanted = run(make(kind), x, recipe)
        module.eval()
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            assert torch.equal(module(x), wanted["y"])
        assert_same(run(module, x, recipe), wanted)  # eval(), with gradients
        module.train()
        assert_same(run(module, x, recipe), wanted)
        assert torch.equal(module(x), make(kind)(x))


def two_formats(role):
    is_a = role is not None and role.name.startswith("a")
    return factories.mxfp8_factory(role) if is_a else factories.row_scaling_factory(role)


def test_tied_mlps_over_steps_and_a_load():
    """Bug case 20: two formats of one Parameter; caches refresh after the step; one after load."""
    a, b = make("mlp", name="a", bias=False), make("mlp", name="b", bias=False)
    tied = ("fc1_weight", "fc2_weight")
    for name in tied:
        setattr(b, name, getattr(a, name))
    recipe, x = emulated(two_formats), torch.randn(16, H)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
    for first in (True, False):
        singles = [{k: v.clone() for k, v in run(m, x, recipe).items()} for m in (a, b)]
        a.zero_grad(), b.zero_grad()
        with dfg.autocast(recipe=recipe):
            y = [m(x, is_first_microbatch=first) for m in (a, b)]
        for got, single in zip(y, singles, strict=True):
            assert torch.equal(got, single["y"])
        assert not torch.equal(*y)
        sum(y).sum().backward()
        for name in tied:
            wanted = singles[0][name] + singles[1][name]
            torch.testing.assert_close(getattr(a, name).grad, wanted)
        optimizer.step()
    model, file = torch.nn.ModuleDict({"a": a, "b": b}), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    values = {name: getattr(a, name).detach().clone() for name in tied}
    with torch.no_grad():
        for name in tied:
            getattr(a, name).zero_()
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)
    model.double().float()
    for name in tied:
        assert getattr(a, name) is getattr(b, name)
        assert torch.equal(getattr(b, name), values[name])
    assert b.fc1.weight is a.fc1_weight


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_every_microbatch_reaches_main_grad(kind, delay):
    """Bug case 19: BF16 weights, FP32 main_grad, the flag cleared once per step."""
    recipe = emulated(factories.mxfp8_factory)
    options = {"bias": False, "dtype": torch.bfloat16}
    module = make(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, **options)
    plain = make(kind, **options)
    weights = {n: p for n, p in module.named_parameters() if n.endswith("weight") and p.dim() == 2}
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
    total = {name: torch.zeros(weight.shape) for name, weight in weights.items()}
    largest = {name: torch.zeros(weight.shape) for name, weight in weights.items()}
    for _ in range(4):
        x = torch.randn(16, H).bfloat16()
        run(module, x, recipe)
        if delay:
            module.backward_dw()
        gradients = run(plain, x, recipe)
        for name in weights:
            total[name] += gradients[name]
            largest[name] += gradients[name].float().abs()
    for name, weight in weights.items():
        assert weight.grad_added_to_main_grad
        # The plain gradients are rounded to BF16, the ones added up in FP32 are not.
        assert ((weight.main_grad - total[name]).abs() <= 2.0**-8 * largest[name] + 1e-6).all()
