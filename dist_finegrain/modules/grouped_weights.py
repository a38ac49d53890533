"""The weights of all experts in one storage, so that one cast reads them where they lie.

Legend: E experts, weights E times [N, K]. In Megatron's flat buffers, or where the caller has put
them, they may lie otherwise: then they are copied together for each cast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def new_weights(experts: int, shape: tuple[int, int], **options) -> list[torch.nn.Parameter]:
    """E uninitialised parameters [N, K] that follow each other in one storage."""
    joined = torch.empty(experts, *shape, **options)
    return [torch.nn.Parameter(weight.data) for weight in joined]  # .data: versions of their own


def join_weights(weights: Sequence[torch.nn.Parameter]) -> None:
    """Put them into one storage; the parameters stay the same objects."""
    if view_in_one(weights) is None:
        joined = torch.stack([weight.data for weight in weights])
        for weight, place in zip(weights, joined, strict=True):
            weight.data = place


def are_copies_of_one_storage(weights: Sequence[torch.Tensor]) -> bool:
    """Whether each has a whole storage of E weights to itself, as plain pickle leaves them."""
    first, *others = weights
    size = len(weights) * first.nbytes
    is_shared = not others or any(share_storage(first, other) for other in others)
    return not is_shared and all(w.untyped_storage().nbytes() == size for w in weights)


def view_in_one(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """[E·N, K] of weights [N, K] that follow each other in one storage; None of others."""
    first = weights[0]
    start, size = first.storage_offset(), first.numel()
    for e, weight in enumerate(weights):
        is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_contiguous()
        if not is_plain or weight.storage_offset() != start + e * size:
            return None
        if weight.dtype != first.dtype or not share_storage(weight, first):
            return None
    rows, columns = first.shape
    return first.detach().as_strided((len(weights) * rows, columns), (columns, 1))


def weights_in_one(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[E·N, K] of weights [N, K] in ``dtype``: without a copy where that is how they lie."""
    joined = view_in_one(weights)
    return torch.cat([w.to(dtype) for w in weights]) if joined is None else joined.to(dtype)


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they lie in one storage; on the meta device too, where none has an address."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def weight_ends(experts: int, rows: int, device: torch.device) -> torch.Tensor:
    """int32 [E]: where each expert's rows of the weights in one end."""
    return torch.arange(rows, experts * rows + 1, rows, dtype=torch.int32, device=device)
