"""Scales in 128×4 tiles from the cast itself: the bytes of the plain cast, swizzled afterwards.

Legend: X [M, K]; SHAPES are (M, K). Result buffers come full of 0xFF, so padding is compared too.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from dist_finegrain.formats import fused, fused_grouped
from dist_finegrain.formats.fused_options import options_of
from dist_finegrain.formats.plane import Format, round_up
from dist_finegrain.formats.swizzle import swizzle_128x4
from tests.special_values import DTYPES, special_values

from .fused_cases import (
    DATA,
    EVERY,
    PAIRED,
    PLACES,
    SOURCES,
    SWIZZLED,
    Matrix,
    Report,
    as_row,
    buffer_differs,
    dirty_buffers,  # noqa: F401, an autouse fixture
    each_device,
    each_source,
    expected_cast,
    expected_of,
    plane_differs,
    planes_differ,
    require,
    run_cast,
    values,
)

# Ragged against tiles of 128 rows, of 4 blocks of 16 (64) and of 32 (128), in both directions.
SHAPES = ((1, 1), (5, 70), (16, 16), (64, 65), (128, 128), (129, 33), (130, 257), (300, 257))
each_format = pytest.mark.parametrize("name", SWIZZLED)


def matrices(shift: int, shapes=SHAPES) -> list[Matrix]:
    kinds = list(DATA)
    cases = enumerate(itertools.product(shapes, DTYPES), start=shift)
    return [Matrix(kinds[index % len(kinds)], *shape, dtype) for index, (shape, dtype) in cases]


def plain(format: Format) -> Format:
    return dataclasses.replace(format, swizzled=False) if hasattr(format, "swizzled") else format


def check(device: str, row: Format, column: Format, source: str, cases: list[Matrix]) -> None:
    """The cast against the oracle, and its scales against those of the plain cast."""
    require(device, row, column)
    report = Report()
    for matrix in cases:
        wanted = expected_of(matrix, row, column, source)
        x = values(matrix).to(device)
        made = run_cast(x, row, column, wanted, source)
        report.add(matrix, planes_differ(made, [w.plane for w in wanted]))
        unswizzled = run_cast(x, plain(row), plain(column), wanted, source)
        for side in ("row", "column"):
            plane, other = getattr(made, side), getattr(unswizzled, side)
            if getattr(plane.format, "swizzled", False):
                text = buffer_differs("scales", plane.scales, swizzle_128x4(other.scales))
                report.add((matrix, side), text)
            report.add((matrix, side), buffer_differs("codes", plane.codes, other.codes))
    report.check()


@each_device
@each_source
@each_format
def test_both_directions(name, source, device):
    format = SWIZZLED[name]
    cases = matrices(list(SWIZZLED).index(name))
    check(device, as_row(format, source), format, source, cases)


@each_device
@each_source
@pytest.mark.parametrize("partner", ["current", "row", "block", "block_2d", "mxfp8", "nvfp4_rht"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_2d_e5m2", "nvfp4", "nvfp4_rht_sr", "nvfp4_row"])
def test_beside_a_plane_of_another_layout(name, partner, source, device):
    """As row and as column of planes that are not swizzled."""
    format, other = SWIZZLED[name], EVERY[partner]
    cases = matrices(list(EVERY).index(partner), ((17, 33), (130, 257)))
    check(device, as_row(format, source), other, source, cases)
    check(device, as_row(other, source), format, source, cases)


@each_device
@pytest.mark.parametrize("column", ["mxfp8", "nvfp4", "nvfp4_rht", "nvfp4_rht_sr"])
@pytest.mark.parametrize("row", ["mxfp8", "nvfp4", "nvfp4_sr"])
def test_pairs_of_swizzled_planes(row, column, device):
    """What sm_100 trains with."""
    check(device, SWIZZLED[row], SWIZZLED[column], "original", matrices(0, ((64, 65), (130, 257))))


@each_device
@each_format
def test_one_direction_alone(name, device):
    """Also of a matrix whose transpose is what lies row by row."""
    format = SWIZZLED[name]
    require(device, format)
    report = Report()
    for matrix in matrices(1, ((17, 33), (130, 257))):
        wanted = expected_of(matrix, format, format, "original")
        x = values(matrix).to(device)
        for view in (x, x.t().contiguous().t()):
            row = run_cast(view, format, None, (wanted[0], None))
            column = run_cast(view, None, format, (None, wanted[1]))
            report.add((matrix, "row"), plane_differs(row.row, wanted[0].plane))
            report.add((matrix, "column"), plane_differs(column.column, wanted[1].plane))
    report.check()


@each_device
@each_format
def test_special_values(name, device):
    """Empty matrices among them."""
    format = SWIZZLED[name]
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
def test_decode_gives_the_values_of_the_plain_plane(name, device):
    """Compiled and in plain torch, with and without the outer scale; also of long rows."""
    format = SWIZZLED[name]
    require(device, format)
    for matrix in (Matrix("nonfinite", *shape, torch.bfloat16) for shape in (*SHAPES, (130, 2100))):
        x = values(matrix)
        statistic = format.measure(x)
        swizzled = format.encode(x, statistic, PLACES["rowwise"])
        wanted = plain(format).encode(x, statistic, PLACES["rowwise"])
        on_device = swizzled.map(lambda part: part.to(device))
        for outer in (True, False):
            exact = wanted.format.decode(wanted, outer=outer)
            assert not buffer_differs("values", format.decode(swizzled, outer=outer), exact)
            got = fused.decode(on_device, torch.float32, outer=outer)
            plain_plane = wanted.map(lambda part: part.to(device))
            same = fused.decode(plain_plane, torch.float32, outer=outer)
            assert not buffer_differs("values", got, same), (matrix, outer)


@each_format
def test_buffers_and_equality(name):
    """Flat scales of whole tiles, zero where there is no block; not equal to the plain format."""
    format = SWIZZLED[name]
    assert format != EVERY[name] and hash(format) != hash(EVERY[name])
    x = values(Matrix("normal", 130, 70, torch.bfloat16))
    encoded = format.encode(x)
    empty = format.empty((130, 70), x.dtype, x.device)
    blocks = round_up(70, 32) // format.block[1]
    for plane in (encoded, empty):
        assert plane.scales.shape == (256 * round_up(blocks, 4),)
    assert [p.shape for p in encoded.parts if p is not None] == [
        p.shape for p in empty.parts if p is not None
    ]
    assert int(encoded.scales.count_nonzero()) <= 130 * blocks


@each_device
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_experts_are_refused(name, device):
    format = SWIZZLED[name]
    require(device, format)
    x = torch.ones(64, 64, device=device)
    ends = torch.tensor([32, 64], dtype=torch.int32, device=device)
    statistic = torch.ones(2, device=device) if name == "nvfp4" else None
    for row, column in ((format, None), (None, format)):
        with pytest.raises(ValueError, match="swizzled scales"):
            fused_grouped.cast_grouped(
                x, ends, row, column, row_statistic=statistic, column_statistic=statistic
            )


def test_experts_are_refused_by_the_operators():
    """Before a kernel runs, also where Python did not look."""
    require("cpu")
    options = options_of(SWIZZLED["nvfp4"]).packed
    ends, amax = torch.tensor([32, 64], dtype=torch.int32), torch.zeros(2)
    with pytest.raises(ValueError, match="swizzled scales with ends"):
        torch.ops.dist_finegrain.measure.default(
            torch.ones(64, 64), amax, None, options, 0.0, 0, False, None, ends
        )


@pytest.mark.parametrize("name", ["current", "block"])
def test_other_codecs_have_no_such_layout(name):
    """Their options with the bit of the layout are refused before a kernel runs."""
    require("cpu")
    format = PAIRED[name]
    x = torch.ones(16, 16)
    plane = format.encode(x)
    with pytest.raises(ValueError, match="options is"):
        torch.ops.dist_finegrain.decode.default(
            plane.codes, plane.scales, plane.outer, {"current": 1, "block": 2}[name] | 1 << 16, x
        )
