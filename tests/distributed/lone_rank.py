"""What test_size_one_groups runs: every module in a group of one rank, with and without calls.

Without: the group of one rank skips its collectives. With ``lone_ranks_communicate`` the module
runs what it runs on several ranks, through the backend, which must not change a bit.
"""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dist_finegrain as dfg
from dist_finegrain import stepping
from dist_finegrain.distributed import collectives
from dist_finegrain.formats.fused_options import advance_rounding_step
from dist_finegrain.modules.direct_grouped import DirectGrouped
from dist_finegrain.modules.direct_linear import DirectLinear
from tests.modules.training_cases import states
from tests.recipes import ALL, emulated

TOKENS, H, STEPS = 128, 64, 2  # whole blocks: the rows of one rank are not cut into segments
SPLIT = [7, 0, 121]
SEQUENCE_PARALLEL = ("column", "row", "layernorm_linear", "layernorm_mlp", "layernorm_mlp_mesh")
KINDS = (*SEQUENCE_PARALLEL, "grouped_column", "grouped_row")


def make(kind: str, group, device: str):
    """A module of this kind, H → H, over ``group``."""
    options = {"params_dtype": torch.bfloat16, "device": device, "tp_group": group, "name": "fc"}
    if kind == "layernorm_linear":
        return dfg.LayerNormLinear(H, H, parallel_mode="column", **options)
    if kind == "layernorm_mlp":
        return dfg.LayerNormMLP(H, H, activation="swiglu", set_parallel_mode=True, **options)
    if kind == "layernorm_mlp_mesh":
        options["tp_mesh"] = DeviceMesh.from_group(options.pop("tp_group"), device)
        return dfg.LayerNormMLP(H, H, set_parallel_mode=True, **options)
    if kind.startswith("grouped_"):
        mode = kind.removeprefix("grouped_")
        return dfg.GroupedLinear(len(SPLIT), H, H, parallel_mode=mode, bias=False, **options)
    return dfg.Linear(H, H, parallel_mode=kind, **options)


def shard_sequences(module) -> None:
    """Sequence parallelism, which the constructor drops for one rank."""
    for linear in module.modules():
        if isinstance(linear, dfg.Linear):
            linear.sequence_parallel = True


def train(kind: str, recipe: str, group, device: str, sequence_parallel: bool) -> dict:
    """Everything that STEPS steps give: outputs, gradients, delayed scales and histories."""
    torch.manual_seed(0)
    stepping._steps.completed = 0  # stochastic rounding is keyed with it
    advance_rounding_step(0)
    module = make(kind, group, device)
    if sequence_parallel:
        shard_sequences(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        x, dy = (torch.randn(TOKENS, H).to(device, torch.bfloat16) for _ in range(2))
        x.requires_grad_()
        with dfg.autocast(recipe=emulated(ALL[recipe])):
            y = module(x, SPLIT) if kind.startswith("grouped_") else module(x)
        y.backward(dy)
        optimizer.step()
        found.update({(step, "y"): y.detach(), (step, "dx"): x.grad})
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            found[step, name] = grad.to_local() if isinstance(grad, DTensor) else grad
    for key, (scale, history) in states(module).items():
        found.update({(key, "scale"): scale, (key, "history"): history})
    return found


@contextlib.contextmanager
def as_several_ranks_do():
    """Collectives run, and layers by the code that has them."""
    with (
        collectives.lone_ranks_communicate(),
        mock.patch.object(DirectLinear, "for_use", lambda *where: None),
        mock.patch.object(DirectGrouped, "takes", lambda *tensors: False),
    ):
        yield


def run_cases(recipes: list[str], device: str, backend: str) -> dict:
    """What differs, by case, and the kinds of collectives that ran, by (module, SP)."""
    torch.set_num_threads(1)
    group = dist.new_group([0], backend=backend)
    differing, kinds = [], {}
    for kind, recipe, sp in itertools.product(KINDS, recipes, (False, True)):
        if sp and kind not in SEQUENCE_PARALLEL:
            continue
        dfg.comm_report(reset=True)
        plain = train(kind, recipe, group, device, False)
        assert not dfg.comm_report(reset=True).rows
        with as_several_ranks_do():
            forced = train(kind, recipe, group, device, sp)
        assert plain.keys() == forced.keys()
        wrong = [key for key, value in plain.items() if not torch.equal(value, forced[key])]
        differing += [f"{kind}, {recipe}, sp={sp}: {key}" for key in wrong]
        report = dfg.comm_report(reset=True)
        kinds.setdefault((kind, sp), {})[recipe] = {row.kind for row in report.rows}
    return {"differing": differing, "kinds": kinds}
