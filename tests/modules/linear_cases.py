"""Layers, steps and comparisons that the tests of Linear share."""

from __future__ import annotations

import torch

import dist_finegrain as dfg


def make(k=96, n=80, dtype=torch.float32, name="demo.fc1", **options):
    torch.manual_seed(0)
    return dfg.Linear(k, n, params_dtype=dtype, name=name, **options)


def run(module, x, recipe, grad=None, **forward):
    """y, dX, dW, dbias of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    with dfg.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **forward)
    y.backward(torch.ones_like(y) if grad is None else grad)
    bias_grad = None if module.bias is None else module.bias.grad
    return y.detach(), x.grad, module.weight.grad, bias_grad


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def sqnr_db(got, wanted):
    got, wanted = got.double(), wanted.double()
    return 10 * torch.log10(wanted.square().sum() / (got - wanted).square().sum()).item()
