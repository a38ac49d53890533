"""FP8 with one FP32 scale per block: 1×128 along the contraction, or 128×128.

Arithmetic per block as per tensor (float8.py), with each block's own amax. A 128×128 scale serves
both planes of a matrix: encoding the transpose gives the transposed codes and scales. Blocks start
at element (0, 0) of what is passed; the last ones may be ragged.

Legend: R rows, C contraction, block (rows, contraction); codes are torch.uint8.
"""

from __future__ import annotations

import torch

from .elements import (
    FP8_MAX,
    blocks,
    decode_elements,
    encode_with_scale,
    finite_amax,
    reciprocal,
    scale_from_amax,
    unblocked,
)


def encode(
    x: torch.Tensor,
    element: str,
    block: tuple[int, int],
    *,
    epsilon: float = 0.0,
    power_of_two: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, C], decode scales FP32 [⌈R/rows⌉, ⌈C/contraction⌉]) of ``x`` [R, C]."""
    # Reductions over a transposed view are several times slower than one transposing copy.
    tiles = blocks(x.contiguous().float(), *block)
    scale = scale_from_amax(finite_amax(tiles, (1, 3)), FP8_MAX[element], epsilon, power_of_two)
    codes = encode_with_scale(tiles, scale[:, None, :, None], element)
    return unblocked(codes, x.shape), reciprocal(scale)


def decode(
    codes: torch.Tensor, decode_scales: torch.Tensor, element: str, block: tuple[int, int]
) -> torch.Tensor:
    """FP32 [R, C] of codes [R, C] and decode scales as ``encode`` gave them."""
    values = decode_elements(blocks(codes, *block), element)
    return unblocked(values.mul_(decode_scales[:, None, :, None]), codes.shape)
