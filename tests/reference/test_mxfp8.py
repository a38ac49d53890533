"""MXFP8 against exact arithmetic: scale bytes, codes, decoded values.

Legend: R rows, C contraction; block (rows, contraction); the oracle works on FP32 bit patterns.
"""

from __future__ import annotations

import math

import pytest
import torch

from dist_finegrain.reference import mxfp8
from dist_finegrain.reference.elements import FLT_MAX, decode_elements
from tests.special_values import (
    DTYPES,
    every_magnitude,
    fp32_patterns,
    special_values,
    with_nonfinite,
)

from . import exact

ROW, TILE = (1, 32), (32, 32)
each_element = pytest.mark.parametrize("element", ["e4m3", "e5m2"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_dtype
@each_element
def test_ten_thousand_blocks(element, dtype):
    """6 cases of 1680 blocks of 32 (840 rows, C = 64), half of them with NaN and infinities."""
    x = torch.cat([every_magnitude(840, 32, dtype, seed=s) for s in (13, 14)], 1)
    for part in (x[:420], with_nonfinite(x[420:])):  # a finite matrix takes the short way
        codes, scales = mxfp8.encode(part, element, ROW)
        blocks = [block for row in fp32_patterns(part) for block in (row[:32], row[32:])]
        expected = [exact.mxfp8_block(block, element) for block in blocks]
        assert codes.reshape(-1, 32).tolist() == [codes for codes, _ in expected]
        assert scales.flatten().tolist() == [byte for _, byte in expected]
        assert_decoded(codes, scales, element)


def assert_decoded(codes: torch.Tensor, scales: torch.Tensor, element: str) -> None:
    """decode() of finite codes [R, 64] is float(code) · 2^(byte - 127), exactly."""
    values = fp32_patterns(mxfp8.decode(codes, scales, element, ROW).reshape(-1, 32))
    largest = exact.ELEMENTS[element].max_code
    blocks = zip(codes.reshape(-1, 32).tolist(), scales.flatten().tolist(), values, strict=True)
    for block, byte, row in blocks:
        for code, value in zip(block, row, strict=True):
            if code & 0x7F <= largest:
                assert value == exact.decoded(code, 1 << exact.UNIT + byte - 127, element)


@each_element
def test_scale_byte_around_every_power_of_two(element):
    """amax = fp8_max · 2^k and its FP32 neighbours, every k, and the ends of the range."""
    fp8_max = exact.ELEMENTS[element].fp8_max
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128))
    middle = torch.cat((powers * fp8_max, powers)).float()
    middle = middle[middle.isfinite()]
    up, down = (middle.nextafter(torch.full_like(middle, end)) for end in (math.inf, 0.0))
    amax = torch.cat((down, middle, up, torch.tensor([0.0, 1e-38, 1e-40, 1.4e-45, FLT_MAX])))
    amax = amax[amax.isfinite()]
    expected = [exact.e8m0_byte(exact.magnitude(b), element) for b in fp32_patterns(amax)]
    assert mxfp8.scale_bytes(amax, element).tolist() == expected
    assert max(expected) <= 254 and {0, 1, 2, 127} <= set(expected)


def test_scale_byte_in_the_subnormal_range_of_the_ratio():
    """Byte 0 while amax · (1/448) ≤ 2^-127, byte 1 just above, up to 2^-126; zero is byte 0."""
    ratios = {0.0: 0, 2.0**-127 * 448: 0, 2.0**-127 * 448 * (1 + 2**-20): 1, 2.0**-126 * 448: 1}
    amax = torch.tensor(list(ratios))
    assert mxfp8.scale_bytes(amax, "e4m3").tolist() == list(ratios.values())


def test_encode_scale_of_all_bytes():
    """2^(127 - byte) for bytes 0…254, the last of them subnormal; NaN for 255."""
    scales = mxfp8.encode_scale(torch.arange(256, dtype=torch.uint8)).tolist()
    assert scales[:255] == [2.0 ** (127 - byte) for byte in range(255)]
    assert math.isnan(scales[255])


@pytest.mark.parametrize("shape", [(1, 1), (64, 96), (70, 50), (33, 32)])
@each_element
def test_tiles_against_their_rows(element, shape):
    """32×32: the byte is the largest of the tile's rows' bytes, the codes follow from it."""
    x = with_nonfinite(every_magnitude(*shape, torch.bfloat16, seed=15))
    codes, scales = mxfp8.encode(x, element, TILE)
    _, row_bytes = mxfp8.encode(x, element, ROW)
    patterns = fp32_patterns(x)
    decoded = mxfp8.decode(codes, scales, element, TILE)
    assert scales.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    for i in range(shape[0]):
        for j in range(shape[1]):
            tile = i // 32, j // 32
            byte = int(row_bytes[tile[0] * 32 : tile[0] * 32 + 32, tile[1]].max())
            assert scales[tile] == byte
            assert codes[i, j] == exact.code(patterns[i][j], 1 << exact.UNIT + 127 - byte, element)
    by_row = mxfp8.decode(codes, scales.repeat_interleave(32, 0)[: shape[0]], element, ROW)
    assert torch.equal(decoded.view(torch.int32), by_row.view(torch.int32))


@each_element
def test_transposed_tiles_are_the_same_bytes(element):
    """32×32, [70, 50]: codes and bytes of Xᵀ are those of X, transposed."""
    x = with_nonfinite(every_magnitude(70, 50, torch.bfloat16, seed=16))
    codes, scales = mxfp8.encode(x, element, TILE)
    codes_t, scales_t = mxfp8.encode(x.t(), element, TILE)
    assert torch.equal(codes_t, codes.t()) and torch.equal(scales_t, scales.t())


@each_dtype
@each_element
def test_special_values(element, dtype):
    """Every matrix of the shared list: codes, bytes, and what is finite after decoding."""
    for name, x in special_values(dtype).items():
        codes, scales = mxfp8.encode(x, element, ROW)
        assert codes.shape == x.shape and scales.shape == (x.shape[0], -(-x.shape[1] // 32)), name
        for row, row_codes, row_bytes in zip(
            fp32_patterns(x), codes.tolist(), scales.tolist(), strict=True
        ):
            blocks = [exact.mxfp8_block(row[j : j + 32], element) for j in range(0, len(row), 32)]
            assert row_bytes == [byte for _, byte in blocks], name
            assert row_codes == [code for block, _ in blocks for code in block], name
        decoded = mxfp8.decode(codes, scales, element, ROW)
        # FLT_MAX rounds up to 256 · 2^120, which is past it; see test_float8_block.py.
        assert torch.equal(decoded.isfinite(), x.isfinite()) or name == "huge", name


@each_element
def test_decode_under_every_scale_byte(element):
    """bug case 7: one code (1.0) under bytes 0…255: 2^(byte - 127), and NaN for 255."""
    one = 0x38 if element == "e4m3" else 0x3C
    codes = torch.full((256, 32), one, dtype=torch.uint8)
    assert decode_elements(codes[0, :1], element).item() == 1.0
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    values = mxfp8.decode(codes, scales, element, ROW)
    assert values[:255, 7].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan().all()
