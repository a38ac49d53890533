"""Exact oracle of the FP8 formats in whole numbers: no torch, no floats, every rounding explicit.

A finite binary32 number is an integer multiple of 2^-149, so it is held as that integer ("units").
A block is a list of binary32 bit patterns; FP16 and BF16 inputs are passed as their FP32 patterns.
The rules are numerics.md's, the constants its hexadecimal ones; nothing is shared with the package.
"""

from __future__ import annotations

import dataclasses

UNIT = 149  # 1.0 is 1 << UNIT units
FLT_MAX = ((1 << 24) - 1) << 253
INFINITY = 1 << 277  # what a binary32 operation overflows to


@dataclasses.dataclass(frozen=True)
class Element:
    """An 8-bit float: least subnormal 2^-least, fp8_max, and 1/fp8_max as binary32 bits."""

    mantissa_bits: int
    least: int
    fp8_max: int
    max_code: int
    reciprocal_bits: int


ELEMENTS = {
    "e4m3": Element(3, 9, 448, 0x7E, 0x3B124925),
    "e5m2": Element(2, 16, 57344, 0x7B, 0x37924925),
}


def is_finite(bits: int) -> bool:
    return bits & 0x7F800000 != 0x7F800000


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


def magnitude(bits: int) -> int:
    """|value| of a finite binary32 pattern, in units."""
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    return (mantissa | 0x800000) << exponent - 1 if exponent else mantissa


def to_bits(units: int) -> int:
    """The pattern of a non-negative binary32 number."""
    exponent = max(units.bit_length() - 24, 0)
    return (exponent << 23) + (units >> exponent)


def shifted(value: int, shift: int) -> int:
    """value / 2^shift rounded to nearest, ties to even."""
    if shift <= 0:
        return value << -shift
    return value + (1 << shift - 1) - 1 + (value >> shift & 1) >> shift


def binary32(numerator: int, denominator: int = 1) -> int:
    """numerator / denominator, a number of units, rounded to binary32; INFINITY past FLT_MAX."""
    quotient, remainder = divmod(numerator, denominator)
    drop = max(quotient.bit_length() - 24, 0)
    # Two more bits and a sticky one decide every rounding.
    sticky = (quotient << 2) | (2 if 2 * remainder >= denominator else 0)
    sticky |= remainder not in (0, denominator - remainder)
    rounded = shifted(sticky, drop + 2) << drop
    return min(rounded, INFINITY)


def product(a: int, b: int) -> int:
    """a · b in binary32."""
    return binary32(a * b, 1 << UNIT) if a and b else 0


def float32_division(a: int, b: int) -> int:
    """a / b in binary32."""
    return binary32(a << UNIT, b)


def scale_from_amax(amax: int, element: str, epsilon: int = 0, power_of_two: bool = False) -> int:
    """Encode scale of a finite amax; all in units."""
    amax = max(amax, epsilon)
    scale = 1 << UNIT
    if amax:
        scale = min(float32_division(ELEMENTS[element].fp8_max << UNIT, amax), FLT_MAX)
    return 1 << scale.bit_length() - 1 if power_of_two else scale


def cast(units: int, element: str) -> int:
    """Code, without its sign, of a magnitude in units: nearest even, saturating."""
    kind = ELEMENTS[element]
    quantum = max(units.bit_length() - kind.mantissa_bits - 1, UNIT - kind.least)
    steps = quantum - (UNIT - kind.least)
    return min((steps << kind.mantissa_bits) + shifted(units, quantum), kind.max_code)


def code(bits: int, scale: int, element: str) -> int:
    """The code of one input pattern multiplied by an encode scale."""
    if not is_finite(bits):
        if element == "e4m3" or is_nan(bits):
            return 0x7F
        return 0xFC if bits >> 31 else 0x7C
    return bits >> 24 & 0x80 | cast(product(magnitude(bits), scale), element)


def decoded(code: int, decode_scale: int, element: str) -> int:
    """Bits of float(code) · decode_scale for a finite code."""
    kind = ELEMENTS[element]
    implicit = 1 << kind.mantissa_bits
    steps, mantissa = divmod(code & 0x7F, implicit)
    significand = (mantissa | implicit) << steps - 1 if steps else mantissa
    value = binary32(significand * decode_scale, 1 << kind.least)
    return (code & 0x80) << 24 | to_bits(value)


def amax(block: list[int]) -> int:
    """Largest finite magnitude of a block, 0 for none."""
    return max((magnitude(bits) for bits in block if is_finite(bits)), default=0)


def float8_block(
    block: list[int], element: str, epsilon: int = 0, power_of_two: bool = False
) -> tuple[list[int], int]:
    """(codes, decode scale in units) of a block that has one FP32 scale of its own."""
    scale = scale_from_amax(amax(block), element, epsilon, power_of_two)
    codes = [code(bits, scale, element) for bits in block]
    return codes, float32_division(1 << UNIT, scale)


def e8m0_byte(amax: int, element: str) -> int:
    """Scale byte of an MXFP8 block: amax · (1/fp8_max) rounded up to a power of two."""
    ratio = product(amax, magnitude(ELEMENTS[element].reciprocal_bits))
    return max((ratio - 1).bit_length() - UNIT + 127, 0) if ratio else 0


def mxfp8_block(block: list[int], element: str) -> tuple[list[int], int]:
    """(codes, scale byte) of an MXFP8 block."""
    byte = e8m0_byte(amax(block), element)
    return [code(bits, 1 << UNIT + 127 - byte, element) for bits in block], byte
