"""A group of one rank: the code of several ranks, through the backend, gives the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dist_finegrain.distributed import collectives
from tests.distributed.launch import run_ranks
from tests.distributed.lone_rank import KINDS, SEQUENCE_PARALLEL, run_cases
from tests.recipes import ALL


def assert_same_bits_and_every_collective(report) -> None:
    """No bit of any case differs, and every collective of the package ran through the backend."""
    assert not report["differing"], "\n".join(report["differing"])
    kinds = report["kinds"]
    assert len(kinds) == len(KINDS) + len(SEQUENCE_PARALLEL)
    for (kind, sp), by_recipe in kinds.items():
        for recipe, found in by_recipe.items():
            assert "agreement" in found, (kind, sp, recipe)
            if kind.startswith("grouped_"):
                continue
            assert ("scatter sum" if sp else "sum") in found, (kind, sp, recipe)
            gathers = {"gather planes", "gather rows"} & found
            assert bool(gathers) == sp, (kind, sp, recipe)
        for recipe in {"current", "delayed", "nvfp4"} & by_recipe.keys():
            assert "max" in by_recipe[recipe], (kind, sp, recipe)
    ran = set().union(*(found for by_recipe in kinds.values() for found in by_recipe.values()))
    assert ran == {"agreement", "max", "sum", "scatter sum", "gather planes", "gather rows"}


def test_gloo_on_one_rank_changes_no_bit():
    (report,) = run_ranks(run_cases, 1, sorted(ALL), "cpu", "gloo")
    assert_same_bits_and_every_collective(report)


@pytest.mark.gpu
def test_nccl_on_one_rank_changes_no_bit():
    (report,) = run_ranks(run_cases, 1, sorted(ALL), "cuda", "nccl")
    assert_same_bits_and_every_collective(report)


def which_groups_communicate():
    alone = dist.new_group([0])
    with collectives.lone_ranks_communicate():
        forced = [collectives.communicates(group) for group in (alone, None)]
        total = collectives.all_reduce_sum(torch.ones(2), alone).tolist()
    return forced, [collectives.communicates(group) for group in (alone, None)], total


def test_only_a_real_group_is_forced_and_only_inside():
    assert run_ranks(which_groups_communicate, 1) == [([True, False], [False, False], [1.0, 1.0])]
