"""A Linear whose kernels are sm_100's: its casts store the scales as those kernels read them.

There is no such GPU here, so scaled_mm is replaced by a product of what its arguments decode to.
"""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.formats.swizzle import unswizzle_128x4
from dist_finegrain.modules import base
from dist_finegrain.ops import native
from dist_finegrain.reference.elements import decode_e4m3, decode_e8m0
from dist_finegrain.reference.nvfp4 import decode as decode_nvfp4
from tests.modules.linear_cases import make, run
from tests.recipes import ALL, emulated


def dense(codes: torch.Tensor, scale) -> torch.Tensor:
    """FP32 values of one operand of scaled_mm: codes [R, C], scales in 128×4 tiles."""
    if isinstance(scale, list):
        packed, (blocks, g) = codes.view(torch.uint8), scale
        scales = unswizzle_128x4(blocks.view(torch.uint8), len(packed), packed.shape[1] // 8)
        return decode_nvfp4(packed, scales, g)
    values = decode_e4m3(codes.view(torch.uint8))
    scales = unswizzle_128x4(scale.view(torch.uint8), len(values), values.shape[1] // 32)
    return values * decode_e8m0(scales).repeat_interleave(32, 1)


def product(left, right, *, scale_a, scale_b, output_dtype, bias=None, **_):
    result = dense(left, scale_a) @ dense(right.t(), scale_b).t()
    return (result if bias is None else result + bias).to(output_dtype)


@pytest.fixture
def sm_100(monkeypatch):
    """Resolution as on sm_100; swizzling in a launch of its own is an error."""

    def refuse(scales):
        raise AssertionError("scales were swizzled outside the cast")

    monkeypatch.setattr(base, "device_kind", lambda device: "sm_100")
    monkeypatch.setattr(native, "scaled_mm", product)
    monkeypatch.setattr(native, "swizzle_128x4", refuse)


@pytest.mark.parametrize("tokens", [64, 37])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "guide"])
def test_native_gemms_read_what_the_casts_wrote(name, tokens, sm_100, monkeypatch):
    """Y, dX, dW and dbias as emulated; also from cached weights."""
    x, grad = torch.randn(tokens, 96), torch.randn(tokens, 64)
    recipe = emulated(ALL[name])
    module = make(96, 64)
    got = run(module, x, recipe, grad, is_first_microbatch=True)
    again = run(module, x, recipe, grad, is_first_microbatch=False)
    binding = next(iter(module._bindings.values()))
    assert any(kernel.swizzled for kernel in binding.kernels.values())
    monkeypatch.setattr(base, "device_kind", lambda device: "cpu")
    wanted = run(make(96, 64), x, recipe, grad)
    for results in (got, again):
        for a, b in zip(results, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_only_planes_that_such_a_kernel_reads_are_swizzled(sm_100):
    """MXFP8 rows for fprop, BF16 columns for dgrad and wgrad."""
    module = make(96, 64)
    recipe = emulated(factories.mxfp8_factory, backward_override="high_precision")
    run(module, torch.randn(32, 96), recipe)
    binding = next(iter(module._bindings.values()))
    assert binding.swizzled("input") == binding.swizzled("weight") == {"rowwise"}
    assert binding.swizzled("grad_output") == binding.swizzled("output") == frozenset()


def test_no_plane_is_swizzled_elsewhere():
    module = make(96, 64)
    run(module, torch.randn(32, 96), emulated(factories.mxfp8_factory))
    binding = next(iter(module._bindings.values()))
    assert not any(binding.swizzled(slot) for slot in ("input", "weight", "grad_output"))


def test_a_quantizers_own_planes_stay_plain():
    """The layout belongs to the GEMM that reads a plane, not to the quantizer."""
    plane = dfg.MXFP8Quantizer()(torch.randn(32, 64)).plane("rowwise")
    assert plane.scales.shape == (32, 2) and not plane.format.swizzled
