"""FP8 block scaling: Transformer Engine's bytes in both planes, layouts, and the quantizer."""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.float8_block import Float8BlockFormat, Float8BlockQuantizer
from dist_finegrain.formats.plane import DIRECTIONS

from .golden import GOLDEN, INPUTS, differing

E4M3 = DType.kFloat8E4M3
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_block_scaling_is_transformer_engines(element, source, dim, power_of_two):
    """0 differing codes and scales in both planes, in the layout that its GEMM reads."""
    quantizer = Float8BlockQuantizer(
        TORCH[element], force_pow_2_scales=power_of_two, block_scaling_dim=dim
    )
    result = quantizer.quantize(GOLDEN[f"{source}.x"])
    for direction in DIRECTIONS:
        case = f"{source}.block{dim}d.{element}.pow2_{power_of_two:d}.{direction}"
        plane = result.plane(direction)
        assert differing(plane.codes, GOLDEN[f"{case}_data"]) == 0
        # The entries that round 128×128 scales up to 4 columns hold what was in memory there.
        used = slice(None) if dim == 1 else slice(0, -(-plane.shape[1] // 128))
        wanted = GOLDEN[f"{case}_scale_inv"]
        assert plane.scales.shape == wanted.shape
        assert differing(plane.scales[:, used], wanted[:, used]) == 0


def test_two_dimensional_blocks_serve_both_planes():
    """128×128, ragged [200, 300]: the column plane is the row plane transposed, byte for byte."""
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    result = Float8BlockQuantizer(E4M3).quantize(x)
    row, column = (result.plane(d) for d in DIRECTIONS)
    assert torch.equal(column.codes[:300, :200], row.codes[:200, :300].t())
    assert torch.equal(column.scales[:3, :2], row.scales[:2, :3].t())


def test_one_dimensional_scales_are_stored_by_contraction_block():
    """1×128, [20, 300]: FP32 [3, 32]; entry [k, r] decodes row r from column 128·k on."""
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    plane = Float8BlockFormat("e4m3").encode(x)
    assert plane.scales.shape == (3, 32)
    codes = plane.codes.view(torch.float8_e4m3fn).float()
    values = plane.format.decode(plane)
    for k in range(3):
        columns = slice(128 * k, min(128 * k + 128, 300))
        for r in (0, 7, 19):
            assert torch.equal(values[r, columns], codes[r, columns] * plane.scales[k, r])


def test_epsilon_is_the_least_amax_of_a_block():
    x = torch.full((1, 128), 1e-9)
    plane = Float8BlockFormat("e4m3", epsilon=1e-6, power_of_two=False).encode(x)
    plain = Float8BlockFormat("e4m3", power_of_two=False).encode(torch.full((1, 128), 1e-6))
    assert torch.equal(plane.scales, plain.scales)
    assert plane.codes.max() < plain.codes.max()


def test_format_is_a_value():
    """Equal by its options; block, multiple and text follow from them."""
    row, tile = Float8BlockFormat("e4m3"), Float8BlockFormat("e5m2", True, 1e-12, False)
    assert row == Float8BlockFormat("e4m3", False, 0.0, True) != tile
    assert (row.block, tile.block) == ((1, 128), (128, 128))
    assert row.family == "float8_block" and row.statistic == "none"
    assert row.contraction_multiple == 16 and row.measure(torch.ones(1, 1)) is None
    assert row.describe() == "float8_block(e4m3, 1x128)"
    assert tile.describe() == "float8_block(e5m2, 128x128, fp32 scales, epsilon=1e-12)"


def test_quantizer_arguments():
    """Transformer Engine's names and defaults: 2-D, power-of-two scales."""
    assert Float8BlockQuantizer(E4M3).plane_format("rowwise") == Float8BlockFormat("e4m3", True)
    quantizer = Float8BlockQuantizer(
        torch.float8_e5m2,
        rowwise=True,
        columnwise=False,
        amax_epsilon=1e-9,
        force_pow_2_scales=False,
        block_scaling_dim=1,
    )
    assert quantizer.plane_format("rowwise") == Float8BlockFormat("e5m2", False, 1e-9, False)
    assert quantizer.quantize(torch.ones(2, 2)).plane("columnwise") is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_scaling_dim": 3}, ValueError, "block_scaling_dim is 3; accepted: 1 .* or 2"),
        ({"amax_epsilon": -1e-3}, ValueError, "amax_epsilon is -0.001; accepted"),
        ({"fp8_dtype": "e4m3"}, TypeError, "fp8_dtype is 'e4m3'; accepted"),
    ],
)
def test_refusals_name_argument_value_and_way_out(options, error, message):
    with pytest.raises(error, match=message):
        Float8BlockQuantizer(**{"fp8_dtype": E4M3, **options})
