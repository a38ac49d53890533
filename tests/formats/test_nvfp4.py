"""NVFP4 planes: Transformer Engine's bytes, padding, shards, rounding, transform, options.

Legend: M, K extents of the input; R, C rows and contraction of a plane, Rp and Cp as stored.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pathlib
import pickle

import pytest
import torch
from safetensors.torch import load_file

from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.nvfp4 import NVFP4Format, NVFP4Quantizer
from dist_finegrain.formats.plane import DIRECTIONS, Plane, Rounding
from dist_finegrain.reference import nvfp4 as reference
from tests.special_values import DTYPES, NONFINITE, special_values, with_nonfinite, with_value

from .cases import assert_same_plane, part_bytes, sample

GOLDEN = pathlib.Path(__file__).parent.parent / "data" / "te_2_20_2_casts.safetensors"
SHAPES = [(96, 160), (360, 180), (1, 1), (17, 40), (0, 64), (64, 0)]
OPTIONS = {
    "1-D": {},
    "2-D": {"with_2d_quantization": True},
    "RHT": {"with_rht": True, "with_post_rht_amax": True},
    "RHT without signs": {"with_rht": True, "with_random_sign_mask": False},
    "row-scaled": {"row_scaled_nvfp4": True},
    "SR": {"stochastic_rounding": True},
    "SR 2-D": {"stochastic_rounding": True, "with_2d_quantization": True},
    "SR RHT": {"stochastic_rounding": True, "with_rht": True},
}
STOCHASTIC = [name for name in OPTIONS if name.startswith("SR")]
each_option = pytest.mark.parametrize("option", OPTIONS)
each_stochastic = pytest.mark.parametrize("option", STOCHASTIC)
each_direction = pytest.mark.parametrize("direction", DIRECTIONS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
PLACE = Rounding(seed=11, stream=22, step=33, row_origin=64, contraction_origin=160)


def format_of(option: str, direction: str) -> NVFP4Format:
    return NVFP4Quantizer(**OPTIONS[option]).plane_format(direction)


def source_of(x: torch.Tensor, direction: str) -> torch.Tensor:
    """The matrix [R, C] that the plane of ``x`` [M, K] in this direction is made from."""
    return x if direction == "rowwise" else x.t()


def sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    return (10 * torch.log10(want.square().sum() / (want - got).square().sum())).item()


# What Transformer Engine wrote.
@pytest.mark.parametrize("option", ["1-D", "2-D", "RHT", "row-scaled"])
@each_direction
@pytest.mark.parametrize("name", ["a_log", "a_mixed", "b_log", "b_mixed"])
def test_bytes_of_transformer_engine(option, direction, name):
    """Codes, scale bytes and global amaxes: 0 differ. (It wrote no row-scaled columns.)"""
    kind = {"1-D": "1d", "2-D": "2d", "RHT": "1d_rht", "row-scaled": "row_scaled"}[option]
    if kind == "row_scaled" and direction == "columnwise":
        return
    golden = load_file(GOLDEN)
    suffix, short = {"rowwise": ("", "row"), "columnwise": ("_t", "col")}[direction]
    source = source_of(golden[f"{name}.x"], direction)
    format_ = format_of(option, direction)
    amax, plane = format_.measure(source), format_.encode(source)
    prefix = f"{name}.nvfp4ref.{kind}"
    assert torch.equal(plane.codes, golden[f"{prefix}.data{suffix}"])
    assert torch.equal(plane.scales, golden[f"{prefix}.scale{suffix}"])
    assert torch.equal(amax, golden[f"{prefix}.global_amax_{short}"])


# Buffers and padding.
@each_option
@each_direction
@each_shape
def test_buffers(option, direction, shape):
    """Sizes, dtypes, zero padding; ``empty`` makes the same ones."""
    x = sample(*shape)
    format_, source = format_of(option, direction), source_of(x, direction)
    plane = format_.encode(source, None, PLACE)
    (rows, contraction), (codes, scales, g) = source.shape, plane.parts
    stored_rows, stored = -(-rows // 16) * 16, -(-contraction // 32) * 32
    assert codes.shape == (stored_rows, stored // 2)
    assert scales.shape == (stored_rows, stored // 16)
    assert g.shape == (stored_rows if format_.row_scaled else 1,) and g.dtype == torch.float32
    whole = -(-contraction // 16) * 16 if format_.rht else contraction
    assert not codes[rows:].any() and not codes[:, -(-whole // 2) :].any()
    assert not (codes[:, whole // 2 : -(-whole // 2)] >> 4).any()
    assert not scales[rows:].any() and not scales[:, -(-contraction // 16) :].any()
    assert not format_.row_scaled or not g[rows:].any()
    assert (plane.shape, plane.dtype, plane.format) == ((rows, contraction), x.dtype, format_)
    empty = format_.empty((rows, contraction), x.dtype, x.device)
    for part, other in zip(plane.parts, empty.parts, strict=True):
        assert (part.shape, part.dtype) == (other.shape, other.dtype) and part.is_contiguous()
    assert format_.decode(plane).shape == (rows, whole)
    assert format_.decode(plane).dtype == format_.decode(plane, outer=False).dtype == torch.float32


@each_option
@each_shape
def test_row_padding_is_never_read_and_all_padding_is_written(option, shape):
    """Bug case 4: 0xFF in rows R…Rp changes no value; buffers full of 0xFF are overwritten."""
    quantizer = NVFP4Quantizer(**OPTIONS[option])
    x = sample(*shape)
    out = quantizer.make_empty(shape)
    for direction in DIRECTIONS:
        out.plane(direction).map(lambda part: part.view(torch.uint8).fill_(0xFF))
    quantizer.quantize(x, out=out)
    result = quantizer(x)
    for direction in DIRECTIONS:
        plane = result.plane(direction)
        assert_same_plane(out.plane(direction), plane)
        rows = plane.shape[0]
        clean = plane.map(torch.clone)
        for part in plane.parts:
            if part.shape[0] > rows or part.dtype == torch.uint8:
                part[rows:].view(torch.uint8).fill_(0xFF)
        for outer in (True, False):
            values = [plane.format.decode(p, outer=outer) for p in (plane, clean)]
            assert torch.equal(*values) and values[0].isfinite().all()


@each_option
@each_direction
def test_strided_equals_contiguous(option, direction):
    x = sample(96, 160)
    plane = format_of(option, direction).encode(source_of(x, direction), None, PLACE)
    wide = torch.full((96, 200), 9.0, dtype=x.dtype)
    wide[:, :160] = x
    for view in (x.t().contiguous().t(), wide[:, :160], wide.t().contiguous().t()[:, :160]):
        source = source_of(view, direction)
        assert_same_plane(format_of(option, direction).encode(source, None, PLACE), plane)


@each_option
@each_direction
def test_pieces_of_any_size_give_the_same_bytes(option, direction, monkeypatch):
    """The reference works in pieces that fit a cache: 32 contraction elements at a time as well."""
    x = with_nonfinite(sample(100, 200, dtype=torch.float32))
    format_, source = format_of(option, direction), source_of(x, direction)
    whole = format_.encode(source, None, PLACE)
    monkeypatch.setattr(reference, "_PIECE_ELEMENTS", 1)
    assert_same_plane(format_.encode(source, None, PLACE), whole)


@each_option
@each_direction
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_dtype_does_not_matter(option, direction, default):
    format_, source = format_of(option, direction), source_of(sample(40, 72), direction)
    plane = format_.encode(source, None, PLACE)
    values = format_.decode(plane)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert_same_plane(format_.encode(source, None, PLACE), plane)
        assert torch.equal(format_.decode(plane), values)
    finally:
        torch.set_default_dtype(before)


# Values.
@each_option
@each_direction
def test_decode_is_e2m1_times_b_times_g_in_this_order(option, direction):
    """And ``outer=False`` is e2m1 · b, which BF16 holds exactly."""
    format_ = format_of(option, direction)
    plane = format_.encode(source_of(sample(50, 70, dtype=torch.float32), direction), None, PLACE)
    rows, whole = format_.decode(plane).shape
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((plane.codes & 15, plane.codes >> 4), -1).flatten(1)[:rows, :whole].long()
    values = magnitudes[codes & 7] * (1 - (codes >> 3) * 2)
    b = plane.scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)[:rows, :whole]
    g = plane.outer[:rows, None] if format_.row_scaled else plane.outer
    assert torch.equal(format_.decode(plane), values * (b * g))
    inner = format_.decode(plane, outer=False)
    assert torch.equal(inner, values * b) and torch.equal(inner.bfloat16().float(), inner)


@each_option
@each_dtype
def test_sqnr_of_normal_data(option, dtype):
    """Of the rowwise plane, and of the columnwise one where it is not rotated."""
    x = sample(256, 320, dtype=dtype)
    for direction in DIRECTIONS:
        format_ = format_of(option, direction)
        if format_.rht is None:
            source = source_of(x, direction)
            got = sqnr_db(source.float(), format_.decode(format_.encode(source)))
            assert format_.cast_sqnr_db <= got < format_.cast_sqnr_db + 2
    assert format_of("1-D", "rowwise").cast_sqnr_db == 20


# Bug cases.
@each_option
@each_dtype
def test_zeros(option, dtype):
    """Bug case 5: zeros, a zero row and a zero block stay exactly 0 and change nothing else."""
    quantizer = NVFP4Quantizer(**OPTIONS[option])
    zeros = quantizer(torch.zeros(64, 64, dtype=dtype))
    for direction in DIRECTIONS:
        plane = zeros.plane(direction)
        assert not any(map(any, part_bytes(plane)))
        assert not plane.format.decode(plane).any()
    x = sample(64, 64, dtype=dtype)
    x[16:32] = 0
    x[:, 32:48] = 0
    for direction in DIRECTIONS:
        format_, source = format_of(option, direction), source_of(x, direction)
        decoded = format_.decode(format_.encode(source, None, PLACE))
        assert decoded.isfinite().all() and not decoded[source.eq(0).all(1)].any()
        if format_.rht is None:
            assert not decoded[source == 0].any()
        # A block and a row added to it with zeros: the same bytes with and without.
        more = torch.cat((source, torch.zeros_like(source)), 0)
        codes = format_.encode(more, None, PLACE).codes[:64]
        assert torch.equal(codes, format_.encode(source, None, PLACE).codes)


@each_option
@pytest.mark.parametrize("amax", [1e-37, 1e-38, 1e-40, 1.4e-45])
def test_tiny_amax(option, amax):
    """Bug case 6: S is capped at FLT_MAX; no NaN or Inf, zeros stay zeros, signs stay."""
    x = torch.zeros(32, 64)
    x[::2, ::2], x[1::2, 1::2] = amax, -amax
    for direction in DIRECTIONS:
        format_, source = format_of(option, direction), source_of(x, direction)
        plane = format_.encode(source, None, PLACE)
        decoded = format_.decode(plane)
        assert decoded.isfinite().all() and plane.outer.isfinite().all()
        assert (decoded.abs() <= 2 * amax).all()
        if format_.rht is None:
            assert not decoded[source == 0].any() and not (decoded * source < 0).any()


@each_option
@pytest.mark.parametrize("value", NONFINITE.values(), ids=NONFINITE)
def test_nonfinite_stays_visible_in_its_block(option, value):
    """Bug case 7: one NaN or Inf decodes to NaN over its block, and only there."""
    x = with_value(sample(2, 64), value, at=(0, 20))
    for direction in DIRECTIONS:
        format_, source = format_of(option, direction), source_of(x, direction)
        decoded = format_.decode(format_.encode(source, None, PLACE))
        expected = torch.zeros_like(decoded, dtype=torch.bool)
        if format_.two_dimensional:
            expected[(slice(0, 2), slice(16, 32)) if direction == "rowwise" else slice(16, 32)] = 1
        elif direction == "rowwise":
            expected[0, 16:32] = True
        else:
            expected[20] = True
        assert torch.equal(decoded.isnan(), expected) and not decoded.isinf().any()


@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in STOCHASTIC])
@pytest.mark.parametrize("value", [2.0**-17, 6e-8, 65504.0])
def test_fp16_is_scaled_in_fp32(option, value):
    """Bug case 8: the bytes of FP16 values are those of the same values in FP32."""
    x = torch.full((32, 64), value).half()
    x[3] = sample(64, dtype=torch.float16)
    for direction in DIRECTIONS:
        format_, source = format_of(option, direction), source_of(x, direction)
        plane, wide = format_.encode(source), format_.encode(source.float())
        assert part_bytes(plane) == part_bytes(wide)
        assert format_.decode(plane).isfinite().all() and plane.decode().dtype == torch.float16


@each_option
@each_dtype
def test_special_values_quantize(option, dtype):
    """The shared list through the quantizer: decoded finiteness, amax of finite elements only."""
    for name, x in special_values(dtype).items():
        result = NVFP4Quantizer(**OPTIONS[option])(x)
        row = result.rowwise_plane
        decoded = row.format.decode(row)
        assert decoded.shape == x.shape and row.outer.isfinite().all(), name
        assert (decoded.isnan() | x.isfinite()).all() and not decoded.isinf().any(), name
        if x.isfinite().all():
            assert not decoded.isnan().any() and not (decoded * x.float() < 0).any(), name
            assert torch.equal(decoded.signbit(), x.signbit()), name


# Stochastic rounding.
@each_stochastic
@each_direction
def test_same_noise_again_other_noise_elsewhere(option, direction):
    """Deterministic; seed, stream, step, place and content each change it; no torch generator."""
    format_, source = format_of(option, direction), source_of(sample(64, 96), direction)
    before = torch.random.get_rng_state()
    plane = format_.encode(source, None, PLACE)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same_plane(format_.encode(source.clone(), None, PLACE), plane)
    assert_same_plane(format_.encode(source), format_.encode(source, None, Rounding()))
    for name in ("seed", "stream", "step", "row_origin", "contraction_origin"):
        place = dataclasses.replace(PLACE, **{name: getattr(PLACE, name) + 16})
        other = format_.encode(source, None, place)
        assert torch.equal(other.scales, plane.scales)
        share = (other.codes != plane.codes).float().mean()
        assert 0.2 < share < 0.9, name
    twin = torch.cat((source, source), 0)  # equal content at another row draws anew
    codes = format_.encode(twin, format_.measure(source), PLACE).codes
    assert torch.equal(codes[: len(source)], plane.codes[: len(source)])
    assert not torch.equal(codes[len(source) :], codes[: len(source)])


@each_stochastic
@each_direction
def test_shards_draw_the_noise_of_their_place(option, direction):
    """Row and contraction pieces with their origin are byte for byte regions of the whole plane."""
    source = source_of(with_nonfinite(sample(128, 192)), direction)
    format_ = format_of(option, direction)
    amax = format_.measure(source)
    whole = format_.encode(source, amax, PLACE)
    cuts = ((0, 48, 0, 192), (48, 128, 0, 192), (0, 128, 64, 128), (16, 80, 32, 128))
    for r0, r1, c0, c1 in cuts:
        shard = format_.encode(
            source[r0:r1, c0:c1],
            amax,
            dataclasses.replace(
                PLACE,
                row_origin=PLACE.row_origin + r0,
                contraction_origin=PLACE.contraction_origin + c0,
            ),
        )
        c1 = min(c1, source.shape[1])
        assert torch.equal(shard.codes, whole.codes[r0:r1, c0 // 2 : c1 // 2])
        assert torch.equal(shard.scales, whole.scales[r0:r1, c0 // 16 : c1 // 16])


@each_stochastic
def test_only_neighbours_occur_and_the_mean_is_the_value(option):
    """256 steps of one matrix: two neighbouring codes each, z-scores of the means are normal."""
    format_ = format_of(option, "rowwise")
    x = sample(32, 64, dtype=torch.float32)
    planes = [format_.encode(x, None, Rounding(step=step)) for step in range(256)]
    nearest = dataclasses.replace(format_, stochastic=False).encode(x)
    assert all(torch.equal(p.scales, nearest.scales) for p in planes)
    values = torch.stack([format_.decode(p) for p in planes])
    step = format_.decode(dataclasses.replace(nearest, parts=_ones(nearest)))
    low, high = values.amin(0), values.amax(0)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    index = [torch.bucketize((v / step).abs() - 0.01, grid) for v in (low, high)]
    same_sign = low * high >= 0
    assert ((index[0] - index[1]).abs() <= 1).all() and same_sign.all()
    inside = (x / step).abs() <= 6
    deviation = (values - x).mean(0)[inside] / (values.std(0)[inside] / 16).clamp(min=1e-9)
    moving = values.std(0)[inside] > 0
    z = deviation[moving]
    assert z.abs().max() < 6 and abs(z.std() - 1) < 0.1 and abs(z.mean()) < 0.15


def _ones(plane: Plane) -> tuple:
    """Parts of a plane whose every code is that of 1.0."""
    return (torch.full_like(plane.codes, 0x22), *plane.parts[1:])


# Hadamard transform.
@pytest.mark.parametrize("option", ["RHT", "RHT without signs"])
@each_dtype
def test_rotating_back_gives_the_values(option, dtype):
    """The columnwise plane times the inverse transform; C = 100 has a last group of 4."""
    x = sample(100, 64, dtype=dtype)
    format_ = format_of(option, "columnwise")
    assert (format_of(option, "rowwise").rht, format_.rht) == (
        None,
        "signed" if option == "RHT" else "plain",
    )
    decoded = format_.decode(format_.encode(x.t()))
    signs = [1 - 2 * (option == "RHT" and s == "-") for s in "+++-+------+-+--"]
    matrix = torch.tensor(
        [[signs[i] * (-1) ** (i & k).bit_count() / 4 for k in range(16)] for i in range(16)]
    )
    back = (decoded.unflatten(1, (7, 16)) @ matrix.t()).flatten(1)[:, :100].t()
    assert sqnr_db(x.float(), back) >= 20


@pytest.mark.parametrize("option", ["RHT", "RHT without signs", "SR RHT"])
def test_product_of_two_rotated_planes(option):
    """dYᵀ · X over 100 tokens, which needs all outputs of the ragged last group."""
    x, dy = sample(100, 96, seed=1), sample(100, 64, seed=2)
    format_ = format_of(option, "columnwise")
    left, right = (format_.decode(format_.encode(t.t())) for t in (dy, x))
    assert sqnr_db(dy.t().float() @ x.float(), left @ right.t()) >= format_.cast_sqnr_db - 3


# The quantizer.
def test_planes_of_each_option():
    quantizer = NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    assert quantizer.plane_format("rowwise") == NVFP4Format(stochastic=True)
    assert quantizer.plane_format("columnwise") == NVFP4Format(rht="signed", stochastic=True)
    assert quantizer.plane_format("columnwise").describe() == "nvfp4(e2m1, rht=signed, stochastic)"
    rows = NVFP4Quantizer(row_scaled_nvfp4=True).plane_format("rowwise")
    assert (rows.statistic, rows.describe()) == ("row", "nvfp4(e2m1, row-scaled)")
    tiles = NVFP4Quantizer(torch.float4_e2m1fn_x2, with_2d_quantization=True)
    assert tiles.plane_format("columnwise").block == (16, 16)
    assert NVFP4Format().block == (1, 16) and NVFP4Format().statistic == "tensor"
    assert (NVFP4Format.family, NVFP4Format().contraction_multiple) == ("nvfp4", 32)
    assert NVFP4Format() == NVFP4Format() != NVFP4Format(stochastic=True)
    assert len({NVFP4Format(), NVFP4Format(), NVFP4Format(rht="plain")}) == 2
    usage = NVFP4Quantizer(DType.kFloat4E2M1, False, True)  # positional, as in Transformer Engine
    assert usage(sample(32, 32)).rowwise_plane is None


@pytest.mark.parametrize(
    "options",
    [
        {"with_rht": True, "with_2d_quantization": True},
        {"row_scaled_nvfp4": True, "with_rht": True},
        {"row_scaled_nvfp4": True, "stochastic_rounding": True},
        {"row_scaled_nvfp4": True, "with_2d_quantization": True},
    ],
)
def test_options_that_exclude_each_other(options):
    with pytest.raises(ValueError, match="exclude each other.*e.g. .*=False") as error:
        NVFP4Quantizer(**options)
    assert all(f"{name}=True" in str(error.value) for name in options)


@pytest.mark.parametrize(
    "options",
    [
        {"nvfp4_use_4over6": True},
        {"nvfp4_e4m3_max": 256},
        {"nvfp4_4over6_err_mode": "MSE"},
    ],
)
def test_four_over_six_is_refused(options):
    with pytest.raises(ValueError, match="nvfp4_use_4over6=False.*with_rht") as error:
        NVFP4Quantizer(**options)
    assert f"{next(iter(options))} is {next(iter(options.values()))!r}" in str(error.value)


@pytest.mark.parametrize("fp4_dtype", [DType.kFloat8E4M3, torch.uint8, "e2m1", None])
def test_other_element_types_are_refused(fp4_dtype):
    with pytest.raises(TypeError, match="fp4_dtype is .*kFloat4E2M1"):
        NVFP4Quantizer(fp4_dtype)


@each_option
def test_copies_and_pickles_write_the_same_bytes(option):
    x = sample(48, 64)
    quantizer = NVFP4Quantizer(**OPTIONS[option])
    result = quantizer(x)
    twins = (quantizer.copy(), copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)))
    for twin in twins:
        assert twin is not quantizer
        for direction in DIRECTIONS:
            assert_same_plane(twin(x).plane(direction), result.plane(direction))
    buffer = io.BytesIO()
    torch.save(result, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    for direction in DIRECTIONS:
        assert_same_plane(loaded.plane(direction), result.plane(direction))


def test_process_group_is_kept_by_copies_and_never_saved():
    """A result's quantizer and a pickled one do not hold it, and keep every option."""
    group = torch.distributed.ProcessGroup(0, 1)
    quantizer = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group)
    for twin in (quantizer.copy(), copy.deepcopy(quantizer)):
        assert twin.amax_reduction_group is group
    for twin in (pickle.loads(pickle.dumps(quantizer)), quantizer(sample(16, 32))._quantizer):
        assert twin.amax_reduction_group is None and twin.with_amax_reduction
    assert quantizer.amax_reduction_group is group
