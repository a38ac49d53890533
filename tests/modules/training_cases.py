"""Every module behind an nn.Linear, its steps and its state, for tests of training behaviours."""

from __future__ import annotations

import contextlib

import torch

import dist_finegrain as dfg

H = 64  # square: a matrix and its transpose have one shape
TOKENS = 24
SPLITS = [7, 0, 16, 1]
KINDS = ("linear", "layernorm_linear", "layernorm_mlp", "grouped")


def make_module(kind, dtype=torch.float32, name="demo.fc1", **options):
    """One of the package's modules, H → H, with biases that are not zero."""
    torch.manual_seed(0)
    made = {
        "linear": lambda: dfg.Linear(H, H, params_dtype=dtype, name=name, **options),
        "layernorm_linear": lambda: dfg.LayerNormLinear(
            H, H, params_dtype=dtype, name=name, **options
        ),
        "layernorm_mlp": lambda: dfg.LayerNormMLP(
            H, H, activation="swiglu", params_dtype=dtype, name=name, **options
        ),
        "grouped": lambda: dfg.GroupedLinear(
            len(SPLITS), H, H, params_dtype=dtype, name=name, **options
        ),
    }[kind]()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(len(parameter)).to(dtype) * 0.1)
    return made


class Block(torch.nn.Module):
    """y = layer(inner(x)); inner is an nn.Linear, which only torch.autocast reaches."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = make_module(kind, **options)
        self.inner = torch.nn.Linear(H, H, bias=False)

    def forward(self, x, **forward):
        return call(self.layer, self.inner(x), **forward)


def call(module, x, **forward):
    """y of one of the package's modules, whatever its forward takes besides x."""
    if isinstance(module, dfg.GroupedLinear):
        splits = [*SPLITS[:-1], len(x) - sum(SPLITS[:-1])]
        return module(x, splits, **forward)
    return module(x, **forward)


def data(seed=1):
    """x [TOKENS, H] and a gradient of y."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, H, generator=generator) for _ in range(2)]


def autocast(recipe):
    """The autocast of a recipe; of None the high-precision path without one."""
    return contextlib.nullcontext() if recipe is None else dfg.autocast(recipe=recipe)


def gradients(module) -> dict[str, torch.Tensor | None]:
    """Copies of the gradients by name."""
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {name: None if g is None else g.clone() for name, g in grads.items()}


def step(block, x, grad, recipe, run=None, **forward):
    """y, dX and all gradients of one forward and backward of ``run`` (default: the block)."""
    block.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(recipe):
        y = (run or block)(x, **forward)
    y.backward(grad.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, **gradients(block)}


def states(module) -> dict[tuple, tuple[torch.Tensor, torch.Tensor]]:
    """Scales and histories by slot of every part."""
    return {
        (name, *key): (slot.scale.clone(), slot.history.clone())
        for name, part in module.named_modules()
        for key, slot in getattr(part, "_delayed", {}).items()
    }


def assert_same(got, wanted) -> None:
    """Equal keys, and tensors equal bit for bit."""
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        pairs = zip(value, wanted[name], strict=True) if isinstance(value, tuple) else None
        for a, b in pairs or [(value, wanted[name])]:
            assert (a is None) == (b is None), name
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name
