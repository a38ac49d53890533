"""Frozen tensors, gradient accumulation, delayed gradients, tied and split weights."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.formats import fused, fused_options
from dist_finegrain.modules import linear_function
from tests.modules.linear_cases import assert_equal, make, run
from tests.recipes import ALL, PLAIN, emulated


class Counting(dfg.Quantizer):
    """Identity that counts encodes per instance label."""

    counts: dict = {}

    def __init__(self, label):
        super().__init__()
        self.label = label

    def encode(self, x):
        self.counts[self.label] = self.counts.get(self.label, 0) + 1
        return (x.clone(),)

    def decode(self, parts, shape, dtype):
        return parts[0].to(dtype)


def counting_factory(role):
    kind = "boundary" if role is None else role.tensor_type
    return dfg.HybridQuantizer(
        rowwise_quantizer=Counting(f"{kind}.row"), columnwise_quantizer=Counting(f"{kind}.col")
    )


def test_frozen_weight_or_input_needs_no_columns():
    """Bug case 17: no columnwise work whose product nobody reads."""
    module, x = make(bias=False), torch.randn(16, 96)
    recipe = emulated(counting_factory)
    module.weight.requires_grad_(False)
    Counting.counts.clear()
    _, dx, dw, _ = run(module, x, recipe)
    assert dw is None and torch.equal(dx, torch.ones(16, 80) @ module.weight)
    assert Counting.counts == {
        "input.row": 1, "weight.row": 1, "weight.col": 1, "grad_output.row": 1,
    }  # fmt: skip
    module.weight.requires_grad_(True)
    Counting.counts.clear()
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()  # x needs no gradient
    assert Counting.counts == {
        "input.row": 1, "input.col": 1, "weight.row": 1, "grad_output.col": 1,
    }  # fmt: skip
    assert torch.allclose(module.weight.grad, torch.ones(80, 16) @ x, atol=1e-4)
    Counting.counts.clear()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        module(x)
    assert Counting.counts == {"input.row": 1, "weight.row": 1}


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(ALL))
def test_bias_gradient_is_the_sum_of_the_unquantized_gradient(
    name, dtype, is_compiled, monkeypatch
):
    """Against FP64: summed in FP32, rounded once; alone too, where no GEMM reads dY."""
    if is_compiled and (reason := fused.why_not(torch.device("cpu"))):
        pytest.skip(reason)
    if not is_compiled:
        monkeypatch.setattr(
            fused_options, "why_unavailable", lambda device: "plain torch was asked for"
        )
    sums, cast = [], fused.cast

    def recording(*args, **kwargs):
        made = cast(*args, **kwargs)
        sums.append(made.bias_grad)
        return made

    monkeypatch.setattr(fused, "cast", recording)
    x, grad = torch.randn(700, 96, dtype=dtype), (torch.randn(700, 80) + 0.5).to(dtype)
    exact, magnitude = grad.double().sum(0), grad.double().abs().sum(0)
    for is_alone in (False, True):
        module = make(dtype=dtype)
        module.weight.requires_grad_(not is_alone)
        sums.clear()
        with dfg.autocast(recipe=emulated(ALL[name])):
            module(x.requires_grad_(not is_alone)).backward(grad)
        got = module.bias.grad
        error = (got.double() - exact).abs()
        rounding = torch.finfo(dtype).eps / 2
        assert got.dtype == dtype
        assert (error <= 1e-6 * magnitude + rounding * exact.abs()).all()
        from_cast = [one for one in sums if one is not None]
        assert len(from_cast) == is_compiled
        assert not is_compiled or torch.equal(got, from_cast[0].to(dtype))


@pytest.mark.parametrize("name", ["identity", "mxfp8", "current"])
@pytest.mark.parametrize("fuse", [False, True])
def test_first_layer_trains_though_its_input_needs_no_gradient(name, fuse):
    """Bug case 18."""
    recipe, x = emulated(PLAIN[name]), torch.randn(16, 96)
    module, reference = make(bias=False, fuse_wgrad_accumulation=fuse), make(bias=False)
    if fuse:
        module.weight.main_grad = torch.zeros(80, 96)
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()
    wanted = run(reference, x, recipe)[2]
    assert torch.equal(module.weight.main_grad if fuse else module.weight.grad, wanted)


@pytest.mark.parametrize("name", ["identity", "mxfp8", "delayed", "row"])
@pytest.mark.parametrize("flag", [False, True])
def test_main_grad_adds_up_over_microbatches(name, flag):
    """Bug case 19: four microbatches into an FP32 main_grad, Megatron's flag cleared per step."""
    recipe = emulated(PLAIN[name])
    fused = make(dtype=torch.bfloat16, bias=False, fuse_wgrad_accumulation=True)
    plain = make(dtype=torch.bfloat16, bias=False)
    fused.weight.main_grad = torch.zeros(80, 96)
    if flag:
        fused.weight.grad_added_to_main_grad = False
    total = torch.zeros(80, 96, dtype=torch.float64)
    for _ in range(4):
        x = torch.randn(16, 96, dtype=torch.bfloat16)
        with dfg.autocast(recipe=recipe):
            fused(x).sum().backward()
        if fused.weight.grad is not None:  # Megatron's hook
            assert flag and fused.weight.grad.count_nonzero() == 0
            assert fused.weight.grad_added_to_main_grad
            fused.weight.grad, fused.weight.grad_added_to_main_grad = None, False
        total += run(plain, x, recipe)[2].double()
    error = (fused.weight.main_grad.double() - total).norm() / total.norm()
    assert error < 2.0**-8  # plain gradients were rounded to BF16, main_grad was not
    fused.weight.overwrite_main_grad = True
    with dfg.autocast(recipe=recipe):
        fused(x).sum().backward()
    error = (fused.weight.main_grad - plain.weight.grad.float()).norm()
    assert error < 2.0**-8 * plain.weight.grad.norm()


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ALL))
def test_wgrad_is_computed_into_main_grad(name, dtype, overwrites, monkeypatch):
    """gemm() gets main_grad itself as ``out``; the product is added in FP32 and rounded once."""
    products, gemm = [], linear_function.gemm

    def recording(kernel, gemm_name, *args, out=None, accumulate=False, **options):
        if gemm_name == "wgrad":
            products.append(gemm(kernel, gemm_name, *args[:2], torch.float32, **options))
            assert out is module.weight.main_grad and accumulate != overwrites
        return gemm(kernel, gemm_name, *args, out=out, accumulate=accumulate, **options)

    monkeypatch.setattr(linear_function, "gemm", recording)
    module = make(bias=False, fuse_wgrad_accumulation=True)
    old = torch.randn(80, 96).to(dtype)
    module.weight.main_grad = old.clone()
    module.weight.overwrite_main_grad = overwrites
    with dfg.autocast(recipe=emulated(ALL[name])):
        module(torch.randn(16, 96)).sum().backward()
    total = products[0] if overwrites else old.float() + products[0]
    assert torch.equal(module.weight.main_grad, total.to(dtype)) and module.weight.grad is None


def test_main_grad_of_other_layouts_is_added_to():
    """A transposed one, or FP64: the product has main_grad's dtype, then it is added."""
    x = torch.randn(16, 96)
    wanted = run(make(bias=False), x, None)[2]
    for old in (torch.ones(96, 80).t(), torch.ones(80, 96, dtype=torch.float64)):
        module = make(bias=False, fuse_wgrad_accumulation=True)
        module.weight.main_grad = old
        module(x).sum().backward()
        assert torch.allclose(old, 1 + wanted.to(old.dtype))


@pytest.mark.parametrize("main_grad", ["missing", None, torch.zeros(1, 80, 96)])
def test_fused_accumulation_without_a_fitting_main_grad_is_refused(main_grad):
    module = make(fuse_wgrad_accumulation=True)
    if not isinstance(main_grad, str):
        module.weight.main_grad = main_grad
    with pytest.raises(ValueError, match=r"no main_grad of its shape \(80, 96\)"):
        module(torch.randn(4, 96))


@pytest.mark.parametrize("name", sorted(ALL))
def test_delayed_weight_gradient_equals_the_immediate_one(name):
    recipe = emulated(ALL[name])
    late, now = make(delay_wgrad_compute=True), make()
    total = torch.zeros_like(now.weight)
    for seed in (1, 2):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed))
        total += run(now, x, recipe)[2]
        with dfg.autocast(recipe=recipe):
            late(x).sum().backward()
    assert late.weight.grad is None
    late.backward_dw()
    late.backward_dw()
    assert torch.equal(late.weight.grad, total)
    with pytest.raises(RuntimeError, match="backward_dw"):
        late.backward_dw()


def test_backward_dw_ignores_torch_autocast_and_keeps_other_gradients():
    x = torch.randn(16, 96)
    late, now = make(delay_wgrad_compute=True), make()
    wanted = run(now, x, None)[2]
    late(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        late.backward_dw()
    assert torch.equal(late.weight.grad, wanted)
    fused = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.zeros(80, 96)
    fused.weight.grad_added_to_main_grad = False
    fused.weight.grad = torch.ones(80, 96)
    fused(x).sum().backward()
    fused.backward_dw()
    assert torch.equal(fused.weight.main_grad, wanted) and (fused.weight.grad == 1).all()
    fused.weight.requires_grad_(False)
    fused.backward_dw()


@pytest.mark.parametrize("name", sorted(set(ALL) - {"delayed", "delayed_children"}))
def test_saving_the_original_input_changes_nothing(name):
    recipe, x = emulated(ALL[name]), torch.randn(48, 96)
    assert_equal(run(make(save_original_input=True), x, recipe), run(make(), x, recipe))


def test_split_parameters_are_one_weight():
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(16, 96)
    split, whole = make(parameters_split=("query_", "key_")), make()
    with torch.no_grad():
        split.query_weight.copy_(whole.weight[:40])
        split.key_weight.copy_(whole.weight[40:])
    with dfg.autocast(recipe=recipe):
        y = split(x)
    y.sum().backward()
    wanted = run(whole, x, recipe)
    assert torch.equal(y, wanted[0])
    assert torch.equal(torch.cat((split.query_weight.grad, split.key_weight.grad)), wanted[2])


def test_tied_weights_with_different_formats_add_their_gradients():
    """Bug case 20 (one rank): two Linears share a Parameter; both caches refresh after the step."""

    def factory(role):
        is_a = role is not None and role.name == "a"
        return factories.mxfp8_factory(role) if is_a else factories.current_scaling_factory(role)

    a, b = make(64, 64, bias=False, name="a"), make(64, 64, bias=False, name="b")
    b.weight = a.weight
    recipe, x = emulated(factory), torch.randn(16, 64)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.5)
    for first in (True, False):
        a.zero_grad()
        with dfg.autocast(recipe=recipe):
            (a(x, is_first_microbatch=first) + b(x, is_first_microbatch=first)).sum().backward()
        both = a.weight.grad.clone()
        singles = [run(m, x, recipe)[2].clone() for m in (a, b)]
        assert torch.allclose(both, singles[0] + singles[1], atol=1e-4)
        a.weight.grad = both
        optimizer.step()
