"""The fused cast against the reference: 0 differing bytes in codes, scales and outer scales.

Fast: all pairs of formats, options, ragged shapes, special values, layouts. Slow: long shapes, 10^7
elements of each format, 2^31 elements. GPU only: no synchronisation, graphs, one launch.
Legend: X [M, K]; SHAPES are (M, K).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from dist_finegrain.formats import fused
from dist_finegrain.formats.casting import CastJob, run_casts
from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.float8 import Float8Quantizer
from dist_finegrain.formats.hybrid import HybridQuantizer
from dist_finegrain.formats.plane import DIRECTIONS, Plane
from dist_finegrain.formats.quantizer import Quantizer
from tests.special_values import DTYPES, special_values

from .cases import PLAIN
from .fused_cases import (
    DATA,
    EVERY,
    OPTIONS,
    PAIRED,
    PLACES,
    SCALE,
    SHAPES,
    SOURCES,
    Matrix,
    Report,
    as_row,
    buffer_differs,
    dirty_buffers,  # noqa: F401, an autouse fixture
    each_device,
    each_source,
    expected_cast,
    expected_of,
    expected_plane,
    moved,
    plane_differs,
    planes_differ,
    require,
    run_cast,
    values,
)

each_format = pytest.mark.parametrize("name", EVERY)
_ORDER = list(EVERY)
_WITH_IDENTITY = sorted({("identity", name) for name in ("identity", *PAIRED)} | {
    (name, "identity") for name in PAIRED
})  # fmt: skip
# Rows whose values depend on drawn bits, under columns that need an amax of those values.
_AFTER_STOCHASTIC = [("nvfp4_rht_sr", name) for name in ("current", "row", "nvfp4_rht_sr", "mxfp8")]
_BY_QUANTIZER = [*_WITH_IDENTITY, *_AFTER_STOCHASTIC]


def matrices(shift: int, shapes=SHAPES) -> list[Matrix]:
    """Each shape in each dtype, the kinds of data in turn from a start of the caller's."""
    kinds = list(DATA)
    cases = enumerate(itertools.product(shapes, DTYPES), start=shift)
    return [Matrix(kinds[index % len(kinds)], *shape, dtype) for index, (shape, dtype) in cases]


def check(device: str, row: str, column: str, source: str, cases: list[Matrix]) -> None:
    formats = as_row(EVERY[row], source), EVERY[column]
    require(device, *formats)
    report = Report()
    for matrix in cases:
        wanted = expected_of(matrix, *formats, source)
        result = run_cast(values(matrix).to(device), *formats, wanted, source)
        report.add(matrix, planes_differ(result, [w.plane for w in wanted]))
    report.check()


# Pairs.
@each_device
@each_source
@pytest.mark.parametrize("column", PAIRED)
@pytest.mark.parametrize("row", PAIRED)
def test_every_pair(row, column, source, device):
    shift = _ORDER.index(row) + 2 * _ORDER.index(column) + 3 * SOURCES.index(source)
    check(device, row, column, source, matrices(shift))


@each_device
@each_source
@pytest.mark.parametrize(("row", "column"), _BY_QUANTIZER, ids=str)
def test_pairs_through_a_quantizer(row, column, source, device):
    """And from ``fused.cast`` with the same formats; no kernel sees Identity."""
    require(device)
    quantizer = HybridQuantizer(
        rowwise_quantizer=_quantizer(row, device),
        columnwise_quantizer=_quantizer(column, device),
        columnwise_source=source,
    )
    formats = [quantizer.plane_format(d) for d in DIRECTIONS]
    report = Report()
    for matrix in matrices(_BY_QUANTIZER.index((row, column))):
        x = values(matrix)
        job = CastJob(x.to(device), quantizer, rounding=PLACES)
        run_casts([job])
        wanted = expected_cast(x, *formats, source)
        result = run_cast(x.to(device), *formats, wanted, source)
        made = {"rowwise": result.row, "columnwise": result.column}
        for direction, want in zip(DIRECTIONS, wanted, strict=True):
            is_held = want.plane.format.family == "identity"
            compare = _held_values_differ if is_held else plane_differs
            for planes in (job.planes, made):
                report.add((matrix, direction), compare(planes[direction], want.plane))
    report.check()


def _quantizer(name: str, device: str) -> Quantizer:
    if name == "delayed":
        scale = torch.full((1,), SCALE, device=device)
        return Float8Quantizer(scale, torch.zeros_like(scale), DType.kFloat8E4M3)
    return PLAIN["block_1d" if name == "block" else name]()


def _held_values_differ(got: Plane, want: Plane) -> str:
    """Of Identity planes, which may have any strides."""
    return buffer_differs("values", got.codes, want.codes)


@each_device
@each_source
@pytest.mark.parametrize("option", OPTIONS)
def test_options_in_both_directions(option, source, device):
    check(device, option, option, source, matrices(_ORDER.index(option)))


@each_device
@each_source
@pytest.mark.parametrize("option", OPTIONS)
def test_options_beside_another_format(option, source, device):
    """As row of an MXFP8 column and as column of a block row."""
    shapes = ((17, 33), (129, 257), (40, 8))
    check(device, option, "mxfp8", source, matrices(_ORDER.index(option), shapes))
    check(device, "block", option, source, matrices(_ORDER.index(option) + 2, shapes))


_TWO_DIMENSIONAL = [name for name, f in EVERY.items() if getattr(f, "two_dimensional", False)]


@each_device
@each_source
@pytest.mark.parametrize("row", _TWO_DIMENSIONAL)
def test_squares_of_different_sizes(row, source, device):
    """Each 2-D format beside each other one: blocks of 128, 32 and 16 of the same tile."""
    for column in _TWO_DIMENSIONAL:
        check(device, row, column, source, matrices(_ORDER.index(column), ((17, 33), (129, 257))))


@each_device
@each_source
@pytest.mark.parametrize("name", ["current", "row", "block", "mxfp8", "nvfp4", "nvfp4_2d"])
def test_bias_gradient_beside_planes(name, source, device):
    """It is of what was read, also where the column replaces that by the row's values."""
    format = EVERY[name]
    require(device, format)
    x = values(Matrix("normal", 300, 260, torch.bfloat16))
    wanted = expected_cast(x, format, format, source)
    for _ in range(5):
        result = run_cast(x.to(device), format, format, wanted, source, bias_grad=True)
        assert not planes_differ(result, [w.plane for w in wanted])
        error = result.bias_grad.cpu().double() - x.double().sum(0)
        assert (error.abs() <= 1e-6 * x.double().abs().sum(0)).all()


@each_device
@pytest.mark.parametrize(
    "name", ["delayed", "delayed_e5m2", "current", "current_e5m2", "current_pow2", "block_2d"]
)
def test_one_scale_for_both_planes(name, device):
    """The statistic is one tensor, as of one quantizer for both: CUDA transposes the codes."""
    format = EVERY[name]
    require(device, format)
    cases = [(m, values(m)) for m in matrices(0, (*SHAPES, (256, 384)))]
    cases += [(case, x) for dtype in DTYPES for case, x in special_values(dtype).items()]
    report = Report()
    for case, x in cases:
        wanted = expected_cast(x, format, format, "original")
        given = {"row_statistic": moved(wanted[0].statistic, device)}
        amaxes = [torch.zeros(1, device=device) for _ in DIRECTIONS]
        if format.statistic == "scale":
            given |= dict(zip(("row_amax", "column_amax"), amaxes, strict=True))
        given["column_statistic"] = given["row_statistic"]
        result = fused.cast(x.to(device), format, format, bias_grad=True, **given)
        report.add((case, x.dtype), planes_differ(result, [w.plane for w in wanted]))
        if format.statistic == "scale":
            recorded, amax = [float(amax) for amax in amaxes], float(wanted[0].amax)
            report.add((case, "amax"), "" if recorded == [amax] * 2 else f"{recorded}, not {amax}")
    report.check()


@each_device
@pytest.mark.parametrize("name", ["current", "delayed_e5m2", "block_2d"])
def test_bias_gradient_beside_one_scale(name, device):
    """The codes overwrite what is summed, but not before; many tiles, so that warps drift apart."""
    format = EVERY[name]
    require(device, format)
    x = values(Matrix("normal", 2048, 1920, torch.bfloat16)).to(device)
    statistic = moved(torch.full((1,), SCALE), device)
    given = {} if format.statistic == "none" else {
        "row_statistic": statistic, "column_statistic": statistic
    }  # fmt: skip
    wanted = x.double().sum(0)
    for _ in range(3):
        sums = fused.cast(x, format, format, bias_grad=True, **given).bias_grad.double()
        assert ((sums - wanted).abs() <= 1e-6 * x.double().abs().sum(0)).all()


@each_device
@pytest.mark.parametrize("name", ["nvfp4_rht", "nvfp4_rht_plain", "nvfp4_rht_sr"])
def test_rotations_that_nearly_overflow(name, device):
    """Magnitudes up to the largest: sums of 16 overflow although a quarter of them would not."""
    format = EVERY[name]
    require(device, format)
    report = Report()
    for exponent in range(120, 128):
        torch.manual_seed(exponent)
        x = (torch.rand(64, 96) - 0.5).ldexp(torch.tensor(exponent + 1)).bfloat16()
        wanted = expected_cast(x, format, format, "original")
        result = run_cast(x.to(device), format, format, wanted)
        report.add(exponent, planes_differ(result, [w.plane for w in wanted]))
    report.check()


# Data and layouts.
@each_device
@each_format
def test_special_values(name, device):
    """Both sources; empty matrices among them."""
    format = EVERY[name]
    require(device, format)
    report = Report()
    for source, dtype in itertools.product(SOURCES, DTYPES):
        for case, x in special_values(dtype).items():
            row = as_row(format, source)
            wanted = expected_cast(x, row, format, source)
            result = run_cast(x.to(device), row, format, wanted, source)
            report.add((case, dtype, source), planes_differ(result, [w.plane for w in wanted]))
    report.check()


@each_device
@each_format
def test_every_kind_of_data(name, device):
    """Each in each dtype, where the rotation of ``matrices`` may have left one out."""
    cases = [Matrix(data, 70, 150, dtype) for data in DATA for dtype in DTYPES]
    check(device, name, name, "original", cases)


def layouts(x: torch.Tensor, device: str):
    """(name, ``x`` [M, K] on ``device`` in that layout)."""
    x = x.to(device)
    rows, columns = x.shape
    wide = torch.full((rows, columns + 11), 9.0, dtype=x.dtype, device=device)
    for offset in (3, 8):
        view = wide[:, offset : offset + columns]
        view.copy_(x)
        yield f"columns from {offset} of a wider matrix", view
    tall = torch.full((2 * rows, columns), 9.0, dtype=x.dtype, device=device)
    tall[::2] = x
    yield "every second row", tall[::2]
    yield "transposed", x.t().contiguous().t()
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view_as(x)
    yield "one element off alignment", shifted.copy_(x)
    strided = torch.full((rows, 2 * columns), 9.0, dtype=x.dtype, device=device)
    strided[:, ::2] = x
    yield "every second column", strided[:, ::2]


@each_device
@each_format
def test_layouts(name, device):
    format = EVERY[name]
    require(device, format)
    report = Report()
    for matrix in matrices(_ORDER.index(name), ((33, 40), (129, 257))):
        wanted = expected_of(matrix, format, format, "original")
        for layout, view in layouts(values(matrix), device):
            result = run_cast(view, format, format, wanted)
            report.add((matrix, layout), planes_differ(result, [w.plane for w in wanted]))
    report.check()


@each_device
@each_format
def test_expanded_rows_and_columns(name, device):
    format = EVERY[name]
    require(device, format)
    for dtype, shape in itertools.product(DTYPES, ((1, 70), (70, 1))):
        x = values(Matrix("row_magnitudes", *shape, dtype)).expand(70, 70)
        wanted = expected_cast(x.contiguous(), format, format)
        view = x[:1] if shape[0] == 1 else x[:, :1]
        result = run_cast(view.to(device).expand(70, 70), format, format, wanted)
        assert not planes_differ(result, [w.plane for w in wanted])


# One direction, twice, statistics, buffers.
@each_device
@each_format
def test_one_direction_alone_writes_the_same_bytes(name, device):
    """And a second run of both."""
    format, partner = EVERY[name], PAIRED["mxfp8"]
    require(device, format, partner)
    report = Report()
    for matrix in matrices(_ORDER.index(name), ((17, 33), (129, 257))):
        x = values(matrix).to(device)
        for row, column in ((format, partner), (partner, format), (format, format)):
            wanted = expected_of(matrix, row, column, "original")
            planes = [one.plane for one in wanted]
            for _ in range(2):
                result = run_cast(x, row, column, wanted)
                report.add((matrix, "both"), planes_differ(result, planes))
            alone = run_cast(x, row, None, (wanted[0], None))
            report.add((matrix, "row"), planes_differ(alone, (planes[0], None)))
            alone = run_cast(x, None, column, (None, wanted[1]))
            report.add((matrix, "column"), planes_differ(alone, (None, planes[1])))
    report.check()


@each_device
@each_format
def test_a_larger_statistic_is_used(name, device):
    """One that was reduced over ranks, 3 × the own one."""
    format = EVERY[name]
    require(device, format)
    x = values(Matrix("normal", 50, 70, torch.bfloat16))
    wanted = []
    for direction, source in zip(DIRECTIONS, (x, x.t()), strict=True):
        one = expected_plane(source, format)
        if format.statistic != "none":
            one.statistic = 3 * one.statistic
        one.plane = format.encode(source, one.statistic, PLACES[direction])
        wanted.append(one)
    result = run_cast(x.to(device), format, format, wanted)
    assert not planes_differ(result, [w.plane for w in wanted])


@each_device
@each_format
def test_result_buffers_come_dirty(name, device, dirty_buffers):  # noqa: F811
    """What makes every comparison of this file also one of padding: nothing was zeroed before."""
    format = EVERY[name]
    require(device, format)
    matrix = Matrix("normal", 17, 33, torch.bfloat16)
    wanted = expected_of(matrix, format, format, "original")
    x = values(matrix).to(device)
    dirty_buffers.clear()
    result = run_cast(x, format, format, wanted)
    for plane in (result.row, result.column):
        for part in plane.parts:
            assert part is None or part.untyped_storage().data_ptr() in dirty_buffers


# Large.
@pytest.mark.slow
@each_device
@each_source
@each_format
def test_long_shapes(name, source, device):
    shapes = ((65537, 24), (24, 65537), (1000, 1000))
    format = EVERY[name]
    require(device, format)
    row, report = as_row(format, source), Report()
    for matrix in matrices(_ORDER.index(name), shapes):
        x = DATA[matrix.data](*matrix[1:])
        wanted = expected_cast(x, row, format, source)
        result = run_cast(x.to(device), row, format, wanted, source)
        report.add(matrix, planes_differ(result, [w.plane for w in wanted]))
    report.check()


@pytest.mark.slow
@each_device
@each_format
def test_ten_million_elements(name, device):
    """2504 × 4001 of every magnitude; 28 formats, so 2.8 · 10^8 elements in all."""
    format = EVERY[name]
    require(device, format)
    dtype = DTYPES[_ORDER.index(name) % 3]
    x = DATA["nonfinite_magnitudes"](2504, 4001, dtype)
    wanted = expected_cast(x, format, format)
    result = run_cast(x.to(device), format, format, wanted)
    assert not planes_differ(result, [w.plane for w in wanted])


# Planes whose bytes in the last rows of X do not depend on the rows before, which are zero.
_HUGE = {
    "cpu": [("nvfp4", "nvfp4_rht")],
    "cuda": [("block", "mxfp8"), ("nvfp4", "row"), ("current", "nvfp4_rht")],
}


@pytest.mark.slow
@each_device
@pytest.mark.parametrize("rows", [65408, 65536, 65664])
def test_two_to_the_31_elements(rows, device):
    """Bug case 33: the last rows of both planes, of amaxes and of decode; up to 25 GB on CUDA."""
    columns, tail = 32768, 128
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
    last = values(Matrix("normal", tail, columns, torch.bfloat16))
    x[-tail:] = last.to(device)
    for names in _HUGE[device]:
        row, column = (EVERY[name] for name in names)
        require(device, row, column)
        wanted = expected_cast(last, row, column, places={})
        amaxes = fused.measure(x, row, column)
        for amax, want in zip(amaxes, wanted, strict=True):
            assert amax is None or not buffer_differs("amax", amax, want.statistic)
        result = fused.cast(x, row, column, row_statistic=amaxes[0], column_statistic=amaxes[1])
        row, column = result.row, result.column.codes
        want_row, want_column = (one.plane.codes for one in wanted)
        assert torch.equal(row.codes[-tail:].cpu(), want_row)
        width = want_column.shape[1]
        assert torch.equal(column[:, -width:].cpu(), want_column)
        assert not column[:, -width - 64 : -width].any()
        del result, column  # room for the decoded matrix
        decoded = fused.decode(row, torch.bfloat16)
        assert torch.equal(decoded[-tail:].cpu(), wanted[0].plane.decode())
        del row, decoded
