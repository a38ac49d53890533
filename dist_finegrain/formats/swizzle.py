"""The order in which sm_100's block-scaled GEMMs read scale bytes (torch's SWIZZLE_32_4_4)."""

from __future__ import annotations

import dataclasses
import functools

import torch

from .plane import Format, padded, round_up


def swizzle_128x4(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` [rows, blocks], one byte each, as contiguous tiles of 128 rows × 4 blocks.

    The result is flat with round_up(rows, 128) · round_up(blocks, 4) elements; what is filled up is
    zero. Tiles follow each other along the blocks first; inside a tile, row r and block c lie at
    (r % 32) · 16 + (r // 32) · 4 + c.
    """
    tiles = padded(scales, 128, 4)
    tiles = tiles.unflatten(0, (tiles.shape[0] // 128, 4, 32))
    tiles = tiles.unflatten(3, (tiles.shape[3] // 4, 4))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_128x4(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The [rows, blocks] that ``swizzle_128x4`` made the flat ``swizzled`` of."""
    tiles = swizzled.reshape(round_up(rows, 128) // 128, round_up(blocks, 4) // 4, 32, 4, 4)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(round_up(rows, 128), round_up(blocks, 4))
    return whole[:rows, :blocks]


def swizzled_count(rows: int, blocks: int) -> int:
    """How many bytes ``swizzle_128x4`` makes of [rows, blocks]."""
    return round_up(rows, 128) * round_up(blocks, 4)


@functools.lru_cache(maxsize=1024)
def with_swizzled_scales(format: Format) -> Format:
    """The same format (MXFP8 or NVFP4) with its scales stored in this order."""
    return dataclasses.replace(format, swizzled=True)
