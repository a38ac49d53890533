"""GroupedLinear on ranks: scales that do not agree are noticed, and what groups must be."""

from __future__ import annotations

import pytest

from tests.distributed.grouped_parity import N, run_cases, run_group_rules
from tests.distributed.launch import run_ranks

TIMEOUT = 600


@pytest.mark.parametrize("recipe", ["current", "nvfp4_1d"])
def test_switching_the_amax_reduction_off_is_noticed(recipe):
    """Bug case 30: scales of sharded experts."""
    reports = run_ranks(run_cases, 2, [recipe], False, timeout=TIMEOUT)
    errors = [error for report in reports for error in report["errors"]]
    for mode, operands in {"column": "dgrad operand 0", "row": "fprop operand 0"}.items():
        assert any(mode in error and operands in error for error in errors), mode
    assert any("fprop operand 1" in error for error in errors)


def test_rules_of_groups():
    for report in run_ranks(run_group_rules, 2, timeout=TIMEOUT):
        assert report["shapes"] == ((8, N // 2), (8, N // 2))
        bias, different = report["messages"]
        assert "bias=True with tp_size=2" in bias
        assert "the ranks of module 'a' resolved different recipes" in different
