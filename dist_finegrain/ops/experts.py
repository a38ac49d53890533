"""Planes of E experts in one buffer: weights as a grouped GEMM reads them, and one expert's part.

Legend: an expert's plane is [R, C]; m rows of one expert; Rp, Cp, Ctot as stored (numerics.md,
"Plane storage").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..formats.fused_grouped import grouped_contraction
from ..formats.identity import IdentityFormat
from ..formats.plane import Format, Plane, padded, round_up

ROW_MULTIPLE = 16
_BLOCK_SCALED = ("mxfp8", "nvfp4")  # scale bytes [Rp, blocks]


@dataclasses.dataclass(frozen=True)
class Experts:
    """Planes [R, C] of ``count`` experts in the buffers of ``plane``: operand B of fprop and dgrad.

    axis 0: the experts' rows lie below each other; 1: their contraction parts beside each other.
    pitch: from one expert's start to the next one's. Made by ``of_rows``, ``of_columns`` (both
    without a copy) and ``of_planes``.
    """

    plane: Plane
    count: int
    shape: tuple[int, int]
    pitch: int
    axis: int

    @classmethod
    def of_rows(cls, plane: Plane, count: int) -> Experts:
        """The row plane of weights [E·R, C] that ``cast_grouped`` made, for fprop; no copy.

        Raises ValueError where the rows do not divide by ``count``.
        """
        rows, contraction = plane.shape
        if count < 1 or rows % count:
            raise ValueError(
                f"count is {count} for a plane of {rows} rows; accepted: a divisor of the rows, "
                "e.g. the number of experts whose weights [E·N, K] were cast"
            )
        return cls(plane, count, (rows // count, contraction), rows // count, 0)

    @classmethod
    def of_columns(cls, plane: Plane, count: int, rows: int) -> Experts:
        """The column plane of weights [E·N, K] that ``cast_grouped`` made, for dgrad; no copy.

        rows: N, the contraction of one expert's plane [K, N]. Raises ValueError where the plane
        has no room for such parts.
        """
        pitch = column_widths(plane.format, [rows])[0]
        if count < 1 or count * pitch > plane.shape[1]:
            raise ValueError(
                f"rows is {rows} and count {count}, which take {count * pitch} of the contraction, "
                f"but the plane has {plane.shape[1]}; accepted: N and E of the weights [E·N, K] "
                "that were cast"
            )
        return cls(plane, count, (plane.shape[0], rows), pitch, 1)

    @classmethod
    def of_planes(cls, planes: Sequence[Plane]) -> Experts:
        """Planes [R, C] of separate weights, copied into one buffer: to be kept while they hold.

        Any format with plain scales. Raises ValueError for none, for unequal ones, for swizzled
        scales and for a user's own format, whose buffers only its decode() understands.
        """
        if not planes:
            raise ValueError("planes is empty; accepted: one plane for each expert, at least one")
        first = planes[0]
        for index, plane in enumerate(planes):
            if (plane.format, tuple(plane.shape)) != (first.format, tuple(first.shape)):
                raise ValueError(
                    f"planes[{index}] is {plane.format.describe()} {tuple(plane.shape)}, planes[0] "
                    f"is {first.format.describe()} {tuple(first.shape)}; accepted: one format and "
                    "one shape for all experts"
                )
        if first.format.family == "user" or getattr(first.format, "swizzled", False):
            raise ValueError(
                f"planes are {first.format.describe()}, which cannot be stacked; accepted: a "
                "format of this package with plain scales, e.g. MXFP8Quantizer(fp8_dtype)"
            )
        rows, contraction = first.shape
        if first.format.family == "identity":
            codes = torch.cat([plane.codes for plane in planes])
            plane = Plane(first.format, tuple(codes.shape), first.dtype, (codes,))
            return cls(plane, len(planes), (rows, contraction), rows, 0)
        pitch = round_up(rows, max(ROW_MULTIPLE, first.format.block[0]))
        plane = _stacked(planes, pitch)
        return cls(plane, len(planes), (rows, contraction), pitch, 0)

    def stacked(self, matrix: torch.Tensor, contraction: int) -> torch.Tensor:
        """``matrix``, laid out as the plane, as a view [E, R, contraction].

        Of axis 1 [E, rows of ``matrix``, contraction].
        """
        extent, sizes = self.count * self.pitch, (self.count, self.pitch)
        if self.axis == 0:
            return matrix[:extent].unflatten(0, sizes)[:, : self.shape[0], :contraction]
        return matrix[:, :extent].unflatten(1, sizes).movedim(1, 0)[:, :, :contraction]

    def outer(self) -> torch.Tensor | None:
        """Outer scales, FP32 [E] or row-scaled [E, R] (of axis 1 [E, Rp]); None without."""
        outer = self.plane.outer
        if outer is None or self.plane.format.statistic != "row" or self.axis == 1:
            return outer
        return outer[: self.count * self.pitch].view(self.count, -1)[:, : self.shape[0]]

    def expert(self, index: int) -> Plane:
        """The plane [R, C] of one expert, in buffers of its own."""
        rows, contraction = self.shape
        start = index * self.pitch
        if self.axis == 0:
            return part(self.plane, index, (start, start + rows), (0, contraction))
        return part(self.plane, index, (0, rows), (start, start + contraction))


def _stacked(planes: Sequence[Plane], pitch: int) -> Plane:
    """Quantized planes below each other, each from a multiple of ``pitch`` rows on."""
    first = planes[0]
    count, format = len(planes), first.format
    device = first.codes.device
    made = format.empty((count * pitch, first.shape[1]), first.dtype, device)
    made = made.map(torch.Tensor.zero_)
    for index, plane in enumerate(planes):
        stored = plane.codes.shape[0]
        start = index * pitch
        made.codes[start : start + stored] = plane.codes
        if plane.scales is not None:
            if format.family in _BLOCK_SCALED:
                made.scales[start : start + stored] = plane.scales
            elif format.block[0] == 1:
                made.scales[:, start : start + stored] = plane.scales
            else:
                first_block = start // format.block[0]
                made.scales[first_block : first_block + plane.scales.shape[0]] = plane.scales
        if plane.outer is not None and format.statistic == "row":
            made.outer[start : start + stored] = plane.outer
    if first.outer is None or format.statistic == "row":
        return made
    outer = torch.cat([plane.outer for plane in planes])
    return dataclasses.replace(made, parts=(*made.parts[:2], outer))


def column_widths(format: Format, sizes: Sequence[int]) -> list[int]:
    """Contraction that each expert's part of a grouped column plane takes, for rows ``sizes``."""
    if format.family in ("identity", "user"):
        return list(sizes)
    block = grouped_contraction(format, 0, 1)
    return [max(round_up(m, block), block) for m in sizes]


def sliceable(plane: Plane) -> Plane:
    """``plane``, or the decoded values of a user's own format, whose buffers cannot be cut."""
    if plane.format.family != "user":
        return plane
    values = plane.format.decode(plane)
    return Plane(IdentityFormat(), plane.shape, plane.dtype, (values,))


def part(plane: Plane, index: int, rows: tuple[int, int], contraction: tuple[int, int]) -> Plane:
    """One expert's plane out of a grouped one: its bytes are those of a cast of its own.

    index: of the expert; rows, contraction: from and to, the latter from a multiple of the block.
    """
    format, (r0, r1), (c0, c1) = plane.format, rows, contraction
    shape = (r1 - r0, c1 - c0)
    if format.family == "user":
        return part(sliceable(plane), index, rows, contraction)
    if format.family == "identity":
        return Plane(format, shape, plane.dtype, (plane.codes[r0:r1, c0:c1],))
    end = c0 + round_up(shape[1], format.contraction_multiple)
    per_byte = 2 if format.family == "nvfp4" else 1
    codes = plane.codes[r0:r1, c0 // per_byte : end // per_byte]
    return Plane(
        format,
        shape,
        plane.dtype,
        (
            padded(codes, ROW_MULTIPLE, 1).contiguous(),
            _scales(plane, (r0, r1), (c0, c1), end),
            _outer(plane, index, r0, r1),
        ),
    )


def _scales(plane: Plane, rows, contraction, end: int) -> torch.Tensor | None:
    if plane.scales is None:
        return None
    (r0, r1), (c0, c1) = rows, contraction
    block_rows, block = plane.format.block
    if plane.format.family in _BLOCK_SCALED:
        return padded(plane.scales[r0:r1, c0 // block : end // block], ROW_MULTIPLE, 1).contiguous()
    if block_rows == 1:
        scales = plane.scales[c0 // block : -(-c1 // block), r0:r1]
        return padded(scales, 1, ROW_MULTIPLE).contiguous()
    # 128×128 blocks, whole ones for each expert; stored rows of scales have a multiple of four.
    scales = plane.scales[r0 // block_rows : -(-r1 // block_rows), c0 // block : -(-c1 // block)]
    return padded(scales, 1, 4).contiguous()


def _outer(plane: Plane, index: int, r0: int, r1: int) -> torch.Tensor | None:
    outer = plane.outer
    if outer is None:
        return None
    if plane.format.statistic != "row":
        return outer[index : index + 1]
    if outer.dim() == 2:
        return outer[index]
    return torch.nn.functional.pad(outer[r0:r1], (0, round_up(r1 - r0, ROW_MULTIPLE) - (r1 - r0)))
