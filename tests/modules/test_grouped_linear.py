"""What a GroupedLinear computes: bit for bit that of a loop of Linears, in every format."""

from __future__ import annotations

import functools

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.formats.plane import DIRECTIONS
from dist_finegrain.modules import linear_function
from tests.modules.grouped_linear_cases import (
    AS_LINEARS,
    EXPERTS,
    SPLITS,
    K,
    N,
    assert_equal,
    bound_loop,
    data,
    loop_of,
    make,
    planes_seen,
    run,
    run_loop,
)
from tests.recipes import ALL, PLAIN, emulated, same_format_hybrid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", AS_LINEARS)
def test_outputs_and_gradients_equal_a_loop_of_linears(name, split, dtype):
    """Bug cases 1 and 2: zero-token experts anywhere, any split, no padding by the caller."""
    module, (x, grad) = make(dtype), data(split, dtype)
    layers = bound_loop(module, x, split, ALL[name], grad)
    recipe = emulated(ALL[name])
    got, wanted = run(module, x, split, recipe, grad), run_loop(layers, x, split, recipe, grad)
    assert_equal(got, wanted)
    assert got[0].shape == (sum(split), N) and got[1].shape == (sum(split), K)
    for m, gradient in zip(split, got[2:], strict=True):
        assert gradient.dtype == dtype and (m > 0 or not gradient.any())


@pytest.mark.parametrize("name", AS_LINEARS)
def test_codes_and_scales_equal_a_loop_of_linears(name, monkeypatch):
    split = [5, 0, 33, 1]
    module, (x, grad) = make(torch.bfloat16), data(split, torch.bfloat16)
    layers = bound_loop(module, x, split, ALL[name], grad)
    seen, recipe = planes_seen(monkeypatch), emulated(ALL[name])
    run(module, x, split, recipe, grad)
    wanted, cast = {}, linear_function.LinearCall.cast

    def noting(call, *jobs):
        cast(call, *jobs)
        for job in jobs:
            kind = next(k for k, q in call.binding.quantizers.items() if q is job.quantizer)
            for d in DIRECTIONS:
                if job.planes[d] is not None:
                    wanted.setdefault((kind, d), []).append(job.planes[d])

    monkeypatch.setattr(linear_function.LinearCall, "cast", noting)
    run_loop(layers, x, split, recipe, grad)
    for kind in ("input", "weight", "grad_output"):
        for d in DIRECTIONS:
            others = wanted[kind, d]
            # Backward visits the loop's layers from last to first.
            others = others[::-1] if kind == "grad_output" else others
            assert len(seen[kind, d]) == len(others) == EXPERTS
            for ours, theirs in zip(seen[kind, d], others, strict=True):
                assert (ours.format, ours.shape) == (theirs.format, theirs.shape)
                assert_planes_equal(ours, theirs)


def assert_planes_equal(ours, theirs):
    rows = ours.shape[0]
    for index, (a, b) in enumerate(zip(ours.parts, theirs.parts, strict=True)):
        assert (a is None) == (b is None)
        if a is None:
            continue
        if index == 2 and a.numel() > 1:  # the padding of row scales is free
            a, b = a[:rows], b[:rows]
        assert torch.equal(a.reshape(b.shape), b), index


@pytest.mark.parametrize("name", sorted(set(AS_LINEARS) - {"nvfp4_stochastic"}))
def test_biases_equal_a_loop_of_linears(name):
    """y bit for bit; the bias gradient is an FP32 sum, whose order may differ."""
    split = [130, 0, 33, 1]
    for dtype in (torch.float32, torch.bfloat16):
        module, (x, grad) = make(dtype, bias=True), data(split, dtype)
        layers = bound_loop(module, x, split, ALL[name], grad)
        recipe = emulated(ALL[name])
        got, wanted = run(module, x, split, recipe, grad), run_loop(layers, x, split, recipe, grad)
        assert_equal(got[: 2 + EXPERTS], wanted[: 2 + EXPERTS])
        for a, b, part in zip(got[-EXPERTS:], wanted[-EXPERTS:], grad.split(split), strict=True):
            exact = part.double().sum(0)
            limit = 1e-6 * part.double().abs().sum(0) + torch.finfo(dtype).eps / 2 * exact.abs()
            assert ((a.double() - exact).abs() <= limit).all()
            assert ((b.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("name", ["mxfp8", "current", "delayed", "nvfp4", "guide"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_tensor_splits_equal_lists(name, split):
    (x, grad), recipe = data(split), emulated(ALL[name])
    wanted = run(make(bias=True), x, split, recipe, grad)
    for dtype in (torch.int32, torch.int64):
        got = run(make(bias=True), x, torch.tensor(split, dtype=dtype), recipe, grad)
        assert_equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["disabled", "identity"])
def test_high_precision_equals_nn_linears_over_three_steps(dtype, how):
    split = [7, 0, 12, 1]
    ours = make(dtype, bias=True)
    plain = [torch.nn.Linear(K, N, dtype=dtype) for _ in range(EXPERTS)]
    for e, layer in enumerate(plain):
        layer.load_state_dict({"weight": ours.weights[e], "bias": ours.biases[e]})
    recipe = emulated(factories.high_precision_factory) if how == "identity" else None
    parameters = [p for layer in plain for p in layer.parameters()]
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (ours.parameters(), parameters)]
    for step in range(3):
        x, grad = data(split, dtype, seed=step)
        got, wanted = run(ours, x, split, recipe, grad), run_loop(plain, x, split, None, grad)
        assert_equal(got[: 2 + EXPERTS], wanted[: 2 + EXPERTS])
        for e, layer in enumerate(plain):
            torch.testing.assert_close(got[2 + EXPERTS + e], layer.bias.grad, rtol=1e-2, atol=1e-2)
            layer.bias.grad.copy_(got[2 + EXPERTS + e])
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(ours.weights, [layer.weight for layer in plain])


@pytest.mark.parametrize("name", sorted(set(PLAIN) - {"nvfp4_stochastic"}))
def test_same_format_as_plain_and_as_hybrid(name):
    split = [5, 0, 33, 1]
    x, grad = data(split)
    hybrid = functools.partial(same_format_hybrid, factory=PLAIN[name])
    got = run(make(), x, split, emulated(hybrid), grad)
    assert_equal(got, run(make(), x, split, emulated(PLAIN[name]), grad))


def test_e4m3_forward_and_e5m2_gradients_keep_their_element():
    """Bug case 11: gradients read as the type that they were written in."""
    split = [64, 0, 32, 32]
    x, grad = data(split, torch.bfloat16)
    high = run(make(torch.bfloat16), x, split, None, grad)
    low = run(make(torch.bfloat16), x, split, emulated(factories.current_scaling_factory), grad)
    for a, b in zip(low[1:3], high[1:3], strict=True):
        assert abs(a.float().norm() / b.float().norm() - 1) < 0.05
        assert (a - b).float().norm() < 0.1 * b.float().norm()


def mixed(role):
    """Expert 6 (the third here) in high precision, the others in MXFP8."""
    if role is not None and role.expert_index == 6:
        return dfg.IdentityQuantizer()
    return factories.mxfp8_factory(role)


def test_experts_may_have_formats_of_their_own():
    split = [5, 0, 33, 9]
    (x, grad), module = data(split), make(first_expert=4)
    layers = loop_of(module)
    got = run(module, x, split, emulated(mixed), grad)
    wanted = run_loop(layers, x, split, emulated(factories.mxfp8_factory), grad)
    plain = run_loop(layers, x, split, None, grad)
    for e, (ours, quantized, exact) in enumerate(zip(got[2:], wanted[2:], plain[2:], strict=True)):
        assert torch.equal(ours, exact if e == 2 else quantized)
    rows = slice(5, 38)
    assert torch.equal(got[0][rows], plain[0][rows]) and torch.equal(got[0][:5], wanted[0][:5])
    assert not torch.equal(plain[0][rows], wanted[0][rows])
    assert torch.equal(got[1][rows], plain[1][rows]) and torch.equal(got[1][38:], wanted[1][38:])


def test_users_own_quantizer_runs_expert_by_expert():
    class Halves(dfg.Quantizer):
        def encode(self, x):
            return (x.half(),)

        def decode(self, parts, shape, dtype):
            return parts[0].to(dtype)

    def factory(role):
        return Halves()

    split = [5, 0, 33, 1]
    (x, grad), module = data(split), make()
    layers = loop_of(module)
    recipe = emulated(factory)
    assert_equal(run(module, x, split, recipe, grad), run_loop(layers, x, split, recipe, grad))


def test_return_bias_leaves_the_addition_to_the_caller():
    split = [3, 0, 2, 1]
    x, _ = data(split)
    module = make(bias=True, return_bias=True)
    y, biases = module(x, split)
    assert [b is p for b, p in zip(biases, module.biases, strict=True)] == [True] * EXPERTS
    added = torch.cat([part + b for part, b in zip(y.split(split), biases, strict=True)])
    assert torch.allclose(added, make(bias=True)(x, split), atol=1e-6)


def test_leading_dimensions_are_flattened_and_kept():
    split = [4, 0, 5, 3]
    x, _ = data(split)
    module = make()
    y = module(x.view(3, 4, K), split)
    assert torch.equal(y.view(12, N), module(x, split))
