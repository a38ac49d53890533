"""torch.autocast, as layers heed it: the dtype they compute in, and how they keep out of it."""

from __future__ import annotations

import contextlib

import torch


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """torch.autocast's dtype where it is on, else that of ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Operators below keep the dtypes they are given; free where torch.autocast is off anyway."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
