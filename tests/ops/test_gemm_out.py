"""gemm(out=, accumulate=): written in place, added in FP32, rounded once; for every kernel kind."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain.ops import native
from dist_finegrain.ops.gemm import gemm, select
from tests.ops.test_gemm import QUANTIZERS, pairs_of_one_family, row_plane

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class HalfUserQuantizer(dfg.Quantizer):
    """A user's own format: halves what it holds."""

    def encode(self, x):
        return (x / 2,)

    def decode(self, parts, shape, dtype):
        return (parts[0] * 2).to(dtype)


def problem(a, b, dtype=torch.float32, m=37, n=21, k=130):
    torch.manual_seed(0)
    left, right = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    if a == "user":
        planes = [HalfUserQuantizer()(x).plane("rowwise") for x in (left, right)]
    else:
        planes = [row_plane(a, left), row_plane(b, right)]
    formats = [p.format for p in planes]
    return select("wgrad", *formats, "cpu", "emulate", k=k, n=n), planes


def pairs():
    rows = "nvfp4 rows"  # for fprop only
    return [("user", "user"), *(pair for pair in pairs_of_one_family() if rows not in pair)]


@pytest.mark.parametrize("a, b", pairs())
def test_out_is_the_product_and_accumulation_is_in_fp32(a, b):
    kernel, planes = problem(a, b)
    exact = gemm(kernel, "wgrad", *planes, torch.float32)
    for dtype in DTYPES:
        whole = torch.full((41, 30), 7.0, dtype=dtype)
        fresh = (torch.empty(37, 21, dtype=dtype), torch.empty(21, 37, dtype=dtype).t())
        for out in (whole[2:39, 3:24], *fresh):
            out.fill_(float("nan"))
            assert gemm(kernel, "wgrad", *planes, dtype, out=out) is out
            assert torch.equal(out, gemm(kernel, "wgrad", *planes, dtype))
            old = torch.randn(37, 21).to(dtype)
            out.copy_(old)
            assert gemm(kernel, "wgrad", *planes, dtype, out=out, accumulate=True) is out
            assert torch.equal(out, (old.float() + exact).to(dtype)), "one rounding"
        whole[2:39, 3:24] = 7.0
        assert (whole == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_identity_of_16_bits_accumulates_in_fp32(dtype):
    """Also where the result has the operands' dtype: the product is not rounded before the sum."""
    kernel, planes = problem("identity", "identity", dtype)
    exact = gemm(kernel, "wgrad", *planes, torch.float32)
    for out_dtype in DTYPES:
        old = torch.randn(37, 21).to(out_dtype)
        out = old.clone()
        gemm(kernel, "wgrad", *planes, out_dtype, out=out, accumulate=True)
        assert torch.equal(out, (old.float() + exact).to(out_dtype))


@pytest.mark.parametrize("name", ["identity", "mxfp8", "row e4m3"])
def test_bias_and_out_together(name):
    kernel, planes = problem(name, name)
    bias, old = torch.randn(21), torch.randn(37, 21)
    wanted = gemm(kernel, "wgrad", *planes, torch.float32, bias=bias)
    out = old.clone()
    gemm(kernel, "wgrad", *planes, torch.float32, bias=bias, out=out)
    assert torch.equal(out, wanted)
    out.copy_(old)
    gemm(kernel, "wgrad", *planes, torch.float32, bias=bias, out=out, accumulate=True)
    assert torch.equal(out, old + wanted)


@pytest.mark.parametrize("name", sorted(set(QUANTIZERS) - {"nvfp4 rows"}))
@pytest.mark.parametrize("m, c, n", [(0, 64, 32), (32, 0, 16), (16, 32, 0)])
def test_the_sum_of_no_products(name, m, c, n):
    """No tokens: zeros, or an unchanged main_grad."""
    kernel, planes = problem(name, name, m=m, n=n, k=c)
    out = torch.full((m, n), 3.0)
    assert gemm(kernel, "wgrad", *planes, torch.float32, out=out, accumulate=True) is out
    assert (out == 3.0).all()
    bias = torch.randn(n)
    gemm(kernel, "wgrad", *planes, torch.float32, bias=bias, out=out, accumulate=True)
    assert torch.equal(out, (3.0 + bias).expand(m, n))
    assert (gemm(kernel, "wgrad", *planes, torch.float32, out=out) == 0).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_mm_without_the_cublaslt_call(accumulate, dtype, monkeypatch):
    """Its product is added in FP32, also into BF16; scaled_mm itself is replaced by a product."""
    asked = []

    def product(left, right, *, output_dtype, **_):
        asked.append(output_dtype)
        return (left.float() @ right.float()).to(output_dtype)

    monkeypatch.setattr(native, "scaled_mm", product)
    planes = [row_plane("tensor e4m3", torch.randn(r, 64)) for r in (37, 32)]
    kernel = select("wgrad", *(p.format for p in planes), "sm_90", "native", k=64, n=32)
    old = torch.randn(37, 32).to(dtype)
    out = old.clone()
    gemm(kernel, "wgrad", *planes, dtype, out=out, accumulate=accumulate)
    codes = [p.codes.view(torch.float8_e4m3fn).float()[: p.shape[0]] for p in planes]
    wanted = codes[0] @ codes[1].t()
    assert asked == [torch.float32 if accumulate else dtype]
    assert torch.equal(out, (wanted + old.float() if accumulate else wanted).to(dtype))


@pytest.mark.parametrize(
    "out, message",
    [
        (None, "accumulate is True and out is None"),
        (torch.zeros(21, 37), r"out is torch.float32 \(21, 37\).*accepted: .*\(37, 21\)"),
        (torch.zeros(37, 21, dtype=torch.float16), "out is torch.float16.*accepted: torch.float32"),
        (torch.zeros(37, 21, device="meta"), "out is .* on meta; accepted: .* on cpu"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out, message):
    kernel, planes = problem("mxfp8", "mxfp8")
    with pytest.raises(ValueError, match=message):
        gemm(kernel, "wgrad", *planes, torch.float32, out=out, accumulate=True)
