"""Delayed scaling: the state of one slot, and the update that ends a step.

pending  FP32 [1]        maximum |x| seen since the last update; -1 = the slot did not run
history  FP32 [length]   past amaxes, newest last
scale    FP32 [1]        what the next casts multiply by
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from .distributed import collectives
from .extension import why_unavailable
from .formats.dtypes import DType
from .formats.float8 import Float8Quantizer
from .formats.fused_delayed import DelayedState, update_delayed
from .formats.requests import DelayedScalingRequest
from .reference.elements import FLT_MAX, FP8_MAX

_NOT_RUN = -1.0
Absent = dict[tuple[Any, str], "DelayedSlot"]  # by group and sort_key: of modules not run here


class DelayedSlot:
    """Scale, history and pending amax of one quantizer slot (or one hybrid child of it).

    owner: a number that a module keeps through deepcopy; group: where amaxes are reduced, or None.
    """

    def __init__(
        self,
        key: tuple,
        name: str,
        request: DelayedScalingRequest,
        element: str,
        device: torch.device,
        owner: int,
    ):
        self.key, self.name, self.owner = key, name, owner
        self.incarnation = 0  # a deepcopy is another slot of the same name
        self.request, self.element = request, element
        self.group: Any = None
        self.held: tuple[DelayedScalingRequest, DelayedState] | None = None
        with torch.inference_mode(False):  # a first forward for inference must not spoil training
            self.scale = torch.ones(1, dtype=torch.float32, device=device)
            self.history = torch.zeros(request.amax_history_len, device=device)
            self.pending = torch.full((1,), _NOT_RUN, device=device)

    @property
    def sort_key(self) -> str:
        """Orders slots alike on every rank, and names them in errors."""
        return "|".join((self.name, *map(str, self.key), str(self.incarnation)))

    def quantizer(self) -> Float8Quantizer:
        """A quantizer that reads this slot's scale and records into its pending amax."""
        return Float8Quantizer(self.scale, self.pending, DType(self.element))

    def to(self, device: torch.device) -> bool:
        """Move the state; True if it moved: quantizers made earlier then read the old tensors."""
        if self.scale.device == device:
            return False
        self.scale, self.history, self.pending = (
            t.to(device) for t in (self.scale, self.history, self.pending)
        )
        return True

    def reset(self) -> None:
        """Forget everything: the weights are others now."""
        self.scale.fill_(1.0)
        self.history.zero_()
        self.pending.fill_(_NOT_RUN)

    def adopt(self, request: DelayedScalingRequest, group: Any, name: str) -> None:
        """Follow another request of the same element; the newest rows of the history are kept."""
        self.request, self.group, self.name = request, group, name
        self.history = _of_length(self.history, request.amax_history_len)

    def follow(self, other: DelayedSlot) -> None:
        """Go on from another slot's scale and history."""
        self.scale.copy_(other.scale)
        history = _of_length(other.history, len(self.history))
        self.history.copy_(history)

    def description(self) -> tuple:
        """What another rank needs to keep a slot of its own in step with this one."""
        made_of = (self.key, self.name, self.request, self.element)
        return made_of, self.incarnation, self.scale.tolist(), self.history.tolist()

    @classmethod
    def described(cls, description: tuple, group: Any, device: torch.device) -> DelayedSlot:
        """The slot of a module that only other ranks of ``group`` have run so far."""
        made_of, incarnation, scale, history = description
        slot = cls(*made_of, device, owner=-1)
        slot.incarnation, slot.group = incarnation, group
        slot.scale.copy_(torch.tensor(scale))
        slot.history.copy_(torch.tensor(history))
        return slot

    def __deepcopy__(self, memo) -> DelayedSlot:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)  # the group is shared
        twin.incarnation += 1
        twin.held = None
        twin.scale, twin.history, twin.pending = (
            copy.deepcopy(t, memo) for t in (self.scale, self.history, self.pending)
        )
        return twin

    def __getstate__(self) -> dict:
        # A process group is rebound at the next forward.
        return {**self.__dict__, "group": None, "held": None}


def update_slots(
    slots: list[DelayedSlot],
    absent: Absent | None = None,
    joined: Mapping[Any, torch.device] | None = None,
) -> None:
    """Reduce the pending amaxes per group and update every slot that ran on some rank.

    absent: slots that other ranks have and this one does not yet, updated like its own; changed
    here when the ranks' slots differ, so that a module which first runs later has their scale.
    joined: groups to reduce over also without a slot, and the device of their modules.
    Raises RuntimeError for several ranks in a captured graph: they compare their slots on the host.
    """
    absent = {} if absent is None else absent
    devices = dict(joined or {})
    shared = [slot for slot in slots if slot.group is not None]
    # What other ranks have concerns this one while a module of its own is in that group.
    known = devices.keys() | {slot.group for slot in shared}
    for key in [key for key in absent if key[0] not in known]:
        del absent[key]
    if _is_capturing():  # a group without slots has nothing to refuse
        devices.clear()
    groups: dict[Any, list[DelayedSlot]] = {group: [] for group in devices}
    for slot in sorted(shared, key=lambda slot: slot.sort_key):
        groups.setdefault(slot.group, []).append(slot)
        devices[slot.group] = slot.pending.device
    here = {(group, slot.sort_key) for group, those in groups.items() for slot in those}
    for key in here & absent.keys():
        del absent[key]
    for group in sorted(groups, key=collectives.group_order):
        if collectives.communicates(group):
            if _is_capturing():
                raise RuntimeError(
                    f"end_step() reduces delayed scales over {collectives.group_size(group)} ranks "
                    "and cannot be captured; end the step outside of the graph"
                )
            try:
                _reduce_pending(groups[group], group, devices[group], absent)
            except RuntimeError as error:
                error.add_note(
                    f"end_step() compares delayed scales with ranks "
                    f"{collectives.group_ranks(group)}: each of them must have run a module of "
                    "this group, and must end the step too"
                )
                raise
    on_device: dict[torch.device, list[DelayedSlot]] = {}
    for slot in (*slots, *absent.values()):
        on_device.setdefault(slot.scale.device, []).append(slot)
    for device, its_slots in on_device.items():
        if why_unavailable(device):
            for slot in its_slots:
                _update(slot)
        else:
            update_delayed([_state(slot) for slot in its_slots])


def _state(slot: DelayedSlot) -> DelayedState:
    """What the kernel is told of this slot; kept while its tensors and its request are the same."""
    if slot.held is not None:
        request, state = slot.held
        is_same = request is slot.request and state.scale is slot.scale
        # A model may have thousands of slots.
        if is_same and state.history is slot.history and state.pending is slot.pending:
            return state
    state = DelayedState(
        slot.scale,
        slot.history,
        slot.pending,
        use_max=slot.request.amax_compute_algo == "max",
        fp8_max=FP8_MAX[slot.element],
        margin=slot.request.margin,
    )
    slot.held = slot.request, state
    return state


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _reduce_pending(
    slots: list[DelayedSlot], group: Any, device: torch.device, absent: Absent
) -> None:
    """One flat MAX; ranks whose slot lists differ exchange them and reduce the union."""
    names = {slot.sort_key for slot in slots} | {name for g, name in absent if g == group}
    if not collectives.all_equal(text_hash("\n".join(sorted(names))), group, device):
        names = _exchange(slots, group, device, absent)
    if not names:
        return
    position = {name: i for i, name in enumerate(sorted(names))}
    flat = torch.full((len(names),), _NOT_RUN, device=device)
    slots = [*slots, *(slot for (g, _), slot in absent.items() if g == group)]
    for slot in slots:
        index = position[slot.sort_key]
        flat[index] = torch.maximum(flat[index], slot.pending[0])
    collectives.all_reduce_max(flat, group)
    for slot in slots:
        slot.pending.copy_(flat[position[slot.sort_key]])


def _exchange(
    slots: list[DelayedSlot], group: Any, device: torch.device, absent: Absent
) -> set[str]:
    """Names of the slots of all ranks; those that this one does not have become ``absent``."""
    own = {slot.sort_key: slot.description() for slot in slots}
    every: dict[str, tuple] = {}
    for described in reversed(collectives.all_gather_object(own, group)):  # the first rank's count
        every.update(described)
    for key in [key for key in absent if key[0] == group and key[1] not in every]:
        del absent[key]
    for name in every.keys() - own.keys():
        if (group, name) not in absent:
            absent[group, name] = DelayedSlot.described(every[name], group, device)
    return set(every)


def _of_length(history: torch.Tensor, length: int) -> torch.Tensor:
    """The newest ``length`` rows; zeros in front where there are fewer."""
    kept = len(history)
    if length < kept:
        return history[-length:].clone()
    return history if length == kept else torch.cat((history.new_zeros(length - kept), history))


def _update(slot: DelayedSlot) -> None:
    """history rolls, amax = window maximum or newest, scale = (fp8_max / amax) / 2^margin."""
    ran = slot.pending >= 0
    rolled = torch.cat((slot.history[1:], slot.pending))
    history = torch.where(ran, rolled, slot.history)
    amax = (
        history.amax(0, keepdim=True) if slot.request.amax_compute_algo == "max" else history[-1:]
    )
    fp8_max = torch.full_like(amax, FP8_MAX[slot.element])
    scale = fp8_max / amax / 2.0**slot.request.margin
    scale = torch.where(scale.isinf(), torch.full_like(scale, FLT_MAX), scale)
    usable = ran & (amax > 0) & amax.isfinite()
    slot.history.copy_(history)
    slot.scale.copy_(torch.where(usable, scale, slot.scale))
    slot.pending.fill_(_NOT_RUN)


def text_hash(text: str) -> int:
    """56-bit hash of a text: fits an int64 with its negative."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
