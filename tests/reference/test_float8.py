"""FP8 per-tensor and row scaling against exact arithmetic, code by code and scale by scale.

Legend: R rows, C contraction; the oracle (exact.py) works on FP32 bit patterns.
"""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.reference import float8
from dist_finegrain.reference.elements import FLT_MAX, finite_amax
from tests.special_values import (
    DTYPES,
    every_magnitude,
    fp32_patterns,
    special_values,
    with_nonfinite,
)

from . import exact

ELEMENTS = ("e4m3", "e5m2")
each_element = pytest.mark.parametrize("element", ELEMENTS)
each_power_of_two = pytest.mark.parametrize("power_of_two", [False, True])


def rows_of_every_magnitude(rows: int, columns: int) -> list[torch.Tensor]:
    """All dtypes, once all finite and once with NaN and infinities: ``rows`` rows together."""
    finite = [every_magnitude(rows // 6, columns, dtype, seed=5) for dtype in DTYPES]
    return finite + [with_nonfinite(x) for x in finite]


@each_power_of_two
@each_element
def test_ten_thousand_rows(element, power_of_two):
    """Row scaling, 10^4 rows of 16 in all dtypes: codes, decode scales and decoded values."""
    for x in rows_of_every_magnitude(10_020, 16):
        codes, decode_scale = float8.encode(
            x, finite_amax(x, 1), element, power_of_two=power_of_two
        )
        expected = [
            exact.float8_block(row, element, power_of_two=power_of_two) for row in fp32_patterns(x)
        ]
        assert codes.tolist() == [codes for codes, _ in expected]
        assert fp32_patterns(decode_scale) == [exact.to_bits(scale) for _, scale in expected]
        assert_decoded(codes, decode_scale, element, [scale for _, scale in expected])


def assert_decoded(codes, decode_scale, element, units: list[int]) -> None:
    """decode() is float(code) · decode scale wherever the code is finite."""
    values = fp32_patterns(float8.decode(codes, decode_scale, element))
    largest = exact.ELEMENTS[element].max_code
    for row, scale, value_row in zip(codes.tolist(), units, values, strict=True):
        for code, value in zip(row, value_row, strict=True):
            if code & 0x7F <= largest:
                assert value == exact.decoded(code, scale, element)


@each_element
def test_two_thousand_tensors(element):
    """Per-tensor current scaling of 1×16 … 3×5 matrices, one amax FP32 [1] each."""
    for seed in range(125):
        whole = every_magnitude(16, 16, DTYPES[seed % 3], seed=seed)
        for x in (*whole[:, None], whole[:3, :5], whole[4:6, 1:8]):
            codes, decode_scale = float8.encode(x, finite_amax(x), element, epsilon=1e-12)
            flat = [bits for row in fp32_patterns(x) for bits in row]
            least = exact.magnitude(fp32_patterns(torch.tensor(1e-12)))
            expected, scale = exact.float8_block(flat, element, epsilon=least)
            assert codes.flatten().tolist() == expected
            assert fp32_patterns(decode_scale) == [exact.to_bits(scale)]


@each_element
def test_ten_thousand_rows_of_delayed_scaling(element):
    """A given scale, unrelated to the data: codes saturate or vanish as they must."""
    scales = every_magnitude(10_020 // 16 + 1, 16, seed=6).abs().flatten()[:10_020]
    scales[scales == 0] = FLT_MAX
    start = 0
    for x in rows_of_every_magnitude(10_020, 16):
        part = scales[start : start + len(x)]
        start += len(x)
        codes, decode_scale = float8.encode_delayed(x, part, element)
        units = [exact.magnitude(bits) for bits in fp32_patterns(part)]
        rows = zip(fp32_patterns(x), units, strict=True)
        expected = [[exact.code(bits, scale, element) for bits in row] for row, scale in rows]
        assert codes.tolist() == expected
        inverse = [exact.to_bits(exact.float32_division(1 << exact.UNIT, u)) for u in units]
        assert fp32_patterns(decode_scale) == inverse
    assert start == 10_020


@each_element
def test_one_scale_serves_every_row(element):
    """FP32 [1] is the same scale for each row as FP32 [R] filled with it."""
    x, scale = every_magnitude(8, 16), torch.tensor([3.7])
    codes, decode_scale = float8.encode_delayed(x, scale, element)
    by_row, _ = float8.encode_delayed(x, scale.expand(8), element)
    assert torch.equal(codes, by_row) and decode_scale.shape == (1,)
    assert decode_scale.data_ptr() != scale.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@each_element
def test_special_values(element, dtype):
    """Every matrix of the shared list, per tensor and per row, empty ones included."""
    for name, x in special_values(dtype).items():
        patterns = fp32_patterns(x)
        codes, decode_scale = float8.encode(x, finite_amax(x), element)
        expected, _ = exact.float8_block([b for row in patterns for b in row], element)
        assert codes.shape == x.shape and codes.flatten().tolist() == expected, name
        codes, decode_scale = float8.encode(x, finite_amax(x, 1), element)
        assert codes.tolist() == [exact.float8_block(row, element)[0] for row in patterns], name
        assert decode_scale.isfinite().all() and (decode_scale > 0).all(), name
        decoded = float8.decode(codes, decode_scale, element)
        assert torch.equal(decoded.isfinite(), x.isfinite()), name
        assert torch.equal(decoded == 0, codes & 0x7F == 0), name


@each_element
def test_decode_without_its_scale(element):
    """None leaves the scale out: the values are those of the codes."""
    x = every_magnitude(4, 16)
    codes, decode_scale = float8.encode(x, finite_amax(x), element)
    assert torch.equal(
        float8.decode(codes, None, element), float8.decode(codes, torch.ones(1), element)
    )
