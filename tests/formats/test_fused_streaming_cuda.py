"""amax, decode and the delayed-scaling update on a GPU, against the reference on the CPU.

Legend: X [M, K]; a plane [R, C]. Equal means equal bits, but any NaN equals any NaN.
"""

from __future__ import annotations

import math

import pytest
import torch

from dist_finegrain.extension import why_unavailable
from dist_finegrain.formats import fused, fused_delayed
from dist_finegrain.formats.float8 import Float8RowFormat, Float8TensorFormat
from dist_finegrain.formats.float8_block import Float8BlockFormat
from dist_finegrain.formats.mxfp8 import MXFP8Format
from dist_finegrain.formats.nvfp4 import NVFP4Format
from dist_finegrain.formats.plane import Plane, saturating_to
from dist_finegrain.reference.elements import FP8_MAX, finite_amax
from tests.special_values import DTYPES, every_magnitude, special_values, with_nonfinite

pytestmark = pytest.mark.gpu

TENSOR, ROW = Float8TensorFormat("e4m3"), Float8RowFormat("e4m3")
FORMATS = [
    TENSOR,
    Float8TensorFormat("e5m2"),
    ROW,
    Float8RowFormat("e5m2"),
    Float8BlockFormat("e4m3"),
    Float8BlockFormat("e5m2", power_of_two=False),
    Float8BlockFormat("e4m3", two_dimensional=True, power_of_two=False),
    Float8BlockFormat("e5m2", two_dimensional=True),
    MXFP8Format("e4m3"),
    MXFP8Format("e5m2", two_dimensional=True),
    NVFP4Format(),
    NVFP4Format(two_dimensional=True),
    NVFP4Format(rht="signed"),
    NVFP4Format(row_scaled=True),
]
# (M, K, elements before the first, row stride): a wide row is read in pieces of 4 KB
LAYOUTS = [
    (5, 100, 0, 100),
    (3, 4099, 1, 4099),
    (3, 9001, 3, 9005),
    (7, 33, 5, 40),
    (2000, 2048, 0, 2048),
    (500, 2048, 8, 4096),
    (300, 8200, 7, 8207),
    (300, 1, 1, 3),
    (1, 300001, 1, 300001),
    (4, 65536, 0, 65536),
]
# C as a multiple of 8, even and odd, below and above what a warp takes at once
SHAPES = [(1, 1), (3, 130), (33, 200), (17, 1501), (200, 7), (140, 2260), (300, 4096)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.describe())


@pytest.fixture(autouse=True)
def kernels():
    if reason := why_unavailable(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)


def bits(t: torch.Tensor) -> torch.Tensor:
    t = t.cpu()
    return torch.where(t.isnan(), torch.full_like(t, math.nan), t).view(
        torch.int32 if t.dtype == torch.float32 else torch.int16
    )


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    differing = (bits(got) != bits(want)).nonzero()
    assert len(differing) == 0, f"{len(differing)} of {want.numel()} differ, first {differing[0]}"


def amaxes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return fused.measure(x, TENSOR, None)[0].cpu(), fused.measure(x, ROW, None)[0].cpu()


# amax.
@each_dtype
def test_amax_of_special_values(dtype):
    for name, x in special_values(dtype).items():
        tensor, rows = amaxes(x.cuda())
        assert torch.equal(tensor, finite_amax(x)), name
        assert torch.equal(rows, finite_amax(x, 1)), name


@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
def test_amax_reads_every_layout_in_place(dtype, layout):
    m, k, offset, stride = layout
    data = with_nonfinite(every_magnitude(1, offset + m * stride, dtype, seed=k), seed=m)[0]
    # What lies outside X is larger than anything in it.
    outside = torch.full_like(data, torch.finfo(dtype).max)
    x = torch.as_strided(outside, (m, k), (stride, 1), offset)
    x.copy_(torch.as_strided(data, (m, k), (stride, 1), offset) / 4)
    moved = torch.as_strided(outside.cuda(), (m, k), (stride, 1), offset)
    tensor, rows = amaxes(moved)
    assert torch.equal(tensor, finite_amax(x)) and torch.equal(rows, finite_amax(x, 1))
    assert torch.equal(fused.measure(moved.t(), TENSOR, None)[0].cpu(), tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
def test_amax_finds_one_element_anywhere(dtype, layout):
    m, k, offset, stride = layout
    x = torch.zeros(offset + m * stride, dtype=dtype, device="cuda")
    x = torch.as_strided(x, (m, k), (stride, 1), offset)
    columns = {0, k - 1, *torch.randint(0, k, (20,)).tolist(), *range(min(k, 9)), max(k - 9, 0)}
    for column in sorted(columns):
        row = column % m
        x[row, column] = -2.5
        tensor, rows = amaxes(x)
        assert tensor.item() == 2.5 and rows[row] == 2.5 and rows.sum() == 2.5, (row, column)
        x[row, column] = 0


@each_dtype
def test_an_amax_replaces_what_was_there(dtype):
    measure = torch.ops.dist_finegrain.measure.default
    packed = fused.options_of(TENSOR).packed
    x = torch.full((3, 70), math.nan, dtype=dtype, device="cuda")
    for before, value, after in ((-1.0, math.nan, 0.0), (-1.0, 2.0, 2.0), (5.0, 2.0, 2.0)):
        amax = torch.full((1,), before, device="cuda")
        x[1, 3] = value
        measure(x, amax, None, packed, 0.0, 0, False, None, None)
        assert amax.item() == after


# decode.
def planes_of(format, x: torch.Tensor) -> list[Plane]:
    """The plane of ``x``; one with any codes; one with any scale bytes too."""
    generator = torch.Generator().manual_seed(7)

    def scramble(part):
        part.copy_(torch.randint(0, 256, part.shape, generator=generator, dtype=torch.uint8))

    planes = [format.encode(x)]
    planes.append(planes[-1].map(torch.clone))
    scramble(planes[-1].codes)
    if planes[-1].scales is not None and planes[-1].scales.dtype == torch.uint8:
        planes.append(planes[-1].map(torch.clone))
        scramble(planes[-1].scales)
    return planes


def check_decode(plane: Plane) -> None:
    on_cuda = plane.map(torch.Tensor.cuda)
    for outer in (True, False):
        values = plane.format.decode(plane, outer=outer)
        for dtype in DTYPES:
            got = fused.decode(on_cuda, dtype, outer=outer)
            assert_same(got, saturating_to(values, dtype))


@each_dtype
@each_format
def test_decode_of_special_values(format, dtype):
    for x in special_values(dtype).values():
        for plane in planes_of(format, x):
            check_decode(plane)


@pytest.mark.parametrize("shape", SHAPES)
@each_format
def test_decode_of_every_magnitude(format, shape):
    for dtype in DTYPES:
        for plane in planes_of(format, with_nonfinite(every_magnitude(*shape, dtype))):
            check_decode(plane)


# Delayed scaling.
def expected_update(slot: fused_delayed.DelayedState) -> tuple[torch.Tensor, torch.Tensor]:
    """(history, scale) after one update of a slot, on the CPU."""
    history, scale, pending = (t.cpu() for t in (slot.history, slot.scale, slot.pending))
    if pending < 0:
        return history, scale
    history = torch.cat((history[1:], pending))
    amax = history.max() if slot.use_max else history[-1]
    if not (amax > 0 and amax.isfinite()):
        return history, scale
    scale = torch.tensor([slot.fp8_max]) / amax / 2.0**slot.margin
    return history, scale.clamp(max=torch.finfo(torch.float32).max)


def make_slots() -> list[fused_delayed.DelayedState]:
    slots = []
    lengths = (1, 2, 16, 31, 32, 33, 255, 256, 257, 1024, 1025)
    pendings = (3.7, -1.0, 0.0, 1e-40, math.inf, 3e38)
    for index, length in enumerate(lengths * len(pendings)):
        history = torch.rand(length, device="cuda") * (0.0 if index % 7 == 0 else 10.0)
        if index % 13 == 0:
            history[length // 2] = math.nan
        slots.append(
            fused_delayed.DelayedState(
                scale=torch.full((1,), 1.0 + index, device="cuda"),
                history=history,
                pending=torch.full((1,), pendings[index % len(pendings)], device="cuda"),
                use_max=index // 2 % 2 == 0,
                fp8_max=FP8_MAX[("e4m3", "e5m2")[index % 2]],
                margin=float(index % 3),
            )
        )
    return slots


def test_update_of_many_slots():
    torch.manual_seed(0)
    slots = make_slots()
    for _ in range(3):
        expected = [expected_update(slot) for slot in slots]
        fused_delayed.update_delayed(slots)
        for index, (slot, (history, scale)) in enumerate(zip(slots, expected, strict=True)):
            assert_same(slot.history, history)
            assert_same(slot.scale, scale)
            assert slot.pending.item() == -1.0
            if index % 3:
                slot.pending.fill_(float(torch.rand(())))


# Streams, graphs, determinism.
def test_no_synchronisation_and_captured_in_a_graph():
    x = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
    plane = NVFP4Format().encode(x)

    def work():
        return fused.measure(x, TENSOR, ROW), fused.decode(plane, torch.bfloat16)

    eager = work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured[0], eager[0], strict=True))
        assert_same(captured[1], eager[1])


# More than 2^31 elements (bug-cases row 33).
@pytest.mark.parametrize("rows", [65408, 65536, 65664])
def test_more_elements_than_an_int32_counts(rows):
    """The last rows of both planes, and of their values, are those of the last rows alone."""
    columns, last = 32768, 128
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB of free GPU memory")
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for piece in x.split(4096):
        piece.normal_()
    x[-1, -1] = 1000.0
    tail = x[-last:].cpu()
    amax = fused.measure(x, TENSOR, None)[0]
    assert amax.item() == 1000.0
    assert torch.equal(fused.measure(x, ROW, None)[0][-last:].cpu(), finite_amax(tail, 1))
    for row, column in ((TENSOR, TENSOR), (MXFP8Format("e4m3"), NVFP4Format())):
        casted = fused.cast(x, row, column, row_statistic=amax, column_statistic=amax)
        expected = row.encode(tail, amax.cpu())
        assert torch.equal(casted.row.codes[-last:].cpu(), expected.codes)
        values = fused.decode(casted.row, torch.bfloat16)[-last:]
        assert_same(values, saturating_to(row.decode(expected), torch.bfloat16))
        del values
        expected = column.encode(tail.t(), amax.cpu())
        width = expected.codes.shape[1]
        assert torch.equal(casted.column.codes[:, -width:].cpu(), expected.codes)
        values = fused.decode(casted.column, torch.bfloat16)[:, -last:]
        assert_same(values.contiguous(), saturating_to(column.decode(expected), torch.bfloat16))
        del values, casted
