"""How fast casts, amaxes and decodes are, beside a copy of the same process.

Run it: python -m tests.benchmarks.casts [--device cuda|cpu] [--rows 16384 --columns 8192]
[--only TEXT] [--repeats N] [--json PATH]. A markdown table on stdout, the numbers in the JSON file.

cuda: microseconds per cast, from graph replays over inputs and outputs that rotate through more
memory than L2 holds; medians; the copy takes turns with each line. floor: least bytes at that copy
rate. launches: kernels, copies and fills of one call. TE: Transformer Engine in the same process.
cpu: against the plain-torch reference, with two threads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from .cast_cases import (
    BAR_SHAPE,
    CASES,
    Case,
    fused_call,
    inputs_of,
    least_bytes,
    reference_call,
)
from .command import execute
from .te_casts import te_casts
from .timing import count_launches, inputs_needed, make_timer, medians

DEFAULT_SHAPES = {"cuda": BAR_SHAPE, "cpu": (4096, 4096)}
DEFAULT_REPEATS = {"cuda": 21, "cpu": 5}
CPU_THREADS = 2


def matrices(shape: tuple[int, int], device: torch.device) -> list[torch.Tensor]:
    """Random normal BF16 inputs, enough of them to rotate over."""
    count = inputs_needed(2 * shape[0] * shape[1], device)
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        for _ in range(count)
    ]


def copy_call(x: torch.Tensor) -> torch.Tensor:
    """What a cast is measured against."""
    return torch.empty_like(x).copy_(x)


def measure_on_gpu(case: Case, xs: list[torch.Tensor], te_cast, repeats: int) -> dict:
    """Times in microseconds, bytes, launches; te_us None where there is nothing to compare with."""
    device, inputs = xs[0].device, inputs_of(case, xs)
    call = fused_call(case, xs[0])
    timers = [make_timer(copy_call, xs, device), make_timer(call, inputs, device)]
    result = {"te_us": None}
    if te_cast is not None:
        try:
            timers.append(make_timer(te_cast, xs, device))
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
            result["te_error"] = first_line(error)
    seconds = medians(timers, repeats)
    copy_rate = 2 * xs[0].nbytes / seconds[0]
    floor = least_bytes(case, xs[0]) / copy_rate
    result |= {
        "us": seconds[1] * 1e6,
        "copy_us": seconds[0] * 1e6,
        "copy_tb_s": copy_rate * 1e-12,
        "floor_us": floor * 1e6,
        "over_floor": seconds[1] / floor,
        "tb_s": least_bytes(case, xs[0]) / seconds[1] * 1e-12,
        "launches": count_launches(call, inputs[0]),
    }
    if len(seconds) > 2:
        result["te_us"] = seconds[2] * 1e6
    return result


def measure_on_cpu(case: Case, xs: list[torch.Tensor], te_cast, repeats: int) -> dict:
    """Times in milliseconds of the compiled kernels and of the reference."""
    inputs = inputs_of(case, xs)
    calls = (fused_call(case, xs[0]), reference_call(case, xs[0]))
    fast, reference = medians([make_timer(c, inputs, xs[0].device) for c in calls], repeats)
    return {
        "ms": fast * 1e3,
        "reference_ms": reference * 1e3,
        "speed_up": reference / fast,
        "elements_per_s": xs[0].numel() / fast,
    }


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def run(arguments: argparse.Namespace) -> dict:
    """Every chosen line; one that fails holds "error" and the others go on."""
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    shape = (arguments.rows, arguments.columns)
    te, te_version = te_casts(device)
    xs = matrices(shape, device)
    measure = measure_on_gpu if device.type == "cuda" else measure_on_cpu
    results = []
    for case in CASES:
        if arguments.only.lower() not in case.name.lower():
            continue
        line = {"name": case.name, "bar_us": case.bar if is_bar(device, shape) else None}
        try:
            line |= measure(case, xs, te.get(case.name), arguments.repeats)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            line["error"] = first_line(error)
        results.append(line)
        print(f"{case.name}: {line.get('error', 'done')}", file=sys.stderr)
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_gpu else f"CPU, {CPU_THREADS} threads",
        "torch": torch.__version__,
        "transformer_engine": te_version,
        "rows": shape[0],
        "columns": shape[1],
        "inputs": len(xs),
        "repeats": arguments.repeats,
        "results": results,
    }


def is_bar(device: torch.device, shape: tuple[int, int]) -> bool:
    """Whether the bars are for this size."""
    return device.type == "cuda" and shape == BAR_SHAPE


GPU_COLUMNS = {
    "µs": ("us", ".1f"),
    "bar": ("bar_us", ".0f"),
    "floor": ("floor_us", ".1f"),
    "× floor": ("over_floor", ".2f"),
    "TB/s": ("tb_s", ".2f"),
    "copy TB/s": ("copy_tb_s", ".2f"),
    "launches": ("launches", "d"),
    "TE µs": ("te_us", ".1f"),
}
CPU_COLUMNS = {
    "ms": ("ms", ".2f"),
    "elements/s": ("elements_per_s", ".2e"),
    "reference ms": ("reference_ms", ".1f"),
    "speed-up": ("speed_up", ".1f"),
}


def markdown(report: dict, columns: dict[str, tuple[str, str]]) -> str:
    """The report as a table; "–" where there is no number, bold where a bar is missed."""
    lines = [
        f"{report['device']}, torch {report['torch']}, BF16 {report['rows']}×{report['columns']}, "
        f"Transformer Engine: {report['transformer_engine']}",
        "",
        "| Work | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for line in report["results"]:
        if "error" in line:
            lines.append(f"| {line['name']} | {line['error']} |")
            continue
        cells = [
            "–" if line.get(key) is None else format(line[key], spec)
            for key, spec in columns.values()
        ]
        if line["bar_us"] is not None and line["us"] > line["bar_us"]:
            cells[0] = f"**{cells[0]}**"
        name = line["name"].replace("|", "\\|")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments, sizes and repeats filled in for the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--columns", type=int)
    parser.add_argument("--only", default="", help="lines whose name contains this text")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args(argv)
    rows, columns = DEFAULT_SHAPES[arguments.device]
    arguments.rows = arguments.rows or rows
    arguments.columns = arguments.columns or columns
    arguments.repeats = arguments.repeats or DEFAULT_REPEATS[arguments.device]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; 1 when a line failed, 2 without compiled kernels."""
    arguments = parse(argv)
    columns = GPU_COLUMNS if arguments.device == "cuda" else CPU_COLUMNS

    def failed(report: dict) -> bool:
        return any("error" in line for line in report["results"])

    return execute(arguments, run, lambda report: markdown(report, columns), failed)


if __name__ == "__main__":
    sys.exit(main())
