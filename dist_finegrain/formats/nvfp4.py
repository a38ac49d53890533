"""NVFP4: 4-bit E2M1 codes, an E4M3 scale per 16 elements (or 16×16), an outer FP32 scale g.

Buffers of a plane [R, C]: packed codes uint8 [Rp, Cp/2], low nibble first; E4M3 scale bytes uint8
[Rp, Cp/16], repeated for each row where blocks are 16×16, or where ``swizzled`` the same in 128×4
tiles (swizzle.py), flat; g FP32 [1], or [Rp] where row-scaled. Rp is R rounded up to 16 and Cp is C
rounded up to 32; padding is zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import torch

from ..reference import nvfp4 as reference
from ..reference.philox import rounding_bits
from .dtypes import DType
from .plane import Direction, Format, Plane, Rounding, round_up
from .quantizer import Quantizer
from .swizzle import swizzle_128x4, swizzled_count, unswizzle_128x4

BLOCK = 16
_FP4_DTYPES = (DType.kFloat4E2M1, torch.float4_e2m1fn_x2)
_PLAIN_SCALING = {
    "nvfp4_use_4over6": False,
    "nvfp4_e4m3_max": 448,
    "nvfp4_4over6_err_mode": "MAE",
}


@dataclasses.dataclass(frozen=True)
class NVFP4Format(Format):
    """One plane in NVFP4.

    two_dimensional: one scale per 16×16. rht: groups of 16 along the contraction are rotated by
    the Hadamard transform with random signs ("signed") or without ("plain") before anything else.
    stochastic: rounding of the codes. row_scaled: one amax, and one g, per plane row. swizzled:
    scale bytes lie in the order that sm_100's GEMM reads.
    """

    family: ClassVar[str] = "nvfp4"
    codec: ClassVar[str] = "nvfp4"
    two_dimensional: bool = False
    rht: Literal["signed", "plain"] | None = None
    stochastic: bool = False
    row_scaled: bool = False
    swizzled: bool = False

    def __post_init__(self):
        # The quantizer refuses these by the names of its arguments.
        assert not (self.two_dimensional and self.rht)
        assert not (self.row_scaled and (self.two_dimensional or self.rht or self.stochastic))

    @property
    def statistic(self) -> str:
        return "row" if self.row_scaled else "tensor"

    @property
    def block(self) -> tuple[int, int]:
        return (BLOCK if self.two_dimensional else 1, BLOCK)

    @property
    def contraction_multiple(self) -> int:
        return 32

    @property
    def cast_sqnr_db(self) -> float:
        """20 dB for nearest, 18.5 dB in 16×16 blocks; stochastic rounding costs under 4 dB more."""
        nearest = 18.5 if self.two_dimensional else 20.0
        return nearest - 4.0 if self.stochastic else nearest

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        """amax of ``x`` [R, C], after the RHT if any: FP32 [1], or [R] where row-scaled."""
        return reference.measure(x, rht=self.rht, row_scaled=self.row_scaled)

    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        """``statistic``: what ``measure`` returns, or its maximum over ranks; None measures ``x``.

        rounding: read by stochastic rounding only; None is ``Rounding()``.
        """
        codes, scales, g = reference.encode(
            x,
            self.measure(x) if statistic is None else statistic,
            two_dimensional=self.two_dimensional,
            rht=self.rht,
            row_scaled=self.row_scaled,
            noise=_noise(rounding or Rounding()) if self.stochastic else None,
        )
        if self.swizzled:
            scales = swizzle_128x4(scales)
        return Plane(self, tuple(x.shape), x.dtype, (codes, scales, g))

    def decode(self, plane: Plane, *, outer: bool = True) -> torch.Tensor:
        """FP32 [R, C]; with RHT the rotated values, [R, C rounded up to whole groups of 16].

        ``outer=False``: e2m1 · b, exact in BF16, without g.
        """
        rows, contraction = plane.shape
        extent = round_up(contraction, BLOCK) if self.rht else contraction
        g = plane.outer[:rows] if outer else None
        scales = plane.scales
        if self.swizzled:
            scales = unswizzle_128x4(scales, rows, plane.codes.shape[1] * 2 // BLOCK)
        return reference.decode(plane.codes[:rows], scales[:rows], g)[:, :extent]

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Plane:
        rows = round_up(shape[0], reference.ROW_MULTIPLE)
        columns = round_up(shape[1], self.contraction_multiple)
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        blocks = columns // BLOCK
        extents = (swizzled_count(rows, blocks),) if self.swizzled else (rows, blocks)
        scales = torch.empty(extents, dtype=torch.uint8, device=device)
        g = torch.empty(rows if self.row_scaled else 1, dtype=torch.float32, device=device)
        return Plane(self, tuple(shape), dtype, (codes, scales, g))

    def describe(self) -> str:
        options = (
            (self.two_dimensional, "16x16"),
            (self.rht, f"rht={self.rht}"),
            (self.stochastic, "stochastic"),
            (self.row_scaled, "row-scaled"),
        )
        return f"nvfp4({', '.join(('e2m1', *(text for on, text in options if on)))})"


def _noise(rounding: Rounding) -> reference.Noise:
    """The random bits of a piece of the plane that starts at a contraction index of its own."""

    def bits(source: torch.Tensor, first: int) -> torch.Tensor:
        place = dataclasses.replace(
            rounding, contraction_origin=rounding.contraction_origin + first
        )
        return rounding_bits(source, **vars(place))

    return bits


class NVFP4Quantizer(Quantizer):
    """NVFP4, each plane with blocks along its own contraction.

    fp4_dtype: DType.kFloat4E2M1 or torch.float4_e2m1fn_x2.
    with_amax_reduction, amax_reduction_group: kept as attributes for Transformer Engine's
    signature. A module shares the amax over its own scale group, the ranks that hold other pieces
    of the same matrix, whatever is given here; a bare ``quantize`` shares nothing.
    with_rht: rotate the columnwise plane; with_random_sign_mask: with random signs.
    with_post_rht_amax: accepted and unused: the amax of a rotated plane is always that of its
    rotated values.
    with_2d_quantization: one scale per 16×16, which serves both planes.
    stochastic_rounding: of the codes of both planes.
    row_scaled_nvfp4: one FP32 scale per plane row instead of per tensor; for fprop only.
    nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode: only their defaults.

    Raises TypeError for another fp4_dtype; ValueError for options that exclude each other and for
    4-over-6.
    """

    def __init__(
        self,
        fp4_dtype: DType | torch.dtype = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if fp4_dtype not in _FP4_DTYPES:
            raise TypeError(
                f"fp4_dtype is {fp4_dtype!r}; accepted: DType.kFloat4E2M1 or "
                "torch.float4_e2m1fn_x2, e.g. fp4_dtype=DType.kFloat4E2M1"
            )
        for name, got in (
            ("nvfp4_use_4over6", nvfp4_use_4over6),
            ("nvfp4_e4m3_max", nvfp4_e4m3_max),
            ("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode),
        ):
            if got != _PLAIN_SCALING[name]:
                supported = ", ".join(f"{k}={v!r}" for k, v in _PLAIN_SCALING.items())
                raise ValueError(
                    f"{name} is {got!r}: 4-over-6 scaling is not supported; accepted: {supported}. "
                    "Supported options are with_rht, with_random_sign_mask, with_2d_quantization, "
                    "stochastic_rounding and row_scaled_nvfp4"
                )
        _refuse_together(with_rht=with_rht, with_2d_quantization=with_2d_quantization)
        _refuse_together(row_scaled_nvfp4=row_scaled_nvfp4, with_rht=with_rht)
        _refuse_together(
            row_scaled_nvfp4=row_scaled_nvfp4, with_2d_quantization=with_2d_quantization
        )
        _refuse_together(row_scaled_nvfp4=row_scaled_nvfp4, stochastic_rounding=stochastic_rounding)
        rowwise_format = NVFP4Format(
            two_dimensional=bool(with_2d_quantization),
            stochastic=bool(stochastic_rounding),
            row_scaled=bool(row_scaled_nvfp4),
        )
        rht = ("signed" if with_random_sign_mask else "plain") if with_rht else None
        self._formats = {
            "rowwise": rowwise_format,
            "columnwise": dataclasses.replace(rowwise_format, rht=rht),
        }
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group

    def plane_format(self, direction: Direction) -> NVFP4Format:
        return self._formats[direction]


def _refuse_together(**options: bool) -> None:
    """ValueError where both options are set."""
    if all(options.values()):
        first, second = options
        raise ValueError(
            f"{first}=True and {second}=True exclude each other; accepted: one of them, "
            f"e.g. {second}=False"
        )
