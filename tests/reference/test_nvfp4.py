"""NVFP4 against exact arithmetic: codes, scale bytes, g, decoded values, transform, rounding.

Legend: R, C rows and contraction of a plane; the oracle works on FP32 bit patterns and "units".
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from dist_finegrain.reference import nvfp4
from dist_finegrain.reference.elements import decode_e4m3
from tests.special_values import (
    DTYPES,
    NONFINITE,
    every_magnitude,
    fp32_patterns,
    special_values,
    with_nonfinite,
    with_value,
)

from . import exact, exact_nvfp4

FLT_MAX = torch.finfo(torch.float32).max
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_rht = pytest.mark.parametrize("rht", ["signed", "plain"])


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """[R, n] bytes as [R, 2·n] codes, low nibble first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def encoded(x: torch.Tensor, amax: torch.Tensor | None = None, **options):
    """(codes [R, C], scale bytes, g), padding cut off, with the amax that ``measure`` gives."""
    rht = options.get("rht")
    row_scaled = options.get("row_scaled", False)
    if amax is None:
        amax = nvfp4.measure(x, rht=rht, row_scaled=row_scaled)
    codes, scales, g = nvfp4.encode(x, amax, **options)
    rows, contraction = x.shape
    assert not codes[rows:].any() and not scales[rows:].any()
    groups = -(-contraction // 16)
    assert not scales[:, groups:].any()
    return unpacked(codes[:rows])[:, : 16 * groups], scales[:rows, :groups], g


def exact_values(x: torch.Tensor) -> list:
    """``x`` [R, C] (C a multiple of 16) as [R][C/16][16] signed units, None for non-finite."""
    return [
        [
            [exact_nvfp4.signed(b) if exact.is_finite(b) else None for b in row[k : k + 16]]
            for k in range(0, len(row), 16)
        ]
        for row in fp32_patterns(x)
    ]


def largest(values) -> int:
    return max((v[1] for v in values if v is not None), default=0)


def comparable_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows divided by their amax and by up to 2^12, so that few vanish under the matrix's."""
    down = 2.0 ** -(torch.arange(len(x)) % 13).to(x.dtype)
    return x / x.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) * down[:, None]


def assert_exact(values: list, encoded_parts, amaxes: list[int], tiles=None) -> None:
    """Codes, scale bytes and g are the oracle's; decoded values too.

    values: [R][blocks][16] signed units; amaxes: one per row, in units; tiles: what shares a scale.
    """
    codes, scales, g = encoded_parts
    tiles = values if tiles is None else tiles
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    decoded = fp32_patterns(nvfp4.decode(packed, scales, g[: len(codes)]))
    g = fp32_patterns(g.expand(len(codes)) if g.numel() == 1 else g[: len(codes)])
    rows = zip(
        values, tiles, amaxes, codes.tolist(), scales.tolist(), g, decoded, strict=True
    )  # fmt: skip
    for row, row_tiles, amax, row_codes, row_scales, row_g, row_decoded in rows:
        assert row_g == exact.to_bits(exact_nvfp4.outer_scale(amax))
        for k, (block, tile) in enumerate(zip(row, row_tiles, strict=True)):
            part = slice(16 * k, 16 * k + 16)
            assert (row_codes[part], row_scales[k]) == exact_nvfp4.block(block, amax, tile)
            if row_scales[k] != 0x7F:
                units = exact.magnitude(row_g)
                assert row_decoded[part] == [
                    exact_nvfp4.decoded(code, row_scales[k], units) for code in row_codes[part]
                ]


# The oracle, and the ground under it.
def test_constants_have_the_documented_bits():
    for value, bits in ((nvfp4._ONE_SIXTH, 0x3E2AAAAB), (nvfp4._ONE_2688TH, 0x39C30C31)):
        assert struct.unpack(">I", struct.pack(">f", value))[0] == bits


def test_oracle_adds_and_rounds_to_bf16_as_torch_does():
    """10^4 sums and BF16 roundings, of equal, opposite and unrelated magnitudes."""
    a = every_magnitude(500, 20, seed=1).clamp(-1e38, 1e38)
    b = torch.where(every_magnitude(500, 20, seed=2) > 0, -a * 1.25, a.roll(1))
    sums = [exact_nvfp4.add(p, q) for p, q in zip(*map(flat_signed, (a, b)), strict=True)]
    assert flat_signed(a + b) == sums
    assert flat_signed(a.bfloat16()) == [(s, exact_nvfp4.bf16(u)) for s, u in flat_signed(a)]


def flat_signed(x: torch.Tensor) -> list:
    return [exact_nvfp4.signed(bits) for bits in fp32_patterns(x.flatten())]


# Elements.
def test_nearest_code_of_a_dense_grid_and_of_every_edge():
    """[0, 8] in steps of 2^-12, every code and midpoint with its 2 FP32 neighbours, both signs."""
    edges = torch.cat((E2M1, (E2M1[1:] + E2M1[:-1]) / 2, torch.tensor([1 - 2**-24, 7.0, 8.0])))
    up, down = (edges.nextafter(torch.full_like(edges, end)) for end in (math.inf, -math.inf))
    random = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 8
    tiny = torch.tensor([1e-45, 1e-40, 1e-38, 1e-20, 9.0, 1e30, FLT_MAX, math.inf])
    grid = torch.arange(8 * 4096 + 1) / 4096
    v = torch.cat((grid, edges, up, down.clamp(min=0), random, tiny[:-1]))
    expected = [exact_nvfp4.nearest_code(exact.magnitude(b)) for b in fp32_patterns(v)]
    assert nvfp4.e2m1_codes(v).tolist() == expected
    assert nvfp4.e2m1_codes(-v).tolist() == [code | 8 for code in expected]
    assert nvfp4.e2m1_codes(tiny[-1:] * torch.tensor([1.0, -1.0])).tolist() == [7, 15]


def test_all_codes_under_all_scale_bytes_come_back():
    """16 codes × 254 finite non-zero bytes × 4 amaxes: e2m1 · (b · g) times m gives the code."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[(scales & 0x7F > 0) & (scales & 0x7F < 0x7F)]
    assert len(scales) == 252
    codes = torch.arange(16, dtype=torch.uint8).expand(len(scales), 16)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    for amax in (1.0, 3.0, 1e-25, 6e34):
        amax = torch.tensor([amax])
        values = nvfp4.decode(packed, scales[:, None], amax * nvfp4._ONE_2688TH)
        m = nvfp4.multiplier(scales, nvfp4.global_scale(amax))
        assert torch.equal(nvfp4.e2m1_codes(values * m[:, None]), codes)


def test_decode_without_g_is_exact_in_bf16():
    """All 16 codes under all 256 bytes: e2m1 · b, NaN for 7F and FF whatever the code."""
    scales = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    values = nvfp4.decode(packed, scales[:, None])
    expected = torch.cat((E2M1, -E2M1)) * scales.view(torch.float8_e4m3fn).float()[:, None]
    assert torch.equal(values.nan_to_num(7e7), expected.nan_to_num(7e7))
    assert torch.equal(values.signbit()[1:127], expected.signbit()[1:127])
    assert torch.equal(values.bfloat16().float().nan_to_num(7e7), values.nan_to_num(7e7))
    assert values.isnan().sum() == 2 * 16


# Scales.
def test_scales_over_the_whole_range():
    """S, b, m and g of 10^4 (amax, block amax) pairs from subnormal to FLT_MAX."""
    amax = every_magnitude(1000, 10, seed=7).abs().flatten()
    amax[:4] = torch.tensor([0.0, 1e-45, 1e-38, FLT_MAX])
    ratio = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) ** 8
    block_amax = torch.where(torch.arange(10_000) % 2 == 0, amax * ratio, amax)
    units = [exact.magnitude(b) for b in fp32_patterns(amax)]
    scale = nvfp4.global_scale(amax)
    exact_scale = [exact_nvfp4.global_scale(u) for u in units]
    assert fp32_patterns(scale) == [exact.to_bits(s) for s in exact_scale]
    pairs = zip((exact.magnitude(b) for b in fp32_patterns(block_amax)), exact_scale, strict=True)
    expected = [exact_nvfp4.scale_byte(*pair) for pair in pairs]
    got = nvfp4.scale_bytes(block_amax, scale)
    assert got.tolist() == expected
    m = [exact_nvfp4.multiplier(*pair) for pair in zip(expected, exact_scale, strict=True)]
    assert fp32_patterns(nvfp4.multiplier(got, scale)) == [exact.to_bits(u) for u in m]
    assert {0, 1, 0x7E} <= set(expected)


# Blocks.
@each_dtype
def test_ten_thousand_blocks(dtype):
    """20 matrices of 512 blocks per dtype, half with NaN and infinities, rows or columns."""
    for seed in range(20):
        x = every_magnitude(128, 64, dtype, seed=seed)
        x = comparable_rows(x) if seed % 4 < 2 else x
        x = with_nonfinite(x) if seed % 2 else x
        x = x.t().contiguous().t() if seed % 3 else x
        values = exact_values(x)
        amax = max(largest(block) for row in values for block in row)
        assert_exact(values, encoded(x), [amax] * 128)


@each_dtype
def test_ten_thousand_blocks_of_16_by_16(dtype):
    """10 matrices of 64 tiles per dtype: 10240 scale bytes, one per tile and repeated for rows."""
    for seed in range(10):
        x = every_magnitude(128, 128, dtype, seed=20 + seed)
        x = comparable_rows(x) if seed % 4 < 2 else x
        x = with_nonfinite(x, seed) if seed % 2 else x
        values = exact_values(x)
        tiles = [
            [sum((values[r // 16 * 16 + k][b] for k in range(16)), []) for b in range(8)]
            for r in range(128)
        ]
        amax = max(largest(tile) for row in tiles for tile in row)
        assert_exact(values, encoded(x, two_dimensional=True), [amax] * 128, tiles)


@each_dtype
def test_ten_thousand_row_scaled_blocks(dtype):
    """2508 rows of 4 blocks per dtype, half with NaN and infinities; one amax and g per row."""
    x = every_magnitude(2508, 64, dtype, seed=40)
    for part in (x[:1254], with_nonfinite(x[1254:])):
        values = exact_values(part)
        amaxes = [max(map(largest, row)) for row in values]
        assert_exact(values, encoded(part, row_scaled=True), amaxes)


@each_rht
@each_dtype
def test_ten_thousand_rotated_blocks(rht, dtype):
    """4 matrices of 448 blocks per case, away from overflow; the amax is that of the result."""
    for seed in range(4):
        x = every_magnitude(112, 64, dtype, seed=60 + seed)
        x = x.clamp(-(2.0**120), 2.0**120) if dtype != torch.float16 else x
        x = comparable_rows(x) if seed % 4 < 2 else x
        x = x.t().contiguous().t() if seed % 2 else x
        values = [
            [exact_nvfp4.hadamard(group, rht, dtype == torch.bfloat16) for group in row]
            for row in exact_values(x)
        ]
        amax = max(largest(block) for row in values for block in row)
        assert exact.to_bits(amax) == fp32_patterns(nvfp4.measure(x, rht=rht))[0]
        assert_exact(values, encoded(x, rht=rht), [amax] * 112)


# Special values.
@each_dtype
@pytest.mark.parametrize("options", [{}, {"row_scaled": True}])
def test_special_values(dtype, options):
    """Every matrix of the shared list, ragged and empty ones included, against the oracle."""
    for name, x in special_values(dtype).items():
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 16))
        values = exact_values(padded)
        amaxes = [max(map(largest, row), default=0) for row in values]
        if not options:
            amaxes = [max(amaxes, default=0)] * len(amaxes)
        codes, scales, g = encoded(x, **options)
        assert_exact(values, (codes, scales, g), amaxes)
        assert g.isfinite().all() and codes.shape == padded.shape, name


@pytest.mark.parametrize("value", NONFINITE.values(), ids=NONFINITE)
@pytest.mark.parametrize("two_dimensional", [False, True])
def test_nonfinite_marks_its_block_and_only_it(value, two_dimensional):
    """Bug case 7: code 0 and scale 7F; the other codes are those of the element being zero."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)) * 100
    x[1, 5] = 1e30  # the amax goes with it
    bad, clean = with_value(x, value), with_value(x, 0.0)
    codes, scales, g = encoded(bad, two_dimensional=two_dimensional)
    expected, expected_scales, expected_g = encoded(clean, two_dimensional=two_dimensional)
    assert torch.equal(codes, expected) and torch.equal(g, expected_g) and codes[1, 5] == 0
    marked = torch.zeros_like(scales, dtype=torch.bool)
    marked[slice(0, 16) if two_dimensional else 1, 0] = True
    assert (scales[marked] == 0x7F).all()
    assert torch.equal(scales[~marked], expected_scales[~marked])
    assert not (expected_scales == 0x7F).any()


@each_rht
def test_nonfinite_spreads_over_its_rotated_group(rht):
    """One NaN or Inf makes all 16 outputs non-finite; so does an overflow in the transform."""
    clean = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    for value in NONFINITE.values():
        x = with_value(clean, value, at=(2, 20))
        codes, scales, g = encoded(x, rht=rht)
        assert scales[2, 1] == 0x7F and not codes[2, 16:32].any()
        assert (scales == 0x7F).sum() == 1 and g.isfinite().all()
    huge = torch.full((2, 32), FLT_MAX)
    huge[1] = 1.0
    codes, scales, _ = encoded(huge, rht=rht)
    assert (scales[0] == 0x7F).all() and not (scales[1] == 0x7F).any()


def test_zero_scale_byte_saturates_and_decodes_to_signed_zero():
    """b = 0 beside a huge element: non-zero elements are ±6, zeros ±0, all decode to ±0."""
    x = torch.zeros(2, 32)
    x[0, 0] = 1e30
    x[1] = torch.tensor([1e-10, -1e-10, 0.0, -0.0]).repeat(8)
    codes, scales, g = encoded(x)
    assert codes[1].tolist() == [7, 15, 0, 8] * 8 and not scales[1].any()
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    decoded = nvfp4.decode(packed, scales, g)[1]
    assert not decoded.any() and torch.equal(decoded.signbit(), x[1].signbit())


# Hadamard transform.
@each_rht
def test_transform_is_the_orthogonal_sylvester_matrix(rht):
    """Row i of the transform of the unit vectors is sign_i · (-1)^popcount(i & k) / 4."""
    unit = torch.eye(16)
    matrix = nvfp4.values_to_encode(nvfp4.contraction_first(unit), rht)[0, :, :].t()
    for i in range(16):
        sign = -0.25 if rht == "signed" and exact_nvfp4.SIGNS[i] == "-" else 0.25
        assert matrix[i].tolist() == [sign * (-1) ** (i & k).bit_count() for k in range(16)]
    assert torch.equal(matrix @ matrix.t(), unit)


@each_dtype
def test_all_outputs_of_the_last_group_are_stored_and_measured(dtype):
    """C = 33: one element fills 16 codes, and the amax is that of its rotation, |x| / 4."""
    x = torch.zeros(1, 33, dtype=dtype)
    x[0, 32] = 64.0
    assert nvfp4.measure(x, rht="signed").item() == 16.0
    codes, scales, _ = nvfp4.encode(x, nvfp4.measure(x, rht="signed"), rht="signed")
    assert (unpacked(codes)[0, 32:48] & 7 == 7).all() and scales[0].tolist() == [0, 0, 0x7E, 0]
    assert codes.shape == (16, 32) and not unpacked(codes)[0, 48:].any()
    assert not unpacked(codes)[0, :32].any()  # +0: the transform of zeros makes no -0


# Stochastic rounding.
def up_counts(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(least code, count of larger ones) over all 65536 random values, per element of ``v``."""
    r = torch.arange(65536, dtype=torch.int32)
    least, ups = [], []
    for value in v:
        codes = nvfp4.e2m1_codes(value.expand(65536), r)
        assert (codes[1:] >= codes[:-1]).all() and codes[-1] - codes[0] <= 1
        least.append(codes[0])
        ups.append((codes > codes[0]).sum())
    return torch.stack(least), torch.stack(ups)


def test_probability_of_rounding_up_is_the_distance():
    """Random magnitudes below 6: P(up) within half of 2^-16 of the exact distance, unbiased."""
    v = torch.rand(150, generator=torch.Generator().manual_seed(5)) * 6
    v = torch.cat((v, v[:50] / 8, torch.tensor([1 - 2**-12, 1 + 2**-10, 3.99, 2.0**-17, 5.999])))
    least, ups = up_counts(v)
    for bits, code, count in zip(fp32_patterns(v), least.tolist(), ups.tolist(), strict=True):
        below, distance = exact_nvfp4.distance(exact.magnitude(bits))
        # Half of 2^-16, and below 1 what u = v + 1 lost, 2^-23 of the gap.
        assert abs((code - below) * 65536 + count - distance * 65536) <= 0.5 + 2**-7


def test_exact_values_stay_and_larger_ones_saturate():
    least, ups = up_counts(torch.cat((E2M1, torch.tensor([6.01, 8.0, 1e30, math.inf]))))
    assert least.tolist() == [*range(8), 7, 7, 7, 7] and not ups.any()


def test_stochastic_codes_equal_the_scalar_model():
    """4096 elements of every magnitude and both signs."""
    x = torch.cat((every_magnitude(32, 64), torch.randn(32, 64) * 2))
    r = torch.randint(0, 65536, x.shape, dtype=torch.int32)
    expected = [
        bits >> 31 << 3 | exact_nvfp4.stochastic_code(exact.magnitude(bits), noise)
        for bits, noise in zip(fp32_patterns(x.flatten()), r.flatten().tolist(), strict=True)
    ]
    assert nvfp4.e2m1_codes(x, r).flatten().tolist() == expected


@pytest.mark.parametrize("options", [{}, {"rht": "signed"}, {"two_dimensional": True}])
def test_noise_meets_its_own_element(options):
    """What ``noise`` returns for the untransformed source is used at the same place."""
    x = torch.randn(20, 100, generator=torch.Generator().manual_seed(6))
    r = torch.randint(0, 65536, (112, 32), dtype=torch.int32)
    r = torch.cat((r, torch.zeros(16, 32, dtype=torch.int32)))
    seen = []

    def noise(source: torch.Tensor, first: int) -> torch.Tensor:
        extent = 16 * len(source)
        seen.append(source.flatten(0, 1)[:, :20])
        return r[first : first + extent].unflatten(0, (-1, 16))

    codes, scales, _ = encoded(x, noise=noise, **options)
    assert torch.equal(torch.cat(seen)[:100].t(), x) and not torch.cat(seen)[100:].any()
    source = nvfp4.contraction_first(x)
    values = nvfp4.values_to_encode(source, options.get("rht")).flatten(0, 1)[:112, :20].t()
    amax = nvfp4.measure(x, rht=options.get("rht"))
    m = nvfp4.multiplier(scales, nvfp4.global_scale(amax)).repeat_interleave(16, 1)
    assert torch.equal(codes, nvfp4.e2m1_codes(values * m, r[:112, :20].t()))
    assert torch.equal(decode_e4m3(scales).isfinite(), torch.ones_like(scales, dtype=torch.bool))


# Layouts.
@each_dtype
@pytest.mark.parametrize("options", [{}, {"rht": "signed"}, {"two_dimensional": True}])
@pytest.mark.parametrize("shape", [(96, 160), (360, 180), (1, 1), (0, 64), (64, 0), (17, 4100)])
def test_layout_of_the_input_does_not_matter(dtype, options, shape):
    """Contiguous, transposed, strided, expanded: the same bytes; the input is not changed."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    before = x.clone()
    amax = nvfp4.measure(x, rht=options.get("rht"))
    parts = nvfp4.encode(x, amax, **options)
    wide = torch.full((shape[0], 2 * shape[1] + 3), 7.0, dtype=dtype)
    wide[:, : shape[1]] = x
    for view in (x.t().contiguous().t(), wide[:, : shape[1]], wide.t().contiguous().t()):
        view = view[:, : shape[1]]
        assert torch.equal(nvfp4.measure(view, rht=options.get("rht")), amax)
        for a, b in zip(nvfp4.encode(view, amax, **options), parts, strict=True):
            assert torch.equal(a, b) and a.is_contiguous() and a.dtype == b.dtype
        assert torch.equal(view, before)
    assert torch.equal(x, before)
    row = x[:1].expand(33, -1) if shape[0] else x
    for a, b in zip(*(nvfp4.encode(y, amax, **options) for y in (row, row.clone())), strict=True):
        assert torch.equal(a, b)
