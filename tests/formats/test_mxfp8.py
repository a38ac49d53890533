"""MXFP8 planes: stored scale bytes, both planes of a matrix, and the quantizer."""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.mxfp8 import MXFP8Format, MXFP8Quantizer
from dist_finegrain.formats.plane import DIRECTIONS

from .golden import GOLDEN, INPUTS


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_scale_bytes_are_stored_by_row_and_block():
    """[20, 70]: bytes uint8 [32, 3]; entry [r, k] decodes row r from column 32·k on."""
    plane = MXFP8Format("e4m3").encode(sample(20, 70))
    assert plane.scales.shape == (32, 3) and plane.codes.shape == (32, 96)
    codes = plane.codes.view(torch.float8_e4m3fn).float()
    values = plane.format.decode(plane)
    for k in range(3):
        columns = slice(32 * k, min(32 * k + 32, 70))
        for r in (0, 7, 19):
            scale = 2.0 ** (int(plane.scales[r, k]) - 127)
            assert torch.equal(values[r, columns], codes[r, columns] * scale)


def test_two_dimensional_bytes_are_repeated_for_each_row():
    """32×32, ragged [70, 50]: 32 equal rows of bytes, padding 0; the column plane mirrors it."""
    result = MXFP8Quantizer(with_2d_quantization=True).quantize(sample(70, 50))
    row, column = (result.plane(d) for d in DIRECTIONS)
    assert row.scales.shape == (80, 2) and column.scales.shape == (64, 3)
    tiles = row.scales[[0, 32, 64]]
    assert torch.equal(row.scales[:70], tiles.repeat_interleave(32, 0)[:70])
    assert not row.scales[70:].any()
    assert torch.equal(column.scales[[0, 32]], tiles.t())
    assert torch.equal(column.codes[:50, :70], row.codes[:70, :50].t())


@pytest.mark.parametrize("source", INPUTS)
def test_columnwise_blocks_lie_along_the_other_dimension(source):
    """1-D: the column plane has its own bytes, one per 32 rows of X."""
    x = GOLDEN[f"{source}.x"]
    plane = MXFP8Quantizer(rowwise=False).quantize(x).plane("columnwise")
    assert plane.shape == tuple(x.t().shape)
    amax = x.float().unflatten(0, (-1, 32)).abs().amax(1).t()
    byte = torch.ceil(torch.log2(amax.double() / 448)).clamp(-127, 127) + 127
    assert torch.equal(plane.scales.double(), torch.where(amax == 0, 0, byte))


def test_format_is_a_value():
    row, tile = MXFP8Format("e4m3"), MXFP8Format("e5m2", True)
    assert row == MXFP8Format("e4m3", False) != tile
    assert (row.block, tile.block) == ((1, 32), (32, 32))
    assert row.family == "mxfp8" and row.statistic == "none"
    assert row.contraction_multiple == 32 and row.measure(torch.ones(1, 1)) is None
    assert (row.describe(), tile.describe()) == ("mxfp8(e4m3)", "mxfp8(e5m2, 32x32)")


def test_quantizer_arguments():
    """Transformer Engine's names; fp8_dtype defaults to E4M3."""
    assert MXFP8Quantizer().plane_format("columnwise") == MXFP8Format("e4m3")
    quantizer = MXFP8Quantizer(DType.kFloat8E5M2, columnwise=False, with_2d_quantization=True)
    assert quantizer.plane_format("rowwise") == MXFP8Format("e5m2", True)
    assert quantizer.quantize(torch.ones(2, 2)).plane("columnwise") is None
    with pytest.raises(TypeError, match="fp8_dtype is <DType.kFloat4E2M1"):
        MXFP8Quantizer(DType.kFloat4E2M1)
