"""Weight gradients that are added to ``main_grad``, by Megatron's protocol.

A weight's ``main_grad`` holds the sum over microbatches; with ``overwrite_main_grad`` it is
replaced instead. ``grad_added_to_main_grad``, where a weight has it, is set once that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_WRITTEN_DTYPES = (torch.float32, torch.bfloat16)  # what GEMMs write, and add to


def main_grads(
    parameters: Sequence[torch.nn.Parameter],
) -> tuple[list[torch.Tensor | None], list[bool]]:
    """Where gradients go, None for frozen parameters, and whether each is added there."""
    into = [p.main_grad if p.requires_grad else None for p in parameters]
    return into, [_is_sum(p) for p in parameters]


def add_to_main_grad(parameter: torch.nn.Parameter, multiply: Callable[..., torch.Tensor]) -> None:
    """Run ``multiply(dtype)`` into main_grad, with one rounding of the sum.

    multiply: the GEMM; also takes ``out`` and ``accumulate``.
    """
    main_grad, is_sum = parameter.main_grad, _is_sum(parameter)
    if main_grad.is_contiguous() and main_grad.dtype in _WRITTEN_DTYPES:
        multiply(main_grad.dtype, out=main_grad, accumulate=is_sum)
    else:
        made = multiply(torch.promote_types(main_grad.dtype, torch.float32))
        main_grad.add_(made) if is_sum else main_grad.copy_(made)


def dummy_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What autograd gets: Megatron's hook expects some gradient and ignores it, or adds zeros."""
    if not (parameter.requires_grad and hasattr(parameter, "grad_added_to_main_grad")):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter)


def _is_sum(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "overwrite_main_grad", False)
