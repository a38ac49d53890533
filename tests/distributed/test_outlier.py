"""An outlier on one rank gives one scale on all; without the reduction it would not."""

from __future__ import annotations

import itertools

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.outlier_cases import AGREED, REDUCTIONS, run_cases, sharded_types

# By the reduction that is left out: recipes that show it, and layers in which it exists.
LEFT_OUT = {
    "all amaxes": (["current", "nvfp4", "row"], {"linear", "grouped"}),
    "input": (["current", "nvfp4"], {"linear", "grouped"}),
    "weight": (["current", "nvfp4"], {"linear", "grouped"}),
    "grad_output": (["current", "nvfp4"], {"linear", "grouped"}),
    "gathered columns": (["row", "block_row_scaled_wgrad"], {"linear"}),
    "second amaxes": (["dequantized_columns"], {"linear"}),
    "delayed": (["delayed", "delayed_children"], {"linear", "grouped"}),
}


@pytest.fixture(scope="module")
def ranks():
    recipes = {"none": list(AGREED), **{name: value[0] for name, value in LEFT_OUT.items()}}
    return run_ranks(run_cases, 2, recipes)


def scales_that_differ(ranks, left_out: str) -> dict:
    """Case → (tensor, direction) of every scale on which the ranks do not agree."""
    first, second = ranks
    found = {case: loud.keys() for case, (loud, _) in first.items() if case[0] == left_out}
    return {
        case: {key for key in keys if first[case][0][key] != second[case][0][key]}
        for case, keys in found.items()
    }


def test_every_agreed_scale_is_one_on_all_ranks_and_knows_the_outlier(ranks):
    """Bug case 30: current, delayed, row-scaled columns, NVFP4 global and post-RHT, experts."""
    assert not any(scales_that_differ(ranks, "none").values())
    for found in ranks:
        for (left_out, layer, recipe, mode, sp), (loud, quiet) in found.items():
            if left_out != "none":
                continue
            tensors = sharded_types(mode, sp)
            if "row" in recipe.split("_"):  # only what is gathered has a scale that all share
                tensors = {"input" if mode == "column" else "grad_output"} if sp else set()
            assert {tensor for tensor, _ in loud} == tensors, (layer, recipe, mode, sp)
            for key, scale in loud.items():
                assert scale != quiet[key], (layer, recipe, mode, sp, key)


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_leaving_a_reduction_out_parts_the_scales(ranks, left_out):
    """Bug case 30: each of them is what makes the test above pass."""
    recipes, layers = LEFT_OUT[left_out]
    differing = scales_that_differ(ranks, left_out)
    shown = {case[1:3] for case, keys in differing.items() if keys}
    everywhere = set(itertools.product(layers, recipes)) - {("grouped", "row")}  # local by design
    assert shown == everywhere
    tensors = {tensor for keys in differing.values() for tensor, _ in keys}
    if left_out in ("input", "weight", "grad_output"):
        assert tensors == {left_out}
    else:
        gathered = {"gathered columns": {"input", "grad_output"}}
        assert tensors == gathered.get(left_out, {"input", "weight", "grad_output"})
    if left_out in ("gathered columns", "second amaxes"):
        assert {d for keys in differing.values() for _, d in keys} == {"columnwise"}


def test_the_reductions_are_all_left_out_once():
    assert {"none", *LEFT_OUT} == REDUCTIONS.keys()
