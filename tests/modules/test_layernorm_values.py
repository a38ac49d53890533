"""What LayerNormLinear and LayerNormMLP compute: against torch.nn, plain against hybrid."""

from __future__ import annotations

import functools

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories, factory_zoo
from dist_finegrain.modules.activations import ACTIVATIONS
from tests.modules.layernorm_cases import MODULES, F, H, Plain, assert_same, make, run
from tests.recipes import ALL, PLAIN, emulated, same_format_hybrid

ZOO = sorted(
    name
    for name, value in vars(factory_zoo).items()
    if callable(value) and getattr(value, "__module__", "") == factory_zoo.__name__
    and not name.startswith("_")
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["disabled", "identity"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("kind", MODULES)
def test_high_precision_equals_torch_modules_over_three_steps(kind, normalization, how, dtype):
    """Bit for bit, except bias gradients: the same values, summed in another order."""
    module = make(kind, dtype, normalization=normalization)
    plain = Plain(module)
    recipe = emulated(factories.high_precision_factory) if how == "identity" else None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
    for step in range(3):
        x = torch.randn(24, H, dtype=dtype)
        grad = torch.randn(24, F if kind == "linear" else H, dtype=dtype)
        got = run(module, x, recipe, grad)
        plain.zero_grad()
        x.requires_grad_()
        y = plain(x)
        y.backward(grad)
        wanted = {"y": y.detach(), "dx": x.grad}
        for name, parameter in plain.ours_by_name.items():
            wanted[name] = parameter.grad
            if name.endswith("bias") and not name.startswith("layer_norm"):
                torch.testing.assert_close(got[name], parameter.grad, rtol=1e-2, atol=1e-2)
                parameter.grad.copy_(got[name])
        assert_same({name: got[name] for name in wanted}, wanted)
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, plain.ours_by_name[name]), (step, name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_torch_modules(activation):
    module = make("mlp", activation=activation, bias=False)
    plain, x = Plain(module), torch.randn(24, H)
    assert_same(
        {k: v for k, v in run(module, x, None).items() if k in ("y", "dx")},
        {k: v for k, v in run(plain, x, None).items() if k in ("y", "dx")},
    )


@pytest.mark.parametrize("name", sorted(PLAIN))
@pytest.mark.parametrize("kind", MODULES)
def test_same_format_as_plain_and_as_hybrid(kind, name):
    x = torch.randn(64, H)
    plain = run(make(kind, activation="swiglu") if kind == "mlp" else make(kind), x,
                emulated(PLAIN[name]))  # fmt: skip
    twice = emulated(functools.partial(same_format_hybrid, factory=PLAIN[name]))
    module = make(kind, activation="swiglu") if kind == "mlp" else make(kind)
    assert_same(run(module, x, twice), plain)


@pytest.mark.parametrize("kind", MODULES)
def test_quantized_layer_is_linear_after_a_norm(kind):
    """The same path as Linear: its planes, results and gradients, bit for bit."""
    recipe, x = emulated(ALL["guide"]), torch.randn(32, H)
    options = {"activation": "swiglu"} if kind == "mlp" else {}
    module = make(kind, **options, name="demo.fc1" if kind == "linear" else "demo")
    plain = Plain(module)
    for key, layer in list(plain.layers.items()):
        n, k = layer.weight.shape
        name = "demo." + ("fc1" if key == "linear" else key.rstrip("_"))
        plain.layers[key] = dfg.Linear(k, n, name=name)
        plain.layers[key].load_state_dict(layer.state_dict())
    leaf = x.clone().requires_grad_()
    with dfg.autocast(recipe=recipe):
        y = plain(leaf)
    y.sum().backward()
    got = run(module, x, recipe)
    assert torch.equal(got["y"], y) and torch.equal(got["dx"], leaf.grad)
    assert torch.equal(got["layer_norm_weight"], plain.norm.weight.grad)
    for key, layer in plain.layers.items():
        assert torch.equal(got[key.replace("linear", "") + "weight"], layer.weight.grad)
        assert torch.equal(got[key.replace("linear", "") + "bias"], layer.bias.grad)


@pytest.mark.parametrize("name", [*ZOO, "guide", "delayed", "delayed_children"])
@pytest.mark.parametrize("kind", MODULES)
def test_every_zoo_recipe_trains_a_step(kind, name):
    factory = ALL.get(name) or getattr(factory_zoo, name)
    module, x = make(kind, torch.bfloat16, normalization="RMSNorm"), torch.randn(2, 32, H)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    grad = torch.randn(2, 32, F if kind == "linear" else H).bfloat16()
    exact = run(module, x.bfloat16(), None, grad)
    for _ in range(2):  # delayed scaling has its scales in the second step
        got = run(module, x.bfloat16(), emulated(factory), grad)
        optimizer.step()
    assert all(g.isfinite().all() and g.count_nonzero() for g in got.values())
    cosine = torch.nn.functional.cosine_similarity
    for key in got:
        assert cosine(got[key].float().flatten(), exact[key].float().flatten(), dim=0) > 0.95, key


@pytest.mark.parametrize("kind", MODULES)
def test_outputs_in_transformer_engines_order(kind):
    x = torch.randn(8, H)
    plain = make(kind)
    y = plain(x)
    last = plain.bias if kind == "linear" else plain.fc2_bias
    normed = plain._norm(x, plain.layer_norm_weight, plain.layer_norm_bias)
    both = make(kind, return_bias=True, return_layernorm_output=True)(x)
    assert torch.allclose(both[0] + last, y) and torch.equal(both[1], last)
    assert torch.equal(both[2], normed) and len(both) == 3
    gathered = {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
    pair = make(kind, **gathered)(x)
    assert torch.equal(pair[0], y) and torch.equal(pair[1], normed) and len(pair) == 2
    assert torch.equal(make(kind, return_bias=True)(x)[1], last)


@pytest.mark.parametrize("kind", MODULES)
def test_gradient_through_the_returned_norm_adds_up(kind):
    module, x = make(kind, return_layernorm_output=True), torch.randn(8, H, requires_grad=True)
    y, normed = module(x)
    total = torch.autograd.grad(y.sum() + 2 * normed.sum(), x, retain_graph=True)[0]
    parts = [torch.autograd.grad(t.sum(), x, retain_graph=True)[0] for t in (y, normed)]
    torch.testing.assert_close(total, parts[0] + 2 * parts[1])


@pytest.mark.parametrize("kind", MODULES)
def test_torch_autocast_of_fp32_parameters(kind):
    """The norm runs in FP32 and everything after it in BF16; gradients have their own dtypes."""
    module, x = make(kind), torch.randn(16, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(module, x, emulated(factories.mxfp8_factory))
        mixed = run(module, x.bfloat16(), emulated(factories.mxfp8_factory))
    assert got.pop("y").dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in got.values())
    assert mixed["y"].dtype == mixed["dx"].dtype == torch.bfloat16
