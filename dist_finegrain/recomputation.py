"""recompute: activation checkpointing that recomputes under the autocast of the forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from .context import Frame, autocast, current_frame


def recompute(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any
) -> Any:
    """``function(*args)``, whose activations are computed again in backward instead of being kept.

    This is ``torch.utils.checkpoint.checkpoint``, which also restores torch.autocast and random
    state; the recomputation besides runs under the autocast that is open now (recipe, enabled,
    amax_reduction_group), whatever is open when backward reaches it. With no autocast open now it
    is the high-precision path.

    use_reentrant: torch's two implementations; both give the bits of a run without recompute().
    options: torch's other keyword arguments (preserve_rng_state, context_fn, …) and, with
    use_reentrant=False, keyword arguments of ``function``.
    Raises TypeError when ``function`` is not callable, ValueError for options that torch refuses.
    """
    if not callable(function):
        raise TypeError(f"function is {function!r}; accepted: a callable, e.g. recompute(layer, x)")
    # A frame of its own: what is open in backward must not decide when nothing was open here.
    frame = dataclasses.replace(current_frame(), is_default=False)

    def under_frame(*inputs: Any, **keywords: Any) -> Any:
        with _reopened(frame):
            return function(*inputs, **keywords)

    return torch.utils.checkpoint.checkpoint(
        under_frame, *args, use_reentrant=use_reentrant, **options
    )


class _reopened(autocast):
    """The autocast that a frame was made by, once more; also in another thread."""

    def __init__(self, frame: Frame):
        self._opened = frame

    def _frame(self) -> Frame:
        return self._opened
