"""Exact oracle of NVFP4 in whole numbers, and a scalar model of its random bits.

As in exact.py: a finite binary32 magnitude is held as its number of 2^-149 ("units"), inputs are
FP32 bit patterns, every rounding is explicit. A signed value is (sign bit, units).
"""

from __future__ import annotations

from fractions import Fraction

from . import exact
from .exact import FLT_MAX, UNIT

ONE = 1 << UNIT
ONE_SIXTH = exact.magnitude(0x3E2AAAAB)
ONE_2688TH = exact.magnitude(0x39C30C31)
HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # E2M1 magnitudes of codes 0…7, in halves
SIGNS = "+++-+------+-+--"
NAN_SCALE = 0x7F

Signed = tuple[int, int]


def signed(bits: int) -> Signed:
    return bits >> 31, exact.magnitude(bits)


def global_scale(amax: int) -> int:
    """S of a finite amax, both in units."""
    return min(exact.float32_division(2688 * ONE, amax), FLT_MAX) if amax else ONE


def outer_scale(amax: int) -> int:
    """g in units."""
    return exact.product(amax, ONE_2688TH)


def scale_byte(block_amax: int, scale: int) -> int:
    """b of a block amax and S."""
    inner = exact.product(scale, ONE_SIXTH)
    return exact.cast(min(exact.product(block_amax, inner), FLT_MAX), "e4m3")


def e4m3(byte: int) -> int:
    """Units of a finite, positive E4M3 byte."""
    return exact.magnitude(exact.decoded(byte, ONE, "e4m3"))


def multiplier(byte: int, scale: int) -> int:
    """m of a scale byte and S."""
    step = exact.product(e4m3(byte), exact.float32_division(ONE, scale))
    return min(exact.float32_division(ONE, step), FLT_MAX) if step else FLT_MAX


def nearest_code(units: int) -> int:
    """E2M1 code of a magnitude: the nearest of the eight values, a tie to the even code."""
    candidates = range(8)
    return min(candidates, key=lambda c: (abs((HALVES[c] << UNIT - 1) - units), c & 1))


def stochastic_code(units: int, r: int) -> int:
    """E2M1 code of a magnitude with 16 random bits: the formula on the exact bits of u."""
    u = exact.binary32(units + ONE) if units < ONE else units
    base = 254 if units < ONE else 252
    return min(7, (exact.to_bits(u) + 64 * r + 32 >> 22) - base)


def distance(units: int) -> tuple[int, Fraction]:
    """(code below, exact fraction of the gap above it) of a magnitude under 6."""
    code = max(c for c in range(8) if HALVES[c] << UNIT - 1 <= units)
    low, high = HALVES[code] << UNIT - 1, HALVES[code + 1] << UNIT - 1
    return code, Fraction(units - low, high - low)


def block(
    values: list[Signed | None],
    amax: int,
    tile: list[Signed | None] | None = None,
    noise: list[int] | None = None,
) -> tuple[list[int], int]:
    """(codes, scale byte) of 16 values, None for a non-finite one.

    amax: of the matrix or row, in units; tile: the values that share the scale, default the block.
    """
    tile = values if tile is None else tile
    scale = global_scale(amax)
    byte = scale_byte(max((v[1] for v in tile if v is not None), default=0), scale)
    m = multiplier(byte, scale)
    codes = []
    for index, value in enumerate(values):
        if value is None:
            codes.append(0)
            continue
        scaled = exact.product(value[1], m)
        code = nearest_code(scaled) if noise is None else stochastic_code(scaled, noise[index])
        codes.append(value[0] << 3 | code)
    return codes, byte if None not in tile else NAN_SCALE


def decoded(code: int, byte: int, g: int) -> int:
    """FP32 bits of e2m1 · (b · g)."""
    value = exact.product(HALVES[code & 7] << UNIT - 1, exact.product(e4m3(byte), g))
    return (code >> 3) << 31 | exact.to_bits(value)


# Hadamard transform.
def add(a: Signed, b: Signed) -> Signed:
    """a + b in binary32; an exact zero is -0 only as the sum of two."""
    total = sum(-units if sign else units for sign, units in (a, b))
    sign = int(total < 0) if total else a[0] & b[0]
    return sign, exact.binary32(abs(total))


def hadamard(values: list[Signed], rht: str, to_bf16: bool) -> list[Signed]:
    """The rotated group of 16."""
    u = [(s ^ (rht == "signed" and SIGNS[i] == "-"), v) for i, (s, v) in enumerate(values)]
    for h in (1, 2, 4, 8):
        for i in range(16):
            if not i & h:
                a, b = u[i], u[i + h]
                u[i], u[i + h] = add(a, b), add(a, (b[0] ^ 1, b[1]))
    y = [(sign, exact.product(units, ONE >> 2)) for sign, units in u]
    return [(sign, bf16(units)) for sign, units in y] if to_bf16 else y


def bf16(units: int) -> int:
    """A magnitude rounded to BF16 (finite results only)."""
    quantum = max(units.bit_length() - 8, 16)  # 8 significant bits, the least subnormal is 2^-133
    return exact.shifted(units, quantum) << quantum


# Random bits.
def mul_hi_lo(a: int, b: int) -> tuple[int, int]:
    return a * b >> 32, a * b & 0xFFFFFFFF


def philox(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 of one counter, as its authors' Random123 writes it."""
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = mul_hi_lo(0xD2511F53, counter[0])
        hi1, lo1 = mul_hi_lo(0xCD9E8D57, counter[2])
        counter = [hi1 ^ counter[1] ^ k0, lo1, hi0 ^ counter[3] ^ k1, lo0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return counter


def content_hash(patterns: list[int], is_fp32: bool) -> int:
    """h of 16 bit patterns in the input's dtype."""
    total, factor = 0, 1
    for p in patterns:
        factor = factor * 0x9E3779B1 % 2**32
        if is_fp32:
            p = (p << 1 | p >> 31) & 0xFFFFFFFF
        total += p * factor
    return total % 2**32


def rounding_bits(h: int, i: int, j: int, *, seed: int, stream: int, step: int) -> int:
    """r of one element: i plane row, j contraction index, both global."""
    words = philox([j >> 3, i, step, h], (seed, stream))
    return (words[(j >> 1) & 3] >> 16 * (j & 1)) & 0xFFFF
