"""MXFP8: FP8 codes with one E8M0 scale byte per 32 elements of the contraction, or per 32×32.

Buffers of a plane [R, C]: codes uint8 [Rp, Cp], Rp rounded up to 16 and Cp to 32; scale bytes
uint8 [Rp, Cp/32], repeated for each row where blocks are 32×32, or where ``swizzled`` the same in
128×4 tiles (swizzle.py), flat. Padding is zero.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ..reference import mxfp8 as reference
from .dtypes import DType, fp8_element
from .float8 import CAST_SQNR_DB, ROW_MULTIPLE
from .plane import Direction, Format, Plane, Rounding, padded, round_up
from .quantizer import Quantizer
from .swizzle import swizzle_128x4, swizzled_count, unswizzle_128x4

BLOCK = 32


@dataclasses.dataclass(frozen=True)
class MXFP8Format(Format):
    """Blocks of 32 along the contraction, or 32×32 where ``two_dimensional``.

    swizzled: scale bytes lie in the order that sm_100's GEMM reads.
    """

    family: ClassVar[str] = "mxfp8"
    codec: ClassVar[str] = "mxfp8"
    element: str
    two_dimensional: bool = False
    swizzled: bool = False

    @property
    def block(self) -> tuple[int, int]:
        return (BLOCK if self.two_dimensional else 1, BLOCK)

    @property
    def contraction_multiple(self) -> int:
        return BLOCK

    @property
    def cast_sqnr_db(self) -> float:
        return CAST_SQNR_DB[self.element]

    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        codes, scales = reference.encode(x, self.element, self.block)
        if self.two_dimensional:
            scales = scales.repeat_interleave(BLOCK, 0)[: x.shape[0]]
        codes = padded(codes, ROW_MULTIPLE, self.contraction_multiple).contiguous()
        scales = padded(scales, ROW_MULTIPLE, 1).contiguous()
        if self.swizzled:
            scales = swizzle_128x4(scales)
        return Plane(self, tuple(x.shape), x.dtype, (codes, scales, None))

    def decode(self, plane: Plane, *, outer: bool = True) -> torch.Tensor:
        rows, contraction = plane.shape
        scales = plane.scales
        if self.swizzled:
            scales = unswizzle_128x4(scales, rows, plane.codes.shape[1] // BLOCK)
        # Stored scales are per row for both kinds of block.
        values = reference.decode(plane.codes[:rows], scales[:rows], self.element, (1, BLOCK))
        return values[:, :contraction]

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Plane:
        rows = round_up(shape[0], ROW_MULTIPLE)
        columns = round_up(shape[1], self.contraction_multiple)
        codes = torch.empty(rows, columns, dtype=torch.uint8, device=device)
        blocks = columns // BLOCK
        extents = (swizzled_count(rows, blocks),) if self.swizzled else (rows, blocks)
        scales = torch.empty(extents, dtype=torch.uint8, device=device)
        return Plane(self, tuple(shape), dtype, (codes, scales, None))

    def describe(self) -> str:
        return f"mxfp8({self.element}{', 32x32' if self.two_dimensional else ''})"


class MXFP8Quantizer(Quantizer):
    """MXFP8, each plane with blocks of 32 along its own contraction.

    with_2d_quantization: one scale per 32×32, which then serves both planes.

    Raises TypeError for another fp8_dtype.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._format = MXFP8Format(fp8_element(fp8_dtype), bool(with_2d_quantization))

    def plane_format(self, direction: Direction) -> MXFP8Format:
        return self._format
