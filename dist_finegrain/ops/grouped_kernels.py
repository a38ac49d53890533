"""How the experts' GEMMs run: cuBLASLt or a loop for each, torch's grouped kernels, emulation.

Legend: E experts, M tokens, N out_features, K in_features; Mp, Rp, Ctot as stored (numerics.md,
"Plane storage"). torch's grouped kernels return BF16 and want, for their TMA loads, rows at
multiples of 16 bytes. Ragged contraction with the tokens innermost, as in quantized column planes,
also wants at least one block of each expert, which cast_grouped sees to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.nn.functional import ScalingType, grouped_mm, scaled_grouped_mm

from ..formats.plane import Plane, saturating_to
from .experts import Experts, column_widths, part, sliceable
from .gemm import Kernel, _counts, gemm
from .lt import group_options
from .matmul import _decoded

_ops = torch.ops.dist_finegrain
_E4M3 = torch.float8_e4m3fn
_STACKED_ROWS, _STACKED_COLUMNS, _RAGGED = range(3)  # fprop, dgrad, wgrad of bindings_groups.cpp


@dataclasses.dataclass(frozen=True)
class Product:
    """The checked arguments of ``grouped_gemm``; ``sizes``: on a CPU always there.

    outs: where ``cublaslt`` writes each expert's wgrad, or adds it to; () for a result of its own.
    """

    name: str
    a: Plane
    b: Experts | Plane
    ends: torch.Tensor
    column_ends: torch.Tensor | None
    sizes: Sequence[int] | None
    out_dtype: torch.dtype
    fast: bool
    outs: Sequence[torch.Tensor | None] = ()
    accumulate: Sequence[bool] = ()

    @property
    def is_wgrad(self) -> bool:
        return self.name == "wgrad"

    @property
    def b_plane(self) -> Plane:
        return self.b if self.is_wgrad else self.b.plane


def _count(p: Product) -> None:
    _counts[p.name, p.a.format.describe(), p.b_plane.format.describe()] += len(p.ends)


def one_by_one(single: Kernel, p: Product) -> torch.Tensor:
    """A loop of single GEMMs over planes cut out of the grouped ones; sizes must be known."""
    a, b, lengths = sliceable(p.a), p.b, p.sizes
    if p.is_wgrad:
        b, lengths = sliceable(b), column_widths(p.a.format, p.sizes)
    elif b.plane.format.family == "user":
        b = dataclasses.replace(b, plane=sliceable(b.plane))
    results, start = [], 0
    for e, (m, length) in enumerate(zip(p.sizes, lengths, strict=True)):
        if p.is_wgrad:
            left, right = (part(x, e, (0, x.shape[0]), (start, start + m)) for x in (a, b))
        else:
            left, right = part(a, e, (start, start + m), (0, a.shape[1])), b.expert(e)
        results.append(gemm(single, p.name, left, right, p.out_dtype, fast=p.fast))
        start += length
    return torch.stack(results) if p.is_wgrad else torch.cat(results)


def cublaslt(p: Product) -> torch.Tensor | None:
    """FP8 by one compiled call; a tensor's scale is repeated beside row scales. None with outs."""
    _count(p)
    left, right, layout = p.a.codes, p.b_plane.codes, _RAGGED
    shape: tuple[int, ...] = (p.a.shape[0], p.b.shape[0])
    if p.is_wgrad:
        shape = (len(p.sizes), *shape)
    else:
        layout = _STACKED_COLUMNS if p.b.axis else _STACKED_ROWS
    is_row = "row" in (p.a.format.statistic, p.b_plane.format.statistic)
    if p.a.format.family == "float8_block":
        scales = p.a.scales, p.b_plane.scales
    elif not is_row:
        scales = p.a.outer, p.b.outer if p.is_wgrad else p.b.outer()
    elif p.is_wgrad:
        scales = _scales_of_rows(p.a), _scales_of_rows(p.b)
    else:
        rows = right.shape[0] if p.b.axis else shape[1]
        scales = _scales_of_tokens(p), _scales_of_experts(p.b, rows)
    made, outs = None, p.outs
    if not outs:
        made = torch.empty(shape, dtype=p.out_dtype, device=left.device)
        outs = made.unbind() if p.is_wgrad else (made,)
    options = [group_options(plane.format, is_row) for plane in (p.a, p.b_plane)]
    _ops.gemm_groups.default(
        left, right, *options, *scales, layout, p.sizes, outs, p.accumulate, p.fast
    )
    return made


def native(p: Product) -> torch.Tensor:
    """Row-scaled E4M3 with an FP32 accumulator, rounded to BF16; per-tensor scales are repeated."""
    _count(p)
    left, recipe = p.a.codes.view(_E4M3), ScalingType.RowWise
    right = p.b_plane.codes.view(_E4M3)
    if p.is_wgrad:
        scales = _scales_of_rows(p.a), _scales_of_rows(p.b)
        offsets = p.column_ends
    else:
        right = p.b.stacked(right, left.shape[1])
        scales = _scales_of_tokens(p), _scales_of_experts(p.b, right.shape[1])
        offsets = p.ends
    result = scaled_grouped_mm(
        left, right.transpose(-2, -1), scales[0], recipe, scales[1], recipe,
        offs=offsets, output_dtype=torch.bfloat16, use_fast_accum=p.fast,
    )  # fmt: skip
    return result[..., : p.a.shape[0], : p.b.shape[0]]


def _scales_of_tokens(p: Product) -> torch.Tensor:
    """FP32 [Mp] of operand A, from one scale per row or per expert."""
    if p.a.format.statistic == "row":
        return p.a.outer
    return p.a.outer.index_select(0, _expert_of_rows(p.ends, p.a.codes.shape[0]))


def _scales_of_experts(b: Experts, rows: int) -> torch.Tensor:
    """FP32 [E, rows] of the experts' weights."""
    outer = b.outer()
    return outer if outer.dim() == 2 else outer[:, None].expand(-1, rows).contiguous()


def _scales_of_rows(plane: Plane) -> torch.Tensor:
    """FP32 [E · Rp] of a grouped column plane."""
    outer = plane.outer
    if outer.dim() == 1:
        outer = outer[:, None].expand(-1, plane.codes.shape[0])
    return outer.reshape(-1).contiguous()


def _expert_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 [rows]: whose token each row is; padding counts as the last expert's."""
    index = torch.arange(rows, dtype=torch.int32, device=ends.device)
    return torch.searchsorted(ends[:-1], index, right=True, out_int32=True)


def identity(p: Product) -> torch.Tensor:
    """BF16 operands as they are; a copy only where rows do not start at multiples of 16 bytes."""
    _count(p)
    left, right = p.a.codes, p.b_plane.codes
    if p.is_wgrad:
        # With the features innermost groups may have any size, also none.
        left, right = _aligned(left.t()).t(), _aligned(right.t())
        result = grouped_mm(left, right, offs=p.column_ends)
        return result[:, : p.a.shape[0], : p.b.shape[0]]
    right = p.b.stacked(right, p.b.shape[1])
    if not (_is_aligned(left) and _is_aligned(right, is_transposed_too=True)):
        left, right = _aligned(left), _aligned(right)
    result = grouped_mm(left, right.transpose(-2, -1), offs=p.ends)
    return result[: p.a.shape[0], : p.b.shape[0]]


def _is_aligned(x: torch.Tensor, *, is_transposed_too: bool = False) -> bool:
    """Whether grouped_mm takes this layout: rows innermost and at multiples of 16 bytes."""
    if is_transposed_too and x.stride(-1) != 1:
        x = x.transpose(-2, -1)
    item = x.element_size()
    starts = [x.storage_offset(), *x.stride()[:-1]]
    is_whole = all(start * item % 16 == 0 for start in starts)
    return is_whole and x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` with rows at multiples of 16 bytes: itself, or a copy with zeros up to there."""
    extent = x.shape[-1] * x.element_size() % 16
    if not extent and _is_aligned(x):
        return x
    pad = (16 - extent) % 16 // x.element_size()
    if pad:
        return torch.nn.functional.pad(x, (0, pad))
    return x.clone(memory_format=torch.contiguous_format)


def emulated(p: Product) -> torch.Tensor:
    """BF16 operands that hold the codes and inner scales exactly; outer scales in FP32 after it."""
    _count(p)
    left = _decoded(_as_stored(p.a), torch.bfloat16)
    right = _decoded(_as_stored(p.b_plane), torch.bfloat16)
    if p.is_wgrad:
        product = grouped_mm(left, right.t(), offs=p.column_ends)
    else:
        right = p.b.stacked(right, left.shape[1])
        product = grouped_mm(left, right.transpose(-2, -1), offs=p.ends)
    return _with_outer_scales(product, p)


def _as_stored(plane: Plane) -> Plane:
    """With the contraction padding, which is zero: so rows start at multiples of 16 bytes."""
    per_byte = 2 if plane.format.family == "nvfp4" else 1
    contraction = plane.codes.shape[1] * per_byte
    return dataclasses.replace(plane, shape=(plane.shape[0], contraction))


def _with_outer_scales(product: torch.Tensor, p: Product) -> torch.Tensor:
    """The product in FP32 times both outer scales; unchanged where there are none."""
    left = p.a.outer
    right = p.b.outer if p.is_wgrad else p.b.outer()
    if left is None:
        return product
    product = product.float()
    is_row = p.a.format.statistic == "row", p.b_plane.format.statistic == "row"
    rows, columns = product.shape[-2:]
    if not any(is_row):
        # One alpha for each expert, as for a single GEMM.
        alpha = left * right
        if not p.is_wgrad:
            return product.mul_(alpha.index_select(0, _expert_of_rows(p.ends, rows))[:, None])
        return product.mul_(alpha[:, None, None])
    if p.is_wgrad:
        left = left[:, :rows, None] if is_row[0] else left[:, None, None]
        right = right[:, None, :columns] if is_row[1] else right[:, None, None]
        return product.mul_(left).mul_(right)
    expert = _expert_of_rows(p.ends, rows)
    left = left[:rows, None] if is_row[0] else left.index_select(0, expert)[:, None]
    right = right.index_select(0, expert)
    return product.mul_(left).mul_(right[:, :columns] if is_row[1] else right[:, None])


def emulated_in_pieces(p: Product) -> torch.Tensor:
    """FP32 operands as two BF16 terms each, in one product with three times the contraction.

    hi·hi + lo·hi + hi·lo: only lo·lo, 2^-16 of the product, is left out. For planes without outer
    scales: blocks with FP32 scales, and a user's own formats beside Identity.
    """
    _count(p)
    left, right = (_decoded(plane, torch.float32) for plane in (p.a, p.b_plane))
    if p.is_wgrad:
        # With the features innermost groups may have any size, also none.
        (hi, lo, finite), others = _terms(_padded_to_8(left.t())), _terms(_padded_to_8(right.t()))
        left = torch.stack((hi, lo, finite), 1).flatten(0, 1)
        right = torch.stack((others[0], others[2], others[1]), 1).flatten(0, 1)
        product = grouped_mm(left.t(), right, offs=p.column_ends * 3)
        return product[:, : p.a.shape[0], : p.b.shape[0]]
    right = p.b.stacked(right, p.b.shape[1])
    (hi, lo, finite), others = _terms(_padded_to_8(left)), _terms(_padded_to_8(right))
    left = torch.cat((hi, lo, finite), -1)
    right = torch.cat((others[0], others[2], others[1]), -1)
    return grouped_mm(left, right.transpose(-2, -1), offs=p.ends)


def _padded_to_8(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))


def _terms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """BF16 (hi, lo, hi where finite) of FP32 ``x``; x = hi + lo up to 2^-16, lo 0 for NaN and Inf.

    Inf and NaN are in hi alone, so that no product of theirs meets another of opposite sign.
    """
    hi = saturating_to(x, torch.bfloat16)
    is_finite = hi.isfinite()
    lo = torch.where(is_finite, x - hi.float(), 0.0).to(torch.bfloat16)
    return hi, lo, torch.where(is_finite, hi, 0.0)
