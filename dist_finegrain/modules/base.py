"""What every module of this package shares: a name, its slots, and the binding to a recipe.

A binding is built at the first forward under a recipe and kept; an unchanged recipe costs a lookup.
"""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import warnings
import zlib
from typing import Any

import torch

from .. import stepping
from ..context import Frame, current_frame
from ..delayed import DelayedSlot
from ..distributed import collectives
from ..formats.quantizer import Quantizer
from ..formats.requests import DelayedScalingRequest
from ..ops.gemm import device_kind
from ..resolution import Site, ask_factory, choose_kernel, describe_recipe, describe_slots
from ..roles import LINEAR_GEMMS, QuantizerRole, Slot
from . import compiled
from .binding import HIGH_PRECISION, Binding, DelayedUse, agreed, log_first_emulation

_KEPT_BINDINGS = 4
_FORWARDS_BEFORE_WARNING = 64
_owners = itertools.count()


class QuantizedModule(torch.nn.Module):
    """Base of Linear and its relatives: name, boundary roles, recipe binding, delayed state."""

    module_type = "linear"

    def __init__(self, name: str | None):
        super().__init__()
        self._name = name or ""
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._bindings: collections.OrderedDict[Any, Binding] = collections.OrderedDict()
        self._trained: Binding | None = None  # whose requests the delayed slots follow
        self._delayed: dict[tuple, DelayedSlot] = {}
        self._owner = next(_owners)
        self._trace_id = compiled.register(self)
        self._step = -1  # the step that the next two are about
        self._frames: dict[Any, Frame] = {}
        self._training_forwards = 0

    # Names and roles.
    @property
    def name(self) -> str:
        """This instance's name, as factories see it in ``role.name``; "" if never named."""
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        if value != self._name:
            self._name = value
            self._outdate()

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """Role with which the factory is asked for the output boundary slot; None by default."""
        return self._output_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        if role != self._output_role:
            self._output_role = role
            self._outdate()

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """Role with which the factory is asked for the grad-input boundary slot; default None."""
        return self._grad_input_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        if role != self._grad_input_role:
            self._grad_input_role = role
            self._outdate()

    @property
    def is_bound(self) -> bool:
        """Whether a recipe was resolved for this module as it is now."""
        return bool(self._bindings)

    def get_quantizer_slots(self) -> tuple[Slot, ...]:
        """The module's slots in the order in which the factory is asked."""
        raise NotImplementedError

    def resolution_site(self, device: str) -> Site:
        """This module as a recipe is resolved for it on ``device``."""
        raise NotImplementedError

    def quantization_group(self) -> Any:
        """Ranks that hold the other shards of this module's matrices, or None."""
        return None

    # Binding.
    def _outdate(self) -> None:
        """Something that a resolution depends on changed: ask again at the next forward."""
        self._bindings.clear()
        self._trained = None
        self._drop_weight_cache()

    def _mark_parameters(self) -> None:
        """Set the attributes by which Megatron knows how parameters are sharded."""

    def _drop_weight_cache(self) -> None:
        """Forget quantized weights that are kept across microbatches."""

    def bind(self, device: torch.device, compute_dtype: torch.dtype) -> Binding | None:
        """The binding for the autocast in force, resolving it if it is new; None while traced.

        Communicates within ``quantization_group()`` when it resolves: every rank must get here.
        """
        if torch.compiler.is_compiling():
            return None  # compiled.py: the operator binds when it runs
        return self.bind_now(device, compute_dtype)

    def bind_now(self, device: torch.device, compute_dtype: torch.dtype) -> Binding:
        """``bind``, also while torch.compile traces."""
        frame = self._frame_in_force()
        if torch.is_grad_enabled():
            stepping.note_training_forward()
        if not frame.enabled:
            return HIGH_PRECISION
        if self.training and torch.is_grad_enabled():
            group = frame.amax_reduction_group
            stepping.join(self, group if collectives.communicates(group) else None, device)
        binding = self._binding_for(frame, device, compute_dtype)
        if torch.is_grad_enabled() and not binding.has_backward:
            self._resolve(binding, "backward", frame, device)
            binding.has_backward = True
        if binding.delayed and self.training and torch.is_grad_enabled():
            self._train_delayed(binding)
        return binding

    def _frame_in_force(self) -> Frame:
        """The open autocast; a recomputation outside of any uses the only one of this step."""
        now = stepping.completed_steps()
        if self._step != now:
            self._step, self._training_forwards = now, 0
            self._frames.clear()
        frame = current_frame()
        if not frame.is_default or not stepping.inside_backward():
            key = (frame.enabled, frame.token, frame.amax_reduction_group)
            self._frames.setdefault(key, frame)
            return frame
        if len(self._frames) > 1:
            raise RuntimeError(
                f"{self.resolution_site('this device')} ran under {len(self._frames)} recipes in "
                "this step, so its recomputation in backward cannot know which to use; accepted: "
                "dist_finegrain.recompute(), or autocast(recipe=...) that context_fn returns or "
                "that is opened inside the checkpointed function"
            )
        return next(iter(self._frames.values()), frame)

    def _binding_for(self, frame: Frame, device: torch.device, dtype: torch.dtype) -> Binding:
        """The kept binding of this frame, or a new one whose forward slots are resolved."""
        key = (frame.token, device, dtype, frame.amax_reduction_group)
        binding = self._bindings.get(key)
        if binding is None:
            binding = Binding(frame.recipe)
            self._resolve(binding, "forward", frame, device)
            self._bindings[key] = binding
            if len(self._bindings) > _KEPT_BINDINGS:
                self._bindings.popitem(last=False)
        self._bindings.move_to_end(key)
        return binding

    def _resolve(self, binding: Binding, direction: str, frame: Frame, device) -> None:
        """Ask the factory for one direction's slots and choose the kernels that they decide."""
        recipe = frame.recipe
        site = self.resolution_site(device_kind(device))
        slots = [s for s in self.get_quantizer_slots() if s.direction == direction]
        uses: list[DelayedUse] = []

        def bind_delayed(slot: Slot, child: str, request: DelayedScalingRequest) -> Quantizer:
            uses.append(self._delayed_use(slot, child, request, frame, device))
            return uses[-1].slot.quantizer()

        def resolve():
            quantizers = ask_factory(recipe, slots, site, bind_delayed)
            known = {**binding.quantizers, **quantizers}
            kernels = {
                g.gemm: choose_kernel(g, known, site, recipe.resolved_execution)
                for g in LINEAR_GEMMS
                if (g.gemm == "fprop") == (direction == "forward")
            }
            lines = [describe_recipe(recipe), describe_slots(slots, quantizers)]
            lines += [f"{use.slot.key}: {use.request}" for use in uses]
            return (quantizers, kernels), "\n".join(lines)

        quantizers, kernels = agreed(resolve, site, self.quantization_group(), device)
        log_first_emulation(site, kernels)
        self._take_up(binding, quantizers, kernels, uses)
        for slot in slots:
            for plane, suffix in (("rowwise", "row"), ("columnwise", "col")):
                text = f"{self.name}|{slot.tensor_type}||{suffix}"
                binding.streams[slot.tensor_type, plane] = zlib.crc32(text.encode())

    def _take_up(self, binding: Binding, quantizers, kernels, uses: list[DelayedUse]) -> None:
        """Keep what one direction was resolved to."""
        binding.quantizers.update(quantizers)
        binding.kernels.update(kernels)
        binding.delayed += uses
        self._trained = None
        for use in uses:
            self._delayed[use.slot.key] = use.slot
            stepping.register_slot(use.slot)

    # Delayed scaling.
    def _delayed_use(self, slot, child, request, frame: Frame, device) -> DelayedUse:
        """The state for a request: the kept one of the same place and element, or a new one."""
        element = request.element(forward=slot.direction == "forward")
        key = (slot.direction, slot.position, slot.tensor_type, child, element)
        group = self._delayed_group(request, frame)
        state = self._delayed.get(key)
        if state is None:
            state = DelayedSlot(key, self.name, request, element, device, self._owner)
            stepping.follow_absent(state, group)
        return DelayedUse(state, request, group)

    def _delayed_group(self, request: DelayedScalingRequest, frame: Frame) -> Any:
        """Where this request's amaxes are reduced; refuses groups that would give wrong scales."""
        own = self.quantization_group()
        group = frame.amax_reduction_group or own
        if not collectives.communicates(group) and not collectives.communicates(own):
            return None
        missing = set(collectives.group_ranks(own)) - set(collectives.group_ranks(group))
        if missing:
            raise ValueError(
                f"amax_reduction_group has ranks {collectives.group_ranks(group)}, but the "
                f"tensor-parallel group of module {self.name!r} has "
                f"{collectives.group_ranks(own)}; it must contain them all, "
                "e.g. amax_reduction_group=None"
            )
        if not request.reduce_amax:
            raise ValueError(
                f"reduce_amax=False in a group of {collectives.group_size(group)} ranks; their "
                "scales would differ; accepted: reduce_amax=True"
            )
        if not self.name:
            raise ValueError(
                "delayed scaling over several ranks needs named modules; "
                "e.g. Linear(..., name='decoder.0.fc1') or assign_names(model)"
            )
        if not self._delayed and self._name_is_taken(group):
            gc.collect()  # a model that was dropped may still wait for the garbage collector
            if self._name_is_taken(group):
                raise ValueError(
                    f"two modules have the name {self.name!r}; delayed scaling over several ranks "
                    "needs unique names, e.g. assign_names(model, overwrite=True)"
                )
        return group

    def _name_is_taken(self, group: Any) -> bool:
        return any(
            other.name == self.name and other.group == group and other.owner != self._owner
            for other in stepping.registered_slots()
        )

    def _train_delayed(self, binding: Binding) -> None:
        """Let the slots follow the binding that trains, and notice steps that never end."""
        if binding is not self._trained:
            self._trained = binding
            for use in binding.delayed:
                use.slot.adopt(use.request, use.group, self.name)
                stepping.follow_absent(use.slot, use.group)
        self._training_forwards += 1
        if self._training_forwards == _FORWARDS_BEFORE_WARNING + 1:
            _warn_never_ending_step()

    # Copies, moves and loads.
    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        moved = [slot.to(fn(slot.scale).device) for slot in self._delayed.values()]
        if any(moved):
            self._outdate()  # bound quantizers read the tensors that were left behind
        self._drop_weight_cache()
        self._mark_parameters()  # to_empty() and the like make new parameters
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        for slot in self._delayed.values():
            slot.reset()
        self._drop_weight_cache()

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        state.update(_bindings=collections.OrderedDict(), _trained=None, _frames={}, _step=-1)
        return state

    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = self._shared_by_copies()
        for key, value in self.__getstate__().items():
            twin.__dict__[key] = value if key in shared else copy.deepcopy(value, memo)
        twin._trace_id = compiled.register(twin)
        twin._mark_parameters()
        return twin

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._trace_id = compiled.register(self)

    def _shared_by_copies(self) -> set[str]:
        """Attributes that a deepcopy shares by reference, such as process groups."""
        return set()


_warned_never_ending_step = False


def _warn_never_ending_step() -> None:
    global _warned_never_ending_step
    if not _warned_never_ending_step:
        _warned_never_ending_step = True
        warnings.warn(
            f"{_FORWARDS_BEFORE_WARNING} training forwards without the end of a step: delayed "
            "scales stand still. Steps end in torch.optim's step(), or call "
            "dist_finegrain.end_step() yourself.",
            stacklevel=4,
        )
