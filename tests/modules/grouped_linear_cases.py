"""Grouped layers, their loops of Linears and comparisons that the tests of GroupedLinear share."""

from __future__ import annotations

import zlib

import torch

import dist_finegrain as dfg
from dist_finegrain.modules.grouped_linear_function import GroupedCall
from tests.recipes import ALL, emulated

K, N, EXPERTS = 96, 80, 4
# The other one tells experts from Linears.
AS_LINEARS = sorted(set(ALL) - {"moe_nvfp4_row_scaled_fwd_mxfp8_bwd"})
SPLITS = {
    "zeros_anywhere": [0, 33, 0, 5],
    "zero_last": [16, 16, 32, 0],
    "only_one": [0, 0, 64, 0],
    "nothing": [0, 0, 0, 0],
    "single_rows": [1, 1, 1, 1],
}


def make(dtype=torch.float32, name="demo.fc1", bias=False, k=K, n=N, experts=EXPERTS, **options):
    torch.manual_seed(0)
    module = dfg.GroupedLinear(experts, k, n, params_dtype=dtype, name=name, bias=bias, **options)
    with torch.no_grad():
        for one in module.biases:
            one.normal_()
    return module


def loop_of(module) -> list[dfg.Linear]:
    """A Linear of the same weights for each expert."""
    layers = []
    for e, weight in enumerate(module.weights):
        layer = dfg.Linear(
            module.in_features, module.out_features, params_dtype=weight.dtype, name=module.name,
            bias=bool(module.biases),
        )  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(weight)
            if module.biases:
                layer.bias.copy_(module.biases[e])
        layers.append(layer)
    return layers


def give_streams(layers) -> None:
    """The rounding streams of the experts, to Linears that are bound."""
    for e, layer in enumerate(layers):
        for binding in layer._bindings.values():
            for kind, plane in binding.streams:
                suffix = {"rowwise": "row", "columnwise": "col"}[plane]
                text = f"{layer.name}|{kind}|{e}|{suffix}"
                binding.streams[kind, plane] = zlib.crc32(text.encode())


def data(split, dtype=torch.float32, k=K, n=N, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(sum(split), width, generator=generator) for width in (k, n))
    return x.to(dtype), grad.to(dtype)


def run(module, x, split, recipe, grad, **forward):
    """[y, dX, dW0 …, dbias0 …] of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with dfg.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, split, **forward)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in (*module.weights, *module.biases))]


def run_loop(layers, x, split, recipe, grad):
    """The same of a loop of Linears."""
    x = x.detach().clone().requires_grad_()
    for layer in layers:
        layer.zero_grad()
    with dfg.autocast(enabled=recipe is not None, recipe=recipe):
        parts = [layer(part) for layer, part in zip(layers, x.split(split), strict=True)]
    y = torch.cat(parts)
    y.backward(grad)
    biases = [layer.bias.grad for layer in layers if layer.bias is not None]
    return [y.detach(), x.grad, *(layer.weight.grad for layer in layers), *biases]


def bound_loop(module, x, split, factory, grad):
    """A loop of Linears that is bound to the recipe and has the experts' streams."""
    layers, recipe = loop_of(module), emulated(factory)
    run_loop(layers, x, split, recipe, grad)
    give_streams(layers)
    for layer in layers:
        for slot in layer._delayed.values():
            slot.reset()
    return layers


def planes_seen(monkeypatch) -> dict:
    """Filled by later casts: (tensor type, direction) → what the GEMMs of each expert read."""
    seen, tokens, weights = {}, GroupedCall.cast_tokens, GroupedCall.cast_weights

    def note(call, kind, made):
        for direction, operand in made.items():
            if operand is not None:
                seen[kind, direction] = operand.each(call.sizes)
        return made

    monkeypatch.setattr(
        GroupedCall, "cast_tokens", lambda c, kind, *a: note(c, kind, tokens(c, kind, *a))
    )
    monkeypatch.setattr(
        GroupedCall, "cast_weights", lambda c, *a: note(c, "weight", weights(c, *a))
    )
    return seen


def assert_equal(got, wanted):
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a is None) == (b is None), index
        assert a is None or torch.equal(a, b), index
