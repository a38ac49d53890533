"""What every FP8 plane obeys: its buffers, padding, layouts of the input, special values, accuracy.

Legend: R rows, C contraction, Rp and Cp the stored extents.
"""

from __future__ import annotations

import math

import pytest
import torch

from dist_finegrain.formats.plane import DIRECTIONS, Plane
from tests.special_values import DTYPES, NONFINITE, every_magnitude, special_values, with_value

from .cases import assert_same_plane, part_bytes
from .fp8_formats import FORMATS, QUANTIZERS, encoded, make

SHAPES = [(96, 160), (360, 180), (1, 1), (0, 64), (64, 0), (16, 128)]
TINY = [1e-38, 1e-40, 1.4e-45]
each_format = pytest.mark.parametrize("name", FORMATS)
each_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS)
each_shape = pytest.mark.parametrize("shape", SHAPES)


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def stored_layout(name: str, rows: int, columns: int) -> list:
    """(shape, dtype) of the three buffers, as numerics.md "Plane storage" says."""
    row_pad = up(rows, 16)
    column_pad = up(columns, 32 if "mxfp8" in name else 16)
    codes, scales, outer = ((row_pad, column_pad), torch.uint8), None, None
    if "mxfp8" in name:
        scales = ((row_pad, column_pad // 32), torch.uint8)
    elif "128x128" in name:
        scales = ((up(rows, 128) // 128, up(up(columns, 128) // 128, 4)), torch.float32)
    elif "1x128" in name:
        scales = ((up(columns, 128) // 128, row_pad), torch.float32)
    else:
        outer = ((row_pad if "row" in name else 1,), torch.float32)
    return [codes, scales, outer]


def layout(plane: Plane) -> list:
    return [None if p is None else (tuple(p.shape), p.dtype) for p in plane.parts]


def poison_row_padding(plane: Plane) -> Plane:
    """A copy whose bytes beyond row R are 0xFF, in codes and in scales that go by rows."""
    plane = plane.map(torch.clone)
    rows, stored_rows = plane.shape[0], plane.codes.shape[0]
    plane.codes[rows:] = 0xFF
    for part in (plane.scales, plane.outer):
        if part is not None and part.shape[0] == stored_rows:
            part[rows:].view(torch.uint8).fill_(0xFF)
        elif part is not None and part.dim() == 2 and part.shape[1] == stored_rows:
            part[:, rows:] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    return plane


# Buffers.
@each_shape
@each_format
def test_buffers_are_those_of_plane_storage(name, shape):
    """Shapes, dtypes, row-major, 16-byte aligned; ``empty`` allocates the same."""
    format = FORMATS[name]
    for x in (sample(*shape), sample(*reversed(shape)).t()):
        plane = encoded(format, x)
        assert plane.shape == shape and plane.dtype == torch.bfloat16
        assert layout(plane) == stored_layout(name, *shape)
        for part in plane.parts:
            assert part is None or (part.is_contiguous() and part.data_ptr() % 16 == 0)
    empty = format.empty(shape, torch.bfloat16, torch.device("cpu"))
    assert layout(empty) == layout(plane)
    assert (empty.format, empty.shape, empty.dtype) == (format, shape, torch.bfloat16)


@each_shape
@each_format
def test_padding_is_written_as_zero(name, shape):
    """Codes, scales and bytes past R and C; nothing else is zero in them."""
    rows, columns = shape
    plane = encoded(FORMATS[name], sample(*shape).abs() + 1)
    expected = torch.zeros_like(plane.codes, dtype=torch.bool)
    expected[:rows, :columns] = True
    assert torch.equal(plane.codes != 0, expected)
    block_rows, block_columns = plane.format.block
    scales = plane.outer if plane.scales is None else plane.scales
    if plane.scales is None:
        used = rows if scales.numel() > 1 else scales.numel()
        assert (scales[:used] > 0).all() and (scales[used:] == 0).all()
        return
    if "1x128" in name:
        scales = scales.t()
    used_rows = up(rows, block_rows) // block_rows if "128x128" in name else rows
    used_columns = up(columns, block_columns) // block_columns
    expected = torch.zeros_like(scales, dtype=torch.bool)
    expected[:used_rows, :used_columns] = True
    assert torch.equal(scales != 0, expected)


@each_shape
@each_format
def test_row_padding_never_influences_a_result(name, shape):
    """bug case 4: 0xFF in rows R…Rp of codes and scales decodes to the same bits."""
    plane = encoded(FORMATS[name], sample(*shape))
    poisoned = poison_row_padding(plane)
    if shape[0] % 16:
        assert part_bytes(poisoned) != part_bytes(plane)
    for outer in (True, False):
        wanted = plane.format.decode(plane, outer=outer)
        assert wanted.shape == shape and wanted.dtype == torch.float32
        assert torch.equal(plane.format.decode(poisoned, outer=outer), wanted)


@each_shape
@each_quantizer
def test_every_byte_of_given_buffers_is_written(quantizer, shape):
    """bug case 4: quantizing into buffers full of 0xFF gives what a fresh quantize gives."""
    x = sample(*shape)
    wanted = make(quantizer).quantize(x)
    out = make(quantizer).make_empty(shape, dtype=x.dtype)
    for direction in DIRECTIONS:
        for part in out.plane(direction).parts:
            if part is not None:
                part.view(torch.uint8).fill_(0xFF)
    make(quantizer).quantize(x, out=out)
    for direction in DIRECTIONS:
        assert_same_plane(out.plane(direction), wanted.plane(direction))


# The input's layout, dtype and direction.
@each_format
def test_strided_inputs_give_the_bytes_of_their_contiguous_copy(name):
    """Transposed, row-strided, column-strided and stride-0 inputs."""
    x = sample(100, 300)
    for view in (x.t(), x[::3], x[:, ::2], x[5:40, 7:140], x[:1].expand(20, -1), x[:, :1].t()):
        assert_same_plane(encoded(FORMATS[name], view), encoded(FORMATS[name], view.contiguous()))


@each_format
def test_encode_leaves_its_input_alone(name):
    for dtype in DTYPES:
        x = sample(20, 70, dtype=dtype)
        kept = x.clone()
        encoded(FORMATS[name], x)
        assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_format
def test_codes_are_those_of_the_same_values_in_fp32(name, dtype):
    """bug case 8: scale arithmetic is FP32, so the dtype of the input changes no byte."""
    for x in (every_magnitude(48, 160, dtype), sample(48, 160, dtype=dtype)):
        parts = part_bytes(encoded(FORMATS[name], x))
        assert parts == part_bytes(encoded(FORMATS[name], x.float()))


@pytest.mark.parametrize("value", [2.0**-17, 6e-8])
@each_format
def test_small_fp16_values(name, value):
    """bug case 8: FP16 full of 2^-17 or of subnormals 6e-8: a scale past 65504 is no overflow."""
    x = torch.full((32, 64), value, dtype=torch.float16)
    plane = encoded(FORMATS[name], x)
    assert part_bytes(plane) == part_bytes(encoded(FORMATS[name], x.float()))
    if FORMATS[name].statistic != "scale":  # a fixed scale of 3.7 underflows, as it must
        assert torch.equal(plane.decode(), x)


@each_quantizer
def test_columnwise_plane_is_the_rowwise_plane_of_the_transpose(quantizer):
    """[96, 160]: both from one quantize, each equal to a quantize of its own."""
    x = sample(96, 160)
    both = make(quantizer).quantize(x)
    assert_same_plane(both.plane("columnwise"), make(quantizer).quantize(x.t()).plane("rowwise"))
    assert both.plane("rowwise").shape == (96, 160) and both.plane("columnwise").shape == (160, 96)


# Values.
@each_format
def test_accuracy_of_one_cast(name):
    """SQNR of random normal data [256, 512]: at least 31 dB in E4M3, 25 dB in E5M2."""
    format = FORMATS[name]
    assert format.cast_sqnr_db == (31.0 if "e4m3" in name else 25.0)
    x = sample(256, 512, dtype=torch.float32)
    error = format.decode(encoded(format, x)) - x
    sqnr = 10 * math.log10(x.double().square().sum() / error.double().square().sum())
    assert format.cast_sqnr_db <= sqnr < 60


@each_format
def test_outer_scale_is_what_decode_can_leave_out(name):
    """Per-tensor and row scales are outer; block and MXFP8 scales are always applied."""
    plane = encoded(FORMATS[name], sample(20, 200))
    bare, full = (plane.format.decode(plane, outer=outer) for outer in (False, True))
    if plane.outer is None:
        assert torch.equal(bare, full)
    else:
        assert torch.equal(bare * plane.outer[:20].reshape(-1, 1), full)
        assert bare.abs().max() > 4 * full.abs().max() or plane.format.statistic == "scale"


@each_quantizer
def test_zeros_stay_zeros(quantizer):
    """bug case 5: zeros (64, 64) in both directions: codes 0, values 0, scales finite."""
    result = make(quantizer).quantize(torch.zeros(64, 64))
    for direction in DIRECTIONS:
        plane = result.plane(direction)
        assert not plane.codes.any()
        assert not plane.format.decode(plane).any()
        for part in (plane.scales, plane.outer):
            assert part is None or part.isfinite().all()


@pytest.mark.parametrize("axis", ["rows", "columns"])
@each_format
def test_zero_blocks_change_no_other_block(name, axis):
    """bug case 5: [256, 256] with zeros past 128: the other half keeps its very bytes."""
    format = FORMATS[name]
    if axis == "columns" and format.statistic == "row":
        pytest.skip("a row's scale follows from all of its columns")
    x = sample(256, 256)
    x[0, 0] = 100.0  # keeps the amax of the tensor
    kept, zeroed = (slice(0, 128), slice(128, 256))
    if axis == "columns":
        kept, zeroed = (slice(None), kept), (slice(None), zeroed)
    y = x.clone()
    y[zeroed] = 0
    with_zeros, without = encoded(format, y), encoded(format, x)
    assert torch.equal(with_zeros.codes[kept], without.codes[kept])
    assert not with_zeros.codes[zeroed].any()
    decoded = format.decode(with_zeros)
    assert torch.equal(decoded[kept], format.decode(without)[kept])
    assert not decoded[zeroed].any()


@pytest.mark.parametrize("amax", TINY)
@each_format
def test_tiny_amax_gives_no_infinity(name, amax):
    """bug case 6: FP32 amax 1e-38, 1e-40, 1.4e-45: scales finite, zeros stay, values within 1."""
    x = torch.zeros(32, 128)
    x[3, 7], x[3, 9] = amax, -amax
    plane = encoded(FORMATS[name], x)
    for part in (plane.scales, plane.outer):
        assert part is None or part.isfinite().all()
    values = plane.format.decode(plane)
    assert values.isfinite().all() and values.count_nonzero() <= 2
    assert torch.equal(values[3, 7], -values[3, 9])
    if plane.format.statistic != "scale":
        assert values[3, 7] == pytest.approx(amax, rel=0.07) or amax < 1e-38


@pytest.mark.parametrize("value", NONFINITE)
@each_format
def test_a_nonfinite_element_is_seen_in_its_place_only(name, value):
    """bug case 7: (2, 64) with one NaN / ±Inf: NaN in E4M3; in E5M2 an Inf stays; else as if 0."""
    x = sample(2, 64)
    x[1, 5] = 0
    plain, y = encoded(FORMATS[name], x), with_value(x, NONFINITE[value])
    plane = encoded(FORMATS[name], y)
    got, wanted = plane.format.decode(plane), plain.format.decode(plain)
    if "e5m2" in name and "inf" in value:
        assert got[1, 5] == NONFINITE[value]
    else:
        assert got[1, 5].isnan()
    got[1, 5] = 0
    assert torch.equal(got, wanted)
    assert part_bytes(plane)[1:] == part_bytes(plain)[1:]
    assert (plane.codes != plain.codes).nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("dtype", DTYPES)
@each_format
def test_special_values_have_finite_scales(name, dtype):
    """The shared list: every scale is finite, NaN and Inf appear where the input has them."""
    for case, x in special_values(dtype).items():
        plane = encoded(FORMATS[name], x)
        for part in (plane.scales, plane.outer):
            assert part is None or part.isfinite().all(), case
        decoded = plane.format.decode(plane)
        assert torch.equal(decoded.isfinite(), x.isfinite()) or case == "huge", case


# Devices.
@each_format
def test_no_host_synchronisation_off_the_cpu(name):
    """On the meta device any look at a value raises; encode and decode do not look."""
    plane = encoded(FORMATS[name], torch.empty(20, 200, dtype=torch.bfloat16, device="meta"))
    assert layout(plane) == stored_layout(name, 20, 200)
    assert plane.format.decode(plane).shape == (20, 200)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_format
def test_cuda_gives_the_bytes_of_the_cpu(name):
    """The plain-torch reference on a GPU, special values included."""
    cases = [x for dtype in DTYPES for x in special_values(dtype).values()]
    cases += [every_magnitude(200, 300, dtype) for dtype in DTYPES]
    for x in (view for case in cases for view in (case, case.t())):
        on_cpu, on_gpu = encoded(FORMATS[name], x), encoded(FORMATS[name], x.cuda())
        assert_same_plane(on_gpu.map(torch.Tensor.cpu), on_cpu)
        decoded = on_gpu.format.decode(on_gpu).cpu()
        wanted = on_cpu.format.decode(on_cpu)
        assert torch.equal(decoded.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))
