"""A mixture of experts in place of a decoder layer's MLP: router, two GroupedLinears, combination.

Legend: S sequence, B batch, H hidden, E experts, k experts of a token, F inner features, T
tensor-parallel ranks; n = S·B tokens.

Every tp rank holds F/T features of each expert and multiplies all tokens, so the experts' result is
a partial sum. The router is whole on every rank and sees that rank's tokens only: all of them, or
under sequence parallelism its S/T positions, whose choices are then gathered with them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional

from dist_finegrain import GroupedLinear
from dist_finegrain.distributed import collectives
from dist_finegrain.modules.mappings import gather_rows, sum_gradient
from dist_finegrain.planning import Plan

BALANCE_WEIGHT = 0.01  # of the balancing loss beside the next-byte loss


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' x: this rank's rows of it under sequence parallelism, else all."""

    @staticmethod
    def forward(ctx, x, group, scatter: bool):
        ctx.group, ctx.scatter = group, scatter
        if scatter:
            return collectives.reduce_scatter_rows(x, group)
        return collectives.all_reduce_sum(x.clone(), group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.scatter:
            grad = collectives.all_gather_rows(grad, ctx.group)
        return grad, None, None


class Router(torch.nn.Module):
    """Which k experts a token goes to, and with which weights; plain torch in FP32.

    last_chosen: the choice of the last forward; kept_choice: taken instead of the k highest.
    """

    def __init__(self, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.last_chosen: torch.Tensor | None = None
        self.kept_choice: torch.Tensor | None = None
        self.weight = torch.nn.Parameter(torch.empty(experts, hidden))
        torch.nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [..., H] → probabilities [..., E], those of the k chosen experts, the experts [..., k].

        The k weights are not scaled to a sum of 1: with k = 1 the router would get no gradient.
        """
        with torch.autocast(x.device.type, enabled=False):
            probabilities = functional.linear(x.float(), self.weight.float()).softmax(-1)
        chosen = self.kept_choice
        if chosen is None:
            chosen = probabilities.detach().topk(self.top_k, dim=-1).indices
        self.last_chosen = chosen
        return probabilities, probabilities.gather(-1, chosen), chosen


@contextlib.contextmanager
def same_choices(model: torch.nn.Module):
    """Within it the model's routers choose again what they chose in their last forward."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.kept_choice = router.last_chosen
    try:
        yield
    finally:
        for router in routers:
            router.kept_choice = None


class MoELayer(torch.nn.Module):
    """y = Σ over a token's k experts of weight · fc2(gelu(fc1(x))), with E experts of 2·H features.

    x, y: [S, B, H], or [S/T, B, H] under sequence parallelism. fc1.weight{e} [2·H/T, H] and
    fc2.weight{e} [H, 2·H/T], no biases; router.weight [E, H], whole on every rank.
    hidden, experts, top_k, prefix: H, E, k and what the names of fc1 and fc2 start with.
    parallel: tp_group, tp_size and sequence_parallel of the model's linears.

    read_splits: read the experts' token counts on the host, which waits for the device. Formats
    that GroupedLinear casts expert by expert need it (``experts_need_host_splits``).
    """

    def __init__(
        self, hidden: int, experts: int, top_k: int, prefix: str, parallel: dict[str, Any]
    ):
        super().__init__()
        self.experts, self.top_k, self.read_splits = experts, top_k, False
        self.group, self.scatter = parallel["tp_group"], parallel["sequence_parallel"]
        self.router = Router(hidden, experts, top_k)
        sizes = {"fc1": (hidden, 2 * hidden, "column"), "fc2": (2 * hidden, hidden, "row")}
        for name, (k, n, mode) in sizes.items():
            options = {"parallel_mode": mode, "bias": False, "name": f"{prefix}.{name}"}
            self.add_module(name, GroupedLinear(experts, k, n, **options, **parallel))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, the balancing loss summed over this rank's tokens)."""
        probabilities, weights, chosen = self.router(x)
        if self.scatter:
            x, weights = gather_rows(x, self.group), gather_rows(weights, self.group)
            chosen = collectives.all_gather_rows(chosen, self.group)
        else:  # every rank computes a part of the gradients of the same x and weights
            x, weights = sum_gradient(x, self.group), sum_gradient(weights, self.group)
        y = self.combine(self.run_experts(x, chosen), weights)
        if self.group is not None:
            y = _SumOverRanks.apply(y, self.group, self.scatter)
        return y, balance_loss(probabilities, chosen, self.experts)

    def run_experts(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [S, B, H], chosen [S, B, k] → the experts' partial results [S, B, k, H]."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # n·k choices, sorted by expert
        # bincount would read its result's size on the host.
        splits = torch.zeros(self.experts, dtype=torch.int64, device=x.device)
        splits.scatter_add_(0, flat, torch.ones_like(flat))
        if self.read_splits:
            splits = splits.tolist()
        copies = x.unsqueeze(2).expand(*chosen.shape, -1).flatten(0, 2)
        inner = functional.gelu(self.fc1(copies[order], splits), approximate="tanh")
        y = self.fc2(inner, splits)
        return y[order.argsort()].view(*chosen.shape, -1)

    @staticmethod
    def combine(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """y [S, B, k, H], weights [S, B, k] FP32 → weighted sums [S, B, H], FP32."""
        return (y.float() * weights.unsqueeze(-1)).sum(2)


def balance_loss(probabilities: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Σ over tokens of E · Σ_e share_e · p_e: 1 per token when balanced, E when one expert has all.

    probabilities [s, B, E] of this rank's positions, chosen [S, B, k] of all. share_e is the part
    of its sequence's choices that fell on e, a number without gradient; so the ranks' sums over
    their positions or sequences add up to the loss of the whole batch.
    """
    counts = functional.one_hot(chosen, experts).sum((0, 2))  # [B, E]
    share = counts / (chosen.shape[0] * chosen.shape[2])
    return experts * (probabilities * share).sum()


def experts_need_host_splits(plan: Plan) -> str:
    """Why, in a plan's words, the experts' token counts must be read on the host; "" if not."""
    rows = (row for row in plan.rows if "m_splits must be a list" in row.reason)
    return next((f"{row.module} {row.gemm}: {row.reason}" for row in rows), "")
