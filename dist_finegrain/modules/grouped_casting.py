"""Casts of the operands of a grouped linear layer: one for all experts, or expert by expert.

Legend: E experts with m tokens each, M together; X [M, K] and dY [M, N], weights E times [N, K].
Both ways give the bytes that a Linear of each expert would get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..formats import fused
from ..formats.casting import CastJob, run_casts
from ..formats.fused_grouped import cast_grouped, measure_grouped
from ..formats.plane import Direction, Format, Plane, in_memory_order
from ..formats.quantizer import Quantizer
from ..ops.experts import Experts, column_widths, part, sliceable


@dataclasses.dataclass(frozen=True)
class Operand:
    """One direction of X, dY or W of all experts, in one of three ways.

    planes: expert by expert; tokens: of X or dY, all experts in one plane, the contraction parts of
    a column ending at ``column_ends``; experts: of W, all experts in the buffers of one plane.
    """

    planes: tuple[Plane, ...] = ()
    tokens: Plane | None = None
    experts: Experts | None = None
    column_ends: torch.Tensor | None = None

    def each(self, sizes: Sequence[int]) -> list[Plane]:
        """One plane per expert; ``sizes``: the experts' tokens."""
        if self.planes:
            return list(self.planes)
        if self.experts is not None:
            return [self.experts.expert(e) for e in range(self.experts.count)]
        plane, is_column = sliceable(self.tokens), self.column_ends is not None
        steps = column_widths(plane.format, sizes) if is_column else sizes
        cuts, start = [], 0
        for e, (m, step) in enumerate(zip(sizes, steps, strict=True)):
            span = (start, start + m)
            whole = (0, plane.shape[0] if is_column else plane.shape[1])
            cuts.append(part(plane, e, *((whole, span) if is_column else (span, whole))))
            start += step
        return cuts

    def stacked(self) -> Experts:
        """Of W: all experts in the buffers of one plane, copied there if cast one by one."""
        return self.experts or Experts.of_planes(self.planes)

    def unpack(self) -> tuple[Operand, list[torch.Tensor | None]]:
        """(the description without buffers, the buffers), for autograd's saved tensors."""
        held = [self.tokens, self.experts and self.experts.plane, *self.planes]
        saved = [in_memory_order(t) for plane in held if plane is not None for t in plane.parts]
        tensors, turned = [t for t, _ in saved], iter([is_turned for _, is_turned in saved])
        # In the place of each buffer: whether its transpose was saved.
        bare = self._with(
            lambda plane: dataclasses.replace(plane, parts=tuple(next(turned) for _ in plane.parts))
        )
        return dataclasses.replace(bare, column_ends=None), [self.column_ends, *tensors]

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> Operand:
        """The inverse of ``unpack``."""
        rest = iter(tensors)
        column_ends = next(rest)

        def filled(plane: Plane) -> Plane:
            parts = [(next(rest), is_turned) for is_turned in plane.parts]
            return dataclasses.replace(plane, parts=tuple(p.t() if t else p for p, t in parts))

        full = self._with(filled)
        return dataclasses.replace(full, column_ends=column_ends)

    def _with(self, change: Callable[[Plane], Plane]) -> Operand:
        tokens = None if self.tokens is None else change(self.tokens)
        experts = self.experts
        if experts is not None:
            experts = dataclasses.replace(experts, plane=change(experts.plane))
        return Operand(tuple(map(change, self.planes)), tokens, experts, self.column_ends)


@dataclasses.dataclass
class GroupedJob:
    """The matrix ``x`` of all experts, rows ending at ``ends`` int32 [E], to be cast in one launch.

    quantizers: one per expert, of equal formats, each with its own scale where that is delayed.
    reduce, record: as in CastJob. row, column, column_ends: the results, as ``Grouped`` has them.
    """

    x: torch.Tensor
    ends: torch.Tensor
    quantizers: Sequence[Quantizer]
    rowwise: bool
    columnwise: bool
    reduce: bool = False
    record: bool = True
    row: Plane | None = None
    column: Plane | None = None
    column_ends: torch.Tensor | None = None

    def operand(self, direction: Direction) -> Operand | None:
        """The result as an operand of tokens; None where it was not asked for."""
        if direction == "rowwise":
            return None if self.row is None else Operand(tokens=self.row)
        if self.column is None:
            return None
        return Operand(tokens=self.column, column_ends=self.column_ends)


def run_grouped_casts(
    jobs: Sequence[GroupedJob], reduce_max: Callable[[list[torch.Tensor]], None]
) -> None:
    """Fill the results of every job; ``reduce_max`` is called as ``run_casts`` calls it."""
    casts = [_GroupedCast(job) for job in jobs]
    for measure in (_GroupedCast.measure, _GroupedCast.measure_again):
        shared = [amax for cast in casts for amax in measure(cast)]
        if shared:
            reduce_max(shared)
    for cast in casts:
        cast.encode()


class _GroupedCast:
    """One job on its way: the formats of the planes to be made, and their statistics."""

    def __init__(self, job: GroupedJob):
        first = job.quantizers[0]
        waits = job.columnwise and first.columnwise_source == "rowwise_dequantized"
        self.job, self.source = job, "rowwise_dequantized" if waits else "original"
        self.row = first.plane_format("rowwise") if job.rowwise or waits else None
        self.column = first.plane_format("columnwise") if job.columnwise else None
        self.row_statistic = self._scales("rowwise", self.row)
        # Scales of one tensor let the kernel write both planes from the same codes.
        is_shared = self._is_one_slot and self.row is not None and self.row_statistic is not None
        self.column_statistic = (
            self.row_statistic
            if is_shared and self.column is not None
            else self._scales("columnwise", self.column)
        )
        has_late_amax = waits and self.row.statistic != "none" and fused.is_measured(self.column)
        self.is_column_late = has_late_amax

    def _scales(self, direction: Direction, format: Format | None) -> torch.Tensor | None:
        """FP32 [E] of delayed scaling."""
        if format is None or format.statistic != "scale":
            return None
        return torch.cat([q.child(direction).scale for q in self.job.quantizers])

    def measure(self) -> list[torch.Tensor]:
        """Find what ``x`` alone determines; returns the amaxes to be shared with other ranks."""
        column = None if self.is_column_late else self.column
        row = self.row
        is_of_row = self.source != "original" and fused.is_measured(column)
        if fused.is_measured(row) or fused.is_measured(column):
            source = self.source if is_of_row else "original"
            is_row_needed = is_of_row or fused.is_measured(row)
            found = self._measured(row if is_row_needed else None, column, source)
            self._take(*found)
        shared = self._shared(row, self.row_statistic)
        if self.column_statistic is not self.row_statistic:
            shared += self._shared(column, self.column_statistic)
        return shared

    def measure_again(self) -> list[torch.Tensor]:
        """Find what the row's codes determine, after the first reduction."""
        if not self.is_column_late:
            return []
        self._take(*self._measured(self.row, self.column, self.source, self.row_statistic))
        return self._shared(self.column, self.column_statistic)

    def _measured(self, row, column, source, row_statistic=None):
        column = column if fused.is_measured(column) else None
        return measure_grouped(
            self.job.x, self.job.ends, row, column, source=source, row_statistic=row_statistic
        )

    def _take(self, row_amax, column_amax) -> None:
        self.row_statistic = self.row_statistic if row_amax is None else row_amax
        self.column_statistic = self.column_statistic if column_amax is None else column_amax

    def _shared(self, format: Format | None, amax) -> list[torch.Tensor]:
        is_shared = self.job.reduce and format is not None and format.statistic == "tensor"
        return [amax] if is_shared else []

    def encode(self) -> None:
        job = self.job
        amaxes = {direction: self._pending() for direction in self._recorded()}
        made = cast_grouped(
            job.x, job.ends, self.row, self.column, source=self.source,
            row_statistic=self.row_statistic, column_statistic=self.column_statistic,
            row_amax=amaxes.get("rowwise"), column_amax=amaxes.get("columnwise"),
        )  # fmt: skip
        for direction, amax in amaxes.items():
            pending = [q.child(direction).amax for q in job.quantizers]
            torch._foreach_maximum_(pending, list(amax.split(1)))
        job.row = made.row if job.rowwise else None
        job.column, job.column_ends = made.column, made.column_ends

    def _pending(self) -> torch.Tensor:
        """FP32 [E] of -1, which stays where an expert has no tokens: it did not run."""
        return self.job.x.new_full((len(self.job.quantizers),), -1.0, dtype=torch.float32)

    def _recorded(self) -> list[Direction]:
        """Directions whose amaxes delayed scaling records; one that serves both is raised once."""
        sides = {"rowwise": self.row, "columnwise": self.column}
        delayed = [d for d, f in sides.items() if f is not None and f.statistic == "scale"]
        if not self.job.record or self.job.x.numel() == 0:
            return []
        return delayed[:1] if len(delayed) == 2 and self._is_one_slot else delayed

    @property
    def _is_one_slot(self) -> bool:
        first = self.job.quantizers[0]
        return self.source == "original" and first.child("rowwise") is first.child("columnwise")


def cast_each(
    jobs: Sequence[CastJob], reduce_max: Callable[[list[torch.Tensor]], None]
) -> dict[Direction, Operand | None]:
    """Run the jobs of one tensor, one per expert, as operands."""
    run_casts(jobs, reduce_max)
    return {d: each_operand(jobs, d) for d in ("rowwise", "columnwise")}


def each_operand(jobs: Sequence[CastJob], direction: Direction) -> Operand | None:
    """The planes that the experts' jobs made, expert by expert; None where none was asked for."""
    planes = tuple(job.planes[direction] for job in jobs)
    return None if planes[0] is None else Operand(planes)
