"""FP8 with one FP32 scale per tensor (current or delayed) or per row of the plane.

Buffers of a plane [R, C]: codes uint8 [Rp, Cp], no inner scales, decode scale FP32 [1] or [Rp];
Rp and Cp are R and C rounded up to 16, padding is zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from ..reference import float8 as reference
from ..reference.elements import finite_amax
from .dtypes import DType, fp8_element
from .plane import Direction, Format, Plane, Rounding, padded, round_up
from .quantizer import Quantizer

ROW_MULTIPLE = 16
CAST_SQNR_DB = {"e4m3": 31.0, "e5m2": 25.0}


@dataclasses.dataclass(frozen=True)
class _Float8Format(Format):
    """What the three kinds share: the codes, and an outer FP32 scale of one shape or another."""

    family: ClassVar[str] = "float8"
    element: str

    @property
    def contraction_multiple(self) -> int:
        return 16

    @property
    def cast_sqnr_db(self) -> float:
        return CAST_SQNR_DB[self.element]

    def decode(self, plane: Plane, *, outer: bool = True) -> torch.Tensor:
        rows, contraction = plane.shape
        codes = plane.codes[:rows, :contraction]
        return reference.decode(codes, plane.outer[:rows] if outer else None, self.element)

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Plane:
        rows = round_up(shape[0], ROW_MULTIPLE)
        columns = round_up(shape[1], self.contraction_multiple)
        codes = torch.empty(rows, columns, dtype=torch.uint8, device=device)
        outer = torch.empty(self._outer_extent(rows), dtype=torch.float32, device=device)
        return Plane(self, tuple(shape), dtype, (codes, None, outer))

    def _outer_extent(self, stored_rows: int) -> int:
        return 1

    def _plane(self, x: torch.Tensor, codes: torch.Tensor, decode_scale: torch.Tensor) -> Plane:
        codes = padded(codes, ROW_MULTIPLE, self.contraction_multiple).contiguous()
        pad = self._outer_extent(codes.shape[0]) - len(decode_scale)
        outer = torch.nn.functional.pad(decode_scale, (0, pad)) if pad else decode_scale
        return Plane(self, tuple(x.shape), x.dtype, (codes, None, outer))


@dataclasses.dataclass(frozen=True)
class _MeasuredFormat(_Float8Format):
    """Scales that follow from amaxes of the matrix being cast.

    epsilon: least amax; power_of_two: round scales down to powers of two.
    """

    epsilon: float = 0.0
    power_of_two: bool = False

    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        """``statistic``: what ``measure`` gives, or its maximum over ranks; None measures ``x``."""
        amax = self.measure(x) if statistic is None else statistic
        options = {"epsilon": self.epsilon, "power_of_two": self.power_of_two}
        codes, decode_scale = reference.encode(x, amax, self.element, **options)
        return self._plane(x, codes, decode_scale)

    def _options_text(self) -> str:
        return self.element + options_text(self.epsilon, self.power_of_two)


@dataclasses.dataclass(frozen=True)
class Float8TensorFormat(_MeasuredFormat):
    """Per-tensor current scaling: one scale, from the amax of the whole matrix."""

    codec: ClassVar[str] = "float8"
    statistic: ClassVar[str] = "tensor"

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        return finite_amax(x)

    def describe(self) -> str:
        return f"float8({self._options_text()})"


@dataclasses.dataclass(frozen=True)
class Float8RowFormat(_MeasuredFormat):
    """One scale per row of the plane: per token of X.row, per output channel of W.row."""

    codec: ClassVar[str] = "float8"
    statistic: ClassVar[str] = "row"

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        return finite_amax(x, 1)

    def describe(self) -> str:
        return f"float8_row({self._options_text()})"

    def _outer_extent(self, stored_rows: int) -> int:
        return stored_rows


@dataclasses.dataclass(frozen=True)
class Float8DelayedFormat(_Float8Format):
    """Per-tensor scaling by a stored scale; the plane owns a copy of what it must decode with."""

    codec: ClassVar[str] = "float8"
    statistic: ClassVar[str] = "scale"

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        """amax FP32 [1] of ``x``: recorded for the next scale, not needed to encode."""
        return finite_amax(x)

    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        """``statistic``: the encode scale FP32 [1]."""
        codes, decode_scale = reference.encode_delayed(x, statistic, self.element)
        return self._plane(x, codes, decode_scale)

    def describe(self) -> str:
        return f"float8_delayed({self.element})"


def options_text(epsilon: float, power_of_two: bool) -> str:
    """What ``describe`` adds for options that are not the defaults of per-tensor scaling."""
    return (", pow2" if power_of_two else "") + (f", epsilon={epsilon:g}" if epsilon else "")


def checked_epsilon(amax_epsilon: float) -> float:
    """``amax_epsilon``; ValueError when it is negative or not finite."""
    if not 0.0 <= amax_epsilon <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"amax_epsilon is {amax_epsilon}; accepted: a finite value of at least 0, "
            "e.g. amax_epsilon=0.0"
        )
    return float(amax_epsilon)


class Float8Quantizer(Quantizer):
    """Per-tensor FP8 with a given scale (delayed scaling).

    scale: FP32 [1], what the input is multiplied by; read at each cast, never written here.
    amax: FP32 [1], raised to the largest finite |x| of each cast.
    fp8_dtype: DType.kFloat8E4M3, DType.kFloat8E5M2 or the torch dtype.

    Raises TypeError for another fp8_dtype; ValueError for a scale or amax of another layout.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._format = Float8DelayedFormat(fp8_element(fp8_dtype))
        for name, tensor in (("scale", scale), ("amax", amax)):
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != (1,):
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; accepted: "
                    f"torch.float32 of shape (1,), e.g. {name}=torch.ones(1)"
                )
        self.scale = scale
        self.amax = amax

    def plane_format(self, direction: Direction) -> Float8DelayedFormat:
        return self._format

    def record_amax(self, amax: torch.Tensor) -> None:
        """``self.amax`` becomes the maximum of itself and ``amax`` (FP32 [1]), in place."""
        torch.maximum(self.amax, amax, out=self.amax)


class Float8CurrentScalingQuantizer(Quantizer):
    """Per-tensor FP8 whose scale follows from the tensor being cast.

    force_pow_2_scales: round the scale down to a power of two; amax_epsilon: least amax.
    with_amax_reduction, amax_reduction_group: kept as attributes for Transformer Engine's
    signature. A module shares the amax over its own scale group, the ranks that hold other pieces
    of the same matrix, whatever is given here; a bare ``quantize`` shares nothing.
    device, scale, amax: accepted and unused, as in Transformer Engine.

    Raises TypeError for another fp8_dtype; ValueError for use_existing_amax=True or a negative
    amax_epsilon.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        device: torch.device | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax:
            raise ValueError(
                "use_existing_amax is True; accepted: use_existing_amax=False, which measures each "
                "tensor (for a scale of your own use Float8Quantizer(scale, amax, fp8_dtype))"
            )
        self._format = Float8TensorFormat(
            fp8_element(fp8_dtype), checked_epsilon(amax_epsilon), bool(force_pow_2_scales)
        )
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group

    def plane_format(self, direction: Direction) -> Float8TensorFormat:
        return self._format


class Float8RowScalingQuantizer(Quantizer):
    """FP8 with one scale per row of each plane: per token or channel, along the contraction.

    force_pow_2_scales: round scales down to powers of two; amax_epsilon: least amax of a row.

    Raises TypeError for another fp8_dtype; ValueError for a negative amax_epsilon.
    """

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._format = Float8RowFormat(
            fp8_element(fp8_dtype), checked_epsilon(amax_epsilon), bool(force_pow_2_scales)
        )

    def plane_format(self, direction: Direction) -> Float8RowFormat:
        return self._format
