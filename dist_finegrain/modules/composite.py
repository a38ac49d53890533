"""A module of several Linears whose parameters are its own, as Transformer Engine names them.

The parts are child modules without parameters: bindings, delayed scales and weight caches live in
them, so everything that walks a model's modules finds one quantized Linear per part.
"""

from __future__ import annotations

from typing import Any

import torch

from ..roles import QuantizerRole, Slot
from .base import QuantizedModule
from .linear import Linear


class Composite(QuantizedModule):
    """Base of modules made of ``Part``s; itself it is never bound to a recipe."""

    def parts(self) -> tuple[Part, ...]:
        """The parts in the order in which they run."""
        raise NotImplementedError

    def slots_of_parts(self) -> tuple[tuple[Slot, ...], ...]:
        """Each part's slots; their positions count through the whole module."""
        raise NotImplementedError

    def get_quantizer_slots(self) -> tuple[Slot, ...]:
        slots = [slot for part in self.slots_of_parts() for slot in part]
        return tuple(sorted(slots, key=lambda s: (s.direction == "backward", s.position)))

    @property
    def is_bound(self) -> bool:
        return any(part.is_bound for part in self.parts())

    def bind_parts(self, device: torch.device, dtype: torch.dtype) -> list[Any]:
        """The parts' bindings: all forward slots are asked before any backward slot."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                for part in self.parts():
                    part.bind(device, dtype)
        return [part.bind(device, dtype) for part in self.parts()]

    def linears(self) -> tuple[Linear, ...]:
        """The linear layers that this module runs."""
        return self.parts()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the process group of a module that was built with tp_size only, or was unpickled."""
        for part in self.parts():
            part.set_tensor_parallel_group(tp_group)

    def backward_dw(self) -> None:
        """Linear.backward_dw of every part, the last one first as in backward."""
        for part in reversed(self.parts()):
            part.backward_dw()

    def _mark_parameters(self) -> None:
        for part in self.parts():
            part.mark_parameters()

    def _outdate(self) -> None:
        for part in self.parts():
            part._outdate()

    def _drop_weight_cache(self) -> None:
        for part in self.parts():
            part._drop_weight_cache()


class Part(Linear):
    """A Linear whose weight and bias are ``<label>_weight`` and ``<label>_bias`` of ``whole``.

    whole: the Composite; its name plus ``.<label>`` is this part's (``<label>`` if it has none).
    options: Linear's, except parameters_split.
    """

    def __init__(self, whole: Composite, label: str, *sizes: int, **options: Any):
        # Around nn.Module's registration: a child that knows its parent would be a cycle.
        self.__dict__.update(_whole=whole, _part_label=label, _label=type(whole).__name__)
        super().__init__(*sizes, **options)

    @property
    def name(self) -> str:
        """The name that factories see in ``role.name``."""
        return f"{self._whole.name}.{self._part_label}" if self._whole.name else self._part_label

    @property
    def weight(self) -> torch.nn.Parameter:
        """This rank's weight [out_features, in_features], owned by the whole module."""
        return getattr(self._whole, f"{self._part_label}_weight")

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """This rank's bias [out_features], owned by the whole module, or None."""
        return getattr(self._whole, f"{self._part_label}_bias")

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """Role of the output slot; the whole module decides it."""
        return self._role_of("output")

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """Role of the grad-input slot; the whole module decides it."""
        return self._role_of("grad_input")

    def _role_of(self, tensor_type: str) -> QuantizerRole | None:
        return next(s.role for s in self.get_quantizer_slots() if s.tensor_type == tensor_type)

    def get_quantizer_slots(self) -> tuple[Slot, ...]:
        index = [part is self for part in self._whole.parts()].index(True)
        return self._whole.slots_of_parts()[index]

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        self._whole.register_parameter(f"{self._part_label}_{name}", param)

    def mark_parameters(self) -> None:
        """Set Megatron's attributes on this part's parameters."""
        super()._mark_parameters()

    def quantize_parameters(self) -> None:
        """Store this part's weight quantized where quantized_model_init is open."""
        super()._quantize_parameters()

    def _quantize_parameters(self) -> None:
        """Left to the whole module: the slots are known when it has all its parts."""

    def _mark_parameters(self) -> None:
        """Left to the whole module: while it is being copied it has no parameters yet."""
