"""Element casts, amaxes and scales of the FP8 formats against exact arithmetic.

Legend: "units" are exact.py's whole numbers, "bits" are FP32 bit patterns.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from dist_finegrain.reference import elements, mxfp8
from tests.special_values import (
    DTYPES,
    NONFINITE,
    every_magnitude,
    fp32_patterns,
    special_values,
    with_value,
)

from . import exact

ELEMENTS = ("e4m3", "e5m2")
CAST = {"e4m3": elements.cast_e4m3, "e5m2": elements.cast_e5m2}
DECODE = {"e4m3": elements.decode_e4m3, "e5m2": elements.decode_e5m2}
ALL_CODES = torch.arange(256, dtype=torch.uint8)
each_element = pytest.mark.parametrize("element", ELEMENTS)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def from_units(units: int) -> float:
    return struct.unpack("<f", struct.pack("<I", exact.to_bits(units)))[0]


def finite_codes(element: str) -> torch.Tensor:
    return ALL_CODES[DECODE[element](ALL_CODES).isfinite()]


# The oracle, and the ground under it.
def test_torch_multiplies_and_divides_as_the_oracle_does():
    """2·10^4 random FP32 pairs of every magnitude, subnormals kept."""
    a, b = every_magnitude(1000, 20, seed=1).abs(), every_magnitude(1000, 20, seed=2).abs()
    b[b == 0] = 1.0
    pairs = zip(fp32_patterns(a.flatten()), fp32_patterns(b.flatten()), strict=True)
    pairs = [(exact.magnitude(p), exact.magnitude(q)) for p, q in pairs]
    products = [exact.to_bits(exact.product(p, q)) for p, q in pairs]
    quotients = [exact.to_bits(exact.float32_division(p, q)) for p, q in pairs]
    assert fp32_patterns((a * b).flatten()) == products
    assert fp32_patterns((a / b).flatten()) == quotients


def test_constants_have_the_documented_bits():
    for element in ELEMENTS:
        bits = struct.pack(">f", elements.FP8_MAX_RECIPROCAL[element]).hex()
        assert int(bits, 16) == exact.ELEMENTS[element].reciprocal_bits
        assert elements.FP8_MAX[element] == exact.ELEMENTS[element].fp8_max


# Casts.
@each_element
def test_cast_of_every_bf16_value(element):
    """All 65536 bit patterns, NaN and infinities included, each sign."""
    x = torch.arange(65536).to(torch.int16).view(torch.bfloat16).float()
    one = 1 << exact.UNIT
    expected = [exact.code(bits, one, element) for bits in fp32_patterns(x)]
    assert CAST[element](x, nonfinite_of=x).tolist() == expected


@each_element
def test_cast_at_and_beside_every_midpoint(element):
    """Between two neighbouring codes: the midpoint goes to the even one, one ulp decides."""
    values = DECODE[element](finite_codes(element)).sort().values
    middle = (values[1:] + values[:-1]) / 2  # exact: one more mantissa bit
    infinity = torch.full_like(middle, math.inf)
    x = torch.cat((middle.nextafter(-infinity), middle, middle.nextafter(infinity)))
    expected = [exact.code(bits, 1 << exact.UNIT, element) for bits in fp32_patterns(x)]
    assert CAST[element](x).tolist() == expected


@each_element
def test_overflow_of_a_finite_input_saturates(element):
    """A product that became ±Inf is the largest code, because the input was finite."""
    values = torch.tensor([math.inf, -math.inf, elements.FLT_MAX, -elements.FLT_MAX])
    largest = exact.ELEMENTS[element].max_code
    expected = [largest, largest | 0x80] * 2
    assert CAST[element](values).tolist() == expected
    assert CAST[element](values, nonfinite_of=torch.ones(4)).tolist() == expected
    scale = torch.tensor([elements.FLT_MAX])
    x = torch.tensor([3.0, -3.0])
    assert elements.encode_with_scale(x, scale, element).tolist() == expected[:2]


@each_element
def test_cast_leaves_its_argument_alone(element):
    values = torch.tensor([1e9, -1e9, 1.0])
    CAST[element](values)
    assert values.tolist() == [1e9, -1e9, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@each_element
def test_code_of_every_special_value(element, dtype):
    """NaN is 7F whatever its sign; ±Inf 7F in E4M3, 7C / FC in E5M2; ±0 keep their sign."""
    infinite = {"inf": 0x7F, "negative_inf": 0x7F}
    if element == "e5m2":
        infinite = {"inf": 0x7C, "negative_inf": 0xFC}
    expected = {"nan": 0x7F, "negative_nan": 0x7F, **infinite}
    for name, value in NONFINITE.items():
        x = with_value(torch.zeros(2, 8, dtype=dtype), value)
        x[0] = -0.0
        codes = elements.encode_with_scale(x, torch.tensor([2.0]), element)
        assert codes[1, 5] == expected[name], name
        assert codes[0].tolist() == [0x80] * 8
        codes[1, 5] = 0
        assert codes[1].tolist() == [0] * 8


# Decoding.
@each_element
def test_decode_of_all_codes(element):
    """256 codes: finite ones exact, 7F / FF (E5M2: 7D-7F, FD-FF) NaN, E5M2's 7C / FC ±Inf."""
    values = DECODE[element](ALL_CODES)
    for code, value in enumerate(values.tolist()):
        magnitude = code & 0x7F
        if magnitude <= exact.ELEMENTS[element].max_code:
            bits = exact.decoded(code, 1 << exact.UNIT, element)
            assert struct.pack("<f", value) == struct.pack("<I", bits), hex(code)
        elif element == "e5m2" and magnitude == 0x7C:
            assert value == (math.inf if code < 0x80 else -math.inf)
        else:
            assert math.isnan(value), hex(code)


@each_element
def test_decode_of_strided_codes(element):
    codes = ALL_CODES.reshape(16, 16)
    finite = codes & 0x77  # takes the path without NaN
    for grid in (codes.t(), finite.t(), codes[:, ::3], finite[1:3]):
        wanted = DECODE[element](grid.contiguous())
        assert torch.equal(DECODE[element](grid).nan_to_num(nan=-1), wanted.nan_to_num(nan=-1))


def test_decode_of_all_e8m0_codes():
    """bug case 7: code c is 2^(c-127); 0 is 2^-127, not zero; 255 is NaN, not Inf."""
    values = elements.decode_e8m0(ALL_CODES).tolist()
    assert values[:255] == [2.0 ** (c - 127) for c in range(255)]
    assert values[0] == math.ldexp(1.0, -127) and math.isnan(values[255])


@each_element
def test_round_trip_of_all_codes_under_all_e8m0_scales(element):
    """Every finite code × bytes 0…254: encode(decode(code)) is the code, where decode is finite."""
    codes = finite_codes(element).expand(255, -1)
    scale_bytes = torch.arange(255, dtype=torch.uint8)
    values = DECODE[element](codes) * elements.decode_e8m0(scale_bytes)[:, None]
    again = elements.encode_with_scale(values, mxfp8.encode_scale(scale_bytes)[:, None], element)
    assert ((again == codes) | values.isinf()).all()
    assert values.isinf().sum() < codes.numel() // 8


@each_element
def test_round_trip_of_all_codes_under_fp32_scales(element):
    """Every finite code × (all powers of two, 4000 random FP32 scales, both extremes)."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).float()
    random = every_magnitude(250, 16, seed=3).abs().flatten()
    extremes = torch.tensor([elements.FLT_MAX, 2.0**-126, 448 / elements.FLT_MAX])
    scales = torch.cat((powers, random[random > 0], extremes))[:, None]
    decode_scales = elements.reciprocal(scales)
    codes = finite_codes(element).expand(len(scales), -1)
    values = DECODE[element](codes) * decode_scales
    again = elements.encode_with_scale(values, scales, element)
    assert ((again == codes) | ~values.isfinite()).all()
    assert values.isfinite().float().mean() > 0.8


# Amaxes and scales.
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_is_over_finite_elements(dtype):
    """bug case 7: the special values, over everything and per row; FP32 [1] and [R]."""
    for name, x in special_values(dtype).items():
        rows = [[b for b in row if exact.is_finite(b)] for row in fp32_patterns(x)]
        per_row = [from_units(exact.amax(row)) for row in rows]
        for layout in (x, x.t().contiguous().t()):
            whole, each = elements.finite_amax(layout), elements.finite_amax(layout, 1)
            assert whole.dtype == each.dtype == torch.float32
            assert each.tolist() == per_row, name
            assert whole.tolist() == [max(per_row, default=0.0)], name


def test_amax_of_nothing_is_zero():
    """Shapes [0, 64], [64, 0], and blocks of them."""
    assert elements.finite_amax(torch.zeros(0, 64)).tolist() == [0.0]
    assert elements.finite_amax(torch.zeros(0, 64), 1).shape == (0,)
    assert elements.finite_amax(torch.zeros(64, 0), 1).tolist() == [0.0] * 64
    tiles = elements.blocks(torch.zeros(64, 0), 32, 32)
    assert elements.finite_amax(tiles, (1, 3)).shape == (2, 0)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@each_element
def test_scale_of_ten_thousand_amaxes(element, epsilon, power_of_two):
    """bug case 6: FP32 amaxes from 1.4e-45 to FLT_MAX; scales and their reciprocals are finite."""
    amax = torch.cat((every_magnitude(625, 16, seed=4).abs().flatten(), torch.zeros(1)))
    amax = torch.cat((amax, torch.tensor([1e-38, 1e-40, 1.4e-45, elements.FLT_MAX])))
    fp8_max = exact.ELEMENTS[element].fp8_max
    scales = elements.scale_from_amax(amax, fp8_max, epsilon, power_of_two)
    least = exact.magnitude(fp32_patterns(torch.tensor(epsilon)))
    expected = [
        exact.scale_from_amax(exact.magnitude(bits), element, least, power_of_two)
        for bits in fp32_patterns(amax)
    ]
    assert fp32_patterns(scales) == [exact.to_bits(s) for s in expected]
    inverse = [exact.to_bits(exact.float32_division(1 << exact.UNIT, s)) for s in expected]
    assert fp32_patterns(elements.reciprocal(scales)) == inverse
    assert scales.isfinite().all() and elements.reciprocal(scales).isfinite().all()
    assert (elements.reciprocal(scales) > 0).all()


# Block views.
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (4, 6), (0, 6), (4, 0)])
def test_blocks_cover_ragged_matrices(shape):
    """[R, C] in 2×3 blocks: each element in its block, the fill is zero, and back again."""
    x = torch.arange(1, shape[0] * shape[1] + 1, dtype=torch.float32).reshape(shape)
    tiles = elements.blocks(x, 2, 3)
    assert tiles.shape == (-(-shape[0] // 2), 2, -(-shape[1] // 3), 3)
    for i in range(shape[0]):
        for j in range(shape[1]):
            assert tiles[i // 2, i % 2, j // 3, j % 3] == x[i, j]
    assert tiles.sum() == x.sum()
    assert torch.equal(elements.unblocked(tiles, shape), x)
