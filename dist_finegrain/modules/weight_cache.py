"""Quantized weights kept across the microbatches of one step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import stepping
from ..formats.plane import Direction, Plane


@dataclasses.dataclass
class WeightCache:
    """Planes of one weight, made under ``binding`` in ``compute_dtype``; None until needed.

    They own their scales, so a later update of delayed scales does not reach them.
    """

    binding: Any
    compute_dtype: torch.dtype
    step: int = dataclasses.field(default_factory=stepping.completed_steps)
    planes: dict[Direction, Plane | None] = dataclasses.field(
        default_factory=lambda: {"rowwise": None, "columnwise": None}
    )

    def is_valid(self, binding: Any, compute_dtype: torch.dtype) -> bool:
        """Until the step ends or the recipe changes; never judged by the parameter's version."""
        same_use = self.binding is binding and self.compute_dtype == compute_dtype
        return same_use and self.step == stepping.completed_steps()
