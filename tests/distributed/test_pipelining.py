"""Delayed scaling under torch's Schedule1F1B: the bits of plain accumulation in one process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.distributed.pipeline_stages import (
    BRANCH_STEP,
    CHECKPOINTS,
    MICROBATCHES,
    STEPS,
    one_process,
    pipelined_every_way,
)

RECIPES = ["delayed", "delayed_children"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(pipelined_every_way, 2, RECIPES)


def is_same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("checkpointing", CHECKPOINTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_stages_of_four_microbatches_change_no_bit(ranks, recipe, checkpointing):
    """Bug case 14, across ranks: gradients, scales and histories, recomputed or not."""
    for step, wanted in enumerate(one_process(recipe)):
        for rank, report in enumerate(ranks):
            got = report[recipe, checkpointing][step]
            expected = wanted[rank]
            assert got.keys() == expected.keys()
            differing = [k for k in got if k != "branched" and not is_same(got[k], expected[k])]
            assert not differing, (step, rank, differing)
            times = 1 if checkpointing == "none" else 2
            assert got["branched"] == times * expected["branched"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_branch_that_does_not_run_keeps_its_history(ranks, recipe):
    """It runs in one step only, for some microbatches; histories grow by one then, else stay."""
    for report in ranks:
        steps = report[recipe, "none"]
        assert 0 < steps[BRANCH_STEP]["branched"] < MICROBATCHES
        histories = [{k: v for k, v in s.items() if k[-1] == "history"} for s in steps]
        for key, value in histories[-1].items():
            name, slot = key[0][0], key[0][3]
            recorded = slot in ("input", "weight", "grad_output")
            ran = 1 if name == "branch" else STEPS
            assert value.count_nonzero() == min(ran, len(value)) * recorded, key
            if name == "branch":
                assert torch.equal(value, histories[BRANCH_STEP][key])
        assert {key[0][0] for key in histories[0]} == {"mlp.fc1", "mlp.fc2"}
        assert {key[0][0] for key in histories[-1]} == {"mlp.fc1", "mlp.fc2", "branch"}
