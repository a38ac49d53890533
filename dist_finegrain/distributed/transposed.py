"""A column plane from the row plane of the same matrix, where its codes are those, transposed.

Legend: m rows per rank, F features, s the segment length: m padded to the block. The row plane is
[ranks · m, F], the column plane [F, ranks · s].
"""

from __future__ import annotations

import torch

from ..formats.plane import Format, Plane
from .plane_layout import segment_length


def transposed(row: Plane, format: Format, ranks: int) -> Plane:
    """The column plane, in ``format``, of the matrix that ``row`` holds.

    ``format`` has square blocks, one scale for the whole matrix, or none (Identity).
    ranks: how many equal shards the rows are; blocks of ``row`` start anew in each.
    """
    rows, features = row.shape
    own = rows // ranks
    if format.family == "identity":
        return Plane(format, (features, rows), row.dtype, (row.parts[0].t(),))
    length = segment_length(format, own)
    plane = format.empty((features, ranks * length), row.dtype, row.codes.device)
    for part in plane.parts:
        if part is not None:
            part.zero_()
    is_packed = format.family == "nvfp4"
    codes = _unpacked(row.codes) if is_packed else row.codes
    whole = codes.new_zeros(features, ranks, length)
    whole[:, :, :own] = codes[:rows, :features].t().unflatten(1, (ranks, own))
    whole = whole.flatten(1, 2)
    if is_packed:
        whole = torch.nn.functional.pad(whole, (0, whole.shape[1] % 2))
        whole = whole[:, 0::2] | (whole[:, 1::2] << 4)
    plane.codes[:features, : whole.shape[1]] = whole
    if plane.scales is not None and rows:
        _transpose_scales(row, plane, ranks, own, length)
    if plane.outer is not None:
        plane.outer.copy_(row.outer)
    return plane


def _transpose_scales(row: Plane, plane: Plane, ranks: int, own: int, length: int) -> None:
    features, block = row.shape[1], plane.format.block[0]
    feature_blocks, row_blocks = -(-features // block), length // block
    if row.format.family == "float8_block":
        grid = row.scales
        if not row.format.two_dimensional:  # 1×128 stored contraction first, one per row
            grid = _first_rows(row.scales.t(), ranks, own, row_blocks, block)
        plane.scales[:feature_blocks, : ranks * row_blocks] = grid[:, :feature_blocks].t()
        return
    grid = _first_rows(row.scales, ranks, own, row_blocks, block)[:, :feature_blocks].t()
    grid = grid.repeat_interleave(block, 0)[:features]  # stored for each row
    plane.scales[:features, : grid.shape[1]] = grid


def _first_rows(scales: torch.Tensor, ranks: int, own: int, blocks: int, block: int):
    """The row of scales with which each block of each rank's rows starts."""
    device = scales.device
    starts = torch.arange(ranks, device=device)[:, None] * own
    starts = starts + torch.arange(blocks, device=device) * block
    return scales[starts.flatten()]


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), 2).flatten(1)
