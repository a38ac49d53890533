"""Which region of each buffer of a plane is one rank's, and where it goes in the gathered plane.

Legend: m rows per rank of the matrix, F its features. The rowwise plane of a shard is [m, F]; the
columnwise one is [F, m]: there the ranks' segments follow each other along the contraction, each
padded to the block. Padding of the other dimension does not travel.
"""

from __future__ import annotations

import dataclasses

import torch

from ..formats.plane import Direction, Format, Plane, round_up


@dataclasses.dataclass(frozen=True)
class Region:
    """Region of buffer ``index``: the first ``length`` along ``dim``, ``across`` of the other.

    step: how far apart two ranks' regions start in the gathered buffer; across: None for a vector.
    """

    index: int
    dtype: torch.dtype
    dim: int
    length: int
    step: int
    across: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.across is None:
            return (self.length,)
        return (self.length, self.across) if self.dim == 0 else (self.across, self.length)

    @property
    def nbytes(self) -> int:
        count = self.length * (1 if self.across is None else self.across)
        return count * self.dtype.itemsize

    def own(self, buffer: torch.Tensor) -> torch.Tensor:
        """The region of one rank's buffer."""
        view = buffer.narrow(self.dim, 0, self.length)
        return view if self.across is None else view.narrow(1 - self.dim, 0, self.across)

    def of_all(self, buffer: torch.Tensor, ranks: int) -> torch.Tensor:
        """The ranks' regions of a gathered buffer, stacked along dim 0."""
        view = buffer.narrow(self.dim, 0, ranks * self.step).unflatten(self.dim, (ranks, self.step))
        view = view.movedim(self.dim, 0).narrow(1 + self.dim, 0, self.length)
        return view if self.across is None else view.narrow(2 - self.dim, 0, self.across)

    def covers(self, buffer: torch.Tensor, ranks: int) -> bool:
        """Whether the regions leave nothing of a gathered buffer unwritten."""
        return ranks * self.nbytes == buffer.numel() * buffer.element_size()


def segment_length(format: Format, rows: int) -> int:
    """Contraction extent of one rank's ``rows`` in a column plane."""
    return round_up(rows, format.block[1])


def is_packable(format: Format) -> bool:
    """Whether planes of this format can travel; what a user's encode() makes is not known."""
    return format.family in ("identity", "float8", "float8_block", "mxfp8", "nvfp4")


def travelling_format(format: Format, rows: int) -> Format:
    """How the row plane of ``rows`` rows travels: 128×128 blocks that end early as rows of blocks.

    A gathered plane can hold them in no other way, as its own blocks start at multiples of 128.
    """
    if format.family == "float8_block" and format.two_dimensional and rows % format.block[0]:
        return dataclasses.replace(format, two_dimensional=False)
    return format


def with_scales_per_row(plane: Plane) -> Plane:
    """A plane of 128×128 blocks as the same values in 1×128 blocks."""
    rows, contraction = plane.shape
    block = plane.format.block[0]
    format = dataclasses.replace(plane.format, two_dimensional=False)
    scales = plane.scales[:, : -(-contraction // block)].repeat_interleave(block, 0)[:rows]
    scales = torch.nn.functional.pad(scales, (0, 0, 0, plane.codes.shape[0] - rows))
    return dataclasses.replace(
        plane, format=format, parts=(plane.codes, scales.t().contiguous(), None)
    )


def regions(
    format: Format, direction: Direction, rows: int, features: int, dtype: torch.dtype
) -> list[Region]:
    """What travels of one rank's plane; scales that are equal on all ranks do not.

    dtype: of the matrix. ``format`` stores its scales unswizzled.
    """
    is_row = direction == "rowwise"
    if format.family == "identity":  # always as the matrix lies
        return [Region(0, format.dtype or dtype, 0, rows, rows, features)]
    per = 2 if format.family == "nvfp4" else 1
    group = 16 if format.rht else 1
    if is_row:
        stored = -(-round_up(features, group) // per)
        found = [Region(0, torch.uint8, 0, rows, rows, stored)]
    else:
        length = -(-round_up(rows, group) // per)
        step = segment_length(format, rows) // per
        found = [Region(0, torch.uint8, 1, length, step, features)]
    if format.family == "float8_block":
        found.append(_block_scales(format, is_row, rows, features))
    elif format.family in ("mxfp8", "nvfp4"):
        block = format.block[1]
        blocks = -(-(features if is_row else rows) // block)
        if is_row:
            found.append(Region(1, torch.uint8, 0, rows, rows, blocks))
        else:
            found.append(Region(1, torch.uint8, 1, blocks, blocks, features))
    if format.statistic == "row" and is_row:
        found.append(Region(2, torch.float32, 0, rows, rows, None))
    return found


def _block_scales(format: Format, is_row: bool, rows: int, features: int) -> Region:
    feature_blocks, row_blocks = -(-features // 128), -(-rows // 128)
    kind = (1, torch.float32)
    if format.two_dimensional:
        return Region(*kind, 0 if is_row else 1, row_blocks, row_blocks, feature_blocks)
    if is_row:
        return Region(*kind, 1, rows, rows, feature_blocks)
    return Region(*kind, 0, row_blocks, row_blocks, features)
