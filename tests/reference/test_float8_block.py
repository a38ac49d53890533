"""FP8 in 1×128 and 128×128 blocks against exact arithmetic.

Legend: R rows, C contraction; block (rows, contraction); the oracle works on FP32 bit patterns.
"""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.reference import float8, float8_block
from dist_finegrain.reference.elements import finite_amax
from tests.special_values import (
    DTYPES,
    every_magnitude,
    fp32_patterns,
    special_values,
    with_nonfinite,
)

from . import exact

each_element = pytest.mark.parametrize("element", ["e4m3", "e5m2"])
each_power_of_two = pytest.mark.parametrize("power_of_two", [False, True])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def expected_blocks(
    x: torch.Tensor, block: tuple[int, int], element: str, power_of_two: bool
) -> tuple[list, list]:
    """(codes, decode scale bits) as nested lists, block by block."""
    patterns = fp32_patterns(x)
    codes = [[None] * x.shape[1] for _ in patterns]
    scales = []
    for top in range(0, x.shape[0], block[0]):
        scales.append([])
        for left in range(0, x.shape[1], block[1]):
            places = [
                (i, j)
                for i in range(top, min(top + block[0], x.shape[0]))
                for j in range(left, min(left + block[1], x.shape[1]))
            ]
            values = [patterns[i][j] for i, j in places]
            block_codes, scale = exact.float8_block(values, element, power_of_two=power_of_two)
            scales[-1].append(exact.to_bits(scale))
            for (i, j), code in zip(places, block_codes, strict=True):
                codes[i][j] = code
    return codes, scales


@each_dtype
@each_power_of_two
@each_element
def test_ten_thousand_rows_of_128(element, power_of_two, dtype):
    """1×128: 12 cases of 840 blocks (420 rows, C = 256), half of them with NaN and infinities."""
    x = every_magnitude(420, 256, dtype, seed=7)
    x[:, 128:] = every_magnitude(420, 128, dtype, seed=8)
    x = torch.cat((x[:210], with_nonfinite(x[210:])))
    for part in (x[:210], x[210:]):  # a finite matrix takes the short way
        codes, scales = float8_block.encode(part, element, (1, 128), power_of_two=power_of_two)
        expected = expected_blocks(part, (1, 128), element, power_of_two)
        assert (codes.tolist(), fp32_patterns(scales)) == expected
        decoded = float8_block.decode(codes, scales, element, (1, 128))
        by_row = float8.decode(codes.reshape(-1, 128), scales.flatten(), element)
        assert torch.equal(decoded.view(torch.int32), by_row.reshape(210, 256).view(torch.int32))


@each_dtype
@each_power_of_two
@each_element
def test_ten_thousand_tiles(element, power_of_two, dtype):
    """Two-dimensional blocks, 12 cases of 840; the rule does not know the block's size, so 4×8."""
    x = every_magnitude(120, 224, dtype, seed=9)
    for part in (x[:60], with_nonfinite(x[60:])):
        codes, scales = float8_block.encode(part, element, (4, 8), power_of_two=power_of_two)
        expected = expected_blocks(part, (4, 8), element, power_of_two)
        assert (codes.tolist(), fp32_patterns(scales)) == expected


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("shape", [(1, 1), (96, 160), (200, 260), (130, 8)])
@each_element
def test_each_block_is_a_tensor_of_its_own(element, shape, block):
    """Ragged [R, C]: codes and decoded values of each block are per-tensor scaling's."""
    x = every_magnitude(*shape, torch.bfloat16, seed=10)
    codes, scales = float8_block.encode(x, element, block, power_of_two=False)
    decoded = float8_block.decode(codes, scales, element, block)
    assert scales.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    for top in range(0, shape[0], block[0]):
        for left in range(0, shape[1], block[1]):
            here = slice(top, top + block[0]), slice(left, left + block[1])
            tile = x[here]
            want, scale = float8.encode(tile, finite_amax(tile), element)
            assert torch.equal(codes[here], want)
            assert scales[top // block[0], left // block[1]] == scale
            assert torch.equal(decoded[here], float8.decode(want, scale, element))


@each_element
def test_transposed_tiles_are_the_same_bytes(element):
    """128×128, [200, 260]: codes and scales of Xᵀ are those of X, transposed."""
    x = with_nonfinite(every_magnitude(200, 260, torch.bfloat16, seed=11))
    codes, scales = float8_block.encode(x, element, (128, 128))
    codes_t, scales_t = float8_block.encode(x.t(), element, (128, 128))
    assert torch.equal(codes_t, codes.t()) and torch.equal(scales_t, scales.t())


@each_dtype
@each_element
def test_special_values(element, dtype):
    """Every matrix of the shared list in both kinds of block; scales stay finite and positive."""
    for name, x in special_values(dtype).items():
        for block in ((1, 128), (128, 128)):
            codes, scales = float8_block.encode(x, element, block)
            expected_codes, expected_scales = expected_blocks(x, block, element, True)
            assert codes.shape == x.shape and codes.tolist() == expected_codes, name
            assert fp32_patterns(scales) == expected_scales, name
            assert scales.isfinite().all() and (scales > 0).all(), name
            decoded = float8_block.decode(codes, scales, element, block)
            assert torch.equal(decoded.isfinite(), x.isfinite()) or name == "huge", name


@each_dtype
@each_element
def test_decoding_past_the_largest_float_is_infinite(element, dtype):
    """Decoding is one FP32 product: a code rounded up from FLT_MAX overflows, a lower one not."""
    x = torch.full((1, 128), torch.finfo(dtype).max, dtype=dtype)
    x[0, 64:] = x[0, 64:] * 0.75
    codes, scales = float8_block.encode(x, element, (1, 128))
    decoded = float8_block.decode(codes, scales, element, (1, 128))
    overflows = dtype != torch.float16
    assert decoded[0, :64].isinf().all() == overflows and decoded[0, 64:].isfinite().all()
    patterns, unit = codes.tolist()[0], exact.magnitude(fp32_patterns(scales)[0][0])
    assert fp32_patterns(decoded)[0] == [exact.decoded(c, unit, element) for c in patterns]


@each_element
def test_a_nonfinite_element_changes_only_its_own_code(element):
    """bug case 7: [2, 256] with one NaN or ±Inf: everything else is as if it were zero."""
    x = every_magnitude(2, 256, seed=12)
    x[0, 3] = 0.0
    codes, scales = float8_block.encode(x, element, (1, 128))
    for value in (torch.nan, torch.inf, -torch.inf):
        y = x.clone()
        y[0, 3] = value
        got, got_scales = float8_block.encode(y, element, (1, 128))
        assert torch.equal(got_scales, scales)
        assert (got != codes).nonzero().tolist() == [[0, 3]]
        decoded = float8_block.decode(got, got_scales, element, (1, 128))[0, 3]
        if element == "e5m2" and value != value or element == "e4m3":
            assert decoded.isnan()
        else:
            assert decoded == value
