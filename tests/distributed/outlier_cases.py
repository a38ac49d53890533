"""What test_outlier runs on two ranks: a loud value that one rank holds, and the scales of both.

Every rank notes the scales of the planes that its GEMMs read, of matrices of which the other rank
holds another piece; also while one of the reductions is left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist

import dist_finegrain as dfg
from dist_finegrain import delayed
from dist_finegrain.distributed import collectives
from dist_finegrain.modules import grouped_linear_function, linear_function
from dist_finegrain.modules.linear_function import LinearCall
from dist_finegrain.roles import LINEAR_GEMMS
from tests.distributed.grouped_parity import Recorder as GroupedRecorder
from tests.distributed.linear_parity import Recorder, shard
from tests.planes import region_of
from tests.recipes import ALL, emulated

# Every recipe of the tests in which ranks agree on a scale of some tensor.
AGREED = (
    "block_row_scaled_wgrad",
    "current",
    "delayed",
    "delayed_children",
    "dequantized_columns",
    "nvfp4",
    "nvfp4_1d",
    "row",
)
MODES = ("column", "row")
LOUD = 64.0
M, K, N = 64, 64, 128
SPLIT = [20, 0, 44]
SIDES = {side: (g.gemm, i) for g in LINEAR_GEMMS for i, side in enumerate(g.sides)}


def sharded_types(mode: str, sequence_parallel: bool) -> set[str]:
    """Tensors that the ranks hold pieces of (contracts.md, "Scale groups")."""
    if mode == "column":
        return {"weight", "grad_output"} | ({"input"} if sequence_parallel else set())
    return {"weight", "input"} | ({"grad_output"} if sequence_parallel else set())


def matrices(loud: bool) -> dict[str, torch.Tensor]:
    """X, W and dY of the whole layer; the loud values are in the last rank's piece of each."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
    made = {k: torch.randn(*shape, generator=generator) for k, shape in shapes.items()}
    if loud:
        for matrix in made.values():
            matrix[-1, -1] = LOUD
    return made


def agreed_scale(plane, region) -> list[float] | None:
    """The scales of this plane that are the other rank's too; None where they are its own."""
    if plane.format.statistic in ("tensor", "scale"):
        return plane.outer.tolist()
    is_whole = region == (None, None)
    return plane.outer.tolist() if plane.format.statistic == "row" and is_whole else None


def linear_scales(recipe: str, mode: str, sequence_parallel: bool, group, loud: bool) -> dict:
    """(tensor, direction) → scales of the planes of a Linear's second step."""
    rank, ranks, whole = dist.get_rank(group), dist.get_world_size(group), matrices(loud)
    layer = dfg.Linear(
        K, N, parallel_mode=mode, sequence_parallel=sequence_parallel, tp_group=group, bias=False,
        name="demo.fc1",
    )  # fmt: skip
    rows = 0 if sequence_parallel else None
    dims = {"column": (rows, 0, 1), "row": (1, 1, rows)}[mode]
    x, weight, dy = (shard(v, d, rank, ranks) for v, d in zip(whole.values(), dims, strict=True))
    with torch.no_grad():
        layer.weight.copy_(weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for _ in range(2):  # delayed scaling follows one step later
        with Recorder() as recorded, dfg.autocast(recipe=emulated(ALL[recipe])):
            layer(x.clone().requires_grad_()).backward(dy)
        optimizer.step()
    found = {}
    for tensor, direction in SIDES:
        gemm, side = SIDES[tensor, direction]
        plane = recorded.operands[gemm][side]
        scale = agreed_scale(plane, region_of(gemm, side, mode, rank, ranks))
        if scale is not None and tensor in sharded_types(mode, sequence_parallel):
            found[tensor, direction] = scale
    return found


def grouped_scales(recipe: str, mode: str, group, loud: bool) -> dict:
    """(tensor, direction) → one list of scales per expert that has tokens, of the second step."""
    rank, ranks, whole = dist.get_rank(group), dist.get_world_size(group), matrices(loud)
    layer = dfg.GroupedLinear(
        len(SPLIT), K, N, parallel_mode=mode, tp_group=group, bias=False, name="demo.fc1"
    )
    dims = {"column": (None, 0, 1), "row": (1, 1, None)}[mode]
    x, weight, dy = (shard(v, d, rank, ranks) for v, d in zip(whole.values(), dims, strict=True))
    with torch.no_grad():
        for e, one in enumerate(layer.weights):
            one.copy_(weight / (1 + e))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for _ in range(2):
        with GroupedRecorder() as recorded, dfg.autocast(recipe=emulated(ALL[recipe])):
            layer(x.clone().requires_grad_(), SPLIT).backward(dy)
        optimizer.step()
    found = {}
    for key, planes in recorded.planes.items():
        region = region_of(*SIDES[key], mode, rank, ranks)
        scales = [agreed_scale(plane, region) for plane in planes]
        if key[0] in sharded_types(mode, False) and None not in scales:
            # An empty expert has no amax to agree on; the weight of each has.
            found[key] = [s for s, m in zip(scales, SPLIT, strict=True) if m or key[0] == "weight"]
    return found


# Reductions to be left out: name → the patch that does it.
def _cast_with(change):
    """LinearCall.cast of jobs that ``change(call, job)`` has altered."""
    cast = LinearCall.cast

    def altered(call, *jobs):
        for job in jobs:
            change(call, job)
        cast(call, *jobs)

    return mock.patch.object(LinearCall, "cast", altered)


def _reduction_of(tensor: str):
    """Amaxes of this tensor, in both kinds of layers."""

    def stays_local(call, job):
        job.reduce = job.reduce and job.quantizer is not call.binding.quantizers[tensor]

    sharded = grouped_linear_function._SHARDED
    fewer = {mode: tuple(t for t in tensors if t != tensor) for mode, tensors in sharded.items()}
    both = contextlib.ExitStack()
    both.enter_context(_cast_with(stays_local))
    both.enter_context(mock.patch.object(grouped_linear_function, "_SHARDED", fewer))
    return both


def _reduction_of_gathered_columns():
    """Row scales of a plane whose contraction is gathered."""
    return _cast_with(lambda call, job: setattr(job, "shares_rows", False))


def _second_reduction():
    """Amaxes that are found after a first reduction."""
    run_casts = linear_function.run_casts

    def once(jobs, reduce_max):
        calls = iter((reduce_max,))
        run_casts(jobs, lambda amaxes: next(calls, lambda _: None)(amaxes))

    return mock.patch.object(linear_function, "run_casts", once)


REDUCTIONS = {
    "none": contextlib.nullcontext,
    "all amaxes": lambda: mock.patch.object(
        collectives, "reduce_max_together", lambda tensors, group, **_: None
    ),
    "input": lambda: _reduction_of("input"),
    "weight": lambda: _reduction_of("weight"),
    "grad_output": lambda: _reduction_of("grad_output"),
    "gathered columns": _reduction_of_gathered_columns,
    "second amaxes": _second_reduction,
    "delayed": lambda: mock.patch.object(delayed, "_reduce_pending", lambda *_: None),
}


def run_cases(recipes: dict[str, list[str]]) -> dict:
    """For each reduction that is left out, the cases of its recipes.

    (left out, layer, recipe, mode, SP) → (scales with the loud values, scales without them).
    """
    torch.set_num_threads(1)
    group = dist.new_group(list(range(dist.get_world_size())))
    found = {}
    for left_out, names in recipes.items():
        with REDUCTIONS[left_out]():
            for recipe, mode, sp in itertools.product(names, MODES, (False, True)):
                scales = functools.partial(linear_scales, recipe, mode, sp, group)
                found[left_out, "linear", recipe, mode, sp] = scales(True), scales(False)
            for recipe, mode in itertools.product(names, MODES):
                scales = functools.partial(grouped_scales, recipe, mode, group)
                found[left_out, "grouped", recipe, mode, False] = scales(True), scales(False)
    return found
