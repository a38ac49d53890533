"""Quantizers that the tensor tests run with, and comparisons of planes."""

from __future__ import annotations

import torch

from dist_finegrain.formats.hybrid import HybridQuantizer
from dist_finegrain.formats.identity import IdentityQuantizer
from dist_finegrain.formats.plane import DIRECTIONS, Plane
from dist_finegrain.formats.quantizer import Quantizer
from dist_finegrain.formats.tensors import QuantizedTensor

from .user_quantizers import Int8Quantizer

# Name → a fresh quantizer with a format of one kind.
PLAIN = {
    "identity": IdentityQuantizer,
    "identity_bf16": lambda: IdentityQuantizer(dtype=torch.bfloat16),
    "user": Int8Quantizer,
}
SOURCES = ("original", "rowwise_dequantized")


def hybrid(row: str, column: str, source: str = "original") -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=PLAIN[row](),
        columnwise_quantizer=PLAIN[column](),
        columnwise_source=source,
    )


def every_quantizer() -> dict:
    """Name → a fresh quantizer: each format alone, beside each of two others, from each source."""
    makers = dict(PLAIN)
    for name in PLAIN:
        for row, column in ((name, "user"), ("user", name), (name, "identity")):
            for source in SOURCES:
                makers[f"{row}|{column}|{source}"] = _hybrid_maker(row, column, source)
    return makers


def _hybrid_maker(row: str, column: str, source: str):
    return lambda: hybrid(row, column, source)


EVERY = every_quantizer()


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def part_bytes(plane: Plane) -> list[bytes | None]:
    """The buffers of a plane as bytes, row-major: equal bytes are equal NaNs too."""
    return [
        None if p is None else p.contiguous().view(torch.uint8).numpy().tobytes()
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
