"""What test_rank_parity runs on every rank: the cases of all modules in one process group."""

from __future__ import annotations

import time

from tests.distributed import grouped_parity, layernorm_parity, linear_parity

RUNNERS = {
    "linear": linear_parity.run_cases,
    "linear rows": linear_parity.run_rows,
    "layernorm": layernorm_parity.run_cases,
    "layernorm rows": layernorm_parity.run_rows,
    "grouped": grouped_parity.run_cases,
}


def run_sections(sections: dict[str, list[str]]) -> dict[str, dict]:
    """By section of ``RUNNERS``: what its runner reports of these recipes, and its seconds."""
    reports = {}
    for section, recipes in sections.items():
        start = time.monotonic()
        reports[section] = RUNNERS[section](recipes)
        reports[section]["seconds"] = round(time.monotonic() - start, 1)
    return reports
