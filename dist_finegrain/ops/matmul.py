"""C = A · Bᵀ of high-precision matrices, and of decoded planes: exact emulation of any format pair.

Legend: A [R, C], B [S, C], result [R, S].
"""

from __future__ import annotations

import functools
import threading

import torch

from ..formats import fused
from ..formats.float8_block import Float8BlockFormat
from ..formats.plane import Format, Plane, saturating_to
from . import lt
from .lt import deliver


def identity_gemm(
    a: Plane,
    b: Plane,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    fast: bool,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """The product of two Identity planes; bit-equal to torch.nn.Linear's where dtypes agree."""
    left, right = a.codes, b.codes
    if left.dtype == out_dtype:
        if out is not None and bias is None and left.is_cuda:
            if accumulate:
                return torch.addmm(out, left, right.t(), out=out)
            return torch.mm(left, right.t(), out=out)
        if not accumulate or out_dtype == torch.float32:
            return deliver(torch.nn.functional.linear(left, right, bias), out, accumulate)
    elif _is_lt_pair(left.dtype, out_dtype) and not lt.available(left.device):
        return lt.high_precision(left, right, out_dtype, bias, out, accumulate)
    return _finish(_product_fp32(left, right), bias, out_dtype, out, accumulate)


def _is_lt_pair(dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether cuBLASLt writes this result of 16-bit operands; others are rounded from FP32."""
    return dtype != torch.float32 and out_dtype in (dtype, torch.float32)


def emulated_gemm(
    a: Plane,
    b: Plane,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    fast: bool,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Decode without the outer scales, multiply with FP32 accumulation, scale, one rounding.

    CPU: FP32 operands. CUDA: BF16 operands, which hold MXFP8, NVFP4, per-tensor and row-scaled
    codes and power-of-two block scales exactly; other formats multiply in FP32 with TF32 off.
    """
    dtype = torch.float32
    if a.codes.is_cuda and _exact_in_bf16(a.format) and _exact_in_bf16(b.format):
        dtype = torch.bfloat16
    left, right = _decoded(a, dtype), _decoded(b, dtype)
    if dtype == torch.bfloat16 and not lt.available(left.device):
        outer = [p.outer for p in (a, b) if p.outer is not None]
        if _is_lt_pair(dtype, out_dtype) and all(scale.numel() == 1 for scale in outer):
            alpha = functools.reduce(torch.mul, outer) if outer else None
            return lt.high_precision(left, right, out_dtype, bias, out, accumulate, alpha=alpha)
        product = lt.high_precision(left, right, torch.float32)
    else:
        product = _product_fp32(left, right)
    return _finish(_with_outer_scales(product, a, b), bias, out_dtype, out, accumulate)


def _decoded(plane: Plane, dtype: torch.dtype) -> torch.Tensor:
    """The plane in ``dtype`` without its outer scale, by a compiled kernel where there is one."""
    if not fused.why_not(plane.codes.device, plane.format):
        return fused.decode(plane, dtype, outer=False)
    return saturating_to(plane.format.decode(plane, outer=False), dtype)


def emulation_note(a: Format, b: Format) -> str:
    """What plan() says about the precision of an emulated pair on CUDA."""
    exact = _exact_in_bf16(a) and _exact_in_bf16(b)
    return "decoded to BF16" if exact else "decoded to FP32, multiplied in FP32 with TF32 off"


def _exact_in_bf16(format: Format) -> bool:
    if isinstance(format, Float8BlockFormat):
        return format.power_of_two
    return format.family in ("float8", "mxfp8", "nvfp4")


def _with_outer_scales(product: torch.Tensor, a: Plane, b: Plane) -> torch.Tensor:
    """Per-tensor scales multiply as one alpha; row scales one side after the other."""
    left, right = a.outer, b.outer
    if left is not None and right is not None and left.numel() == right.numel() == 1:
        return product.mul_(left * right)
    if left is not None:
        product.mul_(left if left.numel() == 1 else left[: product.shape[0], None])
    if right is not None:
        product.mul_(right if right.numel() == 1 else right[: product.shape[1]])
    return product


def _finish(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    accumulate: bool,
) -> torch.Tensor:
    """Adds bias and what ``out`` held in FP32; one rounding to ``dtype``, which ``out`` has."""
    if bias is not None:
        product = product.add_(bias.float())
    return product.to(dtype) if out is None else deliver(product, out, accumulate)


def _product_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.is_cuda and left.dtype != torch.float32 and left.dtype == right.dtype:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    with _ieee_fp32:
        return torch.mm(left.float(), right.float().t())


class _IeeeFp32:
    """FP32 products with FP32 operands, whatever precision the user allows elsewhere.

    The setting is the process's: the first thread in changes it, the last one out restores it.
    """

    def __init__(self):
        self._lock, self._inside, self._previous = threading.Lock(), 0, ()

    @property
    def _backends(self):
        return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul

    def __enter__(self):
        with self._lock:
            if self._inside == 0:
                self._previous = [backend.fp32_precision for backend in self._backends]
                for backend in self._backends:
                    backend.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *exc_info):
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for backend, precision in zip(self._backends, self._previous, strict=True):
                    backend.fp32_precision = precision


_ieee_fp32 = _IeeeFp32()
