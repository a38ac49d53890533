"""What test_layernorm_parity runs on every rank: one module on all ranks against it on one.

Every rank runs the whole module alone and its shard with the others, and compares y, dX and every
gradient over 3 SGD steps. Planes are compared by linear_parity; here it is norms, gates, order.
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
from tests.distributed.linear_parity import relative_norm, shard
from tests.recipes import ALL, emulated

M, H, F = 128, 256, 384
STEPS = 3
# FP32 sums are cut differently; a code next to a rounding boundary may then fall on either side.
LIMIT = {"identity": 1e-5}
QUANTIZED_LIMIT = 2e-3


class Case:
    """One module, whole and sharded, with the same parameters and inputs."""

    def __init__(self, recipe, kind, sequence_parallel, activation, normalization, mesh):
        self.recipe_name, self.kind, self.sp = recipe, kind, sequence_parallel
        self.name = f"{recipe}/{kind}/sp={sequence_parallel}/{activation}/{normalization}"
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

        self.x, self.dy = data(M, H), data(M, H if kind == "mlp" else F) * 0.1
        self.dnormed = data(M, H) * 0.1
        self.x[-1, -1], self.dy[-1, -1] = 37.0, -11.0  # loud on the last rank only
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
        recipe = emulated(ALL[self.recipe_name])
        rows = 0 if self.sp else None
        x = self.x.clone().requires_grad_()
        x_part = shard(self.x, rows, self.rank, self.ranks).clone().requires_grad_()
        with dfg.autocast(recipe=recipe):
            whole, part = self.whole(x), self.part(x_part)
        if self.kind == "linear":
            (y, normed), (y_part, normed_part) = whole, part
            columns = shard(self.dy, 1, self.rank, self.ranks)
            torch.autograd.backward([y, normed], [self.dy, self.dnormed])
            # Each rank's share of the gradient of what every rank now holds.
            mine = self.dnormed / self.ranks if self.sp else self.dnormed
            torch.autograd.backward([y_part, normed_part], [columns, mine])
            pairs = {"y": (y_part, shard(y, 1, self.rank, self.ranks)),
                     "normed": (normed_part, normed)}  # fmt: skip
        else:
            y, y_part = whole, part
            y.backward(self.dy)
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
        return pairs

    def run(self):
        """(errors of this rank, the largest relative difference of all)."""
        errors, largest = [], 0.0
        limit = LIMIT.get(self.recipe_name, QUANTIZED_LIMIT)
        for step in range(STEPS):
            for what, (got, wanted) in self.step().items():
                difference = relative_norm(got, wanted)
                largest = max(largest, difference)
                if not difference <= limit:
                    errors.append(f"{self.name} step {step} {what}: {difference:.2e} > {limit:g}")
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
        recipes,
        (False, True),
        (("mlp", "gelu", "LayerNorm"), ("mlp", "swiglu", "RMSNorm"),
         ("linear", "", "LayerNorm"), ("linear", "", "RMSNorm")),
    ):  # fmt: skip
        if over_mesh and activation == "swiglu":
            continue
        found, difference = Case(recipe, kind, sp, activation, normalization, mesh).run()
        errors, cases = errors + found, cases + 1
        largest[recipe] = max(largest.get(recipe, 0.0), difference)
    return {"errors": errors, "cases": cases, "largest": largest}


def refused_over_a_mesh():
    """What a gated LayerNormMLP over a DeviceMesh says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        dfg.LayerNormMLP(H, F, activation="swiglu", set_parallel_mode=True, tp_mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""
