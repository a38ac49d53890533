"""How fast GroupedLinear and LayerNormMLP are in every recipe, beside torch's BF16 of the process.

Run it: python -m tests.benchmarks.modules [--device cuda|cpu] [--quick] [--parts grouped,mlp]
[--grouped ExMxKxN] [--mlp MxHxF] [--only TEXT] [--repeats N] [--json PATH]. Markdown tables on
stdout, the numbers in the JSON file.

As in the benchmark of Linear every batch of a line stands between two batches of BF16, whose mean
it is compared with; y, dx and all weight gradients without biases, weights quantized every step.
grouped: against torch's grouped_mm; m_splits is a list where the line does not say otherwise. mlp:
RMSNorm, SwiGLU, against the same of torch.nn. Steps are enqueued back to back (cpu: on the host
clock, all emulated). bar: of anchors.md; bold beyond its milliseconds, below its speed-up or below
Transformer Engine of this process. saved, peak: as in the benchmark of Linear, parameters apart.
launches: kernels, copies and fills of one step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from dist_finegrain.extension import build_info

from .casts import CPU_THREADS, first_line
from .command import execute, parts_of
from .linear import _ERRORS, DEFAULT_REPEATS, QUICK_REPEATS, EagerTimer, mode_result, race
from .linear_cases import peak_bytes, relative_error, saved_bytes
from .linear_tables import has_failed, notes, number, table
from .modules_cases import (
    GROUPED_BAR,
    GROUPED_CASES,
    MLP_BAR,
    MLP_CASES,
    Case,
    GroupedMMStep,
    Problem,
    Step,
    grouped_step,
    kernels_of,
    mlp_step,
    plain_mlp_step,
)
from .modules_te import TransformerEngineModules
from .timing import HostTimer, count_launches

PARTS = ("grouped", "mlp")
DEFAULT_SHAPES = {
    "cuda": {"grouped": GROUPED_BAR, "mlp": MLP_BAR},
    "cpu": {"grouped": (4, 256, 128, 192), "mlp": (128, 64, 176)},
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One table: its lines, the shape that bars are for, and how steps are made.

    base: BF16's step; step: one of a case; te_step: the name of the method that makes one of
    Transformer Engine.
    """

    title: str
    base_name: str
    cases: tuple[Case, ...]
    bar_shape: tuple[int, ...]
    problem: Callable[..., Problem]
    base: Callable[[Problem], Step]
    step: Callable[[Case, Problem], Step]
    te_step: str


TABLES = {
    "grouped": Part(
        "GroupedLinear forward + backward, {} experts, {}×{}→{}", "torch grouped_mm, BF16",
        GROUPED_CASES, GROUPED_BAR, Problem.grouped, GroupedMMStep, grouped_step, "grouped_step",
    ),
    "mlp": Part(
        "LayerNormMLP (RMSNorm, SwiGLU) forward + backward, {}×{}, FFN {}", "torch.nn, BF16",
        MLP_CASES, MLP_BAR, Problem.mlp, plain_mlp_step, mlp_step, "mlp_step",
    ),
}  # fmt: skip


def measure(name: str, arguments: argparse.Namespace, te: TransformerEngineModules) -> list[dict]:
    """BF16 and every chosen line of one part; one that fails holds "error_text"."""
    part, shape, device = TABLES[name], arguments.shapes[name], arguments.torch_device
    is_gpu, problem = device.type == "cuda", part.problem(arguments.shapes[name], device)
    base = part.base(problem)
    wanted = base()
    first = {"shape": list(shape), "name": part.base_name, **describe(base, None, is_gpu)}
    lines, works = {}, {}
    for case in part.cases:
        if arguments.only.lower() not in case.name.lower():
            continue
        line = lines[case.name] = {"shape": list(shape), "name": case.name, "te": {}}
        if is_gpu and shape == part.bar_shape:
            line |= {"bar_ms": case.bar_ms, "bar_speed_up": case.bar}
        try:
            step = part.step(case, problem)
            step()  # delayed scaling has seen the data in the second one
            line |= {"error": relative_error(step(), wanted), **describe(step, first, is_gpu)}
            works[case.name, "step"] = step
        except _ERRORS as error:
            line["error_text"] = first_line(error)
        for kind in te.recipes.get(case.name, {}):
            found = line["te"][kind] = {}
            try:
                step = getattr(te, part.te_step)(case.name, kind, problem)
                step()
                found["error"] = relative_error(step(), wanted)
                found["peak_ratio"] = peak_bytes(step) / first["peak_bytes"]
                works[case.name, kind] = step
            except Exception as error:  # whatever it raises is its line's text
                found["error_text"] = first_line(error)
    del wanted
    make = EagerTimer if is_gpu else (lambda call: HostTimer(call, [None]))
    seconds, times, reasons = race(make, base, works, arguments.repeats)
    first["eager"] = {"ms": seconds * 1e3, "speed_up": 1.0}
    for line in lines.values():
        if "error_text" not in line:
            line["eager"] = mode_result(line["name"], times, reasons)
        for kind, found in line["te"].items():
            if "error_text" not in found:
                found |= mode_result(line["name"], times, reasons, kind)
    return [first, *lines.values()]


def describe(step: Step, first: dict | None, is_gpu: bool) -> dict:
    """What is known of a step without a clock; ratios to those of ``first``."""
    found = {"saved_bytes": saved_bytes(step), "peak_bytes": peak_bytes(step)}
    found["launches"] = count_launches(step, None) if is_gpu else None
    if kernels := kernels_of(step):
        found["kernels"] = kernels
    if first is not None:
        for what in ("saved", "peak"):
            of_first = first[f"{what}_bytes"]
            found[f"{what}_ratio"] = found[f"{what}_bytes"] / of_first if of_first else None
    return found


def run(arguments: argparse.Namespace) -> dict:
    """Every chosen part; lines that fail hold "error_text" and the others go on."""
    device = arguments.torch_device
    if device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    te = TransformerEngineModules(device)
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformer_engine": te.version,
        "build": str(build_info()),
        "repeats": arguments.repeats,
        **{part: [] for part in PARTS},
    }
    for part in arguments.parts:
        try:
            report[part] = measure(part, arguments, te)
        except _ERRORS as error:
            line = {"name": f"all of {part}", "shape": list(arguments.shapes[part])}
            report[part] = [line | {"error_text": first_line(error)}]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{part}: {len(report[part])} lines", file=sys.stderr)
    return report


HEAD = (
    "Recipe",
    "ms",
    "bar ms",
    "× BF16",
    "bar ×",
    "TE ×",
    "saved ×",
    "peak ×",
    "launches",
    "error",
)


def row(line: dict) -> list[str]:
    """One line of a table."""
    eager = line.get("eager", {})
    if reason := line.get("error_text") or eager.get("error_text"):
        return [line["name"], reason]
    of_te = {kind: t["speed_up"] for kind, t in line.get("te", {}).items() if "speed_up" in t}
    ms, speed_up = eager["ms"], eager["speed_up"]
    bar_ms, bar = line.get("bar_ms"), line.get("bar_speed_up")
    least = max([*of_te.values(), *([] if bar is None else [bar])], default=None)
    return [
        line["name"],
        number(ms, ".3f", bar_ms is not None and ms > bar_ms),
        number(bar_ms, ".2f"),
        number(speed_up, ".2f", least is not None and speed_up < least),
        number(bar, ".2f"),
        ", ".join(f"{value:.2f} {kind}" for kind, value in of_te.items()) or "–",
        number(line.get("saved_ratio"), ".2f"),
        number(line.get("peak_ratio"), ".2f"),
        number(line.get("launches"), "d"),
        number(line.get("error"), ".1e"),
    ]


def markdown(report: dict) -> str:
    """Every part that was run as a table."""
    te = report["transformer_engine"]
    sections = [f"{report['device']}, torch {report['torch']}, Transformer Engine: {te}"]
    for part in PARTS:
        if lines := report[part]:
            sections += [TABLES[part].title.format(*lines[0]["shape"])]
            sections += [table(HEAD, [row(line) for line in lines]), "\n".join(notes(lines))]
    return "\n\n".join(section for section in sections if section)


# Arguments.
def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments, shapes and repeats filled in for the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--parts", type=parts_of(PARTS), default=PARTS, help="e.g. grouped,mlp")
    parser.add_argument("--grouped", type=functools.partial(_shape, "ExMxKxN", "8x16384x4096x4096"))
    parser.add_argument("--mlp", type=functools.partial(_shape, "MxHxF", "8192x4096x14336"))
    parser.add_argument("--only", default="", help="lines whose name contains this text")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args(argv)
    name = arguments.device
    shapes = {part: getattr(arguments, part) for part in PARTS}
    arguments.shapes = {p: shape or DEFAULT_SHAPES[name][p] for p, shape in shapes.items()}
    repeats = QUICK_REPEATS if arguments.quick else DEFAULT_REPEATS
    arguments.repeats = arguments.repeats or repeats[name]
    index = torch.cuda.current_device() if name == "cuda" else None
    arguments.torch_device = torch.device(name, index)
    return arguments


def _shape(form: str, example: str, text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if len(sizes) != form.count("x") + 1 or not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}; accepted: {form}, e.g. {example}")
    return tuple(map(int, sizes))


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; 1 when a line failed, 2 on a GPU without compiled kernels."""

    def failed(report: dict) -> bool:
        return any(has_failed(line) for part in PARTS for line in report[part])

    return execute(parse(argv), run, markdown, failed, needs_kernels_on=("cuda",))


if __name__ == "__main__":
    sys.exit(main())
