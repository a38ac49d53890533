"""A table of what recipes do to a training: train_gpt.py for each, dense and with experts.

    python examples/recipe_table.py --out runs/table --steps 200 --jobs 2

Every run is a process of its own, on one rank; options that are not listed here are train_gpt.py's.
Writes table.md and table.json, and below them a folder for each run. Takes up again where it was
stopped: runs that are done, with the same options, are read, so changed code needs a new folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: make the examples package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dist_finegrain as dfg
from examples.job import Job, build_parser
from examples.recipes import zoo_recipes

SCRIPT = Path(__file__).with_name("train_gpt.py")
MODELS = {"GPT": (), "MoE": ("--moe",)}
LINEAR_WEIGHT = re.compile(r"\.(qkv|proj|fc1|fc2)\.weight\d*$")
HEADER = (
    "recipe",
    "model",
    "held-out loss, nats/byte",
    "against BF16",
    "cosine of Linear weights, least",
    "median",
    "of others, least",
    "norms within",
)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How near the gradients of one step are to high precision, over all parameters."""

    step: int
    weight_cosine: float  # least of the Linear and expert weights
    weight_cosine_median: float
    other_cosine: float  # least of all other parameters
    norm_error: float  # largest |norm ratio − 1| of any

    @classmethod
    def of(cls, record: dict[str, Any]) -> Agreement:
        """From a "gradients" line of metrics.jsonl."""
        weights, others = [], []
        for row in record["rows"]:
            kind = weights if LINEAR_WEIGHT.search(row["parameter"]) else others
            kind.append(row["cosine"])
        norm_error = max(abs(row["norm_ratio"] - 1) for row in record["rows"])
        least, median = min(weights), statistics.median(weights)
        return cls(record["step"], least, median, min(others), norm_error)


@dataclasses.dataclass(frozen=True)
class Row:
    """One run; gradients: those compared, of its first and its last step, none for BF16."""

    recipe: str
    model: str
    command: str
    held_out: float
    seconds: float
    gradients: tuple[Agreement, ...] = ()

    @classmethod
    def read(cls, recipe: str, model: str, command: str, records: list[dict]) -> Row:
        """From the lines of a finished run's metrics.jsonl."""
        final = next(record for record in records if record["event"] == "held_out")
        compared = tuple(Agreement.of(r) for r in records if r["event"] == "gradients")
        return cls(recipe, model, command, final["loss"], final["seconds"], compared)


def table(rows: Sequence[Row]) -> str:
    """The rows in markdown: the loss, beside BF16 of the same model, and gradients by step."""
    base = {row.model: row.held_out for row in rows if row.recipe == "bf16"}
    lines = [HEADER, ("---",) * len(HEADER)]
    for row in rows:
        is_compared = row.model in base and row.recipe != "bf16"
        change = f"{row.held_out / base[row.model] - 1:+.2%}" if is_compared else "–"
        name = "BF16" if row.recipe == "bf16" else f"`{row.recipe.split(':')[-1]}`"
        cells = [
            ", ".join(text.format(agreement) for agreement in row.gradients) or "–"
            for text in (
                "{0.weight_cosine:.3f}",
                "{0.weight_cosine_median:.3f}",
                "{0.other_cosine:.3f}",
                "{0.norm_error:.1%}",
            )
        ]
        loss = f"{row.held_out:.4f}"
        lines.append((name, row.model, loss, change, *cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def check(recipe: str, model: str, options: Sequence[str]) -> None:
    """Raise ValueError for a run that train_gpt.py would refuse, or that would be another one."""
    arguments = ["--recipe", recipe, *MODELS[model], *options]
    parsed = build_parser().parse_args(arguments)
    if parsed.recipe != recipe or bool(parsed.moe) != (model == "MoE"):
        raise ValueError(
            f"recipe={parsed.recipe} and moe={parsed.moe} for {recipe} of the {model}; accepted: "
            "recipes and models instead, e.g. recipes=bf16 with models=MoE"
        )
    Job.create(parsed, world=1)


def run(recipe: str, model: str, options: Sequence[str], folder: Path) -> Row:
    """Train, unless the folder holds the same run already; RuntimeError with its last lines."""
    arguments = ["--recipe", recipe, *MODELS[model], *options]
    if recipe != "bf16":
        arguments.append("--check-gradients")
    command = f"examples/{SCRIPT.name} {shlex.join(arguments)}"
    metrics, done = folder / "metrics.jsonl", folder / "command"
    if not (done.exists() and done.read_text() == command):
        done.unlink(missing_ok=True)  # what it stands for is about to be overwritten
        call = [sys.executable, str(SCRIPT), *arguments, "--out", str(folder)]
        finished = subprocess.run(call, capture_output=True, text=True, check=False)
        if finished.returncode:
            tail = "\n".join((finished.stdout + finished.stderr).splitlines()[-10:])
            raise RuntimeError(f"{command} ended with {finished.returncode}:\n{tail}")
        done.write_text(command)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Row.read(recipe, model, command, records)


def run_all(
    recipes: Sequence[str], models: Sequence[str], options: Sequence[str], out: Path, jobs: int
) -> list[Row]:
    """A row for every recipe and model, ``jobs`` runs at a time on equal shares of the cores."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the runs, not of this process
    pairs = [(recipe, model) for recipe in recipes for model in models]

    def one(pair: tuple[str, str]) -> Row:
        row = run(*pair, options, out / "-".join(pair).replace(":", "."))
        print(f"{row.recipe}, {row.model}: {row.held_out:.4f} in {row.seconds:.0f} s", flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, pair) for pair in pairs]
        try:
            return [future.result() for future in waiting]
        except RuntimeError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def facts(options: Sequence[str]) -> dict[str, Any]:
    """What the figures depend on besides the recipes."""
    return {
        "options": shlex.join(options),
        "threads": os.environ["OMP_NUM_THREADS"],
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "kernels": str(dfg.build_info()).splitlines()[0],
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def main(argv: list[str] | None = None) -> int:
    """The exit code: 2 for a mistake in the command line, 1 for a run that failed."""
    parser = argparse.ArgumentParser(
        prog="recipe_table.py", description=__doc__.split("\n", 1)[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and runs")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["bf16", *zoo_recipes()],
        help="as train_gpt.py's --recipe; default: bf16 and the whole zoo",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    own, options = parser.parse_known_args(argv)
    try:
        if own.jobs < 1:
            raise ValueError(f"jobs={own.jobs}; accepted: a positive integer, e.g. jobs=2")
        for recipe in own.recipes:  # a mistake ends it here, not after an hour
            for model in own.models:
                check(recipe, model, [*options, "--out", str(own.out)])
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    own.out.mkdir(parents=True, exist_ok=True)
    try:
        rows = run_all(own.recipes, own.models, options, own.out, own.jobs)
    except RuntimeError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    known = facts(options)
    note = ", ".join(f"{name} {value}" for name, value in known.items())
    text = table(rows)
    (own.out / "table.md").write_text(f"{text}\n\n{note}\n")
    record = {"facts": known, "rows": [dataclasses.asdict(row) for row in rows]}
    (own.out / "table.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{text}\n\n{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
