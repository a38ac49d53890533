"""An operand of a linear layer whose rows are sharded, on its way to every rank.

Under sequence parallelism a column-parallel layer gathers X, once for fprop and once for wgrad, and
a row-parallel layer gathers dY. Each rank casts its own rows once; ``choose_wire`` says what
travels.

Legend: m rows per rank, F features (K of X, N of dY).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from ..distributed import collectives
from ..distributed.plane_gather import (
    HIGH_PRECISION,
    ROW_PLANE,
    PendingPlanes,
    Wire,
    choose_wire,
    start_planes,
    with_swizzle,
)
from ..distributed.plane_layout import segment_length
from ..distributed.transposed import transposed
from ..formats import fused
from ..formats.casting import CastJob, padded_segments, run_casts
from ..formats.plane import Direction, Plane, saturating_to

if TYPE_CHECKING:
    from .linear_function import LinearCall


class Gathered:
    """The planes of the whole matrix [tp · m, F], of which this rank holds ``x`` [m, F].

    What travels in high precision, or was written before, is launched at once. Use: ``jobs()`` are
    cast, maybe with others; ``start()`` launches the planes; other work; ``wait()``. All ranks call
    these in one order.

    wire: what travels; what: how comm_report() calls it. keeps: a direction whose plane of this
    rank's rows is written besides, for ``own``. own: planes written before; ``x`` may then be None.
    """

    def __init__(
        self,
        call: LinearCall,
        tensor_type: str,
        x: torch.Tensor | None,
        wire: Wire,
        what: str,
        *,
        keeps: Direction | None = None,
        own: dict[Direction, Plane] | None = None,
    ):
        self.wire = wire
        self.own_job: CastJob | None = None
        self._call, self._tensor_type, self._what = call, tensor_type, what
        self._own = own
        self._pending: PendingPlanes | None = None
        self._rows: collectives.PendingGather | None = None
        written = {*wire.planes, *([keeps] if keeps else [])}
        if own is None and written:
            directions = [d in written for d in ("rowwise", "columnwise")]
            self.own_job = _own_job(call, tensor_type, x, *directions)
        if wire.has_high_precision:
            self._rows = collectives.start_gather(
                x, call.group, kind="gather rows", module=call.name, what=what
            )
        if own is not None:
            self.start()

    def jobs(self) -> list[CastJob]:
        """The cast of this rank's rows, to be run before ``start``; none where there is none."""
        return [self.own_job] if self.own_job else []

    def own(self, direction: Direction) -> Plane:
        """The plane of this rank's rows that was written."""
        return self.own_job.planes[direction]

    def start(self) -> None:
        """Launch the gather of the planes that travel, unless that has been done."""
        if self.wire.planes and self._pending is None:
            own = self._own if self._own is not None else self.own_job.planes
            planes = {d: own[d] for d in self.wire.planes}
            call = self._call
            self._pending = start_planes(planes, call.group, module=call.name, what=self._what)

    def wait(self) -> dict[Direction, Plane | None]:
        """The planes of the whole matrix; None for one that is not needed."""
        planes: dict[Direction, Plane | None] = {"rowwise": None, "columnwise": None}
        call, wire = self._call, self.wire
        swizzled = call.binding.swizzled(self._tensor_type)
        if self._pending is not None:
            planes.update(self._pending.wait())
        if wire.columnwise == ROW_PLANE:
            planes["columnwise"] = self._column_of(planes["rowwise"])
            if wire.rowwise is None:
                planes["rowwise"] = None
        # The casts of whole matrices below wrote their scales in that order themselves.
        for direction in swizzled:
            plane = planes[direction]
            if plane is not None and not plane.format.swizzled:
                planes[direction] = with_swizzle(plane)
        if self._rows is not None:
            wanted = (w == HIGH_PRECISION for w in (wire.rowwise, wire.columnwise))
            job = call.job(self._tensor_type, self._rows.wait(), *wanted)
            call.cast(job)  # every rank has the whole matrix: no reduction
            planes.update({d: p for d, p in job.planes.items() if p is not None})
        return planes

    def _column_of(self, row: Plane) -> Plane:
        """The column plane that follows exactly from the row plane of the whole matrix."""
        call = self._call
        job = call.job(self._tensor_type, row.codes, False, True)
        if not job.columnwise_waits:
            format = job.quantizer.plane_format("columnwise")
            return transposed(row, format, call.segments)
        values = _decoded(row)
        block = job.quantizer.plane_format("columnwise").block[1]
        child = dataclasses.replace(
            job, x=padded_segments(values, call.segments, block), segments=1, reduce=False,
            quantizer=job.quantizer.child("columnwise"),
        )  # fmt: skip
        run_casts([child])
        return child.planes["columnwise"]


def gathered_input(call: LinearCall, x: torch.Tensor, keeps: Direction | None) -> Gathered:
    """The row plane of X for fprop, from this rank's rows [m, K]."""
    wire = _wire(call, "input", x.shape, True, False)
    return Gathered(call, "input", x, wire, "input for fprop", keeps=keeps)


def kept_direction(call: LinearCall, x: torch.Tensor) -> Direction | None:
    """The plane of this rank's rows of X that backward will send; None: it sends x itself."""
    planes = _wire(call, "input", x.shape, False, True).planes
    return planes[0] if planes else None


def gathered_input_again(
    call: LinearCall, x: torch.Tensor | None, own: Plane | None, shape: tuple[int, int]
) -> Gathered:
    """The column plane of X for wgrad, from what forward kept of this rank's rows [m, K].

    own: the plane that ``kept_direction`` named; None: ``x`` was kept.
    """
    wire = _wire(call, "input", shape, False, True)
    planes = None if own is None else {wire.planes[0]: own}
    return Gathered(call, "input", x, wire, "input for wgrad", own=planes)


def gathered_grad_output(call: LinearCall, dy: torch.Tensor) -> Gathered:
    """The planes of dY that are needed, from this rank's rows [m, N]."""
    wire = _wire(call, "grad_output", dy.shape, call.needs_dgrad, call.needs_wgrad)
    return Gathered(call, "grad_output", dy, wire, "grad_output")


def _wire(call: LinearCall, tensor_type: str, shape, rowwise: bool, columnwise: bool) -> Wire:
    quantizer = call.binding.quantizers[tensor_type]
    return choose_wire(quantizer, rowwise, columnwise, *shape, call.compute_dtype)


def _own_job(
    call: LinearCall, tensor_type: str, x: torch.Tensor, rowwise: bool, columnwise: bool
) -> CastJob:
    """The cast of this rank's rows; ranks agree on amaxes that are of several ranks' rows."""
    quantizer = call.binding.quantizers[tensor_type]
    rank, rows = collectives.group_rank(call.group), x.shape[0]
    rounding = call.binding.rounding(tensor_type, rank * rows, 0)
    if rounding:
        first = rank * segment_length(quantizer.plane_format("columnwise"), rows)
        column = dataclasses.replace(rounding["columnwise"], contraction_origin=first)
        rounding = {**rounding, "columnwise": column}
    return CastJob(
        x,
        quantizer,
        rowwise=rowwise,
        columnwise=columnwise,
        reduce=True,
        shares_rows=True,
        record=call.training,
        rounding=rounding,
    )


def _decoded(row: Plane) -> torch.Tensor:
    """What the column of a "rowwise_dequantized" hybrid encodes."""
    if fused.why_not(row.codes.device, row.format, None):
        return saturating_to(row.format.decode(row), row.dtype, keep_inf=False)
    return fused.dequantized_row(row, row.dtype)
