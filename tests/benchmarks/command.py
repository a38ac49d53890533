"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch

from dist_finegrain.formats import fused


def parts_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of ``known``, e.g. "linear,host"."""

    def parts(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; accepted: {known}")
        return found

    return parts


def execute(
    arguments: argparse.Namespace,
    run: Callable[[argparse.Namespace], dict],
    markdown: Callable[[dict], str],
    has_failed: Callable[[dict], bool],
    *,
    needs_kernels_on: tuple[str, ...] = ("cuda", "cpu"),
) -> int:
    """Run, print, write; 1 when a line failed, 2 on a device that needs compiled kernels."""
    device = torch.device(arguments.device)
    if device.type in needs_kernels_on and (reason := fused.why_not(device)):
        print(f"no compiled kernels: {reason}", file=sys.stderr)
        return 2
    report = run(arguments)
    print(markdown(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(has_failed(report))
