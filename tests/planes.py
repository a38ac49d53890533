"""Comparing a shard's plane with the region of the whole matrix's plane, byte for byte."""

from __future__ import annotations

import torch

from dist_finegrain.formats.plane import Plane

# (gemm, operand) → which matrix dimensions its rows and contraction are: M tokens, K in, N out
_DIMENSIONS = {
    ("fprop", 0): "MK",
    ("fprop", 1): "NK",
    ("dgrad", 0): "MN",
    ("dgrad", 1): "KN",
    ("wgrad", 0): "NM",
    ("wgrad", 1): "KM",
}

Region = tuple[tuple[int, int] | None, tuple[int, int] | None]


def region_of(gemm: str, side: int, mode: str, rank: int, ranks: int) -> Region:
    """(rank, ranks) for the plane dimension that is sharded, None for one that is whole."""
    sharded = {"column": "N", "row": "K"}[mode]
    rows, contraction = _DIMENSIONS[gemm, side]
    part = (rank, ranks)
    return (part if rows == sharded else None, part if contraction == sharded else None)


def planes_differ(shard: Plane, whole: Plane, region: Region) -> str:
    """What differs between ``shard`` and its region of ``whole``; empty when nothing does."""
    rows, contraction = whole.shape
    r0, r1 = _bounds(rows, region[0])
    c0, c1 = _bounds(contraction, region[1])
    if shard.shape != (r1 - r0, c1 - c0):
        return f"shape {shard.shape}, expected {(r1 - r0, c1 - c0)}"
    per_byte = 2 if whole.format.family == "nvfp4" else 1
    codes = _bytes(whole.codes[r0:r1, c0 // per_byte : c1 // per_byte])
    own = _bytes(shard.codes[: r1 - r0, : (c1 - c0) // per_byte])
    if count := int((codes != own).sum()):
        return f"{count} code bytes differ"
    if whole.scales is not None:
        wanted, got = (_scale_grid(p, (a, b), (c, d)) for p, a, b, c, d in (
            (whole, r0, r1, c0, c1), (shard, 0, r1 - r0, 0, c1 - c0),
        ))  # fmt: skip
        if wanted.shape != got.shape or not torch.equal(wanted, got):
            return f"block scales differ ({tuple(got.shape)}, {tuple(wanted.shape)})"
    if whole.outer is not None:
        wanted = whole.outer if whole.outer.numel() == 1 else whole.outer[r0:r1]
        got = shard.outer if shard.outer.numel() == 1 else shard.outer[: r1 - r0]
        if not torch.equal(wanted, got):
            return "outer scales differ"
    return ""


def _bounds(extent: int, part: tuple[int, int] | None) -> tuple[int, int]:
    if part is None:
        return 0, extent
    rank, ranks = part
    return rank * extent // ranks, (rank + 1) * extent // ranks


def _scale_grid(plane: Plane, rows: tuple[int, int], contraction: tuple[int, int]) -> torch.Tensor:
    """The scales of a region as a matrix [rows or row blocks, contraction blocks]."""
    block_rows, block_contraction = plane.format.block
    scales = plane.scales
    if plane.format.family == "float8_block":
        if block_rows == 1:
            scales = scales.t()
        else:
            rows = (rows[0] // block_rows, -(-rows[1] // block_rows))
    blocks = (contraction[0] // block_contraction, -(-contraction[1] // block_contraction))
    return scales[rows[0] : rows[1], blocks[0] : blocks[1]]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
