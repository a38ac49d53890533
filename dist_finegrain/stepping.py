"""The moment of update: what a training step is, and what happens when it ends.

A step ends in ``end_step()``, called by a hook after every torch.optim step, unless the user calls
it himself. It reduces and updates delayed scales, advances the step that stochastic rounding is
keyed with, and outdates cached weights.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .delayed import Absent, DelayedSlot, update_slots
from .formats.fused_options import advance_rounding_step


@dataclasses.dataclass
class _Steps:
    """State of the process: everything about steps that affects numbers."""

    completed: int = 0
    forward_seen: bool = False
    user_driven: bool = False
    postponed: bool = False
    slots: Any = dataclasses.field(default_factory=weakref.WeakSet)
    absent: Absent = dataclasses.field(default_factory=dict)
    members: Any = dataclasses.field(default_factory=weakref.WeakKeyDictionary)


_steps = _Steps()


def completed_steps() -> int:
    """Number of completed ``end_step()`` calls: the ``step`` of stochastic rounding."""
    return _steps.completed


def note_training_forward() -> None:
    """A module ran a forward with gradients: the next optimizer step ends a step."""
    _steps.forward_seen = True


def join(module: torch.nn.Module, group: Any, device: torch.device) -> None:
    """Reduce over ``group`` at every end of step while ``module`` lives; over none for None.

    Another rank may have run a module with delayed scaling that this one has left out so far.
    """
    if group is not None:
        _steps.members[module] = group, device
    elif _steps.members:
        _steps.members.pop(module, None)


def register_slot(slot: DelayedSlot) -> None:
    """Make ``end_step`` update this slot for as long as it lives."""
    _steps.slots.add(slot)


def registered_slots() -> list[DelayedSlot]:
    """The delayed slots that are alive in this process."""
    return list(_steps.slots)


def follow_absent(slot: DelayedSlot, group: Any) -> None:
    """Start a slot from what its module's other ranks in ``group`` reached before it ran here."""
    kept = _steps.absent.get((group, slot.sort_key))
    if kept is not None:
        slot.follow(kept)


def end_step() -> None:
    """End the training step: reduce pending amaxes, update delayed scales, outdate weight caches.

    Called by an optimizer hook unless you call it; once you have called it, only your calls count
    (needed with several optimizers). Inside a backward pass it is postponed to the next autocast.
    Communicates: one int64 MAX all-reduce for each amax_reduction_group that modules trained under,
    and each other group with delayed scaling; one of FP32 where there is any; on every rank.
    """
    _steps.user_driven = True
    _end_or_postpone()


def finish_postponed_step() -> None:
    """Run the end of step that was asked for inside a backward pass."""
    if _steps.postponed and not inside_backward():
        _end_step()


def _after_optimizer_step(*_args) -> None:
    # Ranks that share scales must all get to the reduction, whether or not each ran a forward.
    is_shared = _steps.members or any(slot.group is not None for slot in _steps.slots)
    if not _steps.user_driven and (_steps.forward_seen or is_shared):
        _end_or_postpone()


def _end_or_postpone() -> None:
    if inside_backward():
        _steps.postponed = True
    else:
        _end_step()


def _end_step() -> None:
    update_slots(registered_slots(), _steps.absent, dict(_steps.members.values()))
    _steps.completed += 1
    advance_rounding_step(_steps.completed)
    _steps.forward_seen = _steps.postponed = False


def inside_backward() -> bool:
    """Whether this thread is running an autograd backward pass."""
    return torch._C._current_graph_task_id() != -1


register_optimizer_step_post_hook(_after_optimizer_step)
