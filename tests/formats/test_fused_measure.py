"""The kernels around the cast: measured and recorded amaxes, bias gradients, decode.

Legend: X [M, K]; R, C rows and contraction of a plane.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from dist_finegrain.formats import fused
from dist_finegrain.formats.plane import Format, Plane, saturating_to
from tests.special_values import DTYPES, NONFINITE, special_values, with_value

from .fused_cases import (
    DATA,
    EVERY,
    PAIRED,
    PLACES,
    SHAPES,
    SOURCES,
    Matrix,
    Report,
    as_row,
    buffer_differs,
    bytes_of,
    dirty_buffers,  # noqa: F401, an autouse fixture
    each_device,
    each_source,
    expected_cast,
    expected_of,
    moved,
    planes_differ,
    require,
    run_cast,
    values,
)

each_format = pytest.mark.parametrize("name", EVERY)
# One of each kind of statistic, the rotations, and what needs none.
MEASURED = ("current", "row", "nvfp4", "nvfp4_rht", "nvfp4_rht_plain", "nvfp4_row", "block")
_ORDER = list(EVERY)


def in_turn(shift: int, shapes=SHAPES) -> list[Matrix]:
    """Each shape in each dtype, the kinds of data in turn."""
    kinds = list(DATA)
    cases = enumerate(itertools.product(shapes, DTYPES), start=shift)
    return [Matrix(kinds[index % len(kinds)], *shape, dtype) for index, (shape, dtype) in cases]


def has_measure(format: Format) -> bool:
    return format.statistic in ("tensor", "row")


def measured_differs(amaxes, formats, wanted, x) -> str:
    """Of (row, column) amaxes against what the oracle measured; None where there is none."""
    found = []
    for name, amax, format, want in zip(("row", "column"), amaxes, formats, wanted, strict=True):
        if format is not None and has_measure(format):
            assert amax.device == x.device
            found.append(buffer_differs(name, amax, want.statistic))
    return "; ".join(text for text in found if text)


def measured(x, formats, wanted, source):
    """(row amax, column amax); a column of the row's values is measured once the row's is known."""
    if source == "original":
        return fused.measure(x, *formats)
    row, _ = fused.measure(x, formats[0], None)
    statistic = moved(wanted[0].statistic, x.device)
    given, column = fused.measure(x, *formats, source=source, row_statistic=statistic)
    assert given is None  # nothing is measured twice
    return row, column


# Measure.
@each_device
@each_source
@pytest.mark.parametrize("column", MEASURED)
@pytest.mark.parametrize("row", [*MEASURED, "delayed", "mxfp8"])
def test_both_amaxes_of_one_read(row, column, source, device):
    """Equal as bytes; from either source, with the row's statistic given."""
    formats = as_row(EVERY[row], source), EVERY[column]
    require(device, *formats)
    report = Report()
    for matrix in in_turn(_ORDER.index(row) + 3 * _ORDER.index(column)):
        wanted = expected_of(matrix, *formats, source)
        x = values(matrix).to(device)
        amaxes = measured(x, formats, wanted, source)
        report.add(matrix, measured_differs(amaxes, formats, wanted, x))
    report.check()


@each_device
@pytest.mark.parametrize("name", MEASURED)
def test_one_amax_alone(name, device):
    format = EVERY[name]
    require(device, format)
    report = Report()
    for matrix in in_turn(_ORDER.index(name)):
        wanted = expected_of(matrix, format, format, "original")
        x = values(matrix).to(device)
        row, nothing = fused.measure(x, format, None)
        assert nothing is None
        nothing, column = fused.measure(x, None, format)
        assert nothing is None
        report.add(matrix, measured_differs((row, column), (format, format), wanted, x))
    report.check()


@each_device
@pytest.mark.parametrize("name", MEASURED)
def test_amaxes_of_special_values(name, device):
    """Finite elements only; the amax of nothing is 0."""
    format = EVERY[name]
    require(device, format)
    report = Report()
    for dtype, source in itertools.product(DTYPES, SOURCES):
        for case, x in special_values(dtype).items():
            formats = as_row(format, source), format
            wanted = expected_cast(x, *formats, source)
            x = x.to(device)
            amaxes = measured(x, formats, wanted, source)
            report.add((case, dtype), measured_differs(amaxes, formats, wanted, x))
    report.check()


@each_device
@pytest.mark.parametrize("name", MEASURED)
def test_amaxes_of_layouts(name, device):
    format = EVERY[name]
    require(device, format)
    wide = DATA["row_magnitudes"](130, 150, torch.bfloat16)
    views = {
        "sliced": lambda x: x[:, 3:140],
        "rows": lambda x: x[1::3],
        "transposed": lambda x: x.t(),
        "expanded": lambda x: x[7:8].expand(50, 150),
    }
    for view in views.values():
        x = view(wide.to(device))
        wanted = expected_cast(view(wide).contiguous(), format, format)
        amaxes = fused.measure(x, format, format)
        assert not measured_differs(amaxes, (format, format), wanted, x)


@pytest.mark.slow
@each_device
@pytest.mark.parametrize("name", MEASURED)
def test_amaxes_of_many_elements(name, device):
    format = EVERY[name]
    require(device, format)
    for shape, dtype in zip(((2504, 4001), (65537, 24), (24, 65537)), DTYPES, strict=True):
        x = DATA["nonfinite_magnitudes"](*shape, dtype)
        amaxes = fused.measure(x.to(device), format, format)
        for amax, source in zip(amaxes, (x, x.t()), strict=True):
            if has_measure(format):
                assert not buffer_differs("amax", amax, format.measure(source))


# Recorded amaxes.
@each_device
@each_source
@each_format
def test_recorded_amax_is_that_of_what_the_plane_encodes(name, source, device):
    """From -1 (not run yet) and 0 it is raised, a larger one stays; codes do not change."""
    format = EVERY[name]
    require(device, format)
    row, report = as_row(format, source), Report()
    for matrix in in_turn(_ORDER.index(name)):
        x = values(matrix).to(device)
        wanted = expected_of(matrix, row, format, source)
        for start in (-1.0, 0.0, 1e38):
            amaxes = [torch.full((1,), start, device=device) for _ in range(2)]
            options = {"row_amax": amaxes[0], "column_amax": amaxes[1]}
            result = run_cast(x, row, format, wanted, source, **options)
            for side, amax, want in zip(("row", "column"), amaxes, wanted, strict=True):
                text = buffer_differs(side, amax, want.amax.clamp(min=start))
                report.add((matrix, start), text)
            codes = buffer_differs("codes", result.column.codes, wanted[1].plane.codes)
            report.add(matrix, codes)
    report.check()


@each_device
@pytest.mark.parametrize("name", PAIRED)
def test_recorded_amax_of_one_direction(name, device):
    format = EVERY[name]
    require(device, format)
    x = values(Matrix("nonfinite", 129, 257, torch.float16))
    wanted = expected_cast(x, format, format)
    amax = torch.full((1,), -1.0, device=device)
    run_cast(x.to(device), format, None, (wanted[0], None), row_amax=amax)
    assert torch.equal(amax.cpu(), wanted[0].amax)
    amax.fill_(-1)
    run_cast(x.to(device), None, format, (None, wanted[1]), column_amax=amax)
    assert torch.equal(amax.cpu(), wanted[1].amax)


@each_device
@each_format
def test_an_empty_matrix_records_nothing(name, device):
    """contracts.md: a cast of at least one element records; -1 stays "not run"."""
    format = EVERY[name]
    require(device, format)
    for shape in ((0, 64), (64, 0)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        wanted = expected_cast(x, format, format)
        amaxes = torch.full((2, 1), -1.0, device=device)
        options = {"row_amax": amaxes[0], "column_amax": amaxes[1]}
        result = run_cast(x.to(device), format, format, wanted, **options)
        assert not planes_differ(result, [one.plane for one in wanted])
        assert (amaxes == -1).all()


# Bias gradients.
@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4_rht_sr"])
def test_bias_gradient(name, dtype, device):
    """FP32 [K] within 1e-6 · Σ|dY| of the FP64 sum; twice the same bits; planes do not change."""
    format = EVERY[name]
    require(device, format)
    for shape in (*SHAPES, (1000, 140), (0, 64)):
        for data in ("normal", "log_normal"):
            x = DATA[data](*shape, dtype)
            wanted = expected_cast(x, format, format)
            results = [
                run_cast(x.to(device), format, format, wanted, bias_grad=True) for _ in range(2)
            ]
            got = results[0].bias_grad
            assert (got.dtype, got.shape) == (torch.float32, (shape[1],))
            assert not buffer_differs("again", results[1].bias_grad, got.cpu())
            error = (got.cpu().double() - x.double().sum(0)).abs()
            assert (error <= 1e-6 * x.double().abs().sum(0)).all(), (shape, data)
            assert not buffer_differs("codes", results[0].row.codes, wanted[0].plane.codes)


@each_device
def test_bias_gradient_of_one_direction_and_strided_rows(device):
    """The same bits as from both planes of a contiguous matrix; none where none was asked for."""
    format = EVERY["mxfp8"]
    require(device, format)
    wide = values(Matrix("normal", 300, 150, torch.bfloat16)).to(device)
    x = wide[:, 3:140]
    both = fused.cast(x.contiguous(), format, format, bias_grad=True)
    for row, column in ((format, None), (None, format), (format, format)):
        alone = fused.cast(x, row, column, bias_grad=True)
        assert torch.equal(alone.bias_grad, both.bias_grad)
        assert fused.cast(x, row, column).bias_grad is None


@each_device
@pytest.mark.parametrize("value", NONFINITE.values(), ids=NONFINITE)
def test_bias_gradient_shows_nonfinite(value, device):
    require(device, EVERY["mxfp8"])
    x = with_value(values(Matrix("normal", 40, 40, torch.float32)), value, at=(11, 7))
    got = fused.cast(x.to(device), EVERY["mxfp8"], None, bias_grad=True).bias_grad.cpu()
    assert torch.equal(got.isfinite(), torch.arange(40) != 7)
    assert torch.equal(got[7], x.sum(0)[7]) or got[7].isnan() and x[11, 7].isnan()


# Decode.
def decoded_differs(plane: Plane, dtype: torch.dtype, outer: bool, device: str) -> str:
    """Of ``fused.decode`` on ``device`` against Format.decode; any NaN equals any other."""
    got = fused.decode(plane.map(lambda part: part.to(device)), dtype, outer=outer)
    want = saturating_to(plane.format.decode(plane, outer=outer), dtype)
    assert got.device.type == device and got.is_contiguous()
    if not torch.equal(got.isnan().cpu(), want.isnan()):
        return "NaNs differ"
    got, want = (t.cpu().masked_fill(t.isnan().cpu(), 0) for t in (got, want))
    return buffer_differs("values", got, want)


@each_device
@each_format
def test_decode(name, device):
    """Both directions, with and without the outer scale, into each dtype."""
    format = EVERY[name]
    require(device, format)
    report = Report()
    for matrix in in_turn(_ORDER.index(name)):
        for one in expected_of(matrix, format, format, "original"):
            for dtype, outer in itertools.product(DTYPES, (True, False)):
                text = decoded_differs(one.plane, dtype, outer, device)
                report.add((matrix, one.plane.shape, dtype, outer), text)
    report.check()


@each_device
@each_format
def test_decode_of_special_values(name, device):
    format = EVERY[name]
    require(device, format)
    report = Report()
    for dtype in DTYPES:
        for case, x in special_values(dtype).items():
            plane = format.encode(x, None if format.statistic != "scale" else torch.ones(1))
            for into, outer in itertools.product(DTYPES, (True, False)):
                report.add((case, dtype, into), decoded_differs(plane, into, outer, device))
    report.check()


def _any_bytes(format: Format) -> Plane:
    """A plane [300, 520] of random bytes: every code under scales of every magnitude."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, shape) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    plane = format.empty((300, 520), torch.bfloat16, torch.device("cpu"))
    plane.codes.copy_(draw(0, 256, plane.codes.shape))
    for part in plane.parts[1:]:
        if part is None:
            continue
        if part.dtype == torch.float32:  # positive and finite, subnormals included
            part.copy_(draw(0, 0x7F800000, part.shape).view(torch.float32))
        elif format.family == "mxfp8":
            part.copy_(draw(0, 256, part.shape))
        else:
            part.copy_(draw(0, 128, part.shape))
    return plane


@each_device
@each_format
def test_decode_of_any_bytes(name, device):
    """What no cast writes as well: scales 0 and NaN, codes of Inf, products that overflow."""
    format = EVERY[name]
    require(device, format)
    plane = _any_bytes(format)
    for dtype, outer in itertools.product(DTYPES, (True, False)):
        assert not decoded_differs(plane, dtype, outer, device), (dtype, outer)


@each_device
@each_format
def test_row_padding_does_not_reach_a_decoded_value(name, device):
    format = EVERY[name]
    require(device, format)
    matrix = Matrix("normal", 17, 33, torch.bfloat16)
    plane = expected_of(matrix, format, format, "original")[0].plane.map(torch.clone)
    want = fused.decode(plane.map(lambda part: part.to(device)), torch.float32)
    for part in plane.parts:
        if part is not None and part.shape[0] == plane.codes.shape[0]:
            part[17:].view(torch.uint8).fill_(0xFF)
    got = fused.decode(plane.map(lambda part: part.to(device)), torch.float32)
    assert torch.equal(bytes_of(got), bytes_of(want))


@pytest.mark.slow
@each_device
@each_format
def test_decode_of_many_elements(name, device):
    format = EVERY[name]
    require(device, format)
    for shape, dtype in zip(((2504, 4001), (65537, 24), (24, 65537)), DTYPES, strict=True):
        x = DATA["nonfinite_magnitudes"](*shape, dtype)
        for one in expected_cast(x, format, format, places=PLACES):
            assert not decoded_differs(one.plane, dtype, True, device)
