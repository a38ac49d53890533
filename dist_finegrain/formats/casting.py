"""Casting matrices to planes: measure, agree over the scale group, encode.

Several casts that feed one GEMM pair run together, so that their amaxes share one reduction. A cast
is one launch of a compiled kernel (fused.py) where there is one for its formats and device, else
plain torch, whose planes are equal byte for byte.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import fused
from .dtypes import HIGH_PRECISION_DTYPES
from .plane import Direction, Format, Plane, Rounding, saturating_to
from .swizzle import with_swizzled_scales

if TYPE_CHECKING:
    from .quantizer import Quantizer


@dataclasses.dataclass
class CastJob:
    """One matrix ``x`` [M, K] to be written as the planes that its quantizer names.

    reduce: whether amaxes are shared with the other ranks of the scale group.
    record: whether a delayed-scaling amax counts towards the next scale.
    bias_grad: whether ``x``, a gradient of an output, is also summed over its rows.
    swizzled: directions whose plane stores its scales as sm_100's GEMM reads them.
    shares_rows: whether ``reduce`` covers the amaxes of a column plane's rows too: other ranks hold
    other rows of ``x``, so other pieces of each.
    segments: the rows of ``x`` are this many ranks' equal shards: no block of the column plane
    crosses from one to the next; each is padded to the block with zeros in that plane.
    planes, row_sum: the results; None for a direction that was not asked for; FP32 [K] or None.
    """

    x: torch.Tensor
    quantizer: Quantizer
    rowwise: bool = True
    columnwise: bool = True
    reduce: bool = False
    record: bool = True
    bias_grad: bool = False
    swizzled: frozenset[Direction] = frozenset()
    shares_rows: bool = False
    segments: int = 1
    rounding: dict[Direction, Rounding] = dataclasses.field(default_factory=dict)
    planes: dict[Direction, Plane | None] = dataclasses.field(
        default_factory=lambda: {"rowwise": None, "columnwise": None}
    )
    row_sum: torch.Tensor | None = None

    def format(self, direction: Direction) -> Format:
        format = self.quantizer.plane_format(direction)
        return with_swizzled_scales(format) if direction in self.swizzled else format

    @property
    def columnwise_waits(self) -> bool:
        """The column plane is made from the row plane's values, not from ``x``."""
        return self.columnwise and self.quantizer.columnwise_source == "rowwise_dequantized"

    @property
    def is_cut(self) -> bool:
        """Blocks of the column plane would cross the ends of segments."""
        if self.segments == 1 or not self.columnwise:
            return False
        rows = self.x.shape[0] // self.segments
        return rows % self.quantizer.plane_format("columnwise").block[1] != 0


def padded_segments(x: torch.Tensor, segments: int, block: int) -> torch.Tensor:
    """x [segments · m, K] with zero rows after each m, up to a multiple of ``block``."""
    rows = x.shape[0] // segments
    pieces = x.unflatten(0, (segments, rows))
    return torch.nn.functional.pad(pieces, (0, 0, 0, -rows % block)).flatten(0, 1)


def run_casts(
    jobs: Sequence[CastJob], reduce_max: Callable[[list[torch.Tensor]], None] | None = None
) -> None:
    """Fill ``planes`` and ``row_sum`` of every job.

    reduce_max: takes the FP32 amax tensors of the jobs with ``reduce`` and makes each the maximum
    over the scale group, in place. It is called once, and once more when a column needs the amax of
    rowwise codes that depend on the first; whether it is called depends on formats, never on data.
    """
    if any(job.is_cut for job in jobs):
        return _run_cut_casts(jobs, reduce_max)
    casts = [_cast_of(job) for job in jobs]
    for measure in (_Cast.measure, _Cast.measure_again):
        shared = [amax for cast in casts for amax in measure(cast)]
        if shared and reduce_max is not None:
            reduce_max(shared)
    for cast in casts:
        cast.encode()
        if not cast.job.rowwise:
            cast.job.planes["rowwise"] = None


def _run_cut_casts(jobs: Sequence[CastJob], reduce_max) -> None:
    """``run_casts`` with column planes made from padded copies, one part of the job at a time."""
    now: list[CastJob] = []
    columns: list[tuple[CastJob, CastJob]] = []
    for job in jobs:
        if not job.is_cut:
            now.append(job)
        elif job.columnwise_waits:
            now.append(_part(job, job.x, rowwise=True, bias_grad=job.bias_grad))
            columns.append((job, now[-1]))
        else:
            if job.rowwise or job.bias_grad:
                now.append(_part(job, job.x, rowwise=job.rowwise, bias_grad=job.bias_grad))
                columns.append((job, now[-1]))
            now.append(_column_part(job, job.x))
            columns.append((job, now[-1]))
    run_casts(now, reduce_max)
    later = []
    for job, part in columns:
        if job.columnwise_waits:
            row = part.planes["rowwise"]
            values = saturating_to(row.format.decode(row), job.x.dtype, keep_inf=False)
            later.append((job, _column_part(job, values)))
    if later:
        run_casts([part for _, part in later], reduce_max)
    for job, part in columns + later:
        job.row_sum = job.row_sum if part.row_sum is None else part.row_sum
        for direction, plane in part.planes.items():
            is_wanted = job.columnwise if direction == "columnwise" else job.rowwise
            if plane is not None and is_wanted:
                job.planes[direction] = plane


def _part(job: CastJob, x: torch.Tensor, rowwise: bool, bias_grad: bool = False) -> CastJob:
    planes = {"rowwise": None, "columnwise": None}
    return dataclasses.replace(
        job, x=x, rowwise=rowwise, columnwise=False, bias_grad=bias_grad, segments=1, planes=planes
    )


def _column_part(job: CastJob, x: torch.Tensor) -> CastJob:
    block = job.quantizer.plane_format("columnwise").block[1]
    part = _part(job, padded_segments(x, job.segments, block), rowwise=False)
    # A hybrid's child alone: what it encodes is given, whatever its source.
    return dataclasses.replace(part, columnwise=True, quantizer=job.quantizer.child("columnwise"))


def _cast_of(job: CastJob) -> _Cast:
    cast = _FusedCast(job)
    # Other subclasses of Tensor, such as DTensor, do not know the operators.
    is_plain = type(job.x) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    is_matrix = is_plain and job.x.dtype in HIGH_PRECISION_DTYPES
    is_fused = is_matrix and not fused.why_not(job.x.device, cast.row, cast.column)
    return cast if is_fused else _PlainCast(job)


class _Cast(abc.ABC):
    """One job on its way: the formats of the planes to be made, and their statistics."""

    def __init__(self, job: CastJob):
        self.job = job
        is_row_needed = job.rowwise or job.columnwise_waits
        self.row = job.format("rowwise") if is_row_needed else None
        self.column = job.format("columnwise") if job.columnwise else None
        self.row_statistic = self.column_statistic = None

    @property
    def is_column_late(self) -> bool:
        """The column's amax is of row codes that depend on a statistic of their own."""
        waits = self.job.columnwise_waits and self.row.statistic != "none"
        return waits and fused.is_measured(self.column)

    @property
    def column_has_amax_of_row(self) -> bool:
        return not self.job.columnwise_waits and fused.shares_amax(self.row, self.column)

    def measure(self) -> list[torch.Tensor]:
        """Find what ``x`` alone determines; returns the amaxes to be shared with other ranks."""
        if self.row is not None and self.row.statistic == "scale":
            self.row_statistic = self.job.quantizer.child("rowwise").scale
        if self.column is not None and self.column.statistic == "scale":
            self.column_statistic = self.job.quantizer.child("columnwise").scale
        column = None if self.is_column_late else self.column
        self._measure(self.row, column)
        shared = [self.row_statistic] if self._is_shared(self.row) else []
        if self._is_shared(column, self.job.shares_rows) and not self.column_has_amax_of_row:
            shared.append(self.column_statistic)
        return shared

    def measure_again(self) -> list[torch.Tensor]:
        """Find what the row's codes determine, after the first reduction."""
        if not self.is_column_late:
            return []
        self._measure(None, self.column)
        is_shared = self._is_shared(self.column, self.job.shares_rows)
        return [self.column_statistic] if is_shared else []

    def _is_shared(self, format: Format | None, shares_rows: bool = False) -> bool:
        # Row amaxes stay local where the rank contracts its own shard, or holds whole rows.
        kinds = ("tensor", "row") if shares_rows else ("tensor",)
        return self.job.reduce and format is not None and format.statistic in kinds

    def _records(self, direction: Direction, format: Format | None) -> bool:
        """Whether this plane raises a delayed amax; one that serves both planes is raised once."""
        is_delayed = format is not None and format.statistic == "scale"
        if not is_delayed or not self.job.record or self.job.x.numel() == 0:
            return False
        child = self.job.quantizer.child
        is_second = direction == "columnwise" and self.row is not None
        is_again = is_second and not self.job.columnwise_waits
        return not (is_again and child("rowwise") is child("columnwise"))

    @abc.abstractmethod
    def _measure(self, row: Format | None, column: Format | None) -> None:
        """Set the statistics that these planes need and that are not given."""

    @abc.abstractmethod
    def encode(self) -> None:
        """Make the planes."""


class _FusedCast(_Cast):
    """One read for the amaxes of both planes, one for their codes."""

    def _measure(self, row, column):
        if not fused.is_measured(row) and not fused.is_measured(column):
            return
        job = self.job
        is_of_row = job.columnwise_waits and fused.is_measured(column)
        row_amax, column_amax = fused.measure(
            job.x,
            self.row if is_of_row else row,
            column,
            source=job.quantizer.columnwise_source if is_of_row else "original",
            row_statistic=self.row_statistic if is_of_row else None,
            rounding=job.rounding,
        )
        self.row_statistic = self.row_statistic if row_amax is None else row_amax
        self.column_statistic = self.column_statistic if column_amax is None else column_amax

    def encode(self):
        job = self.job
        made = fused.cast(
            job.x,
            self.row,
            self.column,
            source=job.quantizer.columnwise_source if self.column is not None else "original",
            row_statistic=self.row_statistic,
            column_statistic=self.column_statistic,
            rounding=job.rounding,
            row_amax=self._amax("rowwise", self.row),
            column_amax=self._amax("columnwise", self.column),
            bias_grad=job.bias_grad,
        )
        job.planes["rowwise"], job.planes["columnwise"] = made.row, made.column
        job.row_sum = made.bias_grad

    def _amax(self, direction: Direction, format: Format | None) -> torch.Tensor | None:
        records = self._records(direction, format)
        return self.job.quantizer.child(direction).amax if records else None


class _PlainCast(_Cast):
    """Plane by plane in plain torch, as each Format says."""

    def _measure(self, row, column):
        if fused.is_measured(row):
            self.row_statistic = row.measure(self.job.x)
        if column is None or not fused.is_measured(column):
            return
        if self.column_has_amax_of_row:
            self.column_statistic = self.row_statistic
        else:
            self.column_statistic = column.measure(self._column_source())

    def _column_source(self) -> torch.Tensor:
        """The matrix [K, M] that the column plane encodes."""
        job = self.job
        if not job.columnwise_waits:
            return job.x.t()
        row = self._row_plane()
        return saturating_to(row.format.decode(row), job.x.dtype, keep_inf=False).t()

    def _row_plane(self) -> Plane:
        planes = self.job.planes
        if planes["rowwise"] is None:
            rounding = self.job.rounding.get("rowwise")
            planes["rowwise"] = self.row.encode(self.job.x, self.row_statistic, rounding)
        return planes["rowwise"]

    def encode(self):
        job = self.job
        if self.row is not None:
            self._record("rowwise", self.row, job.x)
            self._row_plane()
        if self.column is not None:
            source = self._column_source()
            self._record("columnwise", self.column, source)
            rounding = job.rounding.get("columnwise")
            job.planes["columnwise"] = self.column.encode(source, self.column_statistic, rounding)
        if job.bias_grad:
            job.row_sum = job.x.sum(0, dtype=torch.float32)

    def _record(self, direction: Direction, format: Format, source: torch.Tensor) -> None:
        if self._records(direction, format):
            self.job.quantizer.child(direction).record_amax(format.measure(source))
