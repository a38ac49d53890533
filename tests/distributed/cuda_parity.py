"""What test_cuda_ranks runs on two ranks that share one GPU: the cases of the CPU, on the device.

gloo carries CUDA tensors between processes on one device, which NCCL refuses. BF16 only: native FP8
GEMMs accumulate sums with fewer bits than FP32 parity needs.
"""

from __future__ import annotations

import itertools
from unittest import mock

import torch
import torch.distributed as dist

from dist_finegrain import extension, factory_zoo
from dist_finegrain.modules.direct_grouped import DirectGrouped
from examples.recipes import zoo_recipes
from tests.distributed.grouped_parity import GroupedCase
from tests.distributed.linear_parity import Case
from tests.recipes import ALL

MODES = ("column", "row")


def zoo() -> dict:
    """Every recipe of the zoo by its name."""
    names = [path.partition(":")[2] for path in zoo_recipes()]
    return {name: getattr(factory_zoo, name) for name in names}


def linear_errors(recipe: str, mode: str, group, device: str) -> list[str]:
    """A Linear under sequence parallelism."""
    errors, _ = _on(device, Case(recipe, mode, True, torch.bfloat16, group)).run()
    return errors


def grouped_errors(recipe: str, mode: str, group, device: str) -> list[str]:
    """A GroupedLinear, the whole one too by the code whose planes can be noted."""
    with mock.patch.object(DirectGrouped, "takes", lambda *tensors: False):
        return _on(device, GroupedCase(recipe, mode, torch.bfloat16, group)).run()


def _on(device: str, case):
    """The case with its layers and data on ``device``; its random numbers are the CPU's."""
    case.x, case.dy = case.x.to(device), case.dy.to(device)
    case.whole.to(device)
    case.part.to(device)
    return case


def run_cases(device: str, recipes: list[str]) -> dict:
    """What this rank found of every recipe × mode × layer, and why kernels are missing, if so."""
    torch.set_num_threads(1)
    ALL.update(zoo())  # where cases look recipes up
    group = dist.new_group(list(range(dist.get_world_size())))
    errors, cases = [], 0
    for recipe, mode in itertools.product(recipes, MODES):
        for run in (linear_errors, grouped_errors):
            errors += run(recipe, mode, group, device)
            cases += 1
    unavailable = extension.why_unavailable(torch.device(device))
    return {"cases": cases, "errors": errors, "unavailable": unavailable}
