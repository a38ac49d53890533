"""FP8 with one FP32 scale per block: 1×128 along the contraction, or 128×128.

Buffers of a plane [R, C]: codes uint8 [Rp, Cp], Rp and Cp rounded up to 16; decode scales FP32, in
the layout that the GEMM reads: 1×128 [⌈C/128⌉, Rp], 128×128 [⌈R/128⌉, ⌈C/128⌉ rounded up to 4].
Padding of both is zero.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ..reference import float8_block as reference
from .dtypes import DType, fp8_element
from .float8 import CAST_SQNR_DB, ROW_MULTIPLE, checked_epsilon, options_text
from .plane import Direction, Format, Plane, Rounding, padded, round_up
from .quantizer import Quantizer

BLOCK = 128
SCALE_COLUMN_MULTIPLE = 4  # of 128×128 scales


@dataclasses.dataclass(frozen=True)
class Float8BlockFormat(Format):
    """1×128 blocks, or 128×128 where ``two_dimensional``.

    epsilon: least amax of a block; power_of_two: round scales down to powers of two.
    """

    family: ClassVar[str] = "float8_block"
    codec: ClassVar[str] = "float8_block"
    element: str
    two_dimensional: bool = False
    epsilon: float = 0.0
    power_of_two: bool = True

    @property
    def block(self) -> tuple[int, int]:
        return (BLOCK if self.two_dimensional else 1, BLOCK)

    @property
    def contraction_multiple(self) -> int:
        return 16

    @property
    def cast_sqnr_db(self) -> float:
        return CAST_SQNR_DB[self.element]

    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        options = {"epsilon": self.epsilon, "power_of_two": self.power_of_two}
        codes, scales = reference.encode(x, self.element, self.block, **options)
        codes = padded(codes, ROW_MULTIPLE, self.contraction_multiple).contiguous()
        if self.two_dimensional:
            scales = padded(scales, 1, SCALE_COLUMN_MULTIPLE)
        else:
            scales = padded(scales, ROW_MULTIPLE, 1).t().contiguous()
        return Plane(self, tuple(x.shape), x.dtype, (codes, scales, None))

    def decode(self, plane: Plane, *, outer: bool = True) -> torch.Tensor:
        rows, contraction = plane.shape
        scales = plane.scales if self.two_dimensional else plane.scales.t()[:rows]
        scales = scales[:, : -(-contraction // BLOCK)]
        codes = plane.codes[:rows, :contraction]
        return reference.decode(codes, scales, self.element, self.block)

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Plane:
        rows = round_up(shape[0], ROW_MULTIPLE)
        row_blocks, blocks = -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)
        extents = (blocks, rows)
        if self.two_dimensional:
            extents = (row_blocks, round_up(blocks, SCALE_COLUMN_MULTIPLE))
        columns = round_up(shape[1], self.contraction_multiple)
        codes = torch.empty(rows, columns, dtype=torch.uint8, device=device)
        scales = torch.empty(extents, dtype=torch.float32, device=device)
        return Plane(self, tuple(shape), dtype, (codes, scales, None))

    def describe(self) -> str:
        block = "x".join(map(str, self.block))
        kind = "" if self.power_of_two else ", fp32 scales"
        return f"float8_block({self.element}, {block}{kind}{options_text(self.epsilon, False)})"


class Float8BlockQuantizer(Quantizer):
    """FP8 in blocks, each plane with blocks along its own contraction.

    amax_epsilon: least amax of a block; force_pow_2_scales: round scales down to powers of two.
    block_scaling_dim: 1 for 1×128 blocks, 2 for 128×128 (one scale then serves both planes).

    Raises TypeError for another fp8_dtype; ValueError for a negative amax_epsilon or another
    block_scaling_dim.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(
                f"block_scaling_dim is {block_scaling_dim!r}; accepted: 1 (1×128 blocks) or "
                "2 (128×128 blocks), e.g. block_scaling_dim=1"
            )
        self._format = Float8BlockFormat(
            fp8_element(fp8_dtype),
            block_scaling_dim == 2,
            checked_epsilon(amax_epsilon),
            bool(force_pow_2_scales),
        )

    def plane_format(self, direction: Direction) -> Float8BlockFormat:
        return self._format
