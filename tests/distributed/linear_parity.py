"""What test_linear_parity runs on every rank: one Linear on all ranks against it on one.

Every rank holds the full X, W and dY, runs the whole layer alone, then its shard with the others,
and compares: the planes that each GEMM read, Y, dX, dW, dbias; then the same over 3 SGD steps.

Legend: M tokens, K in_features, N out_features.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from unittest import mock

import torch
import torch.distributed as dist

import dist_finegrain as dfg
from dist_finegrain.distributed import collectives
from dist_finegrain.modules import linear, linear_function
from dist_finegrain.modules.direct_linear import DirectLinear
from tests.distributed.format_pairs import factory_of
from tests.distributed.square_recipes import SQUARE
from tests.planes import planes_differ, region_of
from tests.recipes import emulated

M, K, N = 256, 512, 768
NORM_LIMIT = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
SQUARE_BLOCKS = dict(zip(SQUARE, (128, 32, 16), strict=True))
GEMM_OF = {"Y": "fprop", "dX": "dgrad", "dW": "wgrad"}
STEPS = 3
ROWS = (128, 64, 48, 7, 0)  # per rank


def usual_sizes(ranks: int) -> tuple[int, int, int]:
    """M, K and N of which every shard of K and N is whole 128-blocks."""
    return M, K, max(N, 256 * ranks)


class Recorder:
    """Keeps the operands of every GEMM that runs while it is open: (gemm) → (A, B)."""

    def __init__(self):
        self.operands = {}

    def __enter__(self):
        self._gemm = linear_function.gemm

        def recording(kernel, name, a, b, *args, **kwargs):
            self.operands[name] = (a, b)
            return self._gemm(kernel, name, a, b, *args, **kwargs)

        linear_function.gemm = recording
        return self

    def __exit__(self, *exc_info):
        linear_function.gemm = self._gemm


def relative_norm(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return ((got - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


@contextlib.contextmanager
def one_rank(segments: int):
    """Layers run as one rank does that is told how rows are sharded, and by this project's code."""
    told = functools.partial(linear_function.LinearCall, segments=segments)
    with (
        mock.patch.object(linear, "LinearCall", told),
        mock.patch.object(DirectLinear, "for_use", lambda *where: None),
    ):
        yield


def shard(full: torch.Tensor, dim: int | None, rank: int, ranks: int) -> torch.Tensor:
    return full if dim is None else full.chunk(ranks, dim)[rank].contiguous()


class Case:
    """One layer, whole and sharded, with the same inputs.

    segmented: the one rank is told how rows are sharded; else it knows nothing of ranks.
    """

    def __init__(
        self, recipe_name, mode, sequence_parallel, dtype, group, sizes=None, segmented=True
    ):
        M, K, N = sizes or usual_sizes(dist.get_world_size(group))
        self.name = f"{recipe_name}/{mode}/sp={sequence_parallel}/{dtype}/M={M}"
        self.name += "" if segmented else "/unsegmented"
        self.segmented = segmented
        self.recipe_name, self.mode, self.sp, self.dtype = (
            recipe_name, mode, sequence_parallel, dtype,
        )  # fmt: skip
        self.rank, self.ranks, self.group = dist.get_rank(group), dist.get_world_size(group), group
        generator = torch.Generator().manual_seed(len(recipe_name))

        def data(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.x, self.dy = data(M, K), data(M, N) * 0.1
        # One loud value on the last rank's side only: scales must still agree.
        self.x[-1:, -1], self.dy[-1:, -1] = 37.0, -11.0
        self.weight, self.bias = data(N, K) * 0.05, data(N)
        self.weight[-1, -1] = 3.0
        name = "demo.fc1"
        self.whole = dfg.Linear(K, N, params_dtype=dtype, name=name)
        self.part = dfg.Linear(
            K, N, params_dtype=dtype, parallel_mode=mode, sequence_parallel=sequence_parallel,
            tp_group=group, name=name,
        )  # fmt: skip
        self.w_dim = 0 if mode == "column" else 1
        self.x_dim = 1 if mode == "row" else (0 if sequence_parallel else None)
        self.y_dim = 1 if mode == "column" else (0 if sequence_parallel else None)
        with torch.no_grad():
            self.whole.weight.copy_(self.weight)
            self.whole.bias.copy_(self.bias)
            self.part.weight.copy_(shard(self.weight, self.w_dim, self.rank, self.ranks))
            self.part.bias.copy_(self.shard_of_bias(self.bias))
        parameters = [*self.whole.parameters(), *self.part.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05)

    def shard_of_bias(self, bias):
        return shard(bias, 0, self.rank, self.ranks) if self.mode == "column" else bias

    def step(self, recipe):
        """Forward and backward of both layers; returns what each rank compares."""
        self.optimizer.zero_grad()
        x = self.x.clone().requires_grad_()
        x_part = shard(self.x, self.x_dim, self.rank, self.ranks).clone().requires_grad_()
        segments = self.ranks if self.sp and self.segmented else 1
        with Recorder() as whole, one_rank(segments), dfg.autocast(recipe=recipe):
            y = self.whole(x)
            y.backward(self.dy)
        with Recorder() as part, dfg.autocast(recipe=recipe):
            y_part = self.part(x_part)
            y_part.backward(shard(self.dy, self.y_dim, self.rank, self.ranks))
        if self.mode == "row" and self.sp:  # as Megatron does for sequence_parallel parameters
            dist.all_reduce(self.part.bias.grad, group=self.group)
        pairs = {
            "Y": (y_part, shard(y, self.y_dim, self.rank, self.ranks)),
            "dX": (x_part.grad, shard(x.grad, self.x_dim, self.rank, self.ranks)),
            "dW": (
                self.part.weight.grad,
                shard(self.whole.weight.grad, self.w_dim, self.rank, self.ranks),
            ),
            "dbias": (self.part.bias.grad, self.shard_of_bias(self.whole.bias.grad)),
        }
        return pairs, whole.operands, part.operands

    def run(self):
        """Errors of this rank, and the largest difference of a sum that was cut."""
        errors, sum_difference = [], 0.0
        recipe = emulated(factory_of(self.recipe_name))
        # What blocks of other rows make of a gradient may differ by the format's error: no step on.
        for step in range(STEPS if self.segmented else 1):
            pairs, whole, part = self.step(recipe)
            loose = set()
            for gemm, operands in part.items():
                for side, plane in enumerate(operands):
                    region = region_of(gemm, side, self.mode, self.rank, self.ranks)
                    if self._is_rank_local(plane, region) or self._is_cut(gemm, side, plane):
                        loose.add(gemm)
                        continue
                    if step == 0 and 0 not in plane.shape:
                        found = planes_differ(plane, whole[gemm][side], region)
                        errors += [f"{self.name} {gemm} operand {side}: {found}"] if found else []
            for what, (got, wanted) in pairs.items():
                difference = relative_norm(got.detach(), wanted.detach())
                gemm, limit = GEMM_OF.get(what), NORM_LIMIT[self.dtype]
                if gemm in loose:
                    limit = self._sqnr_limit(part[gemm])
                if not difference <= limit:
                    errors.append(f"{self.name} step {step} {what}: {difference:.3g} > {limit:.3g}")
                if what in ("Y", "dX"):
                    sum_difference = max(sum_difference, difference)
            self.optimizer.step()
        return errors, sum_difference

    @staticmethod
    def _is_rank_local(plane, region) -> bool:
        """Row scales of a plane whose contraction is sharded are local by design."""
        return plane.format.statistic == "row" and region[1] is not None

    def _is_cut(self, gemm, side, plane) -> bool:
        """Blocks of this plane end at the shard, which the one rank does not know of."""
        rows = self.x.shape[0] // self.ranks
        if not self.sp:
            return False
        if gemm == "wgrad" and not self.segmented:
            return rows % plane.format.block[1] != 0
        # Square blocks of gathered rows: told of segments or not, one rank writes whole ones.
        is_gathered = (self.mode, gemm, side) in (("column", "fprop", 0), ("row", "dgrad", 0))
        return is_gathered and rows % SQUARE_BLOCKS.get(self.recipe_name, 1) != 0

    @staticmethod
    def _sqnr_limit(operands) -> float:
        """Relative error that two GEMMs of this format may have from one another."""
        db = min(p.format.cast_sqnr_db for p in operands) - 3
        return 2**0.5 * 10 ** (-db / 20)


def run_cases(recipes: list[str], reduce: bool = True) -> dict:
    """Every recipe × mode × SP × dtype in one process group; what this rank found.

    reduce: False switches the amax MAX off, which must turn the test red.
    """
    torch.set_num_threads(1)
    group = dist.new_group(list(range(dist.get_world_size())))
    if not reduce:
        collectives.reduce_max_together = lambda tensors, group, **_: None
    errors, largest, cases = [], 0.0, 0
    for recipe, mode, sequence_parallel, dtype in itertools.product(
        recipes, ("column", "row"), (False, True), (torch.bfloat16, torch.float32)
    ):
        found, difference = Case(recipe, mode, sequence_parallel, dtype, group).run()
        errors += found
        cases += 1
        if dtype == torch.float32 and "row" not in re.split("[_|]", recipe):
            largest = max(largest, difference)
    return {"cases": cases, "errors": errors, "sum_difference_fp32": largest}


def run_rows(recipes: list[str]) -> dict:
    """Every recipe × mode × rows per rank under SP, in BF16; what this rank found.

    Against one rank that is told of the segments, and against one that is not.
    """
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)))
    errors, cases = [], 0
    for recipe, mode, rows, segmented in itertools.product(
        recipes, ("column", "row"), ROWS, (True, False)
    ):
        sizes = (ranks * rows, 128 * ranks, 256 * ranks)
        errors += Case(recipe, mode, True, torch.bfloat16, group, sizes, segmented).run()[0]
        cases += 1
    return {"cases": cases, "errors": errors}
