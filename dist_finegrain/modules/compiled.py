"""Layers inside torch.compile: a linear layer is one operator, whose body is the eager code.

While Dynamo traces, nothing is bound or asked: the graph holds the operator and a number, and that
number stands for the module, the recipe in force and what is wanted. What cannot be one operator,
``why_eager`` says, runs as it does without torch.compile, after a graph break.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..context import Frame, current_frame, entered
from ..formats.plane import DIRECTIONS, Format, Plane, in_memory_order
from .linear_function import LinearCall, LinearFunction
from .torch_autocast import compute_dtype

_ids = itertools.count()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(module: torch.nn.Module) -> int:
    """A number by which traced code finds this module again."""
    number = next(_ids)
    _modules[number] = module
    return number


@dataclasses.dataclass(frozen=True)
class _Key:
    """What one use of a module inside a graph is known by."""

    module: int
    token: int
    training: bool
    needs_dgrad: bool
    needs_wgrad: bool
    needs_bias: bool
    device: torch.device
    dtype: torch.dtype
    dtypes: tuple[torch.dtype | None, ...]  # of x, weight and bias


@dataclasses.dataclass
class _Use:
    """states: what a forward leaves to its backward beside tensors, by the result's shape."""

    key: _Key
    frame: Frame
    states: dict[tuple[int, ...], _Context] = dataclasses.field(default_factory=dict)

    def call(self) -> LinearCall:
        """The layer's call, bound as the recipe in force at the time of tracing says."""
        key, module = self.key, _modules[self.key.module]
        wants_grad = key.needs_dgrad or key.needs_wgrad or key.needs_bias
        with entered(self.frame), torch.set_grad_enabled(wants_grad):
            binding = module.bind_now(key.device, key.dtype)
        needs = (key.needs_dgrad, key.needs_wgrad)
        call = module.linear_call(binding, key.dtype, *needs, key.training, None)
        # Kept with the graph: it must not keep a parameter alive.
        return dataclasses.replace(call, parameter=None)


class _Context:
    """Stands in for autograd's context of LinearFunction."""

    saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


_uses: list[_Use] = []
_numbers: dict[_Key, int] = {}


@torch.compiler.assume_constant_result
def _number(*parts: Any) -> int:
    """The number of a use; Dynamo runs this while it traces, and keeps the answer."""
    key = _Key(*parts[:-3], dtypes=parts[-3:])
    if key not in _numbers:
        _numbers[key] = len(_uses)
        _uses.append(_Use(key, current_frame()))
    return _numbers[key]


@torch.compiler.assume_constant_result
def _why_eager(module: int, enabled: bool, token: int | None, wants_grad: bool, *where) -> str:
    if not enabled:
        return ""
    frame = current_frame()
    if not frame.enabled or frame.token != token:
        return "autocast is opened inside the compiled function; open it around the call of it"
    for layer in _modules[module].linears():
        with torch.set_grad_enabled(wants_grad):
            reason = layer.why_eager() or _of_binding(layer.bind_now(*where))
        if reason:
            return reason
    return ""


def _of_binding(binding: Any) -> str:
    if binding.delayed:
        return "delayed scaling keeps state between steps"
    formats = [q.plane_format(d) for q in binding.quantizers.values() for d in DIRECTIONS]
    if any(format.family == "user" for format in formats):
        return "a quantizer is the user's own class"
    return ""


def traceable(forward: Callable) -> Callable:
    """Decorates the ``forward`` of a module of linear layers, as its ``linears()`` names them."""
    eagerly = _eagerly(forward)

    @functools.wraps(forward)
    def traced(self, x, is_first_microbatch=None):
        if torch.compiler.is_compiling():
            frame, where = current_frame(), (x.device, compute_dtype(x))
            reason = _why_eager(
                self._trace_id, frame.enabled, frame.token, torch.is_grad_enabled(), *where
            )
            if is_first_microbatch is not None:
                reason = "is_first_microbatch keeps quantized weights between calls"
            if reason:
                torch._dynamo.graph_break(msg=reason)
                return eagerly(self, x, is_first_microbatch)
        return forward(self, x, is_first_microbatch)

    return traced


def untraceable(reason: str) -> Callable:
    """Decorates a ``forward`` that torch.compile leaves as it is, for ``reason``."""

    def decorate(forward: Callable) -> Callable:
        eagerly = _eagerly(forward)

        @functools.wraps(forward)
        def traced(self, *args, **kwargs):
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg=reason)
                return eagerly(self, *args, **kwargs)
            return forward(self, *args, **kwargs)

        return traced

    return decorate


def _eagerly(forward: Callable) -> Callable:
    @torch.compiler.disable
    def forward_without_torch_compile(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return forward_without_torch_compile


def traced_linear(module, x, weight, bias, dtype: torch.dtype) -> torch.Tensor:
    """What ``Linear._multiply`` does with x [M, K] while it is traced: Y [M, N]."""
    frame = current_frame()
    if not frame.enabled:
        bias = None if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias)
    with_grad = torch.is_grad_enabled()
    needs = [with_grad and t is not None and t.requires_grad for t in (x, weight, bias)]
    number = _number(
        module._trace_id, frame.token, with_grad and module.training, *needs, x.device, dtype,
        x.dtype, weight.dtype, None if bias is None else bias.dtype,
    )  # fmt: skip
    return _forward(x, weight, bias, number)[0]


@torch.library.custom_op("dist_finegrain::layer_forward", mutates_args=())
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, number: int
) -> list[torch.Tensor]:
    """Y, and what backward needs: the buffers of X's and W's column planes."""
    use, ctx = _uses[number], _Context()
    with torch.no_grad():
        y = LinearFunction.forward(ctx, x, weight, bias, use.call())
    saved, ctx.saved_tensors = ctx.saved_tensors, ()
    ctx.is_saved = [tensor is not None for tensor in saved]
    use.states[tuple(y.shape)] = ctx
    return [y, *(_own(t, x, weight) for t in saved if t is not None)]


def _own(tensor: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """An operator's results may share no memory with what it is given; Identity planes do."""
    address = tensor.untyped_storage().data_ptr()
    is_shared = any(address == t.untyped_storage().data_ptr() for t in inputs)
    return tensor.clone() if is_shared else tensor


@_forward.register_fake
def _(x, weight, bias, number):
    call = _uses[number].call()
    saved = []
    for slot, matrix, is_needed in (
        ("input", x, call.needs_wgrad), ("weight", weight, call.needs_dgrad),
    ):  # fmt: skip
        if is_needed:
            format = call.job(slot, matrix, False, True).format("columnwise")
            plane = _empty_column(format, matrix, call.compute_dtype)
            saved += [in_memory_order(part)[0] for part in plane.parts]
    y = x.new_empty(x.shape[0], weight.shape[0], dtype=call.compute_dtype)
    return [y, *(tensor for tensor in saved if tensor is not None)]


def _empty_column(format: Format, x: torch.Tensor, dtype: torch.dtype) -> Plane:
    """Its buffers as ``encode`` of xᵀ returns them."""
    if format.family == "identity":
        held = x.new_empty(x.shape, dtype=format.dtype or dtype)
        return Plane(format, x.shape[::-1], dtype, (held.t(),))
    return format.empty(x.shape[::-1], dtype, x.device)


@torch.library.custom_op("dist_finegrain::layer_backward", mutates_args=())
def _backward(dy: torch.Tensor, saved: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Those of dX, dW and the bias gradient that are needed."""
    use, ctx = _uses[number], _Context()
    ctx.__dict__.update(use.states[tuple(dy.shape)].__dict__)
    rest = iter(saved)
    ctx.saved_tensors = tuple(next(rest) if is_there else None for is_there in ctx.is_saved)
    ctx.needs_input_grad = (use.key.needs_dgrad, use.key.needs_wgrad, use.key.needs_bias, False)
    with torch.no_grad():
        gradients = LinearFunction.backward(ctx, dy)
    return [_own(g, dy, *saved) for g in gradients if g is not None]


@_backward.register_fake
def _(dy, saved, number):
    key = _uses[number].key
    module = _modules[key.module]
    k, n = module.local_in_features, module.local_out_features
    shapes = (
        (key.needs_dgrad, (dy.shape[0], k)), (key.needs_wgrad, (n, k)), (key.needs_bias, (n,)),
    )  # fmt: skip
    return [
        dy.new_empty(shape, dtype=dtype)
        for (is_needed, shape), dtype in zip(shapes, key.dtypes, strict=True)
        if is_needed
    ]


def _setup_context(ctx, inputs, output):
    *_, ctx.number = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _differentiate(ctx, grads):
    if grads[0] is None:
        return None, None, None, None
    key = _uses[ctx.number].key
    found = iter(_backward(grads[0], list(ctx.saved_tensors), ctx.number))
    needs = (key.needs_dgrad, key.needs_wgrad, key.needs_bias)
    return *(next(found) if is_needed else None for is_needed in needs), None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
