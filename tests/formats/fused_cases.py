"""The fused kernels: cases, their oracle (Format.measure, encode, decode on the CPU), comparisons.

Legend: X [M, K] is what is cast; its rowwise plane is (R, C) = (M, K), its columnwise one (K, M).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

from dist_finegrain.formats import fused
from dist_finegrain.formats.float8 import Float8DelayedFormat, Float8RowFormat, Float8TensorFormat
from dist_finegrain.formats.float8_block import Float8BlockFormat
from dist_finegrain.formats.mxfp8 import MXFP8Format
from dist_finegrain.formats.nvfp4 import NVFP4Format
from dist_finegrain.formats.plane import DIRECTIONS, Format, Plane, Rounding, saturating_to
from dist_finegrain.formats.swizzle import with_swizzled_scales
from dist_finegrain.reference.elements import finite_amax
from tests.special_values import every_magnitude, with_nonfinite

SCALE = 3.7  # of delayed scaling
SOURCES = ("original", "rowwise_dequantized")
# What any two of which may be the planes of one matrix; Identity never reaches a kernel.
PAIRED = {
    "delayed": Float8DelayedFormat("e4m3"),
    "current": Float8TensorFormat("e4m3"),
    "row": Float8RowFormat("e4m3"),
    "block": Float8BlockFormat("e4m3"),
    "mxfp8": MXFP8Format("e4m3"),
    "nvfp4": NVFP4Format(),
}
OPTIONS = {
    "delayed_e5m2": Float8DelayedFormat("e5m2"),
    "current_e5m2": Float8TensorFormat("e5m2"),
    "current_pow2": Float8TensorFormat("e4m3", power_of_two=True),
    "current_e5m2_pow2_epsilon": Float8TensorFormat("e5m2", 1e5, True),
    "row_e5m2_pow2": Float8RowFormat("e5m2", power_of_two=True),
    "row_epsilon": Float8RowFormat("e4m3", 0.25),
    "block_fp32": Float8BlockFormat("e4m3", power_of_two=False),
    "block_e5m2_epsilon": Float8BlockFormat("e5m2", epsilon=0.25),
    "block_e5m2_fp32_epsilon": Float8BlockFormat("e5m2", epsilon=0.25, power_of_two=False),
    "block_2d": Float8BlockFormat("e4m3", two_dimensional=True),
    "block_2d_fp32": Float8BlockFormat("e4m3", two_dimensional=True, power_of_two=False),
    "block_2d_e5m2_epsilon": Float8BlockFormat("e5m2", two_dimensional=True, epsilon=2.0),
    "mxfp8_e5m2": MXFP8Format("e5m2"),
    "mxfp8_2d": MXFP8Format("e4m3", two_dimensional=True),
    "mxfp8_2d_e5m2": MXFP8Format("e5m2", two_dimensional=True),
    "nvfp4_2d": NVFP4Format(two_dimensional=True),
    "nvfp4_rht": NVFP4Format(rht="signed"),
    "nvfp4_rht_plain": NVFP4Format(rht="plain"),
    "nvfp4_sr": NVFP4Format(stochastic=True),
    "nvfp4_rht_sr": NVFP4Format(rht="signed", stochastic=True),
    "nvfp4_2d_sr": NVFP4Format(two_dimensional=True, stochastic=True),
    "nvfp4_row": NVFP4Format(row_scaled=True),
}
EVERY = PAIRED | OPTIONS
SWIZZLED = {
    name: with_swizzled_scales(format)
    for name, format in EVERY.items()
    if format.family in ("mxfp8", "nvfp4")
}
# Ragged against every block, tile and vector width, and the smallest.
SHAPES = ((1, 1), (1, 7), (5, 1), (16, 16), (17, 33), (130, 129), (129, 257))
PLACES = {
    "rowwise": Rounding(11, 0xDEADBEEF, 33, row_origin=64, contraction_origin=160),
    "columnwise": Rounding(11, 0x01234567, 33, row_origin=160, contraction_origin=64),
}

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module"
)
each_source = pytest.mark.parametrize("source", SOURCES)


def require(device: str, *formats: Format) -> None:
    """Skip where the kernels of ``device`` were not built; a refused format is a failure."""
    if reason := fused.why_not(torch.device(device)):
        pytest.skip(reason)
    reason = fused.why_not(torch.device(device), *formats)
    assert not reason, reason


@pytest.fixture(autouse=True)
def dirty_buffers(monkeypatch) -> set[int]:
    """Every buffer allocated without a value is full of 0xFF; the addresses of those handed out."""
    handed_out = set()

    def dirty(allocate):
        def allocated(*args, **options):
            buffer = allocate(*args, **options)
            if buffer.numel() and buffer.device.type in ("cpu", "cuda"):
                buffer.reshape(-1).view(torch.uint8).fill_(0xFF)
                handed_out.add(buffer.data_ptr())
            return buffer

        return allocated

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, dirty(getattr(owner, name)))
    return handed_out


class Matrix(NamedTuple):
    """What a test casts: a key of ``DATA``, the extents and the dtype."""

    data: str
    rows: int
    columns: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.data} [{self.rows}, {self.columns}] {str(self.dtype).removeprefix('torch.')}"


def normal(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + 7 * columns)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def log_normal(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = normal(rows, columns, torch.float32)
    magnitude = (4 * normal(columns, rows, torch.float32).t()).exp()
    return (x.sign() * magnitude).clamp(-6e4, 6e4).to(dtype)


DATA = {
    "normal": normal,
    "log_normal": log_normal,
    "row_magnitudes": every_magnitude,
    "column_magnitudes": lambda m, k, dtype: every_magnitude(k, m, dtype, 1).t().contiguous(),
    "nonfinite": lambda m, k, dtype: with_nonfinite(normal(m, k, dtype)),
    "nonfinite_magnitudes": lambda m, k, dtype: with_nonfinite(every_magnitude(m, k, dtype, 2)),
}


@functools.cache
def values(matrix: Matrix) -> torch.Tensor:
    return DATA[matrix.data](*matrix[1:])


@dataclasses.dataclass
class Expected:
    """One plane by the oracle: what it was given, what it encodes, and the amax of that."""

    source: torch.Tensor
    statistic: torch.Tensor | None
    plane: Plane
    amax: torch.Tensor


def expected_plane(
    source: torch.Tensor, format: Format, rounding: Rounding | None = None
) -> Expected:
    """The plane of ``source`` [R, C], which it measures itself (delayed scaling: SCALE)."""
    statistic = format.measure(source)
    amax = finite_amax(source)
    if format.rht is not None:
        amax = statistic
    if format.statistic == "scale":
        statistic = torch.tensor([SCALE])
    return Expected(source, statistic, format.encode(source, statistic, rounding), amax)


def dequantized(plane: Plane) -> torch.Tensor:
    """decode(plane) as a "rowwise_dequantized" column child reads it."""
    return saturating_to(plane.format.decode(plane), plane.dtype, keep_inf=False)


def expected_cast(
    x: torch.Tensor, row: Format, column: Format, source: str = "original", places: dict = PLACES
) -> tuple[Expected, Expected]:
    """Both planes of ``x`` [M, K] on the CPU."""
    first = expected_plane(x, row, places.get("rowwise"))
    read = x if source == "original" else dequantized(first.plane)
    return first, expected_plane(read.t(), column, places.get("columnwise"))


@functools.lru_cache(maxsize=8192)
def _expected(matrix: Matrix, direction: str, format: Format, row: Format | None) -> Expected:
    x = values(matrix)
    if row is not None:
        x = dequantized(_expected(matrix, "rowwise", row, None).plane)
    source = x if direction == "rowwise" else x.t()
    return expected_plane(source, format, PLACES[direction])


def expected_of(
    matrix: Matrix, row: Format, column: Format, source: str
) -> tuple[Expected, Expected]:
    """``expected_cast`` of a small case, remembered."""
    read = None if source == "original" else row
    return _expected(matrix, "rowwise", row, None), _expected(matrix, "columnwise", column, read)


def as_row(format: Format, source: str) -> Format:
    """The row partner of a ``format`` column: nothing is made from a rotated row plane's values."""
    if source == "rowwise_dequantized" and format.rht:
        return dataclasses.replace(format, rht=None)
    return format


def as_measured_row(format: Format, source: str) -> Format:
    """As ``as_row``, for ``fused.measure``: what stochastic codes decode to is not known there."""
    row = as_row(format, source)
    if source == "rowwise_dequantized" and getattr(row, "stochastic", False):
        return dataclasses.replace(row, stochastic=False)
    return row


def moved(tensor: torch.Tensor | None, device: str) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def run_cast(
    x: torch.Tensor,
    row: Format | None,
    column: Format | None,
    wanted: tuple[Expected, Expected],
    source: str = "original",
    places: dict = PLACES,
    **options,
):
    """The kernels on ``x``, wherever it lies, with the statistics that the oracle used."""
    statistics = [None if w is None else moved(w.statistic, x.device) for w in wanted]
    return fused.cast(
        x,
        row,
        column,
        source=source,
        row_statistic=statistics[0],
        column_statistic=statistics[1],
        rounding=places,
        **options,
    )


# Comparisons: what differs, as text; empty where nothing does.
def bytes_of(part: torch.Tensor) -> torch.Tensor:
    return part.detach().cpu().contiguous().flatten().view(torch.uint8)


def buffer_differs(name: str, got: torch.Tensor | None, want: torch.Tensor | None) -> str:
    if got is None or want is None:
        return "" if got is want else f"{name} is {got}, expected {want}"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{name} is {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    unequal = (bytes_of(got) != bytes_of(want)).nonzero()
    if not len(unequal):
        return ""
    index, size = int(unequal[0]), want.element_size()
    place = [int(i) for i in torch.unravel_index(torch.tensor(index // size), want.shape)]
    a, b = (bytes_of(t)[index // size * size :][:size].tolist() for t in (got, want))
    return (
        f"{name}: {len(unequal)} of {want.numel() * size} bytes differ, "
        f"first at {place}: bytes {a}, expected {b}"
    )


def plane_differs(got: Plane | None, want: Plane | None) -> str:
    if got is None or want is None:
        return "" if got is want else f"plane is {got}, expected {want}"
    if (got.format, tuple(got.shape), got.dtype) != (want.format, tuple(want.shape), want.dtype):
        return f"plane is {got.format} {got.shape} {got.dtype}"
    if len(got.parts) != len(want.parts):
        return f"{len(got.parts)} buffers, expected {len(want.parts)}"
    names = ("codes", "scales", "outer")
    found = [buffer_differs(n, *p) for n, *p in zip(names, got.parts, want.parts, strict=False)]
    for name, part in zip(names, got.parts, strict=False):
        if part is not None and not part.is_contiguous():
            found.append(f"{name} has strides {part.stride()}")
        if part is not None and part.data_ptr() % 16:
            found.append(f"{name} is not 16-byte aligned")
    return "; ".join(text for text in found if text)


def planes_differ(result, wanted: tuple[Plane | None, Plane | None]) -> str:
    """Of what ``fused.cast`` returned, against (row, column)."""
    pairs = zip(DIRECTIONS, (result.row, result.column), wanted, strict=True)
    found = [f"{name} {text}" for name, *pair in pairs if (text := plane_differs(*pair))]
    return "; ".join(found)


class Report:
    """Collects what differs over many cases, so that a failure says how many and which."""

    def __init__(self):
        self.cases = 0
        self.found: list[str] = []

    def add(self, case: object, text: str) -> None:
        self.cases += 1
        if text:
            self.found.append(f"{case}: {text}")

    def check(self) -> None:
        assert self.cases
        shown = "\n".join(self.found[:8])
        assert not self.found, f"{len(self.found)} of {self.cases} cases differ:\n{shown}"
