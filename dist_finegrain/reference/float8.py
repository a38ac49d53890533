"""FP8 with one FP32 scale per tensor (current, delayed) or per row of the plane.

    s = fp8_max / max(amax, epsilon)      code = cast(x · s)      decoded = float(code) · (1 / s)

Legend: R rows, C contraction. ``element`` is "e4m3" or "e5m2"; codes are torch.uint8.
"""

from __future__ import annotations

import torch

from .elements import FP8_MAX, decode_elements, encode_with_scale, reciprocal, scale_from_amax


def encode(
    x: torch.Tensor,
    amax: torch.Tensor,
    element: str,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, C], decode scale of ``amax``'s shape) of ``x`` [R, C].

    amax: FP32 [1], or [R] for row scaling; over the finite elements, reduced over ranks already.
    """
    scale = scale_from_amax(amax, FP8_MAX[element], epsilon, power_of_two)
    return encode_delayed(x, scale, element)


def encode_delayed(
    x: torch.Tensor, scale: torch.Tensor, element: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, C], decode scale) of ``x`` [R, C] with a given encode scale, FP32 [1] or [R]."""
    return encode_with_scale(x, scale.reshape(-1, 1), element), reciprocal(scale)


def decode(codes: torch.Tensor, decode_scale: torch.Tensor | None, element: str) -> torch.Tensor:
    """FP32 [R, C]; ``decode_scale`` [1] or [R] as ``encode`` gave it, None leaves it out."""
    values = decode_elements(codes, element)
    return values if decode_scale is None else values.mul_(decode_scale.reshape(-1, 1))
