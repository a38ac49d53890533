"""What an unchanged recipe costs: entering autocast, and finding a module's binding again.

Run it: python -m tests.benchmarks.unchanged_recipe. One JSON object; medians in microseconds.
"""

from __future__ import annotations

import functools
import json
import statistics
import time

import torch

import dist_finegrain as dfg
from dist_finegrain import factories

ROUNDS, CALLS = 21, 2000


class Keyed:
    """A callable recipe with a key of its own."""

    def recipe_key(self):
        return ("mxfp8", 1)

    def __call__(self, role):
        return factories.mxfp8_factory(role)


def microseconds(function) -> float:
    """Median over rounds of the mean time of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return round(statistics.median(times), 2)


def main() -> None:
    captured = 3

    def closure(role, captured=captured):
        return factories.mxfp8_factory(role)

    module = dfg.Linear(16, 16, name="fc")
    device, dtype = torch.device("cpu"), torch.float32
    result = {}
    for name, factory in {
        "function": factories.mxfp8_factory,
        "partial": functools.partial(factories.nvfp4_factory, disable_rht=True),
        "closure": closure,
        "recipe_key": Keyed(),
    }.items():
        recipe = dfg.CustomRecipe(qfactory=factory, execution="emulate")

        def enter(recipe=recipe):
            with dfg.autocast(recipe=recipe):
                pass

        result[f"autocast_{name}"] = microseconds(enter)
    with dfg.autocast(recipe=recipe):
        module.bind(device, dtype)
        result["bind"] = microseconds(lambda: module.bind(device, dtype))
    print(json.dumps({"unit": "us", "torch": torch.__version__, **result}))


if __name__ == "__main__":
    main()
