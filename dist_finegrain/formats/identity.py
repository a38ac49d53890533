"""Identity: the values in high precision, as a whole slot or as one child of a hybrid."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch

from .dtypes import check_high_precision
from .plane import Format, Plane, Rounding
from .quantizer import Quantizer
from .tensors import IdentityTensor


@dataclasses.dataclass(frozen=True)
class IdentityFormat(Format):
    """Values [R, C] in ``dtype`` (None: the input's), NaN and infinities included; no padding.

    A cast rounds to nearest even and overflows to infinity as torch's does. A buffer has the
    strides of its input: where nothing is cast it is the input.
    """

    family: ClassVar[str] = "identity"
    dtype: torch.dtype | None = None

    @property
    def cast_sqnr_db(self) -> float:
        return math.inf

    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        return Plane(self, tuple(x.shape), x.dtype, (x.to(self.dtype or x.dtype),))

    def decode(self, plane: Plane, *, outer: bool = True) -> torch.Tensor:
        return plane.codes

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Plane:
        buffer = torch.empty(shape, dtype=self.dtype or dtype, device=device)
        return Plane(self, tuple(shape), dtype, (buffer,))

    def describe(self) -> str:
        if self.dtype is None:
            return "identity"
        return f"identity({str(self.dtype).removeprefix('torch.')})"


class IdentityQuantizer(Quantizer):
    """Holds its input in the compute dtype, or in ``dtype``; returns an IdentityTensor.

    One buffer serves both directions: it is held when either is requested. The result's dtype is
    that of the buffer. Raises TypeError when ``dtype`` is not float32, float16 or bfloat16.
    """

    tensor_class = IdentityTensor

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None:
            check_high_precision(dtype, "IdentityQuantizer's result")
        self.dtype = dtype

    def plane_format(self, direction) -> IdentityFormat:
        return IdentityFormat(self.dtype)

    def usage(self, direction) -> bool:
        return self.rowwise_usage or self.columnwise_usage

    def _wrap(self, shape, dtype, *planes, **options) -> IdentityTensor:
        return super()._wrap(shape, self.dtype or dtype, *planes, **options)
