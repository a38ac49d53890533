"""Quantizers that the tensor tests run with, and comparisons of planes."""

from __future__ import annotations

import functools

import torch

from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowScalingQuantizer,
)
from dist_finegrain.formats.float8_block import Float8BlockQuantizer
from dist_finegrain.formats.hybrid import HybridQuantizer
from dist_finegrain.formats.identity import IdentityQuantizer
from dist_finegrain.formats.mxfp8 import MXFP8Quantizer
from dist_finegrain.formats.nvfp4 import NVFP4Quantizer
from dist_finegrain.formats.plane import DIRECTIONS, Plane
from dist_finegrain.formats.quantizer import Quantizer
from dist_finegrain.formats.tensors import QuantizedTensor

from .user_quantizers import Int8Quantizer

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def delayed() -> Float8Quantizer:
    return Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1), E4M3)


# Name → a fresh quantizer; every format that a plane can have.
PLAIN = {
    "identity": IdentityQuantizer,
    "identity_bf16": lambda: IdentityQuantizer(dtype=torch.bfloat16),
    "user": Int8Quantizer,
    "delayed": delayed,
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "current_pow2": lambda: Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True),
    "row": lambda: Float8RowScalingQuantizer(E4M3),
    "block_1d": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "block_2d": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "mxfp8_2d": lambda: MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer,
    "nvfp4_2d": lambda: NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_rht": lambda: NVFP4Quantizer(with_rht=True),
    "nvfp4_rht_sr": lambda: NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "nvfp4_row": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
}
SOURCES = ("original", "rowwise_dequantized")


def hybrid(row: str, column: str, source: str = "original") -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=PLAIN[row](),
        columnwise_quantizer=PLAIN[column](),
        columnwise_source=source,
    )


def _some_hybrids() -> list[tuple[str, str, str]]:
    """(row, column, source): each format as row child and as column child, from each source."""
    names = list(PLAIN)
    return [
        (row, names[index - distance], source)
        for distance, source in zip((2, 5), SOURCES, strict=True)
        for index, row in enumerate(names)
    ]


HYBRIDS = _some_hybrids()
# Name → a fresh quantizer.
EVERY = PLAIN | {"|".join(case): functools.partial(hybrid, *case) for case in HYBRIDS}


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def part_bytes(plane: Plane) -> list[bytes | None]:
    """The buffers of a plane as bytes, row-major: equal bytes are equal NaNs too."""
    return [
        None if p is None else p.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for p in plane.parts
    ]


def assert_same_plane(got: Plane | None, want: Plane | None) -> None:
    assert (got is None) == (want is None)
    if got is None:
        return
    assert got.format == want.format and tuple(got.shape) == tuple(want.shape)
    assert [_layout(p) for p in got.parts] == [_layout(p) for p in want.parts]
    for index, (a, b) in enumerate(zip(part_bytes(got), part_bytes(want), strict=True)):
        assert a == b, f"buffer {index} of {got.format.describe()} differs"


def assert_same_tensor(got: QuantizedTensor, want: QuantizedTensor) -> None:
    """Class, shape, dtype, formats and every byte."""
    assert type(got) is type(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    for direction in DIRECTIONS:
        assert_same_plane(got.plane(direction), want.plane(direction))


def direct_plane(quantizer: Quantizer, direction: str, matrix: torch.Tensor) -> Plane:
    """The plane of a matrix [R, C], from the child alone."""
    rowwise = direction == "rowwise"
    child = quantizer.child(direction).copy()
    child.set_usage(rowwise=rowwise, columnwise=not rowwise)
    return child.quantize(matrix).plane(direction)


def _layout(part):
    return None if part is None else (tuple(part.shape), part.dtype)
