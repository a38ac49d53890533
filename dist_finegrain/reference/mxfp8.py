"""MXFP8: blocks of 32 along the contraction (or 32×32) with one E8M0 scale byte.

    byte = E8M0 of amax · (1 / fp8_max), rounded up to a power of two
    code = cast(x · 2^(127 - byte))        decoded = float(code) · 2^(byte - 127)

Legend: R rows, C contraction, block (rows, contraction); codes and bytes are torch.uint8.
"""

from __future__ import annotations

import torch

from .elements import (
    FP8_MAX_RECIPROCAL,
    blocks,
    decode_e8m0,
    decode_elements,
    encode_with_scale,
    finite_amax,
    unblocked,
)

_HALF_OF_LEAST_NORMAL = 0x00400000  # bits of 2^-127, which byte 0 decodes to


def scale_bytes(amax: torch.Tensor, element: str) -> torch.Tensor:
    """E8M0 bytes (at most 254, as ``amax`` is finite) of FP32 block amaxes, in their shape."""
    bits = (amax * FP8_MAX_RECIPROCAL[element]).view(torch.int32)
    # Adding all ones below the exponent carries into it unless the mantissa is zero.
    rounded_up = (bits + 0x007FFFFF) >> 23
    return rounded_up.masked_fill(bits <= _HALF_OF_LEAST_NORMAL, 0).to(torch.uint8)


def encode_scale(scale_bytes: torch.Tensor) -> torch.Tensor:
    """2^(127 - byte), FP32: what a block is multiplied by; NaN for byte 255."""
    return decode_e8m0(254 - scale_bytes)


def encode(
    x: torch.Tensor, element: str, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, C], scale bytes [⌈R/rows⌉, ⌈C/contraction⌉]) of ``x`` [R, C]."""
    # Reductions over a transposed view are several times slower than one transposing copy.
    tiles = blocks(x.contiguous().float(), *block)
    scales = scale_bytes(finite_amax(tiles, (1, 3)), element)
    codes = encode_with_scale(tiles, encode_scale(scales)[:, None, :, None], element)
    return unblocked(codes, x.shape), scales


def decode(
    codes: torch.Tensor, scales: torch.Tensor, element: str, block: tuple[int, int]
) -> torch.Tensor:
    """FP32 [R, C] of codes [R, C] and the scale bytes as ``encode`` gave them."""
    values = decode_elements(blocks(codes, *block), element)
    return unblocked(values.mul_(decode_e8m0(scales)[:, None, :, None]), codes.shape)
