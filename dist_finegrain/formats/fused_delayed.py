"""The update that ends a step of delayed scaling, for all slots of a device in one launch."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Sequence

import torch

from ..extension import why_unavailable

_ops = torch.ops.dist_finegrain


@dataclasses.dataclass(frozen=True)
class DelayedState:
    """Delayed scaling of one slot, FP32: scale [1], history [length], pending amax [1]."""

    scale: torch.Tensor
    history: torch.Tensor
    pending: torch.Tensor
    use_max: bool
    fp8_max: float
    margin: float

    @functools.cached_property
    def packed(self) -> bytes:
        """csrc/kernels.h, DelayedSlot."""
        addresses = (t.data_ptr() for t in (self.scale, self.history, self.pending))
        divisor = 2.0**self.margin if self.margin < 128 else math.inf  # as FP32
        settings = (self.history.numel(), self.use_max, self.fp8_max, divisor)
        return struct.pack("<3q2i2f", *addresses, *settings)


# Addresses and settings of the slots, by device and stream: they are copied in stream order.
_tables: dict[tuple, tuple[bytes, torch.Tensor]] = {}
_captured: list[torch.Tensor] = []


def update_delayed(slots: Sequence[DelayedState]) -> None:
    """One launch that updates the scales of ``slots`` of one device, as delayed.py defines it.

    In a captured graph every replay updates them: they must outlive it, and must have been updated
    together before.
    Raises RuntimeError where no compiled kernel runs or a capture comes first, ValueError for
    tensors of another layout.
    """
    device = slots[0].scale.device
    reason = why_unavailable(device)
    if reason:
        raise RuntimeError(f"update_delayed needs a compiled kernel on {device}: {reason}")
    packed = b"".join(slot.packed for slot in slots)
    table = _table(packed, len(slots), device)
    _ops.update_delayed.default(
        [s.scale for s in slots], [s.history for s in slots], [s.pending for s in slots], table
    )


def _table(packed: bytes, count: int, device: torch.device) -> torch.Tensor:
    """``packed`` on the device, int64 [count, 5]; copied there only when it has changed."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The host's memory would have to outlive the graph: what an earlier stream copied will do.
        for (its_device, _), (bytes_, table) in _tables.items():
            if its_device == device and bytes_ == packed:
                if not any(table is kept for kept in _captured):
                    _captured.append(table)  # whoever replays the graph reads it again
                return table
        raise RuntimeError(
            "the delayed scales of these modules were never updated, or others were with them; "
            "run one step with end_step(), with the same modules alive, before capturing one"
        )
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _tables.get((device, stream))
    if held is None or held[0] != packed:
        host = torch.frombuffer(bytearray(packed), dtype=torch.int64).view(count, -1)
        held = _tables[device, stream] = (packed, host.to(device, non_blocking=True))
    return held[1]
