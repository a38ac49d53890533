"""The only caller of torch.distributed. Every function takes its group; None means no group.

A group of one rank skips the call, except inside ``lone_ranks_communicate``, by which tests run on
one rank what several run. ``group_size(None)`` is 1: nothing ever reduces over the default world
group. What runs is counted for ``comm_report``: ``module`` is the name under which, ``what``
says what was carried. A backend's threads may hold what they were given for a while after the call:
they get aliases without a graph, or the module that made it would live on with it.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import traffic

# torch 2.13 renamed these two; 2.11 knows the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_smallest_group = 2  # that communicates


@contextlib.contextmanager
def lone_ranks_communicate() -> Iterator[None]:
    """For debugging: groups of one rank run every collective that a larger group would."""
    global _smallest_group
    before, _smallest_group = _smallest_group, 1
    try:
        yield
    finally:
        _smallest_group = before


def group_size(group: Any) -> int:
    """Number of ranks in ``group``."""
    return 1 if group is None else dist.get_world_size(group)


def communicates(group: Any) -> bool:
    """Whether the ranks of ``group`` exchange anything: there are several, or it is forced."""
    return group is not None and group_size(group) >= _smallest_group


def group_rank(group: Any) -> int:
    """This process's rank in ``group``."""
    return 0 if group is None else dist.get_rank(group)


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of ``group``."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def group_order(group: Any) -> tuple[tuple[int, ...], str]:
    """Sorts groups alike on every rank, also several of the same ranks."""
    return group_ranks(group), "" if group is None else group.group_name


def all_reduce_max(
    tensor: torch.Tensor, group: Any, *, kind: str = "max", module: str = "", what: str = ""
) -> None:
    """Elementwise maximum over the group, in place."""
    if communicates(group):
        _count_reduction(kind, tensor, group, module, what)
        dist.all_reduce(tensor.detach(), op=dist.ReduceOp.MAX, group=group)


def all_reduce_sum(
    tensor: torch.Tensor, group: Any, *, module: str = "", what: str = ""
) -> torch.Tensor:
    """Sum over the group, in place; returns ``tensor``."""
    if communicates(group):
        _count_reduction("sum", tensor, group, module, what)
        dist.all_reduce(tensor.detach(), op=dist.ReduceOp.SUM, group=group)
    return tensor


def reduce_max_together(tensors: list[torch.Tensor], group: Any, *, module: str = "") -> None:
    """Maximum over the group of several FP32 tensors with one all-reduce, in place."""
    if not communicates(group):
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    all_reduce_max(flat, group, module=module, what="amaxes")
    for tensor, value in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(value.view_as(tensor))


class PendingGather:
    """An all-gather on its way; it holds the buffers until ``wait``."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, work: Any):
        self._sent, self._received, self._work = sent, received, work

    def wait(self) -> torch.Tensor:
        """[m · ranks, ...], usable by what is launched from now on."""
        if self._work is not None:
            self._work.wait()
        self._sent = self._work = None
        return self._received


def start_gather(
    tensor: torch.Tensor, group: Any, *, kind: str, module: str = "", what: str = ""
) -> PendingGather:
    """Launch an all-gather along dim 0 of a contiguous [m, ...] and return at once."""
    if not communicates(group):
        return PendingGather(tensor, tensor, None)
    ranks = group_size(group)
    traffic.count(kind, module, what, (ranks - 1) * _nbytes(tensor))
    received = tensor.new_empty((tensor.shape[0] * ranks, *tensor.shape[1:]))
    sent = tensor.detach()
    work = _all_gather(received.detach(), sent, group=group, async_op=True)
    return PendingGather(sent, received, work)


def all_gather_rows(
    tensor: torch.Tensor, group: Any, *, module: str = "", what: str = ""
) -> torch.Tensor:
    """[m, ...] of each rank joined along dim 0: [m · ranks, ...]."""
    if not communicates(group):
        return tensor
    options = {"kind": "gather rows", "module": module, "what": what}
    return start_gather(tensor.contiguous(), group, **options).wait()


def reduce_scatter_rows(
    tensor: torch.Tensor, group: Any, *, module: str = "", what: str = ""
) -> torch.Tensor:
    """Sum over the group of [m · ranks, ...]; this rank's piece [m, ...]."""
    if not communicates(group):
        return tensor
    ranks = group_size(group)
    tensor = tensor.contiguous()
    result = tensor.new_empty((tensor.shape[0] // ranks, *tensor.shape[1:]))
    traffic.count("scatter sum", module, what, (ranks - 1) * _nbytes(result))
    _reduce_scatter(result.detach(), tensor.detach(), group=group)
    return result


def all_equal(value: int, group: Any, device: torch.device) -> bool:
    """Whether every rank of the group passed the same non-negative int (one int64 MAX)."""
    pair = torch.tensor([value, -value], dtype=torch.int64, device=device)
    all_reduce_max(pair, group, kind="agreement", what="hash")
    highest, lowest = pair.tolist()
    return highest == -lowest


def all_gather_object(value: Any, group: Any) -> list[Any]:
    """The picklable ``value`` of every rank; for error messages and rare repairs only."""
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    sizes = [len(pickle.dumps(v)) for v in values]
    traffic.count("agreement", "", "object", sum(sizes) - sizes[group_rank(group)])
    return values


def _count_reduction(kind: str, tensor: torch.Tensor, group: Any, module: str, what: str) -> None:
    ranks = group_size(group)
    traffic.count(kind, module, what, 2 * (ranks - 1) * _nbytes(tensor) // ranks)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
