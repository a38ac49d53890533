"""How fast Linear is in every recipe, beside torch's BF16 Linear of the same process.

Run it: python -m tests.benchmarks.linear [--device cuda|cpu] [--quick] [--parts linear,host,gemm]
[--shapes MxKxN,…] [--gemm-size N] [--only TEXT] [--repeats N] [--no-graph] [--json PATH]. Markdown
tables on stdout, the numbers in the JSON file.

Every batch of a line stands between two batches of BF16, and its speed-up is the median ratio to
their mean, so that a drifting clock cancels. linear: y, dX and dW of BF16 without bias, the weight
quantized every step. eager: steps enqueued back to back, between two events; graph: replays,
without the end of the step. floor: casts alone plus GEMMs alone, as shares of BF16's step. saved:
bytes kept for backward, the weight apart; peak: of one step, above what was allocated before it.
bar: what Transformer Engine 2.20.2 reached, or a target of our own; bold below Transformer Engine
of this process, without it below the bar's upper end. host: a tiny Linear on the host clock. gemm:
products of planes cast beforehand, from graphs. cpu: all emulated, on the host clock.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dist_finegrain.extension import build_info

from .casts import CPU_THREADS, first_line
from .command import execute, parts_of
from .linear_cases import (
    FIRST,
    HOST_BOUND,
    PAIRS,
    RECIPES,
    SECOND,
    TINY,
    Parts,
    Problem,
    Recipe,
    Step,
    finegrain_step,
    peak_bytes,
    product_error,
    relative_error,
    saved_bytes,
    torch_step,
)
from .linear_tables import has_failed, markdown
from .te_linear import TransformerEngine
from .timing import GraphTimer, HostTimer, inputs_needed, make_timer, medians

DEFAULT_SHAPES = {"cuda": (FIRST, SECOND, HOST_BOUND), "cpu": ((256, 256, 384),)}
DEFAULT_GEMM_SIZE = {"cuda": 8192, "cpu": 256}
DEFAULT_REPEATS, QUICK_REPEATS = {"cuda": 11, "cpu": 3}, {"cuda": 3, "cpu": 1}
PARTS = ("linear", "host", "gemm")
HOST_ROUNDS = 5  # per repeat
_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError)
_BATCH_SECONDS = 30e-3
_HOST_BATCH_SECONDS = 50e-3  # a few hundred tiny steps, as a training loop runs them
_WARM_STEPS, _LEAST_STEPS, _MOST_STEPS, _WARM_TINY_STEPS = 3, 3, 300, 20


class EagerTimer:
    """Steps enqueued one after another; device time between two events."""

    def __init__(self, call: Callable[[object], object]):
        self.call, self.steps = call, 1
        for _ in range(_WARM_STEPS):
            call(None)
        steps = round(_BATCH_SECONDS / max(self.seconds(), 1e-7))
        self.steps = min(max(steps, _LEAST_STEPS), _MOST_STEPS)

    def seconds(self) -> float:
        """Mean time of a step of one batch; a step before it keeps the device from waiting."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.call(None)
        start.record()
        for _ in range(self.steps):
            self.call(None)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / self.steps


def take_turns(base, timers: Sequence, repeats: int) -> tuple[float, list[tuple[float, float]]]:
    """Median seconds of ``base``; of each timer its own and how they relate to base's around it."""
    times, ratios, of_base = [[] for _ in timers], [[] for _ in timers], []
    for _ in range(repeats):
        of_base.append(base.seconds())
        for time, ratio, timer in zip(times, ratios, timers, strict=True):
            time.append(timer.seconds())
            of_base.append(base.seconds())
            ratio.append(2 * time[-1] / (of_base[-2] + of_base[-1]))
    median = statistics.median
    return median(of_base), [(median(t), median(r)) for t, r in zip(times, ratios, strict=True)]


def race(make: Callable, base, works: dict, repeats: int) -> tuple[float, dict, dict]:
    """(seconds of ``base``, key → (seconds, share of base's), key → why it cannot be timed).

    make: the timer of a work. Raises what it raises for ``base``.
    """
    base_timer, timers, reasons = make(base), {}, {}
    for key, work in works.items():
        try:
            timers[key] = make(work)
        except _ERRORS as error:
            reasons[key] = first_line(error)
    seconds, found = take_turns(base_timer, list(timers.values()), repeats)
    return seconds, dict(zip(timers, found, strict=True)), reasons


def mode_result(name: str, times: dict, reasons: dict, work: str = "step") -> dict:
    """One recipe in one mode: the step's time, and the floor where its parts were timed."""
    if (name, work) in reasons:
        return {"error_text": reasons[name, work]}
    seconds, share = times[name, work]
    result = {"ms": seconds * 1e3, "speed_up": 1 / share}
    if work == "step" and (name, "casts") in times and (name, "gemms") in times:
        casts, gemms = (times[name, part][1] for part in ("casts", "gemms"))
        result |= {
            "casts_share": casts,
            "gemms_share": gemms,
            "floor_speed_up": 1 / (casts + gemms),
            "of_floor": (casts + gemms) / share,
        }
    return result


def measure_linear(
    shape: tuple[int, int, int], arguments: argparse.Namespace, te: TransformerEngine
) -> list[dict]:
    """BF16 and every chosen recipe of one shape; one that fails holds "error_text"."""
    device, problem = arguments.torch_device, Problem.random(shape, arguments.torch_device)
    is_gpu = device.type == "cuda"
    base = torch_step(problem)
    wanted = base()
    saved, peak = saved_bytes(base), peak_bytes(base)
    first = {"shape": list(shape), "name": "torch BF16", "saved_bytes": saved, "peak_bytes": peak}
    lines, steps, works = {}, {}, {}
    for case in chosen(arguments):
        line = lines[case.name] = {"shape": list(shape), "name": case.name, "te": {}}
        line["bar"] = case.bars.get(shape) if is_gpu else None
        try:
            step, parts, found = prepare(case, problem, wanted, saved, peak)
        except _ERRORS as error:
            line["error_text"] = first_line(error)
        else:
            line |= found
            steps[case.name] = works[case.name, "step"] = step
            works |= {(case.name, work): getattr(parts, work) for work in ("casts", "gemms")}
        of_te, line["te"] = prepare_te(te, case.name, problem, wanted, peak)
        works |= {(case.name, kind): step for kind, step in of_te.items()}
    del wanted
    make = EagerTimer if is_gpu else (lambda call: HostTimer(call, [None]))
    seconds, times, reasons = race(make, base, works, arguments.repeats)
    first["eager"] = {"ms": seconds * 1e3, "speed_up": 1.0}
    for name in steps:
        lines[name]["eager"] = mode_result(name, times, reasons)
    for name, line in lines.items():
        for kind, found in line["te"].items():
            if "error_text" not in found:
                found |= mode_result(name, times, reasons, kind)
    if is_gpu and not arguments.no_graph:
        replayed = {key: call for key, call in works.items() if key[1] in ("casts", "gemms")}
        replayed |= {(name, "step"): step.captured for name, step in steps.items()}
        try:
            seconds, times, reasons = race(graph_timer, base.captured, replayed, arguments.repeats)
        except _ERRORS as error:
            first["graph"] = {"error_text": first_line(error)}
        else:
            first["graph"] = {"ms": seconds * 1e3, "speed_up": 1.0}
            for name in steps:
                lines[name]["graph"] = mode_result(name, times, reasons)
    return [first, *lines.values()]


def graph_timer(call: Callable[[object], object]) -> GraphTimer:
    """Replays of one call."""
    return GraphTimer(call, [None])


def chosen(arguments: argparse.Namespace) -> list[Recipe]:
    """Recipes whose name contains the text asked for."""
    return [case for case in RECIPES if arguments.only.lower() in case.name.lower()]


def prepare(case: Recipe, problem: Problem, wanted, saved: int, peak: int | None):
    """(step, its parts, what is known without a clock): run once, compared with BF16's results."""
    step = finegrain_step(case, problem)
    # The second one: delayed scaling has seen the data then.
    step()
    found = {"error": relative_error(step(), wanted)}
    parts = Parts(step)
    found |= {"kernels": parts.kernels(), "saved_bytes": saved_bytes(step)}
    found["saved_ratio"] = found["saved_bytes"] / saved
    found["peak_bytes"] = peak_bytes(step)
    found["peak_ratio"] = found["peak_bytes"] / peak if peak else None
    return step, parts, found


def prepare_te(te: TransformerEngine, name: str, problem: Problem, wanted, peak: int | None):
    """(kind → step, kind → what is known of it); whatever it raises is its line's text."""
    steps, found = {}, {}
    for kind in te.recipes.get(name, {}):
        try:
            step = te.step(name, kind, problem)
            step()
            found[kind] = {"error": relative_error(step(), wanted)}
            found[kind]["peak_ratio"] = peak_bytes(step) / peak
            steps[kind] = step
        except Exception as error:
            found[kind] = {"error_text": first_line(error)}
    return steps, found


def measure_host(arguments: argparse.Namespace, te: TransformerEngine) -> list[dict]:
    """Host milliseconds of a tiny step, medians of batches that take turns."""
    device, problem = arguments.torch_device, Problem.random(TINY, arguments.torch_device)
    lines, timers = [], []

    def add(name: str, bar: float | None, make: Callable[[], Step], errors=_ERRORS) -> None:
        line = {"name": name, "bar_ms": bar if device.type == "cuda" else None}
        try:
            step = make()
            for _ in range(_WARM_TINY_STEPS):
                step()
            timers.append((line, HostTimer(step, [None], _HOST_BATCH_SECONDS)))
        except errors as error:
            line["error_text"] = first_line(error)
        lines.append(line)

    add("torch BF16", None, functools.partial(torch_step, problem), errors=())
    for case in chosen(arguments):
        if case.host_bar_ms is not None:
            add(case.name, case.host_bar_ms, functools.partial(finegrain_step, case, problem))
            for kind in te.recipes.get(case.name, {}):
                make = functools.partial(te.step, case.name, kind, problem)
                add(f"TE {case.name}, {kind}", None, make, Exception)
    seconds = medians([timer for _, timer in timers], HOST_ROUNDS * arguments.repeats)
    for (line, _), time in zip(timers, seconds, strict=True):
        line |= {"ms": time * 1e3, "over_bf16": time / seconds[0]}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return lines


def measure_gemm(arguments: argparse.Namespace) -> list[dict]:
    """Square products of every pair and backend; BF16's torch.mm first."""
    device, size = arguments.torch_device, arguments.gemm_size
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> torch.Tensor:
        empty = torch.empty(size, size, dtype=torch.bfloat16, device=device)
        return empty.normal_(generator=generator)

    count = inputs_needed(2 * size * size, device)
    matrices = [(normal(), normal()) for _ in range(count)]

    def make(work):
        call, inputs = work
        return make_timer(call, inputs, device)

    calls, errors, failed = {}, {}, []
    for pair in PAIRS:
        if arguments.only.lower() not in pair.name.lower():
            continue
        try:
            planes = [pair.operands(*both) for both in matrices]
            for backend, call in pair.calls(*planes[0], device).items():
                errors[pair.name, backend] = product_error(call(planes[0]), *planes[0])
                calls[pair.name, backend] = (call, planes)
        except _ERRORS as error:
            failed.append({"name": pair.name, "backend": "–", "error_text": first_line(error)})
    base = (lambda pair: torch.mm(pair[0], pair[1].t()), matrices)
    seconds, times, reasons = race(make, base, calls, arguments.repeats)
    flops = 2 * size**3
    lines = [{"name": "BF16", "backend": "mm", "tflop_s": flops / seconds * 1e-12, "ratio": 1.0}]
    for key in calls:
        line = {"name": key[0], "backend": key[1], "error": errors[key]}
        if key in reasons:
            line["error_text"] = reasons[key]
        else:
            time, share = times[key]
            line |= {"tflop_s": flops / time * 1e-12, "ratio": 1 / share}
        lines.append(line)
    return lines + failed


def run(arguments: argparse.Namespace) -> dict:
    """Every chosen part; lines that fail hold "error_text" and the others go on."""
    device = arguments.torch_device
    if device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    te = TransformerEngine(device)
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformer_engine": te.version,
        "build": str(build_info()),
        "repeats": arguments.repeats,
        "gemm_size": arguments.gemm_size,
        "tiny": list(TINY),
        **{part: [] for part in PARTS},
    }
    works = {
        "linear": [functools.partial(measure_linear, s, arguments, te) for s in arguments.shapes],
        "host": [functools.partial(measure_host, arguments, te)],
        "gemm": [functools.partial(measure_gemm, arguments)],
    }
    for part in arguments.parts:
        for index, work in enumerate(works[part]):
            try:
                report[part] += work()
            except _ERRORS as error:
                shape = list(arguments.shapes[index]) if part == "linear" else None
                name = f"all of {part}"
                line = {"name": name, "backend": "–", "shape": shape}
                report[part].append(line | {"error_text": first_line(error)})
            gc.collect()  # graphs and modules with their memory
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"{part} {index}: {len(report[part])} lines", file=sys.stderr)
    return report


# Arguments.
def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments, sizes and repeats filled in for the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument(
        "--parts", type=parts_of(PARTS), default=PARTS, help="e.g. linear,host,gemm"
    )
    parser.add_argument("--shapes", type=_shapes, help="MxKxN, e.g. 16384x8192x8192,64x32x32")
    parser.add_argument("--gemm-size", type=int)
    parser.add_argument("--only", default="", help="lines whose name contains this text")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--no-graph", action="store_true", help="no graphs of Linear")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args(argv)
    name = arguments.device
    arguments.shapes = arguments.shapes or DEFAULT_SHAPES[name]
    arguments.gemm_size = arguments.gemm_size or DEFAULT_GEMM_SIZE[name]
    repeats = QUICK_REPEATS if arguments.quick else DEFAULT_REPEATS
    arguments.repeats = arguments.repeats or repeats[name]
    index = torch.cuda.current_device() if name == "cuda" else None
    arguments.torch_device = torch.device(name, index)
    return arguments


def _shapes(text: str) -> tuple[tuple[int, ...], ...]:
    shapes = tuple(tuple(map(int, shape.split("x"))) for shape in text.split(","))
    if any(len(shape) != 3 or min(shape) < 1 for shape in shapes):
        raise argparse.ArgumentTypeError(f"{text}; accepted: MxKxN, e.g. 16384x8192x8192")
    return shapes


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; 1 when a line failed, 2 on a GPU without compiled kernels."""

    def failed(report: dict) -> bool:
        return any(has_failed(line) for part in PARTS for line in report[part])

    return execute(parse(argv), run, markdown, failed, needs_kernels_on=("cuda",))


if __name__ == "__main__":
    sys.exit(main())
