"""LayerNorm and RMSNorm against FP64, for every mix of dtypes, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.modules.norms import NORMALIZATIONS, Norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(norm, x, weight, bias):
    """The norm in FP64, differentiable."""
    x, gamma = x.double(), weight.double() + norm.zero_centered_gamma
    if norm.has_bias:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * gamma
    return y if bias is None else y + bias.double()


def inputs(norm, x_dtype, dtype, shape=(24, 96)):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 1).to(x_dtype).requires_grad_()
    weight = (torch.randn(shape[-1]) * 0.1 + (not norm.zero_centered_gamma)).to(dtype)
    bias = torch.randn(shape[-1]).to(dtype).requires_grad_() if norm.has_bias else None
    return x, weight.requires_grad_(), bias


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_values_and_gradients_against_fp64(normalization, zero_centered, dtype, x_dtype):
    """One rounding of the result: half an ulp, and FP32 noise."""
    norm = Norm(normalization, 1e-5, zero_centered)
    tensors = inputs(norm, x_dtype, dtype)
    y = norm(*tensors, x_dtype)
    wanted = exact(norm, *tensors)
    assert y.dtype == x_dtype
    rounding = torch.finfo(x_dtype).eps / 2
    error = (y.double() - wanted).abs()
    assert (error <= 1.01 * rounding * wanted.abs() + 2e-6).all()
    grad = torch.randn_like(y)
    leaves = [t for t in tensors if t is not None]
    got = torch.autograd.grad(y, leaves, grad)
    for leaf, ours, theirs in zip(
        leaves, got, torch.autograd.grad(wanted, leaves, grad.double()), strict=True
    ):
        assert ours.dtype == leaf.dtype
        limit = 2 * max(torch.finfo(leaf.dtype).eps, 1e-6)
        assert (ours.double() - theirs.double()).norm() <= limit * theirs.double().norm()


def test_zero_centered_gamma_is_not_rounded_to_bf16():
    """1 + 0.001 is 1 in BF16; the sum must be taken in FP32."""
    x = torch.tensor([[3.0, -3.0]], dtype=torch.bfloat16)
    weight = torch.full((2,), 2.0**-10, dtype=torch.bfloat16)
    y = Norm("RMSNorm", 1e-8, True)(x, weight, None, torch.float32)
    torch.testing.assert_close(y, torch.tensor([[1.0, -1.0]]) * (1 + 2.0**-10), rtol=1e-6, atol=0)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_equal_dtypes_are_torchs_own_function_bit_for_bit(normalization):
    norm = Norm(normalization)
    x, weight, bias = inputs(norm, torch.bfloat16, torch.bfloat16)
    plain = getattr(torch.nn, normalization)(96, eps=1e-5, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(weight)
        if bias is not None:
            plain.bias.copy_(bias)
    y, theirs = norm(x, weight, bias), plain(x)
    assert torch.equal(y, theirs)
    grad = torch.randn_like(y)
    assert torch.equal(
        torch.autograd.grad(y, weight, grad)[0], torch.autograd.grad(theirs, plain.weight, grad)[0]
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_torch_autocast_does_not_change_the_arithmetic(normalization):
    norm = Norm(normalization)
    x, weight, bias = inputs(norm, torch.float32, torch.float32)
    wanted = norm(x, weight, bias).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(x, weight, bias, torch.bfloat16), wanted)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("shape", [(0, 8), (8,), (2, 3, 8)])
def test_shapes_and_constant_rows(normalization, shape, zero_centered):
    norm = Norm(normalization, 1e-5, zero_centered)
    x, weight, bias = inputs(norm, torch.bfloat16, torch.bfloat16, shape)
    y = norm(x, weight, bias)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape and weight.grad.shape == (8,)
    constant = norm(torch.zeros(2, 8, dtype=torch.bfloat16), weight, bias)
    assert constant.isfinite().all()


def test_refusals():
    with pytest.raises(ValueError, match="normalization='layernorm'; accepted.*RMSNorm"):
        Norm("layernorm")
    with pytest.raises(ValueError, match="eps=0; accepted: a positive"):
        Norm(eps=0)
