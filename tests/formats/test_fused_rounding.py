"""Stochastic rounding in the kernels: the reference's bits, exact probabilities, shards.

A block of 16 that holds a 6, under a matrix amax of 2688, has S = 1, b = 1 and m = 1: what is
rounded is x itself. Legend: X [M, K]; v a magnitude below 6; r the 16 random bits of an element.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from dist_finegrain.formats import fused, fused_options
from dist_finegrain.formats.casting import CastJob, run_casts
from dist_finegrain.formats.hybrid import HybridQuantizer
from dist_finegrain.formats.nvfp4 import NVFP4Format, NVFP4Quantizer
from dist_finegrain.formats.plane import DIRECTIONS, Plane, Rounding
from dist_finegrain.reference.nvfp4 import contraction_first
from dist_finegrain.reference.philox import rounding_bits
from tests.special_values import DTYPES

from .cases import PLAIN
from .fused_cases import (
    DATA,
    EVERY,
    PLACES,
    SOURCES,
    Matrix,
    Report,
    as_row,
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

STOCHASTIC = {name: format for name, format in EVERY.items() if "_sr" in name}
SR = NVFP4Format(stochastic=True)
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AMAX = 2688.0
DRAWS = 4096  # of one mean, as bug case 34 counts them
each_stochastic = pytest.mark.parametrize("name", STOCHASTIC)


# The bits of the reference.
@each_device
@each_source
@each_stochastic
def test_bits_of_any_key_and_place(name, source, device):
    """Random seed, stream, step, origins beyond 2^32; contraction origins at every offset in 16."""
    format = STOCHASTIC[name]
    require(device, format)
    draw, report = random.Random(name + source), Report()
    for case in range(48):
        seed, step = draw.getrandbits(32), draw.getrandbits(32 if case % 3 else 40)
        places = {
            direction: Rounding(
                seed=seed,
                stream=draw.getrandbits(32),
                step=step,
                row_origin=draw.getrandbits(8 if case % 2 else 40),
                contraction_origin=16 * draw.getrandbits(24) + (case + shift) % 16,
            )
            for shift, direction in enumerate(DIRECTIONS)
        }
        shape = ((37, 50), (130, 129))[case % 2]
        x = values(Matrix(list(DATA)[case % len(DATA)], *shape, DTYPES[case // 2 % 3]))
        row = as_row(format, source)
        wanted = expected_cast(x, row, format, source, places)
        result = run_cast(x.to(device), row, format, wanted, source, places)
        report.add(places, planes_differ(result, [w.plane for w in wanted]))
    report.check()


@each_device
@each_stochastic
def test_noise_follows_place_and_content_only(name, device):
    """Not the other direction, its options, the address, torch's generators or the call."""
    format = STOCHASTIC[name]
    require(device, format)
    matrix = Matrix("normal", 64, 96, torch.bfloat16)
    x, wanted = values(matrix), expected_of(matrix, format, format, "original")
    before = random_states(device)
    for partner in (None, EVERY["mxfp8"], EVERY["nvfp4"], format):
        column = expected_of(matrix, format, partner or format, "original")[1]
        result = run_cast(x.to(device), format, partner, (wanted[0], partner and column))
        assert not planes_differ(result, (wanted[0].plane, partner and column.plane))
    assert all(map(torch.equal, random_states(device), before))
    for name_ in ("seed", "stream", "step", "row_origin", "contraction_origin"):
        place = dataclasses.replace(PLACES["rowwise"], **{name_: 1 << 20})
        other = run_cast(x.to(device), format, None, (wanted[0], None), places={"rowwise": place})
        share = (other.row.codes.cpu() != wanted[0].plane.codes).float().mean()
        assert 0.2 < share < 0.9, name_


def random_states(device: str) -> list[torch.Tensor]:
    """Of torch's generators, which nothing here may touch."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if device == "cuda" else states


@each_device
@each_source
@each_stochastic
def test_a_shard_is_a_region_of_the_whole(name, source, device):
    """Pieces cut at multiples of 16 of M and K, cast with their origins and the whole's amaxes."""
    format = STOCHASTIC[name]
    require(device, format)
    x = DATA["nonfinite"](128, 192, torch.bfloat16)
    row = as_row(format, source)
    wanted = expected_cast(x, row, format, source)
    for m0, m1, k0, k1 in (
        (0, 48, 0, 192),
        (48, 128, 0, 192),
        (0, 128, 64, 128),
        (16, 80, 32, 160),
    ):
        places = {
            "rowwise": moved_place(PLACES["rowwise"], m0, k0),
            "columnwise": moved_place(PLACES["columnwise"], k0, m0),
        }
        shard = x.to(device)[m0:m1, k0:k1]
        result = run_cast(shard, row, format, wanted, source, places)
        regions = ((m0, m1, k0, k1), (k0, k1, m0, m1))
        for plane, one, region in zip((result.row, result.column), wanted, regions, strict=True):
            assert_is_region(plane, one.plane, *region)


def moved_place(place: Rounding, rows: int, contraction: int) -> Rounding:
    return dataclasses.replace(
        place,
        row_origin=place.row_origin + rows,
        contraction_origin=place.contraction_origin + contraction,
    )


def assert_is_region(shard: Plane, whole: Plane, r0: int, r1: int, c0: int, c1: int) -> None:
    codes, scales = shard.codes[: r1 - r0].cpu(), shard.scales[: r1 - r0].cpu()
    assert torch.equal(codes[:, : (c1 - c0) // 2], whole.codes[r0:r1, c0 // 2 : c1 // 2])
    assert torch.equal(scales[:, : (c1 - c0) // 16], whole.scales[r0:r1, c0 // 16 : c1 // 16])


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ["current", "row", "block", "mxfp8", "nvfp4"])
def test_groups_that_hold_a_nan_draw_the_same_bits_in_plain_torch(row, dtype, device, monkeypatch):
    """The decoded NaN that the column's bits are drawn from is canonical, whatever converts it."""
    require(device, EVERY[row], SR)
    x = DATA["nonfinite"](200, 300, dtype).to(device)
    quantizer = HybridQuantizer(
        rowwise_quantizer=PLAIN["block_1d" if row == "block" else row](),
        columnwise_quantizer=NVFP4Quantizer(stochastic_rounding=True),
        columnwise_source="rowwise_dequantized",
    )
    compiled, plain = (CastJob(x, quantizer, rounding=PLACES) for _ in range(2))
    run_casts([compiled])
    monkeypatch.setattr(
        fused_options, "why_unavailable", lambda device: "plain torch was asked for"
    )
    run_casts([plain])
    assert plain.planes["rowwise"].decode().isnan().any()
    for direction in DIRECTIONS:
        assert not plane_differs(plain.planes[direction], compiled.planes[direction])


# Probabilities.
def cast_constant(v: float, rows: int, columns: int, device: str, sign: float = 1.0, step: int = 0):
    """Codes of ±v, int64, where X [rows, columns] holds v: (row plane's, column plane's, where).

    Every group of 16 along either direction holds one 6; ``where`` is False there.
    """
    index = torch.arange(rows, device=device)[:, None] + torch.arange(columns, device=device)
    where = index % 16 != 0
    x = torch.where(where, v, 6.0) * sign
    amax = torch.tensor([AMAX], device=device)
    places = {d: dataclasses.replace(PLACES[d], step=step) for d in DIRECTIONS}
    statistics = {"row_statistic": amax, "column_statistic": amax}
    result = fused.cast(x, SR, SR, rounding=places, **statistics)
    for plane in (result.row, result.column):
        assert (plane.scales[:, : plane.shape[1] // 16] == 0x38).all()  # b = 1
    codes = [unpacked(p) for p in (result.row, result.column)]
    return codes[0], codes[1].t(), where, x


def unpacked(plane: Plane) -> torch.Tensor:
    """Codes 0…15, int64 [R, C]."""
    codes, (rows, contraction) = plane.codes, plane.shape
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:rows, :contraction].long()


def formula(v: float, r: torch.Tensor) -> torch.Tensor:
    """Code of the magnitude v, a FP32 number, with bits ``r``: numerics.md, in whole numbers."""
    u = torch.tensor([v], dtype=torch.float32)
    u, base = (u + 1, 254) if v < 1 else (u, 252)
    return (((u.view(torch.int32).long() + 64 * r + 32) >> 22) - base).clamp(max=7)


# One in each gap, one with bits below 2^-16 of the gap, one next to a grid point.
VALUES = (0.1, 0.3337, 0.75, 1.2, 1.7, 2.25, 3.14159, 4.0000005, 5.9999995)


@pytest.mark.slow
@each_device
@pytest.mark.parametrize("v", VALUES)
def test_every_r_in_both_planes(v, device):
    """All 65 536 occur among 2^20 elements: each code is the formula's, P(up) is exact."""
    check_every_r(v, device)


@each_device
@pytest.mark.parametrize("v", [0.3337, 3.14159])
def test_every_r_in_both_planes_quickly(v, device):
    check_every_r(v, device)


def check_every_r(v: float, device: str) -> None:
    require(device, SR)
    rows, columns, sign = 16384, 64, -1.0
    v = torch.tensor(v).item()  # as FP32
    row, column, where, x = (t.cpu() for t in cast_constant(v, rows, columns, device, sign))
    below = int((GRID <= v).sum()) - 1
    for codes, source, direction in ((row, x, "rowwise"), (column.t(), x.t(), "columnwise")):
        place = dataclasses.replace(PLACES[direction], step=0)
        bits = rounding_bits(contraction_first(source), **vars(place))
        r = bits.flatten(0, 1).t()[: source.shape[0], : source.shape[1]].long()
        is_v = where if direction == "rowwise" else where.t()
        r, codes = r[is_v], codes[is_v]
        assert len(r.unique()) == 1 << 16
        magnitude = codes - 8  # all are negative
        assert torch.equal(magnitude, formula(v, r))
        ups = torch.zeros(1 << 16, dtype=torch.long).scatter_(0, r, magnitude - below)
        assert set(ups.tolist()) <= {0, 1}
        gap = GRID[below + 1] - GRID[below]
        distance = (torch.tensor(v, dtype=torch.float64) - GRID[below]) / gap
        assert abs(int(ups.sum()) - distance * (1 << 16)) <= 0.5 + 2**-7


def between_grid_points() -> torch.Tensor:
    """64 magnitudes, FP32, none on the grid: eight or more in each of the seven gaps."""
    gap = torch.arange(64) % 7
    inside = (torch.arange(64) // 7 + 0.5 + 0.03 * gap) / 10
    return GRID[gap] + inside * (GRID[gap + 1] - GRID[gap])


@each_device
def test_means_are_unbiased(device):
    """Bug case 34, 65 536 draws at each value: z-scores of 4096-draw means in both planes."""
    check_means(device, rows=1104)


@pytest.mark.slow
@each_device
def test_means_of_a_million_draws_are_unbiased(device):
    check_means(device, rows=17488)


def check_means(device: str, rows: int) -> None:
    """rows · 60 draws at each of the 64 values, in each plane; rows a multiple of 16."""
    require(device, SR)
    scores: dict[str, list] = {"row": [], "column": []}
    for step, v in enumerate(between_grid_points().tolist()):
        row, column, where, _ = cast_constant(v, rows, 64, device, step=step)
        below = int((GRID <= v).sum()) - 1
        p = (v - GRID[below].item()) / (GRID[below + 1] - GRID[below]).item()
        for name, codes in (("row", row), ("column", column)):
            up = codes[where] - below
            assert 0 <= up.min() and up.max() <= 1, v
            means = up[: len(up) // DRAWS * DRAWS].view(-1, DRAWS).double().mean(1)
            scores[name].append((means - p) / (p * (1 - p) / DRAWS) ** 0.5)
    for name, score in scores.items():
        z = torch.cat(score)
        assert z.abs().max() < 6, name
        assert abs(z.std() - 1) < 0.05, (name, z.std())
        assert abs(z.mean()) < 6 / len(z) ** 0.5, (name, z.mean())


@each_device
def test_larger_than_six_always_saturates(device):
    """A block of 6.2 has b = 1: x · m = 6.2; and one of 5.9 beside a 6 gives only 4 and 6."""
    require(device, SR)
    amax = torch.tensor([AMAX], device=device)
    for value, sign in itertools.product((6.0000005, 6.2), (1, -1)):
        x = torch.full((256, 64), sign * value, device=device)
        for step in range(8):
            places = {d: Rounding(step=step) for d in DIRECTIONS}
            statistics = {"row_statistic": amax, "column_statistic": amax}
            result = fused.cast(x, SR, SR, rounding=places, **statistics)
            for plane in (result.row, result.column):
                assert (plane.scales == 0x38).all()
                assert (plane.codes == (0x77 if sign > 0 else 0xFF)).all()


@each_device
@pytest.mark.parametrize("v", GRID.tolist())
def test_grid_values_stay(v, device):
    require(device, SR)
    row, column, where, _ = cast_constant(v, 256, 64, device, sign=-1.0)
    code = GRID.tolist().index(v)
    assert (row[where] == 8 + code).all() and (column[where] == 8 + code).all()


@each_device
@pytest.mark.parametrize("source", SOURCES)
def test_every_option_only_reaches_neighbours_of_the_value(source, device):
    """64 steps: at each element at most two codes, next to each other; scales do not move."""
    require(device, *STOCHASTIC.values())
    x = values(Matrix("normal", 64, 96, torch.bfloat16))
    for format in STOCHASTIC.values():
        wanted = expected_cast(x, EVERY["mxfp8"], format, source)
        steps = []
        for step in range(64):
            places = {d: Rounding(step=step) for d in DIRECTIONS}
            result = run_cast(x.to(device), EVERY["mxfp8"], format, wanted, source, places)
            steps.append(unpacked(result.column).cpu())
        codes = torch.stack(steps)
        assert ((codes >> 3).amax(0) == (codes >> 3).amin(0)).all()
        assert ((codes & 7).amax(0) - (codes & 7).amin(0)).max() == 1
