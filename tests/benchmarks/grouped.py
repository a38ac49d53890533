"""How fast row-scaled FP8 GEMMs of experts are, beside BF16's of the same process.

Run it: python -m tests.benchmarks.grouped [--device cuda|cpu] [--experts 8] [--tokens 32768]
[--n 2048 --k 7168] [--skewed] [--only TEXT] [--repeats N] [--json PATH]. A markdown table on
stdout, the numbers in the JSON file.

cuda: from graph replays over operands that rotate through more memory than L2 holds; medians; BF16
and FP8 of one GEMM take turns. cpu: the loop over experts, on the host clock. Operands are cast
beforehand. error: relative, against FP64 of what the planes decode to, for the first expert with
tokens. --skewed: half of the experts have no tokens, one has half of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from dist_finegrain.formats.float8 import Float8RowFormat, Float8TensorFormat
from dist_finegrain.formats.fused_grouped import cast_grouped, measure_grouped
from dist_finegrain.formats.identity import IdentityFormat
from dist_finegrain.formats.plane import Format, Plane
from dist_finegrain.ops.experts import Experts
from dist_finegrain.ops.gemm import device_kind
from dist_finegrain.ops.grouped import GEMMS, GroupedKernel, grouped_gemm, select_grouped

from .casts import first_line
from .command import execute
from .timing import count_launches, inputs_needed, make_timer, medians

BAR_SIZES = {"experts": 8, "tokens": 32768, "n": 2048, "k": 7168}
DEFAULT_SIZES = {"cuda": BAR_SIZES, "cpu": {"experts": 4, "tokens": 512, "n": 256, "k": 256}}
DEFAULT_REPEATS = {"cuda": 21, "cpu": 5}
ROW, TENSOR, BF16 = Float8RowFormat("e4m3"), Float8TensorFormat("e4m3"), IdentityFormat()


@dataclasses.dataclass(frozen=True)
class Variant:
    """FP8 operands of one format; bars: least speed-up over BF16 by GEMM.

    knows_sizes: the host knows the tokens of each expert, else the device alone.
    """

    name: str
    format: Format
    fast: bool
    bars: dict[str, float] = dataclasses.field(default_factory=dict)
    knows_sizes: bool = True


VARIANTS = (
    Variant("row-scaled, exact", ROW, False, {"fprop": 1.35, "wgrad": 1.4}),
    Variant("row-scaled, fast", ROW, True, {"fprop": 1.5, "wgrad": 1.6}),
    Variant("per-tensor, exact", TENSOR, False),
    Variant("per-tensor, fast", TENSOR, True),
    Variant("row-scaled, exact, sizes on the device", ROW, False, knows_sizes=False),
    Variant("row-scaled, fast, sizes on the device", ROW, True, knows_sizes=False),
)


@dataclasses.dataclass(frozen=True)
class Operands:
    """What one call of ``grouped_gemm`` reads."""

    a: Plane
    b: Experts | Plane
    ends: torch.Tensor
    column_ends: torch.Tensor | None


def token_split(experts: int, tokens: int, is_skewed: bool) -> list[int]:
    """Tokens of each expert: equal, or half of the experts without any and one with half of all."""
    if not is_skewed:
        return [tokens // experts] * (experts - 1) + [tokens - tokens // experts * (experts - 1)]
    busy = max(experts // 2, 1)
    rest = tokens // 2 // max(busy - 1, 1) if busy > 1 else 0
    sizes = [tokens - rest * (busy - 1), *[rest] * (busy - 1), *[0] * (experts - busy)]
    return sizes[busy:] + sizes[:busy]


def make_operands(
    gemm: str, format: Format, split: list[int], n: int, k: int, device: torch.device, seed: int
) -> Operands:
    """Random normal BF16 matrices, cast; weights of all experts in one buffer."""
    generator = torch.Generator(device).manual_seed(seed)
    experts = len(split)

    def normal(rows: int, columns: int) -> torch.Tensor:
        empty = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return empty.normal_(generator=generator)

    def cast(x: torch.Tensor, ends: torch.Tensor, is_row: bool):
        formats = (format, None) if is_row else (None, format)
        row, column = measure_grouped(x, ends, *formats)
        return cast_grouped(x, ends, *formats, row_statistic=row, column_statistic=column)

    ends = torch.tensor(split, device=device).cumsum(0).to(torch.int32)
    if gemm == "wgrad":
        dy, x = (cast(normal(sum(split), width), ends, False) for width in (n, k))
        return Operands(dy.column, x.column, ends, dy.column_ends)
    weights = normal(experts * n, k)
    weight_ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * n
    a = cast(normal(sum(split), k if gemm == "fprop" else n), ends, True).row
    if gemm == "fprop":
        return Operands(
            a, Experts.of_rows(cast(weights, weight_ends, True).row, experts), ends, None
        )
    column = cast(weights, weight_ends, False).column
    return Operands(a, Experts.of_columns(column, experts, n), ends, None)


def call_of(gemm: str, kernel: GroupedKernel, fast: bool, sizes: list[int] | None):
    """The product as a function of its operands, BF16 in the end."""

    def call(o: Operands) -> torch.Tensor:
        return grouped_gemm(
            kernel, gemm, o.a, o.b, o.ends, torch.bfloat16, column_ends=o.column_ends, sizes=sizes,
            fast=fast,
        )  # fmt: skip

    return call


def error_of(gemm: str, call, o: Operands, split: list[int]) -> float:
    """Relative Frobenius error of the first expert with tokens, at most 256 rows of the result."""
    e = next(index for index, m in enumerate(split) if m)
    got, rows = call(o), 256
    starts = [0, *(o.ends if o.column_ends is None else o.column_ends).tolist()]
    part = slice(starts[e], starts[e + 1])
    if gemm == "wgrad":
        got = got[e, :rows]
        left, right = (_decoded(plane, e)[:, part] for plane in (o.a, o.b))
        left = left[:rows]
    else:
        got = got[part][:rows]
        left = _decoded(o.a, e)[part][:rows]
        weight = o.b.expert(e)
        right = weight.format.decode(weight)
    wanted = left.double() @ right.double().t()
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def _decoded(plane: Plane, expert: int) -> torch.Tensor:
    """Values of a grouped plane, right where they are ``expert``'s."""
    outer = plane.outer
    if outer is not None and (plane.format.statistic != "row" or outer.dim() == 2):
        own = outer[expert] if outer.dim() == 2 else outer[expert : expert + 1]
        plane = dataclasses.replace(plane, parts=(*plane.parts[:2], own))
    return plane.format.decode(plane)


def measure(gemm: str, arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    """BF16 and every FP8 variant of one GEMM, timed in turns."""
    n, k, kind = arguments.n, arguments.k, device_kind(device)
    split = token_split(arguments.experts, arguments.tokens, arguments.skewed)
    flops = 2 * arguments.tokens * n * k
    count = inputs_needed(arguments.tokens * (n + k) + arguments.experts * n * k, device)
    variants = [Variant("BF16", BF16, False, knows_sizes=False), *VARIANTS]
    operands, calls = {}, []
    for variant in variants:
        format = variant.format
        if format not in operands:
            operands[format] = [
                make_operands(gemm, format, split, n, k, device, seed) for seed in range(count)
            ]
        mode = "native" if device.type == "cuda" else "emulate"
        known = variant.knows_sizes
        kernel = select_grouped(gemm, format, format, kind, mode, k=k, n=n, sizes_known=known)
        calls.append(call_of(gemm, kernel, variant.fast, split if known else None))
    timers = [
        make_timer(call, operands[v.format], device)
        for v, call in zip(variants, calls, strict=True)
    ]
    seconds = medians(timers, arguments.repeats)
    lines = []
    for variant, call, time in zip(variants, calls, seconds, strict=True):
        first = operands[variant.format][0]
        line = {
            "gemm": gemm,
            "name": variant.name,
            "us": time * 1e6,
            "tflop_s": flops / time * 1e-12,
            "speed_up": seconds[0] / time,
            "bar": variant.bars.get(gemm) if is_bar(arguments, device) else None,
            "error": error_of(gemm, call, first, split),
        }
        line["launches"] = count_launches(call, first) if device.type == "cuda" else None
        lines.append(line)
    return lines


def is_bar(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Whether the bars are for these sizes."""
    sizes = {name: getattr(arguments, name) for name in BAR_SIZES}
    return device.type == "cuda" and sizes == BAR_SIZES and not arguments.skewed


def run(arguments: argparse.Namespace) -> dict:
    """Every chosen GEMM; one that fails holds "error_text" and the others go on."""
    device = torch.device(arguments.device)
    results = []
    for gemm in GEMMS:
        if arguments.only.lower() not in gemm:
            continue
        try:
            results += measure(gemm, arguments, device)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            results.append({"gemm": gemm, "name": "–", "error_text": first_line(error)})
        print(f"{gemm}: {results[-1].get('error_text', 'done')}", file=sys.stderr)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        **{name: getattr(arguments, name) for name in BAR_SIZES},
        "split": token_split(arguments.experts, arguments.tokens, arguments.skewed),
        "repeats": arguments.repeats,
        "results": results,
    }


COLUMNS = {
    "× BF16": ("speed_up", ".2f"),
    "bar": ("bar", ".2f"),
    "µs": ("us", ".1f"),
    "TFLOP/s": ("tflop_s", ".1f"),
    "error": ("error", ".1e"),
    "launches": ("launches", "d"),
}


def markdown(report: dict) -> str:
    """The report as a table; "–" where there is no number, bold where a bar is missed."""
    lines = [
        f"{report['device']}, torch {report['torch']}, {report['experts']} experts, "
        f"{report['tokens']} tokens, N {report['n']}, K {report['k']}, split {report['split']}",
        "",
        "| GEMM | Operands | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for line in report["results"]:
        if "error_text" in line:
            lines.append(f"| {line['gemm']} | {line['name']} | {line['error_text']} |")
            continue
        cells = [
            "–" if line[key] is None else format(line[key], spec) for key, spec in COLUMNS.values()
        ]
        if line["bar"] is not None and line["speed_up"] < line["bar"]:
            cells[0] = f"**{cells[0]}**"
        lines.append(f"| {line['gemm']} | {line['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments, sizes and repeats filled in for the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    for name in BAR_SIZES:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--skewed", action="store_true", help="experts without tokens")
    parser.add_argument("--only", default="", help="GEMMs whose name contains this text")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args(argv)
    for name, size in DEFAULT_SIZES[arguments.device].items():
        setattr(arguments, name, getattr(arguments, name) or size)
    arguments.repeats = arguments.repeats or DEFAULT_REPEATS[arguments.device]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; 1 when a GEMM failed, 2 without compiled kernels."""

    def failed(report: dict) -> bool:
        return any("error_text" in line for line in report["results"])

    return execute(parse(argv), run, markdown, failed)


if __name__ == "__main__":
    sys.exit(main())
