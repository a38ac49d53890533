"""Weights that a module holds only quantized: how they are made, and how a forward reads them.

Legend: W [N, K], out_features by in_features of this rank; its planes are [N, K] and [K, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..formats.casting import CastJob, run_casts
from ..formats.identity import IdentityQuantizer
from ..formats.plane import DIRECTIONS, Direction, Plane
from ..formats.quantizer import Quantizer
from ..formats.tensors import QuantizedTensor
from ..model_init import current_model_init
from ..ops.gemm import device_kind
from ..resolution import Site, ask_factory
from ..roles import Slot
from .binding import Binding


class InitialValue:
    """The value that a weight had before it was quantized, on the CPU until it is cleared."""

    def __init__(self, value: torch.Tensor):
        self._value: torch.Tensor | None = value.detach().to("cpu", copy=True)

    def get(self) -> torch.Tensor | None:
        """The weight [N, K] in the parameters' dtype; None after ``clear``."""
        return self._value

    def clear(self) -> None:
        """Give the memory back."""
        self._value = None


def quantize_parameters(module: torch.nn.Module, slots: Mapping[str, Slot]) -> None:
    """Replace the weights named in ``slots`` as the open quantized_model_init asks; else nothing.

    slots: parameter name → its weight slot. Raises ValueError, before any weight is replaced, for
    what quantized_model_init refuses.
    """
    wanted = current_model_init()
    if wanted is None:
        return
    _refuse_layouts(module, slots)
    quantizers = {}
    for name, slot in slots.items():
        site = module.resolution_site(device_kind(getattr(module, name).device))
        answer = ask_factory(wanted.recipe, [slot], site, _refuse_delayed)[slot.tensor_type]
        _refuse_formats(answer, slot, site, module.tp_size)
        quantizers[name] = answer
    are_plain = {isinstance(quantizer, IdentityQuantizer) for quantizer in quantizers.values()}
    if len(are_plain) > 1:
        raise ValueError(
            f"some weights of {_site(module)} are Identity in quantized_model_init, others are "
            "not; accepted: one kind for all experts, e.g. factories.mxfp8_factory"
        )
    if are_plain == {True}:
        return
    for name, quantizer in quantizers.items():
        weight = getattr(module, name)
        quantizer.set_usage(rowwise=True, columnwise=True)
        parameter = torch.nn.Parameter(quantizer(weight.detach()), weight.requires_grad)
        if wanted.preserves_initial_value:
            initial = InitialValue(weight)
            parameter.get_high_precision_init_val = initial.get
            parameter.clear_high_precision_init_val = initial.clear
        module.register_parameter(name, parameter)


def forget_initial_value(weight: torch.Tensor) -> None:
    """The weight is initialised anew: a preserved value is no longer its own."""
    if hasattr(weight, "clear_high_precision_init_val"):
        weight.clear_high_precision_init_val()


def stored_planes(
    module: Any, weight: QuantizedTensor, binding: Binding, slot: str, dtype: torch.dtype
) -> dict[Direction, Plane]:
    """The planes of a stored weight for a forward under ``binding`` in ``dtype``; nothing is cast.

    module: whose weight it is; slot: its key in ``binding.quantizers``. The high-precision path
    gets the dequantized values.
    Raises ValueError when the recipe wants another format, or a plane that was dropped is needed.
    """
    quantizer = binding.quantizers[slot]
    if binding.recipe is None:
        job = CastJob(weight.detach().dequantize(dtype=dtype), quantizer)
        run_casts([job])
        return job.planes
    for direction in DIRECTIONS:
        plane, needed = weight.plane(direction), direction == "rowwise" or torch.is_grad_enabled()
        if plane is None and needed:
            raise ValueError(
                f"the stored weight of {_site(module)} holds no {direction} plane, it was dropped "
                "by update_usage or clear; accepted: keep it, or run under torch.no_grad() what "
                "reads the rowwise plane only"
            )
        _check_recipe(module, weight, direction, quantizer)
    planes = {d: weight.plane(d) for d in DIRECTIONS}
    return {d: p and _in_dtype(p, dtype) for d, p in planes.items()}


def _in_dtype(plane: Plane, dtype: torch.dtype) -> Plane:
    """Identity values follow the compute dtype, codes mean the same in all of them."""
    if plane.format.family != "identity" or plane.format.dtype is not None:
        return plane
    return plane.map(lambda part: part.to(dtype))


def _site(module: Any) -> Site:
    return module.resolution_site("this device")


def _check_recipe(module: Any, weight: QuantizedTensor, direction, quantizer: Quantizer) -> None:
    plane, bound = weight.plane(direction), quantizer.plane_format(direction)
    if plane is None:
        return
    sources = (weight._quantizer.columnwise_source, quantizer.columnwise_source)
    is_same_source = direction == "rowwise" or sources[0] == sources[1]
    if plane.format != bound or not is_same_source:
        notes = [f" ({s})" if direction == "columnwise" else "" for s in sources]
        raise ValueError(
            f"the weight of {_site(module)} is stored with {direction} {plane.format.describe()}"
            f"{notes[0]}, this recipe wants {bound.describe()}{notes[1]}; accepted: a recipe whose "
            "weight slot is that of quantized_model_init, where the module had its present name, "
            "e.g. Linear(..., name='decoder.0.fc1')"
        )


# What a stored weight cannot be.
def _refuse_layouts(module: Any, slots: Mapping[str, Slot]) -> None:
    if getattr(module, "tp_mesh", None) is not None:
        raise ValueError(
            "tp_mesh in quantized_model_init: a DTensor does not hold planes; accepted: "
            "tp_group=mesh.get_group() instead of tp_mesh"
        )
    missing = [name for name in slots if getattr(module, name, None) is None]
    if missing:
        raise ValueError(
            "parameters_split in quantized_model_init: blocks and scales belong to the whole "
            "weight; accepted: parameters_split=None"
        )


def _refuse_delayed(slot: Slot, child: str, request: Any) -> Quantizer:
    raise ValueError(
        f"qfactory returned {request!r} for {slot} ({child}) in quantized_model_init: a stored "
        "weight is not cast in each step, so there is no amax to delay; accepted: a Quantizer, "
        "e.g. factories.current_scaling_factory"
    )


def _refuse_formats(quantizer: Quantizer, slot: Slot, site: Site, tp_size: int) -> None:
    for direction in DIRECTIONS:
        format = quantizer.plane_format(direction)
        if getattr(format, "stochastic", False):
            raise ValueError(
                f"{slot} of {site} is {direction} {format.describe()} in quantized_model_init: "
                "what is written into a stored weight has no step to draw from; accepted: "
                "stochastic_rounding=False for weights"
            )
        if format.statistic == "tensor" and tp_size > 1:
            raise ValueError(
                f"{slot} of {site} is {direction} {format.describe()} in quantized_model_init with "
                f"tp_size={tp_size}: its one scale would be that of this rank's shard; accepted: "
                "scales of blocks or rows, e.g. factories.float8_block_scaling_factory"
            )
