"""The only caller of torch.distributed. Every function takes its group; None means no group.

A group of one rank skips the call. ``group_size(None)`` is 1: nothing ever reduces over the default
world group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed these two; 2.11 knows the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: Any) -> int:
    """Number of ranks in ``group``."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Any) -> int:
    """This process's rank in ``group``."""
    return 0 if group is None else dist.get_rank(group)


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of ``group``; they also sort groups alike on every rank."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def all_reduce_max(tensor: torch.Tensor, group: Any) -> None:
    """Elementwise maximum over the group, in place."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def all_reduce_sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over the group, in place; returns ``tensor``."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def reduce_max_together(tensors: list[torch.Tensor], group: Any) -> None:
    """Maximum over the group of several FP32 tensors with one all-reduce, in place."""
    if group_size(group) == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    all_reduce_max(flat, group)
    for tensor, value in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(value.view_as(tensor))


def all_gather_rows(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """[m, ...] of each rank joined along dim 0: [m · ranks, ...]."""
    ranks = group_size(group)
    if ranks == 1:
        return tensor
    tensor = tensor.contiguous()
    result = tensor.new_empty((tensor.shape[0] * ranks, *tensor.shape[1:]))
    _all_gather(result, tensor, group=group)
    return result


def reduce_scatter_rows(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over the group of [m · ranks, ...]; this rank's piece [m, ...]."""
    ranks = group_size(group)
    if ranks == 1:
        return tensor
    tensor = tensor.contiguous()
    result = tensor.new_empty((tensor.shape[0] // ranks, *tensor.shape[1:]))
    _reduce_scatter(result, tensor, group=group)
    return result


def all_equal(value: int, group: Any, device: torch.device) -> bool:
    """Whether every rank of the group passed the same non-negative int (one int64 MAX)."""
    pair = torch.tensor([value, -value], dtype=torch.int64, device=device)
    all_reduce_max(pair, group)
    highest, lowest = pair.tolist()
    return highest == -lowest


def all_gather_object(value: Any, group: Any) -> list[Any]:
    """The picklable ``value`` of every rank; for error messages and rare repairs only."""
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
