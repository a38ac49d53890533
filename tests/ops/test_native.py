"""Native GEMMs: on Hopper against FP64 of the decoded planes; for sm_100 the documented layouts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain.formats.plane import round_up
from dist_finegrain.formats.swizzle import swizzle_128x4, with_swizzled_scales
from dist_finegrain.ops import native
from dist_finegrain.ops.gemm import device_kind, gemm, select

E4M3, E5M2 = dfg.DType.kFloat8E4M3, dfg.DType.kFloat8E5M2
EXACT_ACCUMULATION, FAST_ACCUMULATION = 2e-4, 2.5e-3


def block(dim, **options):
    return dfg.Float8BlockQuantizer(E4M3, block_scaling_dim=dim, **options)


PAIRS = {
    "tensor": (dfg.Float8CurrentScalingQuantizer(E4M3), dfg.Float8CurrentScalingQuantizer(E4M3)),
    "tensor e5m2": (
        dfg.Float8CurrentScalingQuantizer(E5M2),
        dfg.Float8CurrentScalingQuantizer(E4M3),
    ),
    "row": (dfg.Float8RowScalingQuantizer(E4M3), dfg.Float8RowScalingQuantizer(E4M3)),
    "tensor row": (dfg.Float8CurrentScalingQuantizer(E4M3), dfg.Float8RowScalingQuantizer(E4M3)),
    "row tensor": (dfg.Float8RowScalingQuantizer(E4M3), dfg.Float8CurrentScalingQuantizer(E5M2)),
    "block 1-D 2-D": (block(1), block(2)),
    "block 2-D 1-D": (block(2), block(1)),
    "block 1-D 1-D": (block(1), block(1)),
    "block f32": (block(1, force_pow_2_scales=False), block(2, force_pow_2_scales=False)),
}


def planes(pair, m, n, k, device):
    torch.manual_seed(m + n + k)
    matrices = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    return [q(x.bfloat16()).plane("rowwise") for q, x in zip(PAIRS[pair], matrices, strict=True)]


def relative_error(got, operands, bias=None):
    exact = [p.format.decode(p).double() for p in operands]
    wanted = exact[0] @ exact[1].t()
    wanted = wanted if bias is None else wanted + bias.double()
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("k, n", [(256, 144), (1040, 256)])
def test_native_product_within_the_tensor_cores_accuracy(pair, k, n):
    kind = device_kind(torch.device("cuda"))
    for m in (1, 3, 7, 8, 15, 17, 31, 33, 127, 129, 1000):
        operands = planes(pair, m, n, k, "cuda")
        kernel = select("fprop", *(p.format for p in operands), kind, "native", k=k, n=n)
        assert kernel.execution == "native"
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        for out, b in itertools.product((torch.float32, torch.bfloat16), (None, bias)):
            got = gemm(kernel, "fprop", *operands, out, bias=b)
            assert got.shape == (m, n) and got.dtype == out
            limit = EXACT_ACCUMULATION if out == torch.float32 else 4e-3
            assert relative_error(got, operands, b) <= limit, (m, out, b is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_row_padding_never_reaches_a_native_result(pair):
    kind = device_kind(torch.device("cuda"))
    for m in (1, 17, 129):
        operands = planes(pair, m, 144, 256, "cuda")
        kernel = select("fprop", *(p.format for p in operands), kind, "native", k=256, n=144)
        clean = gemm(kernel, "fprop", *operands, torch.bfloat16)
        operands[0].codes[m:] = 0x7F
        assert torch.equal(gemm(kernel, "fprop", *operands, torch.bfloat16), clean)


@pytest.mark.gpu
def test_fast_accumulation_is_a_little_less_exact():
    operands = planes("tensor", 512, 512, 8192, "cuda")
    kind = device_kind(torch.device("cuda"))
    kernel = select("fprop", *(p.format for p in operands), kind, "native", k=8192, n=512)
    exact, fast = (
        relative_error(gemm(kernel, "fprop", *operands, torch.float32, fast=f), operands)
        for f in (False, True)
    )
    assert exact <= EXACT_ACCUMULATION < fast <= FAST_ACCUMULATION


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "block 2-D", "block f32"])
def test_emulation_on_cuda_is_exact_to_fp32(name):
    quantizer = {
        "mxfp8": dfg.MXFP8Quantizer(E4M3),
        "nvfp4": dfg.NVFP4Quantizer(),
        "block 2-D": block(2),
        "block f32": block(2, force_pow_2_scales=False),
    }[name]
    torch.manual_seed(0)
    operands = [quantizer(torch.randn(r, 1040, device="cuda")).plane("rowwise") for r in (130, 70)]
    formats = [p.format for p in operands]
    kernel = select("fprop", *formats, "sm_90", "emulate", k=1040, n=70)
    assert kernel.execution == "emulated"
    assert relative_error(gemm(kernel, "fprop", *operands, torch.float32), operands) <= 1e-6


class Call:
    """Stands in for scaled_mm: keeps the arguments, returns zeros of the right shape."""

    def __call__(self, left, right, **options):
        self.left, self.right, self.options = left, right, options
        shape = (left.shape[0], right.shape[1])
        return torch.zeros(shape, dtype=options["output_dtype"])


@pytest.fixture
def call(monkeypatch):
    recorded = Call()
    monkeypatch.setattr(native, "scaled_mm", recorded)
    return recorded


def quantized(quantizer, rows, columns):
    return quantizer(torch.randn(rows, columns)).plane("rowwise")


def stored_swizzled(plane):
    """The same plane as a cast for sm_100 writes it."""
    parts = (plane.codes, swizzle_128x4(plane.scales), plane.outer)
    return dataclasses.replace(plane, format=with_swizzled_scales(plane.format), parts=parts)


def run(function, a, b):
    return function(a, b, torch.bfloat16, None, False)


def test_sm_100_mxfp8_arguments(call):
    """Documented: E8M0, 128×4-swizzled, numel round_up(rows, 128) · round_up(K/32, 4). Not run."""
    a, b = (quantized(dfg.MXFP8Quantizer(E4M3), r, 96) for r in (40, 32))
    assert run(native.mxfp8, a, b).shape == (40, 32)
    for scale, rows in ((call.options["scale_a"], 48), (call.options["scale_b"], 32)):
        assert scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous()
        assert scale.numel() == round_up(rows, 128) * round_up(96 // 32, 4)
    assert call.left.dtype == torch.float8_e4m3fn and call.right.stride() == (1, 96)
    assert call.options["swizzle_a"] == native.SwizzleType.SWIZZLE_32_4_4


def test_sm_100_nvfp4_arguments(call):
    """Documented: packed E2M1, E4M3 scales swizzled, FP32 global scale as second level. Not run."""
    a, b = (quantized(dfg.NVFP4Quantizer(), r, 64) for r in (40, 32))
    assert run(native.nvfp4, a, b).shape == (40, 32)
    blocks, outer = call.options["scale_a"]
    assert blocks.dtype == torch.float8_e4m3fn and outer is a.outer
    assert blocks.numel() == 128 * round_up(64 // 16, 4)
    assert call.left.dtype == torch.float4_e2m1fn_x2 and call.left.shape == (48, 32)
    assert call.options["scale_recipe_b"][1] == native.ScalingType.TensorWise


@pytest.mark.parametrize("quantizer", [dfg.MXFP8Quantizer(E4M3), dfg.NVFP4Quantizer()])
def test_sm_100_scales_that_the_cast_swizzled_are_passed_as_they_are(quantizer, call, monkeypatch):
    """And plain ones, of either operand, swizzled before the product."""
    plain = [quantized(quantizer, rows, 160) for rows in (140, 48)]
    swizzled = [stored_swizzled(plane) for plane in plain]
    function = getattr(native, plain[0].format.family)

    def scales():
        given = call.options["scale_a"], call.options["scale_b"]
        return [s[0] if isinstance(s, list) else s for s in given]

    run(function, *plain)
    wanted = scales()
    for a, b in itertools.product(*zip(plain, swizzled, strict=True)):
        run(function, a, b)
        for got, want, plane in zip(scales(), wanted, (a, b), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            is_stored = got.data_ptr() == plane.scales.data_ptr()
            assert is_stored == plane.format.swizzled
    monkeypatch.setattr(native, "swizzle_128x4", None)
    run(function, *swizzled)


def test_sm_90_block_scales_have_the_strides_that_scaled_mm_asks_for(call):
    a, b = quantized(block(1), 40, 256), quantized(block(2), 160, 256)
    run(native.block, b, a)
    assert call.options["scale_a"].shape == (4, 2) and call.options["scale_a"].stride() == (1, 4)
    run(native.block, a, b)
    assert call.options["scale_a"].shape == (48, 2) and call.options["scale_a"].stride() == (1, 48)
    assert call.options["scale_b"].shape == (4, 2) and call.options["scale_b"].stride() == (1, 4)
