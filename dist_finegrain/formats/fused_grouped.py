"""Casts of E experts, whose rows of one matrix follow each other, in one launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from .fused import measure_planes
from .fused_options import (
    buffers,
    check_matrix,
    check_source,
    is_measured,
    options_of,
    readable,
    rounding_places,
    statistic_of,
)
from .plane import Direction, Format, Plane, Rounding, saturating_to

_ops = torch.ops.dist_finegrain


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Planes of E consecutive groups of rows.

    row: plane of X [M, K]. column: plane [K, Ctot] in which expert e's part, its rows of Xᵀ padded
    to whole blocks and at least one, ends at ``column_ends[e]`` (int32 [E]). Outer scales are per
    expert, FP32 [E]; row-scaled ones [Mp] and [E, Kp].
    """

    row: Plane | None
    column: Plane | None
    column_ends: torch.Tensor | None


def _group_block(format: Format) -> int:
    """What every expert's part of a column plane starts at a multiple of."""
    if format.family == "float8_block":
        return format.block[1]
    return format.contraction_multiple


def grouped_contraction(format: Format, rows: int, experts: int) -> int:
    """Ctot: room for the column parts of any split of ``rows``, known without a synchronisation.

    Identity parts are not padded.
    """
    if format.family == "identity":
        return rows
    block = _group_block(format)
    return -(-rows // block) * block + experts * block


def _check_grouped(what: str, x, ends, *formats: Format | None) -> None:
    check_matrix(what, x)
    if ends.dtype != torch.int32 or ends.dim() != 1 or not len(ends) or ends.device != x.device:
        raise ValueError(
            f"ends is {ends.dtype} {tuple(ends.shape)} on {ends.device}; accepted: torch.int32 [E] "
            f"on {x.device}, the cumulative row ends of at least one expert, e.g. "
            "torch.tensor([128, 256], dtype=torch.int32)"
        )
    if x.shape[1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; accepted: at least one column")
    for format in formats:
        if format is not None and format.family == "float8_block" and format.two_dimensional:
            raise ValueError(
                f"{format.describe()} has 128×128 blocks, which reach over experts; accepted: "
                "1×128 blocks, e.g. Float8BlockQuantizer(fp8_dtype, block_scaling_dim=1)"
            )
        if getattr(format, "swizzled", False):
            raise ValueError(
                f"{format.describe()} has swizzled scales, whose tiles of 128 rows or 4 blocks "
                "reach over experts; accepted: plain scales, e.g. swizzled=False"
            )


def cast_grouped(
    x: torch.Tensor,
    ends: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    column_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
    row_amax: torch.Tensor | None = None,
    column_amax: torch.Tensor | None = None,
) -> Grouped:
    """``cast`` of E experts, whose rows of ``x`` [M, K] end at ``ends`` int32 [E], in one launch.

    ends: non-decreasing, the last one M; an expert may have no row. Statistics, as
    ``measure_grouped`` gives them: FP32 [E]; row-scaled [M] for the row and [E, K] for the column.
    row_amax, column_amax: FP32 [E], each expert's raised by its own. Other arguments as for
    ``cast``; ``x`` is read in place where its last stride is 1.

    Raises as ``cast`` does; ValueError for 128×128 blocks, swizzled scales and ends of another
    layout.
    """
    _check_grouped("cast_grouped", x, ends, row, column)
    is_dequantized = check_source(source, row) and column is not None
    experts, rounding = ends.shape[0], rounding or {}
    if row is not None and row.family == "identity" and is_dequantized:
        row_plane = row.encode(x)
        values = saturating_to(row.decode(row_plane), x.dtype, keep_inf=False)
        options = {"column_statistic": column_statistic, "column_amax": column_amax}
        made = cast_grouped(values, ends, None, column, rounding=rounding, **options)
        return dataclasses.replace(made, row=row_plane)

    r, c = options_of(row), options_of(column)
    row_plane = row.encode(x) if row is not None and not r.packed else None
    column_plane = column_ends = None
    if r.packed:
        row_plane = _with_outer(row.empty((x.shape[0], x.shape[1]), x.dtype, x.device), experts)
    if c.packed:
        extent = grouped_contraction(column, x.shape[0], experts)
        column_plane = column.empty((x.shape[1], extent), x.dtype, x.device)
        column_plane = _with_outer(column_plane, experts, is_column=True)
        column_ends = torch.empty_like(ends)
    if r.packed or c.packed:
        places, seed_step = rounding_places(x, row, column, rounding)
        _ops.cast.default(
            readable(x), buffers(row_plane) if r.packed else [], buffers(column_plane),
            r.packed, r.epsilon, c.packed, c.epsilon, is_dequantized and c.packed != 0,
            statistic_of(row, row_statistic), statistic_of(column, column_statistic),
            row_amax, column_amax, places, seed_step, None, ends, column_ends,
        )  # fmt: skip
    if column is not None and not c.packed:
        values = x
        if is_dequantized:
            values = _dequantized_grouped(row_plane, ends, x.dtype)
        column_plane, column_ends = column.encode(values.t()), ends.clone()
    return Grouped(row_plane, column_plane, column_ends)


def _with_outer(plane: Plane, experts: int, *, is_column: bool = False) -> Plane:
    """The plane with an outer scale per expert in the place of its only one."""
    if plane.outer is None:
        return plane
    shape: tuple[int, ...] = (experts,)
    if plane.format.statistic == "row":
        if not is_column:
            return plane
        shape = (experts, *plane.outer.shape)
    outer = plane.outer.new_empty(shape)
    return dataclasses.replace(plane, parts=(*plane.parts[:2], outer))


def _dequantized_grouped(plane: Plane, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the column of a "rowwise_dequantized" hybrid encodes, of a grouped row plane."""
    if plane.outer is not None and plane.format.statistic != "row":
        rows = torch.arange(plane.codes.shape[0], dtype=torch.int32, device=ends.device)
        expert = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        plane = dataclasses.replace(plane, parts=(*plane.parts[:2], plane.outer[expert]))
    return saturating_to(plane.format.decode(plane), dtype, keep_inf=False)


def measure_grouped(
    x: torch.Tensor,
    ends: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``measure`` of E experts: FP32 [E]; row-scaled [M] for the row and [E, K] for the column.

    Arguments and errors as for ``measure`` and ``cast_grouped``.
    """
    _check_grouped("measure_grouped", x, ends, row, column)
    is_dequantized = check_source(source, row) and is_measured(column)
    if is_dequantized and getattr(row, "stochastic", False) and row_statistic is not None:
        made = cast_grouped(x, ends, row, None, row_statistic=row_statistic, rounding=rounding)
        x, row, is_dequantized = _dequantized_grouped(made.row, ends, x.dtype), None, False
    return measure_planes(x, ends, row, column, is_dequantized, row_statistic)
