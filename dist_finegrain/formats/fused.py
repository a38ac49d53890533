"""One read of a matrix, up to two planes: the Python face of the compiled kernels.

Formats stay the oracle: what ``Format.measure``, ``encode`` and ``decode`` do in plain torch is
done here, planes and amaxes with equal bytes. Identity never reaches a kernel.
Legend: X [M, K]; its row plane is (R, C) = (M, K), its column plane (K, M).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ..extension import why_unavailable
from .fused_options import (
    buffers,
    check_matrix,
    check_source,
    is_measured,
    options_of,
    oriented,
    rounding_places,
    shares_amax,
    statistic_of,
    why_not,
)
from .plane import Direction, Format, Plane, Rounding, saturating_to

__all__ = ["Casted", "cast", "decode", "is_measured", "measure", "shares_amax", "why_not"]
_ops = torch.ops.dist_finegrain
BIAS_ROWS = 128  # rows of X whose sum is one row of partial bias gradients


@dataclasses.dataclass(frozen=True)
class Casted:
    """row: plane of X; column: plane of Xᵀ; bias_grad: FP32 [K]; None where not asked for."""

    row: Plane | None
    column: Plane | None
    bias_grad: torch.Tensor | None = None


def cast(
    x: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    column_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
    row_amax: torch.Tensor | None = None,
    column_amax: torch.Tensor | None = None,
    bias_grad: bool = False,
) -> Casted:
    """Both planes of ``x`` [M, K] (FP32, FP16 or BF16) from one read and one launch.

    row, column: formats of the planes, None for one that is not wanted. source: what the column
    encodes, "original" or "rowwise_dequantized". row_statistic, column_statistic: what ``measure``
    gives, or its maximum over ranks: FP32 [1] or [R]; the scale FP32 [1] of delayed scaling.
    row_amax, column_amax: FP32 [1], raised to the amax of what that plane encodes. bias_grad: also
    the column sums of ``x``, FP32 [K]. Read in place: last stride 1 and any row stride, or (source
    "original", no bias_grad) the transpose of such; anything else is copied once.

    Raises RuntimeError where no compiled kernel runs (``why_not``), ValueError or TypeError for
    arguments that do not fit, by name.
    """
    check_matrix("cast", x)
    rounding = rounding or {}
    is_dequantized = check_source(source, row) and column is not None
    if x.numel() == 0:
        statistics = (row_statistic, column_statistic)
        return _cast_empty(x, row, column, is_dequantized, statistics, bias_grad)
    if row is not None and row.family == "identity" and is_dequantized:
        row_plane = row.encode(x)
        x_of_row = saturating_to(row.decode(row_plane), x.dtype, keep_inf=False)
        only_column = cast(
            x_of_row, None, column, column_statistic=column_statistic, rounding=rounding,
            column_amax=column_amax,
        )  # fmt: skip
        return Casted(row_plane, only_column.column, _sum_rows(x) if bias_grad else None)

    r, c = options_of(row), options_of(column)
    identity_row = row.encode(x) if row is not None and not r.packed else None
    identity_column = None
    if column is not None and not c.packed and not is_dequantized:
        identity_column = column.encode(x.t())
    row_plane = column_plane = sums = None
    if r.packed or c.packed:
        matrix, is_swapped = oriented(x, is_fixed=is_dequantized or bias_grad)
        if r.packed:
            row_plane = row.empty((x.shape[0], x.shape[1]), x.dtype, x.device)
        if c.packed:
            column_plane = column.empty((x.shape[1], x.shape[0]), x.dtype, x.device)
        places, seed_step = rounding_places(x, row, column, rounding)
        sides = [
            (buffers(row_plane), r, statistic_of(row, row_statistic), row_amax),
            (buffers(column_plane), c, statistic_of(column, column_statistic), column_amax),
        ]
        if is_swapped:
            sides.reverse()
            places = places[3:] + places[:3]
        (a, a_options, a_statistic, a_amax), (b, b_options, b_statistic, b_amax) = sides
        partials = None
        if bias_grad:
            blocks = -(-x.shape[0] // BIAS_ROWS)
            partials = torch.empty(blocks, x.shape[1], dtype=torch.float32, device=x.device)
        _ops.cast.default(
            matrix, a, b, a_options.packed, a_options.epsilon, b_options.packed, b_options.epsilon,
            is_dequantized and c.packed != 0, a_statistic, b_statistic, a_amax, b_amax, places,
            seed_step, partials, None, None,
        )  # fmt: skip
        sums = partials.sum(0) if bias_grad else None
    elif bias_grad:
        sums = _sum_rows(x)
    if column is not None and not c.packed and is_dequantized:
        identity_column = column.encode(dequantized_row(row_plane, x.dtype).t())
    return Casted(row_plane or identity_row, column_plane or identity_column, sums)


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, dtype=torch.float32)


def dequantized_row(row_plane: Plane, dtype: torch.dtype) -> torch.Tensor:
    """What the column of a "rowwise_dequantized" hybrid encodes: infinities saturate too."""
    return saturating_to(decode(row_plane, dtype), dtype, keep_inf=False)


def _cast_empty(x, row, column, is_dequantized, statistics, bias_grad) -> Casted:
    """Planes without any element: what the formats make of them."""
    row_statistic, column_statistic = statistics
    row_plane = None if row is None else row.encode(x, statistic_of(row, row_statistic))
    column_plane = None
    if column is not None:
        values = x
        if is_dequantized:
            values = saturating_to(row.decode(row_plane), x.dtype, keep_inf=False)
        column_plane = column.encode(values.t(), statistic_of(column, column_statistic))
    return Casted(row_plane, column_plane, _sum_rows(x) if bias_grad else None)


def measure(
    x: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(row amax, column amax) that the formats need, FP32 [1] or [R], from one read of X [M, K].

    None where a format is None or measures nothing. One tensor is returned twice where one amax
    serves both planes. source "rowwise_dequantized": the column's amax is of the row's values;
    where the row has a statistic it must be given, and is not measured again. rounding: of the row,
    where it is stochastic: such rows are cast and decoded for their amax.

    Raises as ``cast`` does, and ValueError for a row statistic that is missing.
    """
    check_matrix("measure", x)
    is_dequantized = check_source(source, row) and is_measured(column)
    if is_dequantized and getattr(row, "stochastic", False) and row_statistic is not None:
        made = cast(x, row, None, row_statistic=row_statistic, rounding=rounding)
        x, row, is_dequantized = dequantized_row(made.row, x.dtype), None, False
    return measure_planes(x, None, row, column, is_dequantized, row_statistic)


def measure_planes(
    x: torch.Tensor,
    ends: torch.Tensor | None,
    row: Format | None,
    column: Format | None,
    is_dequantized: bool,
    row_statistic: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``measure``, or ``measure_grouped`` where ``ends`` int32 [E] is given, of checked arguments.

    is_dequantized: the column's amax is of the row's values.
    """
    if is_dequantized and row.family == "identity":
        values = saturating_to(row.decode(row.encode(x)), x.dtype, keep_inf=False)
        return measure_planes(values, ends, None, column, False, None)
    if is_dequantized and row.statistic != "none" and row_statistic is None:
        raise ValueError(
            f"row_statistic is None, but the column's amax is of values that {row.describe()} "
            "rounds; accepted: what measure(x, row, None) gives, reduced over the ranks"
        )
    measures_row = is_measured(row) and row_statistic is None
    is_shared = not is_dequantized and measures_row and shares_amax(row, column)
    experts = 0 if ends is None else ends.shape[0]
    row_amax = _amax(row, x, x.shape[0], 0, experts) if measures_row else None
    column_amax = None
    if is_measured(column) and not is_shared:
        column_amax = _amax(column, x, x.shape[1], experts, experts)
    if x.numel() and (row_amax is not None or column_amax is not None):
        matrix, is_swapped = oriented(x, is_fixed=ends is not None or is_dequantized)
        sides = [(row_amax, options_of(row)), (column_amax, options_of(column))]
        if is_swapped:
            sides.reverse()
        (a, a_options), (b, b_options) = sides
        _ops.measure.default(
            matrix, a, b, a_options.packed, a_options.epsilon,
            b_options.packed, is_dequantized,
            statistic_of(row, row_statistic) if is_dequantized else None, ends,
        )  # fmt: skip
    return row_amax, row_amax if is_shared else column_amax


def _amax(format, x, rows: int, experts_of_rows: int, experts: int) -> torch.Tensor:
    """What ``measure`` sets, zeros without elements: [1] or [R]; of experts [E], [M], [E, K]."""
    shape: tuple[int, ...] = (max(experts, 1),)
    if format.statistic == "row":
        shape = (experts_of_rows, rows) if experts_of_rows else (rows,)
    make = torch.empty if x.numel() else torch.zeros
    return make(shape, dtype=torch.float32, device=x.device)


def decode(plane: Plane, dtype: torch.dtype, *, outer: bool = True) -> torch.Tensor:
    """Values [R, C] of a plane in ``dtype``, nearest-even, saturating; NaN and infinities stay.

    ``outer=False`` leaves the outer scale out. With RHT: the rotated values of whole groups,
    [R, C rounded up to 16]. Raises RuntimeError where no compiled kernel runs.
    """
    format = plane.format
    options = options_of(format)
    if not options.packed or 0 in plane.shape:
        return saturating_to(format.decode(plane, outer=outer), dtype)
    reason = why_unavailable(plane.codes.device)
    if reason:
        raise RuntimeError(f"decode needs a compiled kernel on {plane.codes.device}: {reason}")
    rows, contraction = plane.shape
    extent = -(-contraction // 16) * 16 if format.rht else contraction
    out = torch.empty(rows, extent, dtype=dtype, device=plane.codes.device)
    _ops.decode.default(
        plane.codes, plane.scales, plane.outer if outer else None, options.packed, out
    )
    return out
