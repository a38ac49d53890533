"""Activations of LayerNormMLP, under Transformer Engine's names.

A gated one halves the width: of h [..., 2f] the first half goes through the function, the second
multiplies it. Under tensor parallelism each rank's h [..., 2f/tp] holds its own two halves, so the
rows of fc1 on rank r are [first half's rows r·f/tp …, second half's rows r·f/tp …].
They run in the dtype of h, each torch operation rounding once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .torch_autocast import without_autocast


def _gelu(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(h, approximate="tanh")  # as Transformer Engine, whose name does not say it


def _qgelu(h: torch.Tensor) -> torch.Tensor:
    return h * torch.sigmoid(1.702 * h)


def _srelu(h: torch.Tensor) -> torch.Tensor:
    return F.relu(h).square()


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": F.relu,
    "silu": F.silu,
    "srelu": _srelu,
}
# Gated name → what the first half goes through.
_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu": _gelu,
    "glu": torch.sigmoid,
    "qgeglu": _qgelu,
    "reglu": F.relu,
    "sreglu": _srelu,
    "swiglu": F.silu,
}
ACTIVATIONS = (*_PLAIN, *_GATED)


def check_activation(name: str) -> None:
    """ValueError unless ``name`` is one of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation={name!r}; accepted: {ACTIVATIONS}, e.g. activation='swiglu' "
            "(ReLU² is 'srelu')"
        )


def is_gated(name: str) -> bool:
    """Whether the activation halves the width."""
    return name in _GATED


def activate(name: str, h: torch.Tensor) -> torch.Tensor:
    """The activation of h: [..., f] of [..., f], or of [..., 2f] for a gated one, in h's dtype."""
    with without_autocast(h.device):
        if name in _PLAIN:
            return _PLAIN[name](h)
        first, second = h.chunk(2, dim=-1)
        return _GATED[name](first) * second
