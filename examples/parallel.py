"""What a tensor- and data-parallel trainer does around the model: groups, gradients, comparison.

Two all-reduces per step make the gradients right: the parameters that every tp rank holds whole
get, under sequence parallelism, a partial sum from each rank's positions; and data-parallel ranks
average what their batches gave.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dist_finegrain as dfg
from examples.gpt_model import GPT, is_tensor_parallel
from examples.moe_layer import same_choices

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place: tp ranks share one model, dp ranks train copies of it.

    Groups are None where the size is 1.
    """

    rank: int = 0
    world: int = 1
    tp: int = 1
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None

    @property
    def dp(self) -> int:
        return self.world // self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @classmethod
    def create(cls, tp: int, device_type: str) -> Ranks:
        """Cut the initialised world into world/tp groups of tp neighbouring ranks."""
        world = dist.get_world_size()
        mesh = init_device_mesh(device_type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
        return cls(
            rank=dist.get_rank(),
            world=world,
            tp=tp,
            tp_group=mesh.get_group("tp") if tp > 1 else None,
            dp_group=mesh.get_group("dp") if world > tp else None,
        )


@contextlib.contextmanager
def precision(recipe: dfg.CustomRecipe | None, device_type: str, dtype: torch.dtype):
    """Forward context: compute in ``dtype`` (parameters stay FP32), quantize as ``recipe`` says."""
    mixed = torch.autocast(device_type, dtype, enabled=dtype != torch.float32)
    with mixed, dfg.autocast(enabled=recipe is not None, recipe=recipe):
        yield


def reduce_gradients(model: GPT, ranks: Ranks) -> None:
    """Make every ``.grad`` that of the mean loss over all tokens: two all-reduces at most."""
    parameters = list(model.parameters())
    if ranks.tp_group is not None and model.config.sequence_parallel:
        replicated = [p for p in parameters if not is_tensor_parallel(p)]
        _all_reduce_flat([p.grad for p in replicated], ranks.tp_group)
    if ranks.dp_group is not None:
        _all_reduce_flat([p.grad for p in parameters], ranks.dp_group, scale=1 / ranks.dp)


def _all_reduce_flat(tensors: list[torch.Tensor], group: dist.ProcessGroup, scale: float = 1):
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)
    flat *= scale
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def clip_gradients(model: GPT, ranks: Ranks, max_norm: float) -> torch.Tensor:
    """Scale gradients so that the whole model's norm is at most max_norm; returns the norm before.

    A shard counts on its own rank, a replicated parameter once.
    """
    parameters = list(model.parameters())
    squares = torch.stack(torch._foreach_norm([p.grad for p in parameters])).square()
    shared = torch.tensor([is_tensor_parallel(p) for p in parameters], device=squares.device)
    sharded, replicated = squares[shared].sum(), squares[~shared].sum()
    if ranks.tp_group is not None:
        dist.all_reduce(sharded, group=ranks.tp_group)
    norm = (sharded + replicated).sqrt()
    torch._foreach_mul_([p.grad for p in parameters], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def mean_loss(loss_sum: torch.Tensor, tokens: int, model: GPT, ranks: Ranks) -> float:
    """Nats per byte over all ranks, of local sums that cover ``tokens`` per dp rank."""
    total = loss_sum.detach().clone()
    if ranks.tp_group is not None and model.config.sequence_parallel:
        dist.all_reduce(total, group=ranks.tp_group)
    if ranks.dp_group is not None:
        dist.all_reduce(total, group=ranks.dp_group)
    return total.item() / (tokens * ranks.dp)


@torch.no_grad()
def held_out_loss(
    model: GPT, ranks: Ranks, batches: Iterable[Batch], forward_context: Callable
) -> float:
    """Mean loss in nats per byte; every rank evaluates the same batches."""
    model.eval()
    total, tokens = torch.zeros((), device=model.rotation.device), 0
    for inputs, targets in batches:
        with forward_context():
            total += model(inputs, targets)
        tokens += targets.numel()
    model.train()
    return mean_loss(total, tokens, model, ranks)


@dataclasses.dataclass(frozen=True)
class GradientComparison:
    """One parameter's quantized gradient against its high-precision one."""

    parameter: str
    cosine: float
    norm_ratio: float


def compare_gradients(
    model: GPT, ranks: Ranks, batch: Batch, reference: Callable, candidate: Callable
) -> list[GradientComparison]:
    """Same weights, same batch, two forward contexts: cosine and norm ratio per whole parameter.

    Two zero gradients agree: 1 and 1. Tokens go to the experts that the reference chose: a choice
    that flips is no error of a gradient.

    reference, candidate: make the context of a forward pass, such as
    ``functools.partial(precision, recipe, "cpu", torch.bfloat16)``. Changes no weight and leaves no
    ``.grad``; all ranks take part.
    """
    expected = _gradients(model, ranks, batch, reference)
    with same_choices(model):
        got = _gradients(model, ranks, batch, candidate)
    sums = torch.stack(
        [
            torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()])
            for a, b in zip(expected, got, strict=True)
        ]
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    if ranks.tp_group is not None:
        whole = sums.clone()
        dist.all_reduce(whole, group=ranks.tp_group)
        sharded = torch.tensor([is_tensor_parallel(p) for p in parameters], device=sums.device)
        sums = torch.where(sharded[:, None], whole, sums)
    dots, squares_a, squares_b = sums.unbind(1)
    are_zero = (squares_a == 0) & (squares_b == 0)  # an expert without tokens
    cosines = torch.where(are_zero, 1, dots / (squares_a * squares_b).sqrt())
    ratios = torch.where(are_zero, 1, (squares_b / squares_a).sqrt())
    return [
        GradientComparison(*row)
        for row in zip(names, cosines.tolist(), ratios.tolist(), strict=True)
    ]


def _gradients(
    model: GPT, ranks: Ranks, batch: Batch, forward_context: Callable
) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    backward(model, batch, forward_context)
    reduce_gradients(model, ranks)
    gradients = [p.grad.double() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def backward(model: GPT, batch: Batch, forward_context: Callable) -> torch.Tensor:
    """Forward and backward of the mean loss of one batch; returns the local summed loss."""
    with forward_context():
        loss = model(*batch)
    (loss / batch[1].numel()).backward()
    return loss.detach()
