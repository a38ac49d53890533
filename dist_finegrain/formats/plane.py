"""A plane: one quantized representation of a matrix, for one operand of one GEMM.

Legend: R rows of the plane, C its contraction dimension (always last), Rp and Cp as stored.
The rowwise plane of X [M, K] has (R, C) = (M, K); the columnwise plane has (K, M): it is the
rowwise plane of X transposed, so that every GEMM of the project is C = A · Bᵀ of two planes.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import torch

Direction = Literal["rowwise", "columnwise"]
DIRECTIONS: tuple[Direction, Direction] = ("rowwise", "columnwise")


def round_up(value: int, multiple: int) -> int:
    """``value`` rounded up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Where stochastic rounding draws from: the Philox key and the place of the plane's origin.

    seed: ``CustomRecipe.rounding_seed``; stream: CRC-32 of the slot's text; step: completed
    ``end_step()`` calls; row_origin, contraction_origin: global index of the plane's first element.
    """

    seed: int = 0
    stream: int = 0
    step: int = 0
    row_origin: int = 0
    contraction_origin: int = 0


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """What the bytes of one plane mean: a frozen value without tensors, equal by its options.

    ``family``: the two operands of a GEMM must share it. ``statistic``: what must be measured
    (and reduced over the ranks that hold other pieces of the matrix) before encoding:
    "none", "tensor" (amax, FP32 [1]), "row" (amax, FP32 [R]) or "scale" (nothing is measured for
    encoding; the stored FP32 [1] scale is given, the amax is only recorded).
    """

    family: ClassVar[str]
    statistic: ClassVar[str] = "none"
    # How the compiled kernels know this class; a subclass may encode otherwise and has none.
    codec: ClassVar[str | None] = None

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "codec" not in cls.__dict__:
            cls.codec = None

    @property
    def rht(self) -> str | None:
        """The random Hadamard transform along the contraction that both operands must share."""
        return None

    @property
    def block(self) -> tuple[int, int]:
        """(rows, contraction) extent that one inner scale covers; (1, 1) where there is none."""
        return (1, 1)

    @property
    def contraction_multiple(self) -> int:
        """Stored contraction extent Cp is C rounded up to this."""
        return 1

    @property
    def cast_sqnr_db(self) -> float:
        """Least SQNR of one cast of random normal data; a GEMM of two such planes has 3 dB less."""
        return 0.0

    def measure(self, x: torch.Tensor) -> torch.Tensor | None:
        """amax of ``x`` [R, C] as ``statistic`` says: FP32 [1], FP32 [R] or None."""
        return None

    @abc.abstractmethod
    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        """The plane of ``x`` [R, C] (FP32, FP16 or BF16, any strides)."""

    @abc.abstractmethod
    def decode(self, plane: Plane, *, outer: bool = True) -> torch.Tensor:
        """[R, C] in FP32 (Identity: the held dtype); ``outer=False`` leaves the outer scale out.

        With RHT: the rotated values of whole groups, [R, C rounded up to 16], as a GEMM reads them.
        """

    @abc.abstractmethod
    def empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Plane:
        """An uninitialised plane with the buffers that ``encode`` would return."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Short text for tables and errors, e.g. ``mxfp8(e4m3)``."""


@dataclasses.dataclass
class Plane:
    """Codes and scales of one matrix [R, C], stored padded to [Rp, Cp]; ``dtype`` is the source's.

    ``parts`` holds the buffers in the format's order: codes, inner (block) scales, outer FP32
    scale ([1] or [Rp]); an entry is None where the format has no such buffer.
    """

    format: Format
    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[torch.Tensor | None, ...]

    @property
    def codes(self) -> torch.Tensor:
        return self.parts[0]

    @property
    def scales(self) -> torch.Tensor | None:
        return self.parts[1] if len(self.parts) > 1 else None

    @property
    def outer(self) -> torch.Tensor | None:
        return self.parts[2] if len(self.parts) > 2 else None

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parts if p is not None)

    def decode(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values [R, C] in ``dtype`` (default: the source's), nearest-even, saturated."""
        return saturating_to(self.format.decode(self), dtype or self.dtype)

    def map(self, function) -> Plane:
        """The same plane with ``function`` applied to each buffer."""
        parts = tuple(None if p is None else function(p) for p in self.parts)
        return dataclasses.replace(self, parts=parts)


def saturating_to(
    values: torch.Tensor, dtype: torch.dtype, *, keep_inf: bool = True
) -> torch.Tensor:
    """``values`` rounded nearest-even to ``dtype``; finite ones saturate, NaN is canonical.

    ``keep_inf=False`` saturates infinities too: what the column child of a "rowwise_dequantized"
    hybrid reads (numerics.md, "Hybrid"). Otherwise values that are of ``dtype`` are returned as
    they are.
    """
    if keep_inf and values.dtype == dtype:
        return values
    limit = torch.finfo(dtype).max
    rounded = values.to(dtype)
    result = rounded.clamp(-limit, limit)
    if keep_inf:
        result = torch.where(values.isinf(), rounded, result)
    # Torch's conversions and clamps give a NaN another payload where they are vectorised; the bits
    # that stochastic rounding draws depend on it.
    return result.masked_fill_(values.isnan(), torch.nan)


def in_memory_order(part: torch.Tensor | None) -> tuple[torch.Tensor | None, bool]:
    """(what to save of a buffer, whether it is the transpose of the buffer).

    Saved-tensor hooks give back values in strides of their own choice, and strides decide in which
    order a high-precision product is summed.
    """
    if part is None or part.dim() != 2 or part.is_contiguous() or not part.t().is_contiguous():
        return part, False
    return part.t(), True


def padded(x: torch.Tensor, row_multiple: int, contraction_multiple: int) -> torch.Tensor:
    """``x`` [R, C] with zero rows and columns up to the given multiples (``x`` itself if none)."""
    rows, contraction = x.shape
    row_pad = round_up(rows, row_multiple) - rows
    contraction_pad = round_up(contraction, contraction_multiple) - contraction
    if row_pad == 0 and contraction_pad == 0:
        return x
    return torch.nn.functional.pad(x, (0, contraction_pad, 0, row_pad))
