"""What test_layernorm_parity runs on every rank: one module on all ranks against it on one.

Every rank runs the whole module alone and its shard with the others, and compares y, dX and every
gradient over 3 SGD steps. Planes are compared by linear_parity; here it is norms, gates, order.
FP32 only: BF16 rounds cut sums before the next layer casts them, and codes part.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dist_finegrain as dfg
from dist_finegrain.distributed import collectives
from dist_finegrain.modules import normed_input
from tests.distributed import linear_parity
from tests.distributed.format_pairs import factory_of, formats_of
from tests.distributed.linear_parity import ROWS, Recorder, one_rank, relative_norm, shard
from tests.recipes import emulated

M, H, F = 128, 256, 512
STEPS = 3
KINDS = (
    ("mlp", "gelu", "LayerNorm"),
    ("mlp", "swiglu", "RMSNorm"),
    ("linear", "", "LayerNorm"),
    ("linear", "", "RMSNorm"),
)
# FP32 sums are cut differently; a code next to a rounding boundary may then fall on either side.
LIMIT = {"identity": 1e-5}
QUANTIZED_LIMIT = 2e-3
NVFP4_LIMIT = 1e-2  # one code of four bits weighs more


class Case:
    """One module, whole and sharded, with the same parameters and inputs."""

    def __init__(
        self, recipe, kind, sequence_parallel, activation, normalization, mesh=None, rows=M
    ):
        self.recipe_name, self.kind, self.sp = recipe, kind, sequence_parallel
        self.name = f"{recipe}/{kind}/sp={sequence_parallel}/{activation}/{normalization}/M={rows}"
        self.gated = activation == "swiglu"
        self.group = dist.group.WORLD if mesh is None else mesh.get_group()
        self.mesh, self.rank, self.ranks = mesh, dist.get_rank(), dist.get_world_size()
        over = {"tp_group": self.group} if mesh is None else {"tp_mesh": mesh}
        over["sequence_parallel"] = sequence_parallel
        torch.manual_seed(0)
        options = {"normalization": normalization, "name": "layer"}
        if kind == "mlp":
            options["activation"] = activation
            self.whole = dfg.LayerNormMLP(H, F, **options)
            self.part = dfg.LayerNormMLP(H, F, set_parallel_mode=True, **options, **over)
        else:
            self.whole = dfg.LayerNormLinear(
                H, F, return_layernorm_output=True, return_layernorm_output_gathered=True, **options
            )
            self.part = dfg.LayerNormLinear(H, F, parallel_mode="column",
                                            return_layernorm_output=True,
                                            return_layernorm_output_gathered=True,
                                            **options, **over)  # fmt: skip
        generator = torch.Generator().manual_seed(1)

        def data(*shape):
            return torch.randn(*shape, generator=generator)

        self.x, self.dy = data(rows, H), data(rows, H if kind == "mlp" else F) * 0.1
        self.dnormed = data(rows, H) * 0.1
        self.x[-1:, -1], self.dy[-1:, -1] = 37.0, -11.0  # loud on the last rank only
        ours = dict(self.part.named_parameters())
        with torch.no_grad():
            for name, parameter in self.whole.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(data(len(parameter)) * 0.2)
                mine = ours[name].to_local() if mesh is not None else ours[name]
                mine.copy_(self.shard_of(name, parameter))
        parameters = [*self.whole.parameters(), *self.part.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.05)

    def shard_of(self, name, full):
        """This rank's piece of a parameter or gradient; of each half of fc1 behind a gate."""
        if name.startswith("layer_norm") or name == "fc2_bias":
            return full
        if name == "fc2_weight":
            return shard(full, 1, self.rank, self.ranks)
        halves = full.chunk(2) if self.kind == "mlp" and self.gated else (full,)
        return torch.cat([shard(half, 0, self.rank, self.ranks) for half in halves])

    def step(self):
        self.optimizer.zero_grad()
        recipe = emulated(factory_of(self.recipe_name))
        rows = 0 if self.sp else None
        x = self.x.clone().requires_grad_()
        x_part = shard(self.x, rows, self.rank, self.ranks).clone().requires_grad_()
        with one_rank(self.ranks if self.sp else 1), dfg.autocast(recipe=recipe):
            whole = self.whole(x)
        with Recorder() as operands, dfg.autocast(recipe=recipe):
            part = self.part(x_part)
        if self.kind == "linear":
            (y, normed), (y_part, normed_part) = whole, part
            columns = shard(self.dy, 1, self.rank, self.ranks)
            torch.autograd.backward([y, normed], [self.dy, self.dnormed])
            # Each rank's share of the gradient of what every rank now holds.
            mine = self.dnormed / self.ranks if self.sp else self.dnormed
            with operands:
                torch.autograd.backward([y_part, normed_part], [columns, mine])
            pairs = {"y": (y_part, shard(y, 1, self.rank, self.ranks)),
                     "normed": (normed_part, normed)}  # fmt: skip
        else:
            y, y_part = whole, part
            y.backward(self.dy)
            with operands:
                y_part.backward(shard(self.dy, rows, self.rank, self.ranks))
            pairs = {"y": (y_part, shard(y, rows, self.rank, self.ranks))}
        pairs["dX"] = (x_part.grad, shard(x.grad, rows, self.rank, self.ranks))
        for name, parameter in self.part.named_parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.to_local()
            elif getattr(parameter, "sequence_parallel", False):  # as Megatron's trainer does
                dist.all_reduce(grad, group=self.group)
            pairs[name] = (grad, self.shard_of(name, self.whole.get_parameter(name).grad))
        return pairs, operands.operands

    def loose(self) -> dict[str, str]:
        """Results that are one rank's up to the format's error only → the GEMM that makes them so.

        Row scales are local where the contraction is sharded. Stochastic noise depends on content:
        what fc1 gets of dY may part in the last bit, so its noise does.
        """
        row, column = formats_of(self.recipe_name)
        is_mlp, found = self.kind == "mlp", {}
        if row == "row" and is_mlp:
            found["y"] = "fprop"
        is_noise_other = column == "nvfp4" and is_mlp
        if column == "row" or is_noise_other:
            found |= dict.fromkeys(("dX", "layer_norm_weight", "layer_norm_bias"), "dgrad")
        if is_noise_other:
            found["fc1_weight"] = "wgrad"
        return found

    @property
    def limit(self) -> float:
        """Relative norm of a difference of what is one rank's."""
        if "nvfp4" in self.recipe_name:
            return NVFP4_LIMIT
        return LIMIT.get(self.recipe_name, QUANTIZED_LIMIT)

    def run(self):
        """(errors of this rank, the largest relative difference of all)."""
        errors, largest, loose = [], 0.0, self.loose()
        # Weights that were moved by other gradients are others: no step on.
        for step in range(1 if loose else STEPS):
            pairs, operands = self.step()
            for what, (got, wanted) in pairs.items():
                difference = relative_norm(got, wanted)
                largest = max(largest, difference)
                limit = self.limit
                if what in loose:
                    limit = linear_parity.Case._sqnr_limit(operands[loose[what]])
                    # Sums over rows that weigh the errors of dX unevenly.
                    limit *= 1.5 if what.startswith("layer_norm") else 1.0
                if not difference <= limit:
                    errors.append(f"{self.name} step {step} {what}: {difference:.2e} > {limit:.2e}")
            self.optimizer.step()
        return errors, largest


def run_cases(recipes, mutation="", over_mesh=False):
    """Every case in one process group. mutation: what to break, which must turn the test red."""
    torch.set_num_threads(1)
    if mutation == "amaxes":
        collectives.reduce_max_together = lambda tensors, group, **_: None
    if mutation == "norm gradients":
        normed_input.sum_gradient = lambda x, group: x
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if over_mesh else None
    errors, cases, largest = [], 0, {}
    for recipe, sp, (kind, activation, normalization) in itertools.product(
        recipes, (False, True), KINDS
    ):
        if over_mesh and activation == "swiglu":
            continue
        found, difference = Case(recipe, kind, sp, activation, normalization, mesh).run()
        errors, cases = errors + found, cases + 1
        largest[recipe] = max(largest.get(recipe, 0.0), difference)
    return {"errors": errors, "cases": cases, "largest": largest}


def run_rows(recipes):
    """Every recipe × rows per rank under SP, against one rank that is told of the segments."""
    torch.set_num_threads(1)
    errors, cases = [], 0
    for recipe, rows, (kind, activation, normalization) in itertools.product(
        recipes, ROWS, (KINDS[0], KINDS[3])
    ):
        total = rows * dist.get_world_size()
        errors += Case(recipe, kind, True, activation, normalization, rows=total).run()[0]
        cases += 1
    return {"errors": errors, "cases": cases}


def refused_over_a_mesh():
    """What a gated LayerNormMLP over a DeviceMesh says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        dfg.LayerNormMLP(H, F, activation="swiglu", set_parallel_mode=True, tp_mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""
