"""What every module of this package shares: a name, its slots, and the binding to a recipe.

A binding is what one recipe means for one module: quantizers of its slots and kernels of its GEMMs.
It is built at the first forward under that recipe and kept; an unchanged recipe costs one lookup.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import logging
import warnings
import zlib
from typing import Any

import torch

from .. import stepping
from ..context import Frame, current_frame
from ..delayed import DelayedSlot, text_hash
from ..distributed import collectives
from ..formats.identity import IdentityQuantizer
from ..formats.plane import Direction, Rounding
from ..formats.quantizer import Quantizer
from ..formats.requests import DelayedScalingRequest
from ..ops.gemm import Kernel, device_kind, select
from ..recipe import CustomRecipe
from ..resolution import Site, ask_factory, choose_kernel, describe_slots
from ..roles import LINEAR_GEMMS, QuantizerRole, Slot

logger = logging.getLogger("dist_finegrain")

_KEPT_BINDINGS = 4
_FORWARDS_BEFORE_WARNING = 64
_owners = itertools.count()


@dataclasses.dataclass
class Binding:
    """One recipe resolved for one module; ``has_backward`` once the backward slots were asked."""

    recipe: CustomRecipe | None
    quantizers: dict[str, Quantizer]
    kernels: dict[str, Kernel]
    has_backward: bool = False
    delayed: list[tuple[DelayedSlot, DelayedScalingRequest]] = dataclasses.field(
        default_factory=list
    )
    streams: dict[tuple[str, Direction], int] = dataclasses.field(default_factory=dict)

    def rounding(
        self, tensor_type: str, direction: Direction, row_origin: int, contraction_origin: int
    ) -> Rounding:
        """Where stochastic rounding of this slot's plane draws from in this step."""
        return Rounding(
            seed=self.recipe.rounding_seed if self.recipe else 0,
            stream=self.streams.get((tensor_type, direction), 0),
            step=stepping.completed_steps(),
            row_origin=row_origin,
            contraction_origin=contraction_origin,
        )

    def is_fast(self, gemm: str) -> bool:
        """Whether the recipe lets this GEMM use fast accumulation."""
        return self.recipe is not None and gemm in self.recipe.fast_accumulation


def _high_precision_binding() -> Binding:
    """The binding of the disabled path: Identity everywhere, no factory involved."""
    identity = IdentityQuantizer()
    types = ("input", "weight", "output", "grad_output", "grad_input")
    pair = identity.plane_format("rowwise")
    kernels = {g.gemm: select(g.gemm, pair, pair, "cpu", "native", k=1, n=1) for g in LINEAR_GEMMS}
    return Binding(None, dict.fromkeys(types, identity), kernels, has_backward=True)


_HIGH_PRECISION = _high_precision_binding()


class QuantizedModule(torch.nn.Module):
    """Base of Linear and its relatives: name, boundary roles, recipe binding, delayed state."""

    module_type = "linear"

    def __init__(self, name: str | None):
        super().__init__()
        self._name = name or ""
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._bindings: collections.OrderedDict[Any, Binding] = collections.OrderedDict()
        self._active: Binding | None = None
        self._delayed: dict[tuple, DelayedSlot] = {}
        self._owner = next(_owners)
        self._forwards = (0, 0)  # (step, training forwards in it)

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
        self._active = None
        self._drop_weight_cache()

    def _drop_weight_cache(self) -> None:
        """Forget quantized weights that are kept across microbatches."""

    def bind(self, device: torch.device, compute_dtype: torch.dtype) -> Binding:
        """The binding for the autocast in force, resolving it if it is new.

        Communicates within ``quantization_group()`` when it resolves: every rank must get here.
        """
        frame = current_frame()
        training = torch.is_grad_enabled() and self.training
        if training:
            stepping.note_training_forward()
        if not frame.enabled:
            return _HIGH_PRECISION
        binding = self._binding_for(frame, device, compute_dtype)
        if torch.is_grad_enabled() and not binding.has_backward:
            self._resolve(binding, "backward", frame, device)
            binding.has_backward = True
        if binding is not self._active:
            self._active = binding
            for slot, request in binding.delayed:
                slot.adopt(request)
        if training and binding.delayed:
            self._warn_if_steps_never_end()
        return binding

    def _binding_for(self, frame: Frame, device: torch.device, dtype: torch.dtype) -> Binding:
        """The kept binding of this frame, or a new one whose forward slots are resolved."""
        key = (frame.token, device, dtype, frame.amax_reduction_group)
        binding = self._bindings.get(key)
        if binding is None:
            binding = Binding(frame.recipe, {}, {})
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
        group = self.quantization_group()
        delayed: list[tuple[DelayedSlot, DelayedScalingRequest]] = []

        def bind_delayed(slot: Slot, child: str, request: DelayedScalingRequest) -> Quantizer:
            state = self._delayed_slot(slot, child, request, frame, device)
            delayed.append((state, request))
            return state.quantizer()

        def resolve():
            quantizers = ask_factory(recipe, slots, site, bind_delayed)
            known = {**binding.quantizers, **quantizers}
            kernels = {
                g.gemm: choose_kernel(g, known, site, recipe.resolved_execution)
                for g in LINEAR_GEMMS
                if (g.gemm == "fprop") == (direction == "forward")
            }
            return quantizers, kernels, describe_slots(slots, quantizers)

        quantizers, kernels = _resolved_alike(resolve, site, group, device)
        _log_first_emulation(site, kernels)
        binding.quantizers.update(quantizers)
        binding.kernels.update(kernels)
        binding.delayed += delayed
        for state, request in delayed:
            state.adopt(request)
            self._delayed[state.key] = state
            stepping.register_slot(state)
        for slot in slots:
            for plane, suffix in (("rowwise", "row"), ("columnwise", "col")):
                text = f"{self.name}|{slot.tensor_type}||{suffix}"
                binding.streams[slot.tensor_type, plane] = zlib.crc32(text.encode())

    # Delayed scaling.
    def _delayed_slot(self, slot, child, request, frame: Frame, device) -> DelayedSlot:
        """The state for a request: the kept one of the same place and element, or a new one."""
        element = request.element(forward=slot.direction == "forward")
        key = (slot.direction, slot.position, slot.tensor_type, child, element)
        group = self._delayed_group(request, frame)
        state = self._delayed.get(key)
        if state is None:
            state = DelayedSlot(key, self.name, request, element, device, self._owner)
        state.name, state.group = self.name, group
        return state

    def _delayed_group(self, request: DelayedScalingRequest, frame: Frame) -> Any:
        """Where this request's amaxes are reduced; refuses groups that would give wrong scales."""
        own = self.quantization_group()
        group = frame.amax_reduction_group or own
        if collectives.group_size(group) <= 1 and collectives.group_size(own) <= 1:
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
        for other in stepping.registered_slots():
            same_place = other.name == self.name and other.group == group
            if same_place and other.owner != self._owner:
                raise ValueError(
                    f"two modules have the name {self.name!r}; delayed scaling over several ranks "
                    "needs unique names, e.g. assign_names(model, overwrite=True)"
                )
        return group

    def _warn_if_steps_never_end(self) -> None:
        step, count = self._forwards
        now = stepping.completed_steps()
        self._forwards = (now, count + 1 if step == now else 1)
        if self._forwards[1] == _FORWARDS_BEFORE_WARNING + 1:
            _warn_never_ending_step()

    # Copies, moves and loads.
    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        for slot in self._delayed.values():
            slot.to(fn(slot.scale).device)
        self._outdate()
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._outdate()

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        state.update(_bindings=collections.OrderedDict(), _active=None)
        return state

    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = self._shared_by_copies()
        for key, value in self.__getstate__().items():
            twin.__dict__[key] = value if key in shared else copy.deepcopy(value, memo)
        return twin

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


_logged_emulation = False


def _log_first_emulation(site: Site, kernels: dict[str, Kernel]) -> None:
    """One line per run, when the first module gets a GEMM that was asked to be emulated."""
    global _logged_emulation
    count = sum(kernel.execution == "emulated" for kernel in kernels.values())
    if count and not _logged_emulation:
        _logged_emulation = True
        logger.warning("%d GEMMs of %s run in exact emulation; see plan()", count, site)


def _resolved_alike(resolve, site: Site, group: Any, device: torch.device):
    """Run ``resolve`` and compare its outcome over the group: all ranks go on, or all raise."""
    error, text = None, ""
    try:
        quantizers, kernels, text = resolve()
    except Exception as caught:
        if collectives.group_size(group) == 1:
            raise
        error, text = caught, f"{type(caught).__name__}: {caught}"
    if collectives.group_size(group) > 1 and not collectives.all_equal(
        text_hash(text), group, device
    ):
        texts = collectives.all_gather_object(text, group)
        lines = "\n".join(f"rank {r}:\n{t}" for r, t in enumerate(texts))
        error = error or ValueError(
            f"the ranks of {site} resolved different recipes; the factory must answer alike on "
            f"every rank of a tensor-parallel group:\n{lines}"
        )
    if error is not None:
        raise error
    return quantizers, kernels
