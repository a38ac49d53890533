"""sm_100's scale layout, element by element against cuBLAS's formula for 128×4 tiles."""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.formats.swizzle import swizzle_128x4, swizzled_count, unswizzle_128x4


def offset(row: int, block: int, blocks: int) -> int:
    """Where the scale of (row, block) lies: tiles of 512 bytes, block tiles first."""
    tiles_per_row = -(-blocks // 4)
    tile = row // 128 * tiles_per_row + block // 4
    inside = row % 128
    return tile * 512 + inside % 32 * 16 + inside // 32 * 4 + block % 4


@pytest.mark.parametrize(
    "shape", [(128, 4), (256, 8), (16, 1), (144, 6), (384, 12), (0, 4), (16, 0)]
)
def test_every_scale_lies_where_the_formula_says(shape):
    """uint8 [rows, blocks] → flat, round_up(rows, 128) · round_up(blocks, 4), the rest zero."""
    rows, blocks = shape
    scales = torch.arange(rows * blocks).remainder(255).add(1).to(torch.uint8).reshape(shape)
    flat = swizzle_128x4(scales)
    expected = torch.zeros(-(-rows // 128) * 128 * (-(-blocks // 4) * 4), dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            expected[offset(row, block, blocks)] = scales[row, block]
    assert torch.equal(flat, expected) and flat.is_contiguous()
    assert len(flat) == swizzled_count(rows, blocks)
    assert torch.equal(unswizzle_128x4(flat, rows, blocks), scales)


def test_result_can_be_viewed_as_scale_dtypes():
    """What the GEMM takes: E8M0 for MXFP8, E4M3 for NVFP4."""
    flat = swizzle_128x4(torch.ones(16, 3, dtype=torch.uint8))
    assert flat.view(torch.float8_e8m0fnu).numel() == 512
    assert flat.view(torch.float8_e4m3fn).numel() == 512
