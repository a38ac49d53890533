"""One Linear on ranks whose scales do not agree is told from the same Linear on one."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.linear_parity import run_cases

TIMEOUT = 600


@pytest.mark.parametrize("recipe", ["current", "nvfp4_1d"])
def test_switching_the_amax_reduction_off_is_noticed(recipe):
    reports = run_ranks(run_cases, 2, [recipe], False, timeout=TIMEOUT)
    assert any("operand" in error for report in reports for error in report["errors"])
