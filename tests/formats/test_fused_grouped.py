"""Grouped casts: each expert's rows as if cast alone, its columns at a multiple of the block.

Legend: X [M, K] is E experts' rows one after another; m rows of one expert; Ctot the contraction of
the column plane: M rounded up to the block and one block more for each expert.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from dist_finegrain.formats import fused_grouped
from dist_finegrain.formats.plane import Format, Plane, round_up
from tests.special_values import DTYPES

from .fused_cases import (
    DATA,
    EVERY,
    PLACES,
    SOURCES,
    Expected,
    Matrix,
    Report,
    as_measured_row,
    as_row,
    buffer_differs,
    dirty_buffers,  # noqa: F401, an autouse fixture
    each_device,
    each_source,
    expected_cast,
    moved,
    plane_differs,
    planes_differ,
    require,
    run_cast,
    values,
)

# 128×128 blocks are refused for experts.
GROUPED = {name: format for name, format in EVERY.items() if not name.startswith("block_2d")}
BLOCKS = {"float8": 16, "float8_block": 128, "mxfp8": 32, "nvfp4": 32}
SCALE_EXTENT = {"mxfp8": 32, "nvfp4": 16}
SPLITS = {
    "one": [37],
    "zeros_anywhere": [0, 5, 0, 0, 130, 16, 0],
    "nothing": [0, 0, 0],
    "single_rows": [1, 1, 1, 1, 1],
    "whole_blocks": [128, 256, 128],
    "ragged": [64, 192, 1, 127],
    "around_a_block": [127, 129, 31, 33, 15, 17],
    "many": [3] * 40,
}
_ORDER = list(GROUPED)
each_format = pytest.mark.parametrize("name", GROUPED)


@dataclasses.dataclass
class Grouped:
    """Both planes by the oracle, expert by expert, and what they were given."""

    row: Plane
    column: Plane
    column_ends: torch.Tensor
    row_statistic: torch.Tensor | None
    column_statistic: torch.Tensor | None
    amaxes: list[torch.Tensor]  # of what the row and the column plane encode, FP32 [E] each


def expected_grouped(
    x: torch.Tensor, split: list[int], row: Format, column: Format, source: str = "original"
) -> Grouped:
    both = [expected_cast(part, row, column, source) for part in x.split(split)]
    rows, columns = map(list, zip(*both, strict=True))
    block = BLOCKS[column.family]
    widths = torch.tensor([max(round_up(m, block), block) for m in split])
    return Grouped(
        row_plane(rows, split, row, x),
        column_plane(columns, widths.tolist(), split, column, x),
        widths.cumsum(0).to(torch.int32),
        statistics(rows, torch.cat),
        statistics(columns, torch.stack if column.statistic == "row" else torch.cat),
        [recorded(experts, split) for experts in (rows, columns)],
    )


def recorded(experts: list[Expected], split: list[int]) -> torch.Tensor:
    """Each expert's amax of what its plane encodes, FP32 [E]; −∞ without rows."""
    none = torch.full((1,), -torch.inf)
    return torch.cat([one.amax if m else none for one, m in zip(experts, split, strict=True)])


def statistics(experts: list[Expected], join) -> torch.Tensor | None:
    given = [one.statistic for one in experts]
    return None if given[0] is None else join(given)


def filled(part: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """``part`` with zeros up to ``extent`` along ``dim``."""
    shape = list(part.shape)
    shape[dim] = extent - shape[dim]
    return torch.cat((part, torch.zeros(shape, dtype=part.dtype)), dim)


def row_plane(experts: list[Expected], split: list[int], format: Format, x: torch.Tensor) -> Plane:
    """The experts' rows below each other; one outer scale for each expert or row."""
    stored = round_up(len(x), 16)
    dim = 1 if format.family == "float8_block" else 0  # where the rows of the scales lie

    def joined(index: int, dim: int) -> torch.Tensor | None:
        used = [one.plane.parts[index] for one in experts]
        if used[0] is None:
            return None
        used = [part.narrow(dim, 0, m) for part, m in zip(used, split, strict=True)]
        return filled(torch.cat(used, dim), dim, stored)

    outer = joined(2, 0) if format.statistic == "row" else outer_scales(experts, torch.cat)
    return Plane(format, tuple(x.shape), x.dtype, (joined(0, 0), joined(1, dim), outer))


def column_plane(
    experts: list[Expected], widths: list[int], split: list[int], format: Format, x: torch.Tensor
) -> Plane:
    """The experts' contraction pieces beside each other, each zero up to its whole blocks."""
    block = BLOCKS[format.family]
    total = round_up(len(x), block) + len(split) * block
    total = round_up(total, format.contraction_multiple)

    def joined(index: int, dim: int, per: int) -> torch.Tensor:
        parts = zip(experts, widths, strict=True)
        wide = [filled(one.plane.parts[index], dim, width // per) for one, width in parts]
        return filled(torch.cat(wide, dim), dim, total // per)

    codes = joined(0, 1, 2 if format.family == "nvfp4" else 1)
    scales = None
    if format.family == "float8_block":
        scales = joined(1, 0, block)
    elif format.family in SCALE_EXTENT:
        scales = joined(1, 1, SCALE_EXTENT[format.family])
    outer = outer_scales(experts, torch.stack if format.statistic == "row" else torch.cat)
    return Plane(format, (x.shape[1], total), x.dtype, (codes, scales, outer))


def outer_scales(experts: list[Expected], join) -> torch.Tensor | None:
    outer = [one.plane.outer for one in experts]
    return None if outer[0] is None else join(outer)


def ends_of(split: list[int], device: str) -> torch.Tensor:
    return torch.tensor(split, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def run_grouped(x, split, row, column, wanted: Grouped, **options):
    """split: rows of each expert, or ``ends`` already on the device."""
    device = x.device.type
    return fused_grouped.cast_grouped(
        x,
        split if isinstance(split, torch.Tensor) else ends_of(split, device),
        row,
        column,
        row_statistic=None if row is None else moved(wanted.row_statistic, device),
        column_statistic=None if column is None else moved(wanted.column_statistic, device),
        rounding=PLACES,
        **options,
    )


def grouped_differs(result, wanted: Grouped, row: bool = True, column: bool = True) -> str:
    text = planes_differ(result, (wanted.row if row else None, wanted.column if column else None))
    if column:
        text += buffer_differs("column_ends", result.column_ends, wanted.column_ends)
    return text


def check(
    device: str,
    row: Format,
    column: Format,
    shift: int,
    columns: tuple[int, ...],
    source: str = "original",
) -> None:
    row = as_row(row, source)
    require(device, row, column)
    kinds, report = list(DATA), Report()
    for case, ((name, split), k) in enumerate(itertools.product(SPLITS.items(), columns), shift):
        matrix = Matrix(kinds[case % len(kinds)], sum(split), k, DTYPES[case // 2 % 3])
        x = values(matrix)
        wanted = expected_grouped(x, split, row, column, source)
        result = run_grouped(x.to(device), split, row, column, wanted, source=source)
        report.add((name, matrix), grouped_differs(result, wanted))
    report.check()


# Planes.
@each_device
@each_format
def test_each_expert_as_if_cast_alone(name, device):
    """Each format in both directions: every byte, those between the experts' blocks included."""
    check(device, GROUPED[name], GROUPED[name], _ORDER.index(name), (40, 130))


@each_device
@each_format
def test_beside_another_format(name, device):
    """As row of an MXFP8 column and as column of a block row."""
    check(device, GROUPED[name], GROUPED["mxfp8"], _ORDER.index(name), (33,))
    check(device, GROUPED["block"], GROUPED[name], _ORDER.index(name) + 1, (130,))


@each_device
@pytest.mark.parametrize("name", ["row", "row_e5m2_pow2", "nvfp4_row", "current"])
def test_outer_scales_of_whole_and_ragged_tiles(name, device):
    """Rows of whole vectors; K of one tile, of a tile and 8 (and padding), of two; in every dtype.

    Experts of 0, 1, 127, 128 and 129 rows; the outer scales of the padding rows are 0.
    """
    format, split, report = GROUPED[name], [0, 1, 127, 128, 129, 0], Report()
    require(device, format)
    for k, dtype in itertools.product((128, 136, 256), DTYPES):
        matrix = Matrix("row_magnitudes", sum(split), k, dtype)
        x = values(matrix)
        wanted = expected_grouped(x, split, format, format)
        result = run_grouped(x.to(device), split, format, format, wanted)
        report.add(matrix, grouped_differs(result, wanted))
    report.check()


@each_device
@each_format
def test_columns_of_the_rows_values(name, device):
    """source="rowwise_dequantized", each format as the column of itself and of a per-tensor row."""
    options = {"columns": (130,), "source": "rowwise_dequantized"}
    check(device, GROUPED[name], GROUPED[name], _ORDER.index(name), **options)
    check(device, GROUPED["current"], GROUPED[name], _ORDER.index(name) + 1, **options)


@each_device
@each_source
@each_format
def test_recorded_amaxes(name, source, device):
    """Each expert's own, from -1, which stays where it has no rows; a larger one stays."""
    format = GROUPED[name]
    row = as_row(format, source)
    require(device, row, format)
    x, split = values(Matrix("nonfinite", 384, 130, torch.bfloat16)), SPLITS["ragged"]
    wanted = expected_grouped(x, split, row, format, source)
    for start in (-1.0, 1e38):
        amaxes = [torch.full((len(split),), start, device=device) for _ in range(2)]
        options = {"row_amax": amaxes[0], "column_amax": amaxes[1], "source": source}
        run_grouped(x.to(device), split, row, format, wanted, **options)
        for amax, want in zip(amaxes, wanted.amaxes, strict=True):
            assert torch.equal(amax.cpu(), want.clamp(min=start))


@each_device
@each_format
def test_one_direction_alone(name, device):
    format = GROUPED[name]
    require(device, format)
    x = values(Matrix("row_magnitudes", 384, 130, torch.bfloat16))
    split = SPLITS["ragged"]
    wanted = expected_grouped(x, split, format, format)
    result = run_grouped(x.to(device), split, format, None, wanted)
    assert not grouped_differs(result, wanted, column=False)
    result = run_grouped(x.to(device), split, None, format, wanted)
    assert not grouped_differs(result, wanted, row=False)


@each_device
@each_format
def test_strided_rows(name, device):
    format = GROUPED[name]
    require(device, format)
    wide = values(Matrix("nonfinite", 384, 150, torch.float16))
    wanted = expected_grouped(wide[:, 3:140].contiguous(), SPLITS["ragged"], format, format)
    result = run_grouped(wide.to(device)[:, 3:140], SPLITS["ragged"], format, format, wanted)
    assert not grouped_differs(result, wanted)


@each_device
@each_format
def test_one_expert_is_the_whole_matrix(name, device):
    """Its row plane has the bytes of the plain cast; its column plane begins with them."""
    format = GROUPED[name]
    require(device, format)
    x = values(Matrix("normal", 384, 130, torch.bfloat16))
    wanted = expected_grouped(x, [384], format, format)
    result = run_grouped(x.to(device), [384], format, format, wanted)
    plain = expected_cast(x, format, format)
    assert not plane_differs(result.row, plain[0].plane)
    codes = plain[1].plane.codes
    assert torch.equal(result.column.codes[:, : codes.shape[1]].cpu(), codes)


@each_device
def test_square_blocks_are_refused(device):
    require(device)
    x, square = values(Matrix("normal", 37, 40, torch.bfloat16)).to(device), EVERY["block_2d"]
    for row, column in ((square, None), (None, square)):
        with pytest.raises(ValueError, match="128"):
            fused_grouped.cast_grouped(x, ends_of([37], device), row, column)


# Amaxes.
@each_device
@each_format
def test_amaxes_of_each_expert(name, device):
    """[E]; row-scaled [M] of the row plane and [E, K] of the column plane; 0 for no rows."""
    format = GROUPED[name]
    require(device, format)
    if format.statistic not in ("tensor", "row"):
        pytest.skip("nothing is measured")
    kinds, report = list(DATA), Report()
    for case, (split_name, split) in enumerate(SPLITS.items(), _ORDER.index(name)):
        matrix = Matrix(kinds[case % len(kinds)], sum(split), 130, DTYPES[case % 3])
        x, ends = values(matrix), ends_of(split, device)
        for source in SOURCES:
            row = as_measured_row(format, source)
            wanted = expected_grouped(x, split, row, format, source)
            statistic = moved(wanted.row_statistic, device)
            after = {"source": source, "row_statistic": statistic}
            options = after if source == "rowwise_dequantized" else {}
            x_there = x.to(device)
            both = fused_grouped.measure_grouped(x_there, ends, row, format, **options)
            alone = fused_grouped.measure_grouped(x_there, ends, row, None)[0]
            found = [("column", both[1], wanted.column_statistic)]
            found.append(("row alone", alone, wanted.row_statistic))
            if source == "original":
                alone = fused_grouped.measure_grouped(x_there, ends, None, format)[1]
                found.append(("row", both[0], wanted.row_statistic))
                found.append(("column alone", alone, wanted.column_statistic))
            for side, amax, want in found:
                report.add((split_name, str(matrix), source), buffer_differs(side, amax, want))
    report.check()


# Bug case 36.
REPEATED = {
    "mxfp8|block": ("mxfp8", "block"),
    "nvfp4_sr|nvfp4_rht_sr": ("nvfp4_sr", "nvfp4_rht_sr"),
    "current|row": ("current", "row"),
}


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@each_device
@pytest.mark.parametrize("is_grouped", [False, True], ids=["whole", "grouped"])
@pytest.mark.parametrize("pair", REPEATED)
def test_five_hundred_repeats(pair, is_grouped, device, monkeypatch, four_threads):
    """(384, 640), groups [64, 192, 1, 127]: the bytes of the first each time.

    On four threads of the CPU; on CUDA on a side stream, with the producer of X still pending.
    """
    monkeypatch.undo()  # dirty buffers are not what this is about
    row, column = (EVERY[name] for name in REPEATED[pair])
    require(device, row, column)
    x, split = values(Matrix("nonfinite", 384, 640, torch.bfloat16)), SPLITS["ragged"]
    whole, grouped = expected_cast(x, row, column), expected_grouped(x, split, row, column)
    planes = (grouped.row, grouped.column) if is_grouped else [one.plane for one in whole]
    # Moved once: a copy from the host would wait for the producer.
    ends = ends_of(split, device)
    for given in (whole, (grouped,)):
        for one in given:
            move_statistics(one, device)

    def run(x: torch.Tensor):
        if is_grouped:
            return run_grouped(x, ends, row, column, grouped)
        return run_cast(x, row, column, whole)

    x = x.to(device)
    first = run_behind_producer(run, x)
    assert not planes_differ(first, planes)
    parts = buffers(first)
    for _ in range(500):
        for part, other in zip(parts, buffers(run_behind_producer(run, x)), strict=True):
            assert torch.equal(part, other)


def move_statistics(given: Expected | Grouped, device: str) -> None:
    for field in dataclasses.fields(given):
        if field.name.endswith("statistic"):
            setattr(given, field.name, moved(getattr(given, field.name), device))


def buffers(result) -> list[torch.Tensor]:
    parts = [*result.row.parts, *result.column.parts]
    return [part.view(torch.uint8) for part in parts if part is not None]


def run_behind_producer(run, x: torch.Tensor):
    """``run(x)``; on CUDA on a side stream, where a copy of ``x`` is not written yet."""
    if x.device.type == "cpu":
        return run(x)
    late, side = torch.zeros_like(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000)
        late.copy_(x)
        result = run(late)
    torch.cuda.current_stream().wait_stream(side)
    return result
