"""What Transformer Engine 2.20.2 wrote (tests/data/README.md), and how many values differ."""

from __future__ import annotations

import pathlib

import torch
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).parents[1] / "data" / "te_2_20_2_casts.safetensors"
GOLDEN = load_file(DATA)
INPUTS = ("a_log", "a_mixed", "b_log", "b_mixed")
BUFFERS = {"rowwise": "data", "columnwise": "transpose"}  # of per-tensor casts


def differing(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many elements differ in any bit; shapes and dtypes must agree."""
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    size = got.element_size()
    a, b = (t.contiguous().view(torch.uint8).reshape(-1, size) for t in (got, wanted))
    return int((a != b).any(1).sum())
