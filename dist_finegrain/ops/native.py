"""torch's native low-precision GEMMs behind the plane interface, one function per operand pair.

Used where the cuBLASLt call (lt.py) is not built, and to check it. Every function takes planes
A [R, C] and B [S, C] with codes of whole rows, runs on the Rp stored rows and returns a view of the
first R (and S), or puts that into ``out``. Scale layouts are torch.nn.functional.scaled_mm's;
the sm_100 functions are checked against its documented layouts and were not run on hardware.
"""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from ..formats.plane import Plane
from ..formats.swizzle import swizzle_128x4
from .lt import deliver, per_row

_TORCH_ELEMENT = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _codes(plane: Plane) -> torch.Tensor:
    return plane.codes.view(_TORCH_ELEMENT[plane.format.element])


def _call(
    a, b, left, right, out_dtype, bias, out, accumulate, *, fast=False, **scales
) -> torch.Tensor:
    """scaled_mm of A and Bᵀ; what its epilogue cannot add (a bias, ``out``) is added in FP32."""
    if accumulate:
        product = _call(a, b, left, right, torch.float32, bias, None, False, fast=fast, **scales)
        return deliver(product, out, True)
    in_epilogue = bias is not None and out_dtype != torch.float32 and bias.dtype == out_dtype
    epilogue = None
    if in_epilogue:
        epilogue = torch.nn.functional.pad(bias, (0, right.shape[0] - bias.shape[0]))
    add_after = bias is not None and not in_epilogue
    result = scaled_mm(
        left,
        right.t(),
        bias=epilogue,
        output_dtype=torch.float32 if add_after else out_dtype,
        use_fast_accum=fast,
        **scales,
    )[: a.shape[0], : b.shape[0]]
    result = (result + bias.float()).to(out_dtype) if add_after else result
    return deliver(result, out, False)


def tensorwise(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """One FP32 decode scale per operand."""
    return _call(
        a, b, _codes(a), _codes(b), out_dtype, bias, out, accumulate, fast=fast,
        scale_a=a.outer, scale_recipe_a=ScalingType.TensorWise,
        scale_b=b.outer, scale_recipe_b=ScalingType.TensorWise,
    )  # fmt: skip


def rowwise(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """FP32 decode scales [Rp, 1] and [1, Sp]; a per-tensor operand repeats its scale."""
    return _call(
        a, b, _codes(a), _codes(b), out_dtype, bias, out, accumulate, fast=fast,
        scale_a=per_row(a)[:, None], scale_recipe_a=ScalingType.RowWise,
        scale_b=per_row(b)[None, :], scale_recipe_b=ScalingType.RowWise,
    )  # fmt: skip


def block(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """128-element blocks, 1×128 or 128×128, with FP32 scales."""
    return _call(
        a, b, _codes(a), _codes(b), out_dtype, bias, out, accumulate,
        scale_a=_block_scales(a), scale_recipe_a=_block_recipe(a),
        scale_b=_block_scales(b), scale_recipe_b=_block_recipe(b),
    )  # fmt: skip


def _block_recipe(plane: Plane) -> ScalingType:
    two = plane.format.two_dimensional
    return ScalingType.BlockWise128x128 if two else ScalingType.BlockWise1x128


def _block_scales(plane: Plane) -> torch.Tensor:
    """The stored scales as scaled_mm asks for them, of A and of B alike.

    1×128: [Rp, ⌈C/128⌉], stride (1, Rp); 128×128: [pad4(⌈C/128⌉), ⌈R/128⌉], stride (1, pad4).
    """
    return plane.scales.t()


def _swizzled(plane: Plane, element: torch.dtype) -> torch.Tensor:
    """Scale bytes in 128×4 tiles: as stored, or plain ones swizzled in a launch of their own."""
    scales = plane.scales if plane.format.swizzled else swizzle_128x4(plane.scales)
    return scales.view(element)


def mxfp8(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """E8M0 scales in 128×4-swizzled tiles (sm_100; not run on hardware)."""
    return _call(
        a, b, _codes(a), _codes(b), out_dtype, bias, out, accumulate,
        scale_a=_swizzled(a, torch.float8_e8m0fnu),
        scale_recipe_a=ScalingType.BlockWise1x32, swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        scale_b=_swizzled(b, torch.float8_e8m0fnu),
        scale_recipe_b=ScalingType.BlockWise1x32, swizzle_b=SwizzleType.SWIZZLE_32_4_4,
    )  # fmt: skip


def nvfp4(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """E4M3 scales in 128×4-swizzled tiles, one FP32 g per operand (sm_100; not run on hardware)."""
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    left, right = (p.codes.view(torch.float4_e2m1fn_x2) for p in (a, b))
    return _call(
        a, b, left, right, out_dtype, bias, out, accumulate,
        scale_a=[_swizzled(a, torch.float8_e4m3fn), a.outer],
        scale_recipe_a=recipe, swizzle_a=swizzle,
        scale_b=[_swizzled(b, torch.float8_e4m3fn), b.outer],
        scale_recipe_b=recipe, swizzle_b=swizzle,
    )  # fmt: skip
