"""How torch's operators see a quantized tensor.

Copies, moves and views that keep the last dimension work on the planes. Every other operator acts
on the dequantized value and returns plain tensors; what it writes in place is quantized again. A
slice, split or transpose of a quantized tensor is therefore a copy: writes to it stay there
(Identity holds its values as they are, so its slices are true views).
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

from .dtypes import HIGH_PRECISION_DTYPES
from .plane import DIRECTIONS

aten = torch.ops.aten
_HANDLERS = {}


class DispatchingTensor(torch.Tensor):
    """Base of the wrapper tensors: sends every operator to its handler, or to the values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], DispatchingTensor):
            return handler(*args, **(kwargs or {}))
        return _on_values(func, args, kwargs or {})


def _handles(*operators):
    def register(handler):
        _HANDLERS.update(dict.fromkeys(operators, handler))
        return handler

    return register


@_handles(aten.detach.default, aten.alias.default)
def _detach(tensor):
    return tensor._like()


@_handles(aten.clone.default)
def _clone(tensor, *, memory_format=None):
    return tensor._mapped(torch.clone)


@_handles(aten.view.default, aten._unsafe_view.default)
def _view(tensor, shape):
    viewed = torch.empty(tensor.shape, device="meta").view(shape).shape
    if tensor.ndim and viewed and viewed[-1] == tensor.shape[-1]:
        return tensor._like(shape=viewed)
    return tensor.dequantize().view(viewed)


@_handles(aten._to_copy.default)
def _to_copy(tensor, *, dtype=None, device=None, non_blocking=False, **layout):
    if dtype is not None and dtype != tensor.dtype:
        wide = dtype if dtype in HIGH_PRECISION_DTYPES else None
        values = tensor.dequantize(dtype=wide)
        return values.to(device, dtype, non_blocking=non_blocking)
    device = torch.device(device) if device is not None else tensor.device
    moved = tensor._mapped(lambda part: part.to(device, non_blocking=non_blocking, copy=True))
    moved._quantizer = tensor._quantizer._on(device)
    return moved


@_handles(aten.new_zeros.default)
def _new_zeros(tensor, size, *, dtype=None, device=None, **layout):
    """Zeros in the same formats and directions; the quantizer's amax record does not see them."""
    zeros = torch.zeros(size, dtype=dtype or tensor.dtype, device=device or tensor.device)
    if zeros.dtype != tensor.dtype:
        return zeros
    quantizer = tensor._quantizer._on(zeros.device)
    usages = tensor.get_usages()
    planes = quantizer._planes(zeros, *(usages[d] for d in DIRECTIONS), record=False)
    return quantizer._wrap(zeros.shape, zeros.dtype, *planes, device=zeros.device)


@_handles(aten.copy_.default)
def _copy_(tensor, source, non_blocking=False):
    """Equal formats copy their bytes, so that saved tensors load exactly; all else re-quantizes."""
    if tensor._copy_planes_from(source):
        return tensor
    if isinstance(source, DispatchingTensor):
        source = source.dequantize()
    if source.dtype not in HIGH_PRECISION_DTYPES:
        source = source.to(tensor.dtype)
    return tensor.quantize_(source.to(tensor.device).expand(tensor.shape))


def _on_values(func, args, kwargs):
    """Run ``func`` on dequantized values; quantize again what it wrote to."""
    values_of_written = []

    def values(argument, is_written):
        if not isinstance(argument, DispatchingTensor):
            return argument
        # Fused optimizers take it that the strides are those of the gradient.
        dequantized = argument.dequantize().contiguous()
        if is_written:
            values_of_written.append((argument, dequantized))
        return dequantized

    def mapped(argument, schema):
        is_written = schema.alias_info is not None and schema.alias_info.is_write
        return tree_map(lambda item: values(item, is_written), argument)

    schemas = func._schema.arguments
    by_name = {schema.name: schema for schema in schemas}
    args = [mapped(argument, schema) for argument, schema in zip(args, schemas, strict=False)]
    kwargs = {name: mapped(argument, by_name[name]) for name, argument in kwargs.items()}
    result = func(*args, **kwargs)
    for tensor, dequantized in values_of_written:
        tensor.quantize_(dequantized)
    return result  # of an in-place operator torch itself returns the tensor written to
