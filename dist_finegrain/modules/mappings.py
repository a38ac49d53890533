"""Collectives with their dual in backward, for tensors outside of the linear layers' function."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed import collectives


class _GatherRows(torch.autograd.Function):
    """Rows of every rank in forward; the ranks' gradients summed and scattered in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return collectives.all_gather_rows(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return collectives.reduce_scatter_rows(grad, ctx.group), None


class _SumGradient(torch.autograd.Function):
    """Nothing in forward; in backward the sum of the ranks' gradients, added up in FP32."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        total = grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return collectives.all_reduce_sum(total, ctx.group).to(grad.dtype), None


def gather_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
    """x [m, ...] of every rank of ``group`` joined along dim 0: [m · ranks, ...]."""
    return _GatherRows.apply(x, group) if collectives.communicates(group) else x


def sum_gradient(x: torch.Tensor, group: Any) -> torch.Tensor:
    """x itself, equal on all ranks of ``group``, each of which computes a part of its gradient."""
    return _SumGradient.apply(x, group) if collectives.communicates(group) else x
