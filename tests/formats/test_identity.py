"""Identity: values bit for bit, one buffer for both directions, no padding."""

from __future__ import annotations

import math

import pytest
import torch

from dist_finegrain.formats.identity import IdentityFormat, IdentityQuantizer
from dist_finegrain.formats.plane import DIRECTIONS
from dist_finegrain.formats.tensors import IdentityTensor

from .cases import assert_same_tensor, part_bytes, sample

HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", HIGH_PRECISION)
NAN, INF = float("nan"), float("inf")


def special_values(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    row = [NAN, -NAN, INF, -INF, 0.0, -0.0, info.max, info.tiny, info.tiny / 4]
    return torch.tensor([row, row[::-1], [1.0] * 9], dtype=dtype)


@every_dtype
def test_values_are_held_bit_for_bit(dtype):
    x = special_values(dtype)
    quantized = IdentityQuantizer()(x)
    assert type(quantized) is IdentityTensor and quantized.dtype is dtype
    bits = x.view(torch.uint8)
    assert torch.equal(quantized.dequantize().view(torch.uint8), bits)
    assert part_bytes(quantized.rowwise_plane) == [bits.numpy().tobytes()]
    columns = quantized.columnwise_plane.codes
    assert tuple(columns.shape) == quantized.columnwise_plane.shape == (9, 3)
    assert torch.equal(columns.t().contiguous().view(torch.uint8), bits)


@every_dtype
@pytest.mark.parametrize("held", HIGH_PRECISION)
def test_dtype_is_a_nearest_even_cast(dtype, held):
    x = torch.cat([special_values(dtype), sample(4, 9, dtype=torch.float32).to(dtype) * 300])
    quantized = IdentityQuantizer(dtype=held)(x)
    assert quantized.dtype is held
    value = quantized.dequantize()
    assert value.dtype is held
    torch.testing.assert_close(value, x.to(held), rtol=0, atol=0, equal_nan=True)


def test_infinity_survives_a_wider_dequantize():
    x = torch.tensor([[INF, -INF, NAN, 1.0]], dtype=torch.bfloat16)
    wide = IdentityQuantizer()(x).dequantize(dtype=torch.float32)
    assert wide[0].tolist()[:2] == [INF, -INF] and wide[0, 2].isnan()


def test_dtype_that_is_not_high_precision_is_refused():
    for dtype in (torch.int8, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=str(dtype)):
            IdentityQuantizer(dtype=dtype)
    with pytest.raises(TypeError, match="tensor has dtype torch.float64"):
        IdentityQuantizer()(torch.zeros(2, 2, dtype=torch.float64))


def test_format_encodes_without_a_copy_and_without_padding():
    x = sample(3, 7)
    for matrix in (x, x.t(), x[:, :5], x.expand(3, 7)):
        plane = IdentityFormat().encode(matrix)
        assert plane.codes.data_ptr() == matrix.data_ptr() and plane.shape == tuple(matrix.shape)
        assert len(plane.parts) == 1 and plane.nbytes == matrix.numel() * 2
        assert plane.format.decode(plane) is plane.codes
    format_ = IdentityFormat(torch.float32)
    assert format_.encode(x).codes.dtype is torch.float32
    assert format_.empty((3, 7), torch.bfloat16, torch.device("cpu")).codes.dtype is torch.float32
    assert (format_.family, format_.statistic, format_.rht) == ("identity", "none", None)
    assert format_.contraction_multiple == 1 and format_.block == (1, 1)
    assert format_.cast_sqnr_db == math.inf
    assert format_ != IdentityFormat() and format_ == IdentityFormat(torch.float32)
    assert [IdentityFormat().describe(), format_.describe()] == ["identity", "identity(float32)"]


@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)])
def test_one_buffer_serves_both_directions(usage):
    x = sample(48, 64)
    quantizer = IdentityQuantizer(rowwise=usage[0], columnwise=usage[1])
    quantized = quantizer(x)
    for tensor in (quantized, quantizer.make_empty(x.shape), quantized.clone()):
        assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
        assert tensor.plane_nbytes == x.numel() * 2
        row, column = (tensor.plane(d).codes for d in DIRECTIONS)
        assert row.data_ptr() == column.data_ptr()
    assert len(quantized.prepare_for_saving()[0]) == 1
    quantizer.update_quantized(x + 1, quantized)
    assert torch.equal(quantized.columnwise_plane.codes, (x + 1).t())
    none = IdentityQuantizer(rowwise=False, columnwise=False)(x)
    assert none.get_usages() == {"rowwise": False, "columnwise": False}


def test_usage_updates_do_nothing():
    quantized = IdentityQuantizer()(sample(48, 64))
    quantized.update_usage(rowwise=False, columnwise=False)
    quantized.update_usage(rowwise=True, columnwise=True)
    assert torch.equal(quantized.dequantize(), sample(48, 64))


def test_result_is_independent_of_its_input_and_detach_aliases():
    x = sample(48, 64)
    quantized = IdentityQuantizer()(x)
    alias = quantized.detach()
    x.zero_()
    assert torch.equal(quantized.dequantize(), sample(48, 64))
    alias.copy_(torch.ones(48, 64))
    assert torch.equal(quantized.dequantize(), torch.ones(48, 64, dtype=x.dtype))
    again = IdentityQuantizer()(quantized)
    quantized.zero_()
    assert again.dequantize().all()


def test_slices_are_views_of_the_held_values():
    quantized = IdentityQuantizer()(sample(48, 64))
    quantized[3:5].fill_(2)
    quantized.t()[0] = 3
    assert quantized.dequantize()[3:5, 1:].eq(2).all() and quantized.dequantize()[:, 0].eq(3).all()
    assert quantized.dequantize().data_ptr() == quantized.rowwise_plane.codes.data_ptr()


@pytest.mark.parametrize("matrix", [sample(48, 64), sample(64, 48).t(), sample(48, 80)[:, :64]])
def test_noop_and_update_with_any_strides(matrix):
    quantizer = IdentityQuantizer()
    plane = quantizer.plane_format("rowwise").encode(matrix.clone())
    target = IdentityTensor(matrix.shape, matrix.dtype, plane, None, quantizer=quantizer)
    other = sample(48, 64, seed=1)
    quantizer.update_quantized(other, target, noop_flag=torch.ones(1))
    assert torch.equal(target.dequantize(), matrix)
    quantizer.update_quantized(other, target, noop_flag=torch.zeros(1))
    assert_same_tensor(target, quantizer(other))


def test_update_casts_to_the_held_dtype():
    quantized = IdentityQuantizer()(sample(48, 64))
    wide = sample(48, 64, dtype=torch.float32, seed=1) / 3
    quantized.copy_(wide)
    assert quantized.rowwise_plane.codes.dtype is torch.bfloat16
    assert torch.equal(quantized.dequantize(), wide.bfloat16())
