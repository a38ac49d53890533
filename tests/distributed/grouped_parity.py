"""What test_grouped_parity runs on every rank: one GroupedLinear on all ranks against it on one.

The layer communicates no tensor: column mode takes whole x and dy [M, N/tp], row mode x [M, K/tp]
and whole dy; dX (column) and Y (row) are partial sums, which this test adds up. What the ranks must
agree on inside are the amaxes of sharded matrices: the planes of every expert are compared with
those of the whole layer, and no other collective may run.
"""

from __future__ import annotations

import itertools
from unittest import mock

import torch
import torch.distributed as dist

import dist_finegrain as dfg
from dist_finegrain.distributed import collectives
from dist_finegrain.modules.grouped_linear_function import GroupedCall
from dist_finegrain.roles import LINEAR_GEMMS
from tests.distributed.format_pairs import factory_of
from tests.distributed.linear_parity import (
    NORM_LIMIT,
    STEPS,
    Case,
    relative_norm,
    shard,
    usual_sizes,
)
from tests.planes import planes_differ, region_of
from tests.recipes import ALL, emulated

SPLIT, K, N = [33, 0, 90, 5], 512, 768  # usual_sizes has another N on more ranks
_REDUCTIONS = ("all_gather_rows", "all_reduce_sum", "reduce_scatter_rows")


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Also where it has no element, which contiguous() leaves as it is."""
    return x.clone(memory_format=torch.contiguous_format)


class Recorder:
    """Keeps the planes of every expert that are cast while it is open: (kind, direction) → list."""

    def __init__(self):
        self.planes = {}

    def __enter__(self):
        self._casts = GroupedCall.cast_tokens, GroupedCall.cast_weights
        tokens, weights = self._casts

        def note(call, kind, made):
            for direction, operand in made.items():
                if operand is not None:
                    planes = operand.each(call.sizes)
                    self.planes[kind, direction] = [p.map(_contiguous) for p in planes]
            return made

        GroupedCall.cast_tokens = lambda c, kind, *a: note(c, kind, tokens(c, kind, *a))
        GroupedCall.cast_weights = lambda c, *a: note(c, "weight", weights(c, *a))
        return self

    def __exit__(self, *exc_info):
        GroupedCall.cast_tokens, GroupedCall.cast_weights = self._casts


class GroupedCase:
    """One layer, whole and sharded, with the same inputs."""

    def __init__(self, recipe_name, mode, dtype, group):
        self.name = f"{recipe_name}/{mode}/{dtype}"
        self.recipe_name, self.mode, self.dtype, self.group = recipe_name, mode, dtype, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        _, K, N = usual_sizes(self.ranks)
        generator = torch.Generator().manual_seed(len(recipe_name))

        def data(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.x, self.dy = data(sum(SPLIT), K), data(sum(SPLIT), N) * 0.1
        # One loud value on the last rank's side only: scales must still agree.
        self.x[-1, -1], self.dy[-1, -1] = 37.0, -11.0
        weights = data(len(SPLIT), N, K) * 0.05
        weights[:, -1, -1] = 3.0
        options = {"bias": False, "params_dtype": dtype, "name": "demo.fc1"}
        self.whole = dfg.GroupedLinear(len(SPLIT), K, N, **options)
        self.part = dfg.GroupedLinear(
            len(SPLIT), K, N, parallel_mode=mode, tp_group=group, **options
        )
        self.w_dim, self.x_dim, self.y_dim = (0, None, 1) if mode == "column" else (1, 1, None)
        with torch.no_grad():
            for e, weight in enumerate(weights):
                self.whole.weights[e].copy_(weight)
                self.part.weights[e].copy_(self.shard(weight, self.w_dim))
        parameters = [*self.whole.parameters(), *self.part.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05)

    def shard(self, full, dim):
        return shard(full, dim, self.rank, self.ranks)

    def step(self, recipe):
        """Forward and backward of both layers: what each rank compares, and the planes of both."""
        self.optimizer.zero_grad()
        x = self.x.clone().requires_grad_()
        x_part = self.shard(self.x, self.x_dim).clone().requires_grad_()
        with Recorder() as whole, dfg.autocast(recipe=recipe):
            y = self.whole(x, SPLIT)
            y.backward(self.dy)
        with Recorder() as part, dfg.autocast(recipe=recipe):
            y_part = self.part(x_part, SPLIT)
            y_part.backward(self.shard(self.dy, self.y_dim))
        y_part, dx_part = y_part.detach(), x_part.grad
        # As the caller's combine does. FP32 as the partial products are rounded already.
        total = (y_part if self.mode == "row" else dx_part).float()
        dist.all_reduce(total, group=self.group)
        y_part, dx_part = (total, dx_part) if self.mode == "row" else (y_part, total)
        pairs = {"Y": (y_part, self.shard(y.detach(), self.y_dim))}
        pairs["dX"] = (dx_part, self.shard(x.grad, self.x_dim))
        for e, (ours, full) in enumerate(zip(self.part.weights, self.whole.weights, strict=True)):
            pairs[f"dW{e}"] = (ours.grad, self.shard(full.grad, self.w_dim))
        return pairs, whole.planes, part.planes

    def run(self) -> list[str]:
        """Errors of this rank."""
        errors, recipe = [], emulated(factory_of(self.recipe_name))
        for step in range(STEPS):
            pairs, whole, part = self.step(recipe)
            loose = {}
            for g, side in itertools.product(LINEAR_GEMMS, (0, 1)):
                key = g.sides[side]
                region = region_of(g.gemm, side, self.mode, self.rank, self.ranks)
                for e, (ours, full) in enumerate(zip(part[key], whole[key], strict=True)):
                    if Case._is_rank_local(ours, region):
                        loose[g.gemm] = [planes[e] for planes in map(part.get, g.sides)]
                    elif step == 0 and (found := planes_differ(ours, full, region)):
                        errors.append(f"{self.name} {g.gemm} operand {side} expert {e}: {found}")
            for what, (got, wanted) in pairs.items():
                limit = NORM_LIMIT[self.dtype]
                gemm = {"Y": "fprop", "dX": "dgrad"}.get(what)
                if gemm in loose:
                    limit = Case._sqnr_limit(loose[gemm])
                difference = relative_norm(got, wanted)
                if not difference <= limit:
                    errors.append(f"{self.name} step {step} {what}: {difference:.3g} > {limit:.3g}")
            self.optimizer.step()
        return errors


def _refused(*args, **kwargs):
    raise AssertionError("GroupedLinear communicated a tensor")


def run_cases(recipes: list[str], reduce: bool = True) -> dict:
    """Every recipe × mode × dtype in one process group; what this rank found.

    reduce: False switches the amax MAX off, which must turn the test red.
    """
    torch.set_num_threads(1)
    group = dist.new_group(list(range(dist.get_world_size())))
    if not reduce:
        collectives.reduce_max_together = lambda tensors, group: None
    errors, cases = [], 0
    with mock.patch.multiple(collectives, **dict.fromkeys(_REDUCTIONS, _refused)):
        for recipe, mode, dtype in itertools.product(
            recipes, ("column", "row"), (torch.bfloat16, torch.float32)
        ):
            errors += GroupedCase(recipe, mode, dtype, group).run()
            cases += 1
    return {"cases": cases, "errors": errors}


def run_group_rules() -> dict:
    """A group that comes later, ranks that answer differently, a bias: what is raised."""
    group = dist.new_group(list(range(dist.get_world_size())))
    rank, x = dist.get_rank(), torch.randn(8, K)
    late = dfg.GroupedLinear(2, K, N, bias=False, parallel_mode="column", tp_size=2, name="a")
    late.set_tensor_parallel_group(group)
    with dfg.autocast(recipe=emulated(ALL["mxfp8"])):
        shape = tuple(late(x, [3, 5]).shape)
    messages = []
    for call in (
        lambda: dfg.GroupedLinear(2, K, N, parallel_mode="row", tp_group=group),
        lambda: _forward(late, x, ALL["nvfp4" if rank else "current"]),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    with dfg.autocast(recipe=emulated(ALL["mxfp8"])):
        again = tuple(late(x, [8, 0]).shape)
    return {"shapes": (shape, again), "messages": messages}


def _forward(module, x, factory):
    with dfg.autocast(recipe=emulated(factory)):
        module(x, [3, 5])
