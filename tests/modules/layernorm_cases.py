"""LayerNormLinear and LayerNormMLP beside the plain torch modules that they stand for."""

from __future__ import annotations

import torch

import dist_finegrain as dfg
from dist_finegrain.modules.activations import activate, is_gated

H, F = 96, 160
MODULES = ("linear", "mlp")


def make(kind, dtype=torch.float32, name="demo", **options):
    """A LayerNormLinear 96 → 160, or a LayerNormMLP 96 → 160 → 96, norms not at their start."""
    torch.manual_seed(0)
    cls = {"linear": dfg.LayerNormLinear, "mlp": dfg.LayerNormMLP}[kind]
    module = cls(H, F, params_dtype=dtype, name=name, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(len(parameter)).to(dtype) * 0.1)
    return module


class Plain(torch.nn.Module):
    """The same layers from torch.nn, with the same parameters under the same names."""

    def __init__(self, module):
        super().__init__()
        norm, weight = module._norm, module.layer_norm_weight
        self.activation = getattr(module, "activation", None)
        cls = torch.nn.LayerNorm if norm.has_bias else torch.nn.RMSNorm
        self.norm = cls(H, eps=norm.eps, dtype=weight.dtype)
        inner = F * (2 if self.activation and is_gated(self.activation) else 1)
        sizes = {"": (H, F)}
        if self.activation:
            sizes = {"fc1_": (H, inner), "fc2_": (F, H)}
        self.layers = torch.nn.ModuleDict(
            {
                prefix or "linear": torch.nn.Linear(
                    *size, bias=getattr(module, f"{prefix}bias") is not None, dtype=weight.dtype
                )
                for prefix, size in sizes.items()
            }
        )
        self.ours_by_name = {}
        for prefix, layer in ((f"{k}", v) for k, v in self.layers.items()):
            for name, parameter in layer.named_parameters():
                self.ours_by_name[("" if prefix == "linear" else prefix) + name] = parameter
        for name, parameter in self.norm.named_parameters():
            self.ours_by_name[f"layer_norm_{name}"] = parameter
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                self.ours_by_name[name].copy_(parameter)

    def forward(self, x):
        x = self.norm(x)
        layers = list(self.layers.values())
        x = layers[0](x)
        return layers[1](activate(self.activation, x)) if self.activation else x


def run(module, x, recipe, grad=None, **forward):
    """y, dX and the gradients by name of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with dfg.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **forward)
    y.backward(torch.ones_like(y) if grad is None else grad)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in got:
        assert torch.equal(got[name], wanted[name]), name
