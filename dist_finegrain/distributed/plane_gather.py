"""Gathering an operand whose rows are sharded: as planes, as one plane, or in high precision.

``choose_wire`` picks the fewest bytes; the gathered planes are the same whichever it picks. Planes
travel packed in one asynchronous all-gather.

Legend: m rows per rank, F features; the whole matrix is [ranks · m, F].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..formats.plane import Direction, Format, Plane, round_up
from ..formats.quantizer import Quantizer
from ..formats.swizzle import swizzle_128x4, with_swizzled_scales
from . import collectives
from .plane_layout import (
    Region,
    is_packable,
    regions,
    segment_length,
    travelling_format,
    with_scales_per_row,
)

_ALIGNMENT = 16

PLANE, ROW_PLANE, HIGH_PRECISION = "plane", "row plane", "high precision"


@dataclasses.dataclass(frozen=True)
class Wire:
    """How an operand's planes get to every rank; None for a plane that is not needed.

    rowwise: "plane", as written by each rank, or "high precision", quantized after.
    columnwise: the same two, or "row plane": it follows exactly from the row plane.
    nbytes: what one rank sends.
    """

    rowwise: str | None
    columnwise: str | None
    nbytes: int

    @property
    def planes(self) -> tuple[Direction, ...]:
        """The directions whose planes travel."""
        row = self.rowwise == PLANE or self.columnwise == ROW_PLANE
        return (("rowwise",) if row else ()) + (("columnwise",) if self.columnwise == PLANE else ())

    @property
    def has_high_precision(self) -> bool:
        """Whether the matrix itself travels."""
        return HIGH_PRECISION in (self.rowwise, self.columnwise)


def choose_wire(
    quantizer: Quantizer,
    rowwise: bool,
    columnwise: bool,
    rows: int,
    features: int,
    dtype: torch.dtype,
) -> Wire:
    """The way of fewest bytes for the planes that are needed of shards [rows, features]."""
    children = (quantizer.child("rowwise"), quantizer.child("columnwise"))
    return _choose(
        quantizer.plane_format("rowwise"),
        quantizer.plane_format("columnwise"),
        quantizer.columnwise_source == "rowwise_dequantized",
        children[0] is children[1],
        rowwise,
        columnwise,
        rows,
        features,
        dtype,
    )


@functools.lru_cache(maxsize=4096)
def _choose(row, column, waits, is_one_child, rowwise, columnwise, rows, features, dtype) -> Wire:
    follows = waits or _is_transpose(row, column, is_one_child)
    # A row plane in square blocks is cut at the shard, so it cannot be made of the whole matrix.
    is_cut = row.block[0] > 1 and rows % row.block[0] != 0
    of_row = [PLANE] * is_packable(row) + [HIGH_PRECISION] * (not is_cut)
    candidates = []
    for row_way in of_row if rowwise else [None]:
        ways = []
        # What a user's encode() makes of a shard need not be a piece of what it makes of the whole.
        if is_packable(column) and (not waits or is_packable(row)):
            ways.append(PLANE)
        if follows and is_packable(row) and row_way != HIGH_PRECISION:
            ways.append(ROW_PLANE)
        if not waits or not (is_cut or row_way == PLANE):
            ways.append(HIGH_PRECISION)
        for column_way in ways if columnwise else [None]:
            wire = Wire(row_way, column_way, 0)
            nbytes = sum(
                plane_bytes(row if d == "rowwise" else column, d, rows, features, dtype)
                for d in wire.planes
            )
            nbytes += wire.has_high_precision * rows * features * dtype.itemsize
            candidates.append(dataclasses.replace(wire, nbytes=nbytes))
    # Equal bytes: high precision needs no packing, and a written plane no second cast.
    return min(
        candidates,
        key=lambda w: (w.nbytes, len(w.planes), w.columnwise == ROW_PLANE),
    )


def _is_transpose(row: Format, column: Format, is_one_child: bool) -> bool:
    """Whether the column plane holds the row plane's codes and scales, transposed."""
    if row != column or getattr(row, "stochastic", False):
        return False
    if row.family == "identity" or row.block[0] > 1:
        return True
    if row.family != "float8":
        return False
    return row.statistic == "tensor" or (row.statistic == "scale" and is_one_child)


def plane_bytes(
    format: Format, direction: Direction, rows: int, features: int, dtype: torch.dtype
) -> int:
    """Bytes that one rank sends of a plane, without the alignment of its buffers."""
    if direction == "rowwise":
        format = travelling_format(format, rows)
    return sum(region.nbytes for region in regions(format, direction, rows, features, dtype))


@dataclasses.dataclass
class _Piece:
    """One plane on its way: this rank's, and where its regions lie in the packed buffer."""

    direction: Direction
    plane: Plane
    regions: list[Region]
    offsets: list[int]


class PendingPlanes:
    """Planes on their way; ``wait`` assembles those of the whole matrix."""

    def __init__(self, pieces: list[_Piece], pending: collectives.PendingGather, ranks: int):
        self._pieces, self._pending, self._ranks = pieces, pending, ranks

    def wait(self, swizzled: frozenset[Direction] = frozenset()) -> dict[Direction, Plane]:
        """The gathered planes; those in ``swizzled`` store their scales as sm_100 reads them."""
        received = self._pending.wait()
        received = received.view(self._ranks, received.numel() // self._ranks)
        planes = {}
        for piece in self._pieces:
            plane = _assembled(piece, received, self._ranks)
            if piece.direction in swizzled:
                plane = with_swizzle(plane)
            planes[piece.direction] = plane
        return planes


def start_planes(
    planes: Mapping[Direction, Plane], group: Any, *, module: str = "", what: str = ""
) -> PendingPlanes:
    """Launch the gather of this rank's planes, rowwise [m, F] and/or columnwise [F, m].

    Every rank passes planes of equal formats and shapes; per-tensor scales and the row scales of a
    columnwise plane must be equal on all ranks. Returns at once.
    """
    pieces, size = [], 0
    for direction, plane in planes.items():
        if direction == "rowwise" and travelling_format(plane.format, plane.shape[0]) != (
            plane.format
        ):
            plane = with_scales_per_row(plane)
        shape = plane.shape if direction == "rowwise" else plane.shape[::-1]
        found = regions(plane.format, direction, *shape, plane.dtype)
        offsets = []
        for region in found:
            offsets.append(size)
            size += round_up(region.nbytes, _ALIGNMENT)
        pieces.append(_Piece(direction, plane, found, offsets))
    sent = _packed(pieces, max(size, _ALIGNMENT))  # also without any row
    pending = collectives.start_gather(sent, group, kind="gather planes", module=module, what=what)
    return PendingPlanes(pieces, pending, collectives.group_size(group))


def _packed(pieces: Sequence[_Piece], size: int) -> torch.Tensor:
    sent = pieces[0].plane.parts[0].new_empty(size, dtype=torch.uint8)
    for piece in pieces:
        for region, offset in zip(piece.regions, piece.offsets, strict=True):
            own = region.own(_as_sent(piece, region.index))
            target = sent[offset : offset + region.nbytes].view(region.dtype)
            target.view(region.shape).copy_(own)
    return sent


def _as_sent(piece: _Piece, index: int) -> torch.Tensor:
    """A buffer of this rank's plane; Identity's column plane is sent as the matrix lies."""
    part = piece.plane.parts[index]
    is_turned = piece.plane.format.family == "identity" and piece.direction == "columnwise"
    return part.t() if is_turned else part


def _assembled(piece: _Piece, received: torch.Tensor, ranks: int) -> Plane:
    own, is_row = piece.plane, piece.direction == "rowwise"
    format = own.format
    rows, features = own.shape if is_row else own.shape[::-1]
    extent = ranks * (rows if is_row else segment_length(format, rows))
    shape = (extent, features) if is_row else (features, extent)
    if format.family == "identity":
        whole = format.empty((extent, features), own.dtype, received.device)
        plane = dataclasses.replace(whole, shape=shape)
    else:
        whole = plane = format.empty(shape, own.dtype, received.device)
    for region, offset in zip(piece.regions, piece.offsets, strict=True):
        buffer = whole.parts[region.index]
        if not region.covers(buffer, ranks):
            buffer.zero_()
        found = received[:, offset : offset + region.nbytes].view(region.dtype)
        region.of_all(buffer, ranks).copy_(found.unflatten(1, region.shape))
    if format.family == "identity":
        return plane if is_row else plane.map(lambda part: part.t())
    if own.outer is not None and all(region.index != 2 for region in piece.regions):
        plane.outer.copy_(own.outer)
    return plane


def with_swizzle(plane: Plane) -> Plane:
    """The same plane with its scales in the order that sm_100 reads."""
    codes, scales, outer = plane.parts
    format = with_swizzled_scales(plane.format)
    return dataclasses.replace(plane, format=format, parts=(codes, swizzle_128x4(scales), outer))
