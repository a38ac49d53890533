"""Activations: their formulas in FP64, which half a gate is, and unknown names."""

from __future__ import annotations

import math

import pytest
import torch

from dist_finegrain.modules.activations import ACTIVATIONS, activate, check_activation, is_gated


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "gelu": gelu,
    "geglu": gelu,
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "qgeglu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp_min(0),
    "reglu": lambda x: x.clamp_min(0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "srelu": lambda x: x.clamp_min(0) ** 2,
    "sreglu": lambda x: x.clamp_min(0) ** 2,
}


def test_every_name_has_a_formula_here():
    assert set(FORMULAS) == set(ACTIVATIONS)
    assert {name for name in ACTIVATIONS if is_gated(name)} == {
        "geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu",
    }  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients(name):
    h = torch.randn(16, 24, dtype=torch.float64, requires_grad=True)
    y = activate(name, h)
    function = FORMULAS[name]
    wanted = function(h[:, :12]) * h[:, 12:] if is_gated(name) else function(h)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), h)[0], torch.autograd.grad(wanted.sum(), h)[0]
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dtype_stays_also_under_torch_autocast(name):
    h = torch.randn(4, 8, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = activate(name, h)
    assert y.dtype == torch.float16 and torch.equal(y, activate(name, h))


def test_unknown_name():
    with pytest.raises(ValueError, match=r"activation='relu2'; accepted.*'srelu'"):
        check_activation("relu2")
