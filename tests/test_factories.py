"""Every ready factory and zoo recipe: total over roles, accepted by plan(), trains a Linear."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories, factory_zoo
from tests.recipes import emulated


def public_functions(module):
    return {
        name: f
        for name, f in inspect.getmembers(module, inspect.isfunction)
        if f.__module__ == module.__name__ and not name.startswith("_")
    }


FACTORIES = {**public_functions(factories), **public_functions(factory_zoo)}
# What each recipe multiplies with: formats of A in fprop, dgrad and wgrad.
KINDS = {
    "high_precision_fwd_mxfp8_bwd": ("identity", "mxfp8", "mxfp8"),
    "mxfp8_fwd_nvfp4_bwd": ("mxfp8", "nvfp4", "nvfp4"),
    "mxfp8_fwd_high_precision_bwd": ("mxfp8", "identity", "identity"),
    "nvfp4_1d_weight": ("nvfp4",) * 3,
    "nvfp4_row_scaled_fwd_mxfp8_bwd": ("nvfp4", "mxfp8", "mxfp8"),
    "nvfp4_row_scaled_fwd_high_precision_bwd": ("nvfp4", "identity", "identity"),
    "moe_nvfp4_row_scaled_fwd_mxfp8_bwd": ("mxfp8",) * 3,
    "float8_block_row_scaled_wgrad": ("float8_block", "float8_block", "float8_row"),
    "high_precision_factory": ("identity",) * 3,
    "delayed_scaling_factory": ("float8_delayed",) * 3,
    "current_scaling_factory": ("float8",) * 3,
    "row_scaling_factory": ("float8_row",) * 3,
    "float8_block_scaling_factory": ("float8_block",) * 3,
    "mxfp8_factory": ("mxfp8",) * 3,
    "nvfp4_factory": ("nvfp4",) * 3,
}


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_answers_every_role_and_trains(name):
    factory = FACTORIES[name]
    assert pickle.loads(pickle.dumps(factory)) is factory
    for role in (None, dfg.QuantizerRole(), dfg.QuantizerRole("new", "kind", "of.role")):
        assert isinstance(factory(role), (dfg.Quantizer, dfg.QuantizerRequest))
    module = dfg.Linear(64, 48, name="fc")
    result = dfg.plan(module, emulated(factory))
    kinds = tuple(row.formats[0].split("(")[0] for row in result.rows)
    assert result.ok and kinds == KINDS[name]
    with dfg.autocast(recipe=emulated(factory)):
        module(torch.randn(16, 64)).square().mean().backward()
    assert module.weight.grad.isfinite().all() and module.weight.grad.count_nonzero()


def test_block_with_row_scaled_wgrad_is_native_on_hopper_without_the_slow_kernel():
    recipe = dfg.CustomRecipe(factory_zoo.float8_block_row_scaled_wgrad, execution="native")
    result = dfg.plan(dfg.Linear(256, 256, name="fc"), recipe, device="sm_90")
    assert [r.kernel.split()[1] for r in result.rows] == ["128-block"] * 2 + ["rowwise"]


def test_moe_recipe_tells_experts_from_dense_layers():
    recipe = emulated(factory_zoo.moe_nvfp4_row_scaled_fwd_mxfp8_bwd)
    experts = dfg.plan(dfg.GroupedLinear(4, 64, 48, name="fc"), recipe)
    assert experts.ok and [row.gemm for row in experts.rows] == ["fprop", "dgrad", "wgrad"]
    assert experts.rows[0].formats == ("nvfp4(e2m1, row-scaled)",) * 2
    assert {f for row in experts.rows[1:] for f in row.formats} == {"mxfp8(e4m3)"}
    dense = dfg.plan(dfg.Linear(64, 48, name="fc"), recipe)
    assert {f for row in dense.rows for f in row.formats} == {"mxfp8(e4m3)"}
