"""NVFP4: E2M1 codes, one E4M3 scale per 16 elements of the contraction or per 16×16, one FP32 g.

    S = min(2688 / amax, FLT_MAX), 1 for amax 0        amax: of the matrix, or of the plane row
    b = E4M3(min(amax_blk · (S · (1/6)), FLT_MAX))
    m = min(1 / (float(b) · (1/S)), FLT_MAX)
    code = E2M1(x · m)                                 nearest-even or stochastic, saturating at 6
    g = amax · (1/2688)                                decoded = e2m1 · (b · g)

Every line is FP32, one rounding per operation, in the order written; quotients are tensor / tensor
(torch turns scalar / tensor into a reciprocal and a product). b = 0 needs no case of its own: m is
FLT_MAX, non-zero elements become ±6 and decode to ±0. Non-finite is judged on what is encoded,
that is after the Hadamard transform: the element's code is 0, its block's scale byte is 7F.

Legend: R, C rows and contraction of the plane; Rp, Cp: rounded up to 16 and 32; G = Cp/16 groups.
Arithmetic runs contraction-first, on [G, 16, Rp]: each pass over the elements of a block is then
contiguous, and a columnwise plane, which is x.t(), already lies like that in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from .elements import cast_e4m3, decode_e4m3, finite_amax

BLOCK = 16
ROW_MULTIPLE = 16
CONTRACTION_MULTIPLE = 32
NAN_SCALE = 0x7F
FLT_MAX = torch.finfo(torch.float32).max
_SCALE_RANGE = 2688.0  # 448 · 6
_ONE_SIXTH = float.fromhex("0x1.555556p-3")  # bits 3E2AAAAB
_ONE_2688TH = float.fromhex("0x1.861862p-12")  # bits 39C30C31
_SIGNED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_PIECE_ELEMENTS = 1 << 17

Noise = Callable[[torch.Tensor, int], torch.Tensor]


def contraction_first(x: torch.Tensor) -> torch.Tensor:
    """``x`` [R, C] as [G, 16, Rp] in its dtype, zero-padded; a view where that needs no copy."""
    rows, contraction = x.shape
    row_pad, contraction_pad = -rows % ROW_MULTIPLE, -contraction % CONTRACTION_MULTIPLE
    transposed = x.detach().t()
    if row_pad or contraction_pad:
        transposed = torch.nn.functional.pad(transposed, (0, row_pad, 0, contraction_pad))
    transposed = transposed.contiguous()
    return transposed.unflatten(0, (transposed.shape[0] // BLOCK, BLOCK))


def values_to_encode(source: torch.Tensor, rht: str | None) -> torch.Tensor:
    """FP32 copy of ``source`` [G, 16, R]; with ``rht`` ("signed" or "plain") each group rotated.

    The rotation of BF16 is rounded to BF16, that of FP16 and FP32 stays FP32.
    """
    values = source.to(torch.float32, copy=True)
    if rht is None:
        return values
    rotated = hadamard(values, rht)
    return rotated.copy_(rotated.bfloat16()) if source.dtype == torch.bfloat16 else rotated


def hadamard(u: torch.Tensor, rht: str) -> torch.Tensor:
    """Randomized Hadamard transform along dim 1 of FP32 ``u`` [G, 16, R], which is overwritten."""
    if rht == "signed":
        u.mul_(torch.tensor(_SIGNED, dtype=u.dtype, device=u.device)[:, None])
    result = torch.empty_like(u)
    for h in (1, 2, 4, 8):
        pairs = (BLOCK // (2 * h), 2, h)
        first, second = u.unflatten(1, pairs).unbind(2)
        total, difference = result.unflatten(1, pairs).unbind(2)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        u, result = result, u
    return u.mul_(0.25)


def measure(x: torch.Tensor, *, rht: str | None = None, row_scaled: bool = False) -> torch.Tensor:
    """amax over the finite values to encode of ``x`` [R, C]: FP32 [1], or [R] where row-scaled."""
    if rht is None:
        return finite_amax(x, 1 if row_scaled else None)
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    for _, source in _pieces(x):
        amax = torch.maximum(amax, finite_amax(values_to_encode(source, rht)))
    return amax


def encode(
    x: torch.Tensor,
    amax: torch.Tensor,
    *,
    two_dimensional: bool = False,
    rht: str | None = None,
    row_scaled: bool = False,
    noise: Noise | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [Rp, Cp/2], E4M3 scale bytes uint8 [Rp, Cp/16], g FP32 [1] or [Rp]).

    x: FP32, FP16 or BF16 [R, C], any strides. amax: what ``measure`` returns or more, FP32 [1], or
    [R] where row-scaled. two_dimensional: one scale per 16×16, repeated for each row. noise: called
    with the source [n, 16, Rp] in ``x``'s dtype, before any transform, and the contraction index of
    its first element, makes the random bits, int32 [n, 16, Rp] below 2^16; None rounds to nearest
    even. Padding is zero in all three results.
    """
    rows, contraction = x.shape
    row_pad = -rows % ROW_MULTIPLE
    if row_scaled and row_pad:
        amax = torch.nn.functional.pad(amax, (0, row_pad))
    encode_scale = global_scale(amax)
    extent = contraction + -contraction % CONTRACTION_MULTIPLE
    packed, scales = (
        torch.empty((rows + row_pad, extent // per), dtype=torch.uint8, device=x.device)
        for per in (2, BLOCK)
    )
    for first, source in _pieces(x):
        bits = None if noise is None else noise(source, first)
        values = values_to_encode(source, rht)
        codes, block_scales = _encode_groups(values, encode_scale, two_dimensional, bits)
        last = first + BLOCK * len(source)
        packed[:, first // 2 : last // 2] = codes.t()
        scales[:, first // BLOCK : last // BLOCK] = block_scales.t()
    scales[rows:] = 0  # a 16×16 tile reaches into the row padding
    return packed, scales, amax * _ONE_2688TH


def _pieces(x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(contraction index, ``contraction_first`` part) of ``x``; parts stay in a CPU's cache."""
    rows, contraction = x.shape
    width = contraction
    if x.device.type == "cpu":
        width = _PIECE_ELEMENTS // max(rows, 1) // CONTRACTION_MULTIPLE * CONTRACTION_MULTIPLE
    width = max(width, CONTRACTION_MULTIPLE)
    for first in range(0, contraction, width):
        yield first, contraction_first(x[:, first : first + width])


def _encode_groups(
    values: torch.Tensor,
    encode_scale: torch.Tensor,
    two_dimensional: bool,
    bits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [8·n, R], scale bytes uint8 [n, R]) of FP32 [n, 16, R], overwritten."""
    block_amax = _block_amax(values, two_dimensional)
    is_bad = None
    # Only a CPU tensor is looked at; elsewhere that would be a host synchronisation.
    if values.device.type != "cpu" or not block_amax.isfinite().all():
        is_bad = ~block_amax.isfinite()
        values.masked_fill_(~values.isfinite(), 0.0)
        block_amax = _block_amax(values, two_dimensional)
    scales = scale_bytes(block_amax, encode_scale)
    codes = e2m1_codes(values.mul_(multiplier(scales, encode_scale)[:, None]), bits)
    if is_bad is not None:
        scales.masked_fill_(is_bad, NAN_SCALE)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).flatten(0, 1), scales


def _block_amax(values: torch.Tensor, two_dimensional: bool) -> torch.Tensor:
    """max |values| of each block, FP32 [G, Rp], NaN and Inf included; a tile's for each row."""
    amax = torch.maximum(values.amax(1).abs_(), values.amin(1).abs_())
    if two_dimensional:
        tiles = amax.unflatten(1, (amax.shape[1] // BLOCK, BLOCK)).amax(2)
        amax = tiles.repeat_interleave(BLOCK, 1)
    return amax


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """S of a finite FP32 ``amax``, in its shape."""
    scale = (torch.full_like(amax, _SCALE_RANGE) / amax).clamp(max=FLT_MAX)
    return scale.masked_fill(amax == 0, 1.0)


def scale_bytes(block_amax: torch.Tensor, encode_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes b of finite FP32 block amaxes; ``encode_scale`` S broadcasts."""
    return cast_e4m3((block_amax * (encode_scale * _ONE_SIXTH)).clamp(max=FLT_MAX))


def multiplier(scale_bytes: torch.Tensor, encode_scale: torch.Tensor) -> torch.Tensor:
    """m, FP32, of E4M3 bytes; ``encode_scale`` S broadcasts."""
    step = decode_e4m3(scale_bytes) * (torch.ones_like(encode_scale) / encode_scale)
    return (torch.ones_like(step) / step).clamp(max=FLT_MAX)


def e2m1_codes(scaled: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """FP32 ``scaled`` (no NaN) to E2M1 codes, uint8 0…15 of its shape; zeros keep their sign.

    noise: int32 below 2^16, same shape: rounds up where the distance to the code below, in units
    of 2^-16 of the gap, exceeds it; None rounds to nearest even. Both saturate at 6.
    """
    sign = (scaled.view(torch.int32) >> 28).bitwise_and_(8)
    v = scaled.abs()
    if noise is None:
        v.clamp_(max=6.0)
        # Adding 2^22 times v's power of two (at least 1) leaves one mantissa bit: the add rounds.
        exponent = v.view(torch.int32).clamp(min=0x3F800000).bitwise_and_(0x7F800000)
        magic = exponent.add_(22 << 23)
        code = v.add_(magic.view(torch.float32)).view(torch.int32).bitwise_and_(7)
        code.add_(magic.bitwise_right_shift_(22)).sub_(254 + 44)
        return code.add_(sign).to(torch.uint8)
    # Below 1 the codes are 0.5 apart: v + 1 has that spacing in its top mantissa bit, as v above.
    is_small = (v.view(torch.int32) - 0x3F800000).bitwise_right_shift_(31)  # -1 or 0
    v.add_((is_small & 0x3F800000).view(torch.float32))
    code = v.view(torch.int32).add_(noise, alpha=64).add_(32).bitwise_right_shift_(22)
    code.clamp_(max=252 + 7).sub_(252).add_(is_small, alpha=2)
    return code.add_(sign).to(torch.uint8)


def decode(
    packed: torch.Tensor, scales: torch.Tensor, g: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 [R, 2·n] of packed codes uint8 [R, n] and scale bytes [R, n/8]: e2m1 · (b · g).

    g: FP32 [1] or [R]; None leaves it out, e2m1 · b.
    """
    factor = decode_e4m3(scales)
    if g is not None:
        factor = factor * g[:, None]
    # Two FP32 values per byte, fetched as one 64-bit element.
    pairs = _pair_table(packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
    values = pairs.view(torch.float32).view(*scales.shape, BLOCK)
    return values.mul_(factor[:, :, None]).flatten(1)


def _pair_table(device: torch.device) -> torch.Tensor:
    values = _E2M1 + tuple(math.copysign(v, -1.0) for v in _E2M1)
    values = torch.tensor(values, dtype=torch.float32, device=device)
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack((low, high), 1).view(torch.int64).flatten()
