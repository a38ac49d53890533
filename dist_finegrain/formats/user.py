"""The format of a user's own Quantizer: its encode() and decode() are the whole definition."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from .plane import Format, Plane, Rounding

if torch.distributed.is_available():
    from torch.distributed import ProcessGroup
else:
    ProcessGroup = ()

# Attributes of a quantizer that say nothing about the bytes it writes.
USAGE_ATTRIBUTES = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")


@dataclasses.dataclass(frozen=True, eq=False)
class UserFormat(Format):
    """Planes written and read by ``quantizer.encode`` and ``quantizer.decode``.

    Two are equal when their quantizers are of one class and have equal attributes, process groups
    aside.
    """

    family: ClassVar[str] = "user"
    quantizer: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UserFormat) or type(self.quantizer) is not type(other.quantizer):
            return False
        if self.quantizer is other.quantizer:
            return True
        mine, theirs = _attributes(self.quantizer), _attributes(other.quantizer)
        return mine.keys() == theirs.keys() and all(_equal(mine[k], theirs[k]) for k in mine)

    def __hash__(self) -> int:
        return hash(type(self.quantizer))

    def encode(
        self,
        x: torch.Tensor,
        statistic: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> Plane:
        parts = self.quantizer.encode(x)
        if not isinstance(parts, tuple):
            raise TypeError(
                f"{type(self.quantizer).__name__}.encode returned {type(parts).__name__}; "
                "it must return a tuple of tensors, e.g. (codes, scales)"
            )
        for part in parts:
            if part is not None and not isinstance(part, torch.Tensor):
                raise TypeError(
                    f"{type(self.quantizer).__name__}.encode returned a tuple with a "
                    f"{type(part).__name__}; accepted: tensors, or None for a buffer left out"
                )
        return Plane(self, tuple(x.shape), x.dtype, parts)

    def decode(self, plane: Plane, *, outer: bool = True) -> torch.Tensor:
        return self.quantizer.decode(plane.parts, plane.shape, torch.float32)

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Plane:
        return self.encode(torch.zeros(shape, dtype=dtype, device=device))

    def describe(self) -> str:
        return f"user({type(self.quantizer).__name__})"


def _attributes(quantizer: Any) -> dict[str, Any]:
    attributes = {k: v for k, v in vars(quantizer).items() if k not in USAGE_ATTRIBUTES}
    return {k: None if is_process_group(v) else v for k, v in attributes.items()}


def is_process_group(value: Any) -> bool:
    """Whether ``value`` belongs to this process and says nothing about the bytes of a plane."""
    return isinstance(value, ProcessGroup)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)
