"""The compiled cuBLASLt call behind the plane interface, one function per operand pair.

D = alpha · A · Bᵀ (+ bias) (+ D) of planes A [R, C] and B [S, C]. Without ``out`` a product of
quantized planes runs on the Rp stored rows, and the result is a view of the first R: its bits then
depend on Rp only. With ``out`` [R, S] it is written in place, nothing beyond it. sm_100's functions
follow the documented layouts and were not run on hardware.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..extension import build_info
from ..formats.plane import Format, Plane
from ..formats.swizzle import swizzle_128x4

_ops = torch.ops.dist_finegrain
_SCALAR, _ROW, _VEC128, _BLOCK128, _VEC32, _VEC16 = range(1, 7)  # ScaleMode of csrc/gemm/problem.h
_ELEMENT = {"e4m3": 3, "e5m2": 4}  # GemmElement
_HIGH = {torch.float16: 1, torch.bfloat16: 2}
_E2M1 = 5
_ALIGNMENT = 16  # bytes; of columns, rows and address of what FP8 and FP4 products write, of a bias


@functools.lru_cache
def available(device: torch.device) -> str:
    """Why the cuBLASLt call does not run on ``device``; "" when it does."""
    if device.type != "cuda":
        return f"cuBLASLt runs on CUDA tensors, not on {device.type}"
    return build_info().gemm_reason


class _Operand(NamedTuple):
    """matrix: codes [Rp, bytes], or [R, C] in FP16 or BF16; mode: how ``scales`` are laid out."""

    matrix: torch.Tensor
    element: int
    mode: int = 0
    scales: torch.Tensor | None = None

    @property
    def options(self) -> int:
        return self.element | self.mode << 4

    @property
    def is_narrow(self) -> bool:
        return self.mode != 0

    def fills(self, rows: int) -> bool:
        """Whether the product may have ``rows`` of this side: 1×128 scales need all stored ones."""
        return self.mode != _VEC128 or self.matrix.shape[0] == rows


def deliver(result: torch.Tensor, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    """``result``, or ``out`` after it was set to it or (in FP32, one rounding) raised by it."""
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def is_aligned(tensor: torch.Tensor) -> bool:
    """By its offset, which fake tensors have too; torch's storages start at aligned addresses."""
    return tensor.storage_offset() * tensor.element_size() % _ALIGNMENT == 0


def _writes_in_place(out: torch.Tensor, left: _Operand, right: _Operand) -> bool:
    rows, columns = out.shape
    if out.stride(1) != 1 or (rows > 1 and out.stride(0) < columns):
        return False
    if not left.is_narrow:
        return True
    return (
        left.fills(rows)
        and right.fills(columns)
        and columns % _ALIGNMENT == 0
        and is_aligned(out)
        and out.stride(0) * out.element_size() % _ALIGNMENT == 0
    )


def _product(
    left: _Operand,
    right: _Operand,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    accumulate: bool,
    *,
    fast: bool = False,
    alpha: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, S] = ``shape`` in ``out_dtype``; into ``out`` where given.

    A bias of the result's own 16-bit dtype is added by the epilogue, in FP32 before the rounding.
    The epilogue takes no other for every operand, so any other one is what an FP32 result starts
    from (beta = 1): also added in FP32, and 16-bit results are rounded from that once.
    An ``out`` that cuBLASLt cannot write (strides, alignment, 1×128 scales with padded rows) gets
    the FP32 product, or without ``accumulate`` the rounded one, from a temporary.
    """
    is_plain = bias is None or bias.dtype == out_dtype
    in_place = (
        out is not None
        and (is_plain or out_dtype == torch.float32)
        and _writes_in_place(out, left, right)
    )
    target, adds = out, accumulate
    if not in_place:
        rows, columns = shape
        if left.is_narrow:
            rows, columns = left.matrix.shape[0], right.matrix.shape[0]
        dtype = out_dtype if is_plain and not accumulate else torch.float32
        target = torch.empty(rows, columns, dtype=dtype, device=left.matrix.device)
        adds = False
    if bias is not None and target.dtype == torch.float32:
        deliver(bias, target[:, : shape[1]], adds)
        bias, adds = None, True
    if bias is not None and bias.shape[0] < target.shape[1]:
        bias = torch.nn.functional.pad(bias, (0, target.shape[1] - bias.shape[0]))
    if bias is not None and not (bias.is_contiguous() and is_aligned(bias)):
        bias = bias.clone(memory_format=torch.contiguous_format)
    _ops.gemm.default(
        left.matrix, right.matrix, left.options, right.options, left.scales, right.scales, alpha,
        bias, target, adds, fast,
    )  # fmt: skip
    if in_place:
        return out
    result = target[: shape[0], : shape[1]]
    return deliver(result if out is not None else result.to(out_dtype), out, accumulate)


def _planes(a, b, left, right, out_dtype, bias, out, accumulate, **options) -> torch.Tensor:
    shape = (a.shape[0], b.shape[0])
    return _product(left, right, shape, out_dtype, bias, out, accumulate, **options)


def tensorwise(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """One FP32 decode scale per operand."""
    left, right = (_operand(p, _SCALAR, p.outer) for p in (a, b))
    return _planes(a, b, left, right, out_dtype, bias, out, accumulate, fast=fast)


def rowwise(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """FP32 decode scales [Rp] and [Sp]; a per-tensor operand repeats its scale."""
    left, right = (_operand(p, _ROW, per_row(p)) for p in (a, b))
    return _planes(a, b, left, right, out_dtype, bias, out, accumulate, fast=fast)


def group_options(format: Format, is_row: bool) -> int:
    """What ``gemm_groups`` is told of FP8 operands; is_row: one scale per row, not per expert."""
    mode = _ROW if is_row else _SCALAR
    if format.family == "float8_block":
        mode = _BLOCK128 if format.two_dimensional else _VEC128
    return _ELEMENT[format.element] | mode << 4


def per_row(plane: Plane) -> torch.Tensor:
    """The outer scale of each stored row, FP32 [Rp]."""
    rows = plane.codes.shape[0]
    return plane.outer if plane.outer.numel() == rows else plane.outer.expand(rows).contiguous()


def block(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """128-element blocks, 1×128 or 128×128, with FP32 scales as they are stored."""
    left, right = (
        _operand(p, _BLOCK128 if p.format.two_dimensional else _VEC128, p.scales) for p in (a, b)
    )
    return _planes(a, b, left, right, out_dtype, bias, out, accumulate)


def mxfp8(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """E8M0 scales in 128×4-swizzled tiles (sm_100; not run on hardware)."""
    left, right = (_operand(p, _VEC32, _swizzled(p)) for p in (a, b))
    return _planes(a, b, left, right, out_dtype, bias, out, accumulate)


def nvfp4(
    a: Plane, b: Plane, out_dtype, bias, fast: bool, out=None, accumulate: bool = False
) -> torch.Tensor:
    """E4M3 scales in 128×4-swizzled tiles, alpha = g_A · g_B (sm_100; not run on hardware)."""
    left, right = (_operand(p, _VEC16, _swizzled(p)) for p in (a, b))
    alpha = a.outer * b.outer
    return _planes(a, b, left, right, out_dtype, bias, out, accumulate, alpha=alpha)


def high_precision(
    left: torch.Tensor,
    right: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    *,
    alpha: torch.Tensor | None = None,
) -> torch.Tensor:
    """alpha · left · rightᵀ of [R, C] and [S, C], both BF16 or both FP16, accumulated in FP32.

    alpha: FP32, one element on the device, or None. Any strides and any C; one that is not 1
    anywhere costs a copy.
    """
    operands = [_Operand(_with_unit_stride(m), _HIGH[m.dtype]) for m in (left, right)]
    shape = (left.shape[0], right.shape[0])
    return _product(*operands, shape, out_dtype, bias, out, accumulate, alpha=alpha)


def _with_unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix``, copied unless its rows or its columns are contiguous and do not overlap."""
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    is_row_major = (column_stride == 1 or columns == 1) and (row_stride >= columns or rows == 1)
    is_column_major = (row_stride == 1 or rows == 1) and (column_stride >= rows or columns == 1)
    return matrix if is_row_major or is_column_major else matrix.contiguous()


def _operand(plane: Plane, mode: int, scales: torch.Tensor) -> _Operand:
    """Codes with their scales; scales that start between two aligned addresses are copied."""
    if not is_aligned(scales):
        scales = scales.clone()
    element = _E2M1 if mode == _VEC16 else _ELEMENT[plane.format.element]
    return _Operand(plane.codes, element, mode, scales)


def _swizzled(plane: Plane) -> torch.Tensor:
    """Scale bytes in 128×4 tiles: as stored, or plain ones swizzled in a launch of their own."""
    return plane.scales if plane.format.swizzled else swizzle_128x4(plane.scales)
