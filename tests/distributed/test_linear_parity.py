"""One Linear on two ranks equals the same Linear on one, in planes, results and over SGD steps."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.linear_parity import run_cases
from tests.distributed.square_recipes import SQUARE
from tests.recipes import ALL

TIMEOUT = 600


@pytest.mark.slow
def test_every_recipe_mode_and_dtype_on_two_ranks():
    reports = run_ranks(run_cases, 2, sorted(ALL), timeout=TIMEOUT)
    for rank, report in enumerate(reports):
        assert report["cases"] == len(ALL) * 8
        assert not report["errors"], f"rank {rank}:\n" + "\n".join(report["errors"])
    # Were no sum ever cut differently, the limits above would be vacuous.
    assert max(report["sum_difference_fp32"] for report in reports) > 0


ROWS = (128, 64, 48, 7, 0)


@pytest.mark.slow
def test_every_recipe_with_any_number_of_rows_per_rank():
    """Sequence parallelism; bug case 32: blocks end where a rank's rows do."""
    recipes = sorted({**ALL, **SQUARE})
    for rank, report in enumerate(run_ranks(run_cases, 2, recipes, True, ROWS, timeout=TIMEOUT)):
        assert report["cases"] == len(recipes) * 2 * len(ROWS)
        assert not report["errors"], f"rank {rank}:\n" + "\n".join(report["errors"])


@pytest.mark.parametrize("recipe", ["current", "nvfp4_1d"])
def test_switching_the_amax_reduction_off_is_noticed(recipe):
    reports = run_ranks(run_cases, 2, [recipe], False, timeout=TIMEOUT)
    assert any("operand" in error for report in reports for error in report["errors"])
