"""Quantized tensors: usage, values, operators, copies and saving for backward, for every format."""

from __future__ import annotations

import copy

import pytest
import torch

from dist_finegrain.formats.identity import IdentityQuantizer
from dist_finegrain.formats.plane import DIRECTIONS
from dist_finegrain.formats.tensors import IdentityTensor, QuantizedTensor

from .cases import EVERY, assert_same_plane, assert_same_tensor, delayed, hybrid, part_bytes, sample
from .user_quantizers import Int8Quantizer

every = pytest.mark.parametrize("name", EVERY)
# Identity's planes are one buffer.
droppable = pytest.mark.parametrize(
    "name", [n for n in EVERY if n not in ("identity", "identity_bf16")]
)


@every
@pytest.mark.parametrize("shape", [(48, 64), (3, 16, 64), (64,), (0, 64), (2, 0, 64), (16, 0)])
def test_planes_and_values_of_every_shape(name, shape):
    x = sample(*shape)
    quantized = EVERY[name]()(x)
    rows, columns = x.numel() // max(shape[-1], 1) if shape[-1] else 16, shape[-1]
    assert (quantized.shape, quantized.dtype, quantized.device) == (x.shape, x.dtype, x.device)
    assert tuple(quantized.rowwise_plane.shape) == (rows, columns)
    assert tuple(quantized.columnwise_plane.shape) == (columns, rows)
    values = quantized.dequantize()
    assert (values.shape, values.dtype) == (x.shape, x.dtype) and type(values) is torch.Tensor
    assert (values - x).float().norm() <= 0.15 * x.float().norm()


@every
def test_dequantize_prefers_rowwise_and_transposes_columnwise_back(name):
    x = sample(3, 16, 64)
    quantized = EVERY[name]()(x)
    row = quantized.rowwise_plane.decode().reshape(x.shape)
    assert torch.equal(quantized.dequantize(), row)
    if quantized.columnwise_plane.format.rht is None:
        column_only = QuantizedTensor(
            x.shape, x.dtype, None, quantized.columnwise_plane, quantizer=Int8Quantizer()
        )
        values = column_only.dequantize()
        assert torch.equal(values, quantized.columnwise_plane.decode().t().reshape(x.shape))
        assert values.is_contiguous()
    assert quantized.dequantize(dtype=torch.float32).dtype is torch.float32


@pytest.mark.parametrize("name", ["nvfp4_rht", "nvfp4_rht_sr"])
def test_columnwise_plane_with_rht_alone_is_not_decoded(name):
    quantized = EVERY[name]()(sample(48, 64))
    quantized.update_usage(rowwise=False)
    with pytest.raises(RuntimeError, match="RHT"):
        quantized.dequantize()
    with pytest.raises(RuntimeError, match="RHT"):
        quantized + 1
    quantized.copy_(sample(48, 64, seed=1))
    other = EVERY[name]()(sample(48, 64, seed=1))
    assert_same_plane(quantized.columnwise_plane, other.columnwise_plane)


@droppable
def test_usage_can_only_be_dropped(name):
    quantized = EVERY[name]()(sample(48, 64))
    row = quantized.rowwise_plane
    both = quantized.plane_nbytes
    quantized.update_usage(columnwise=False)
    assert quantized.get_usages() == {"rowwise": True, "columnwise": False}
    assert quantized.columnwise_plane is None and quantized.plane_nbytes < both
    with pytest.raises(RuntimeError, match="columnwise=True"):
        quantized.update_usage(rowwise=False, columnwise=True)
    assert quantized.rowwise_plane is row
    quantized.update_usage(rowwise=True)
    assert quantized.rowwise_plane is row


@every
def test_clear_is_idempotent(name):
    quantized = EVERY[name]()(sample(48, 64))
    for _ in range(2):
        quantized.clear()
        assert quantized.get_usages() == {"rowwise": False, "columnwise": False}
        assert quantized.plane_nbytes == 0 and quantized.shape == (48, 64)
    with pytest.raises(RuntimeError, match="neither plane"):
        quantized.dequantize()
    with pytest.raises(RuntimeError, match="rowwise=True"):
        quantized.update_usage(rowwise=True)


@every
def test_detach_shares_buffers_and_isolates_usage(name):
    quantized = EVERY[name]()(sample(48, 64))
    alias = quantized.detach()
    assert type(alias) is type(quantized)
    for direction in DIRECTIONS:
        ours, theirs = quantized.plane(direction).codes, alias.plane(direction).codes
        assert ours.data_ptr() == theirs.data_ptr()
    alias.clear()
    assert quantized.get_usages() == {"rowwise": True, "columnwise": True}


@every
def test_clone_is_independent(name):
    x, other = sample(48, 64), sample(48, 64, seed=1)
    quantized = EVERY[name]()(x)
    twin = quantized.clone()
    assert_same_tensor(twin, quantized)
    twin.copy_(other)
    assert_same_tensor(quantized, EVERY[name]()(x))
    assert_same_tensor(twin, EVERY[name]()(other))


@every
def test_views_that_keep_the_last_dimension_share_planes(name):
    quantized = EVERY[name]()(sample(6, 8, 64))
    flat = quantized.view(-1, 64)
    assert type(flat) is type(quantized) and flat.shape == (48, 64)
    assert flat.rowwise_plane.codes.data_ptr() == quantized.rowwise_plane.codes.data_ptr()
    assert torch.equal(flat.reshape(2, 24, 64).dequantize().view(6, 8, 64), quantized.dequantize())
    other = quantized.view(6, 512)
    assert type(other) is torch.Tensor
    assert torch.equal(other, quantized.dequantize().view(6, 512))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        quantized.view(5, 64)


@every
def test_other_operators_act_on_the_value(name):
    quantized, x = EVERY[name]()(sample(48, 64)), sample(8, 64, seed=1)
    value = quantized.dequantize()
    pairs = [
        (quantized * 2, value * 2),
        (x @ quantized.t(), x @ value.t()),
        (torch.nn.functional.linear(x, quantized), torch.nn.functional.linear(x, value)),
        (torch.cat([quantized, quantized]), torch.cat([value, value])),
        (quantized[3:9], value[3:9]),
        (quantized.split(16)[1], value.split(16)[1]),
        (quantized.float(), quantized.dequantize(dtype=torch.float32)),
        (quantized.to(torch.float64), value.double()),
        (torch.zeros_like(quantized), torch.zeros_like(value)),
    ]
    for got, want in pairs:
        assert type(got) is torch.Tensor and got.dtype == want.dtype
        assert torch.equal(got, want)
    target = torch.empty(48, 64)
    assert torch.equal(target.copy_(quantized), value.float())


@every
def test_in_place_operators_quantize_the_result(name):
    quantized = EVERY[name]()(sample(48, 64))
    value = quantized.dequantize().clone()
    assert quantized.add_(1) is quantized and type(quantized) is type(EVERY[name]()(value))
    assert_same_tensor(quantized, EVERY[name]()(value + 1))
    value = quantized.dequantize().clone()
    torch._foreach_mul_([quantized, torch.ones(2)], 2.0)
    assert_same_tensor(quantized, EVERY[name]()(value * 2))
    assert torch.sub(value, 1, out=quantized) is quantized
    assert_same_tensor(quantized, EVERY[name]()(value - 1))


@every
def test_copy_from_values_and_from_a_quantized_tensor(name):
    x, other = sample(48, 64), sample(48, 64, seed=1)
    quantized = EVERY[name]()(x)
    codes = quantized.rowwise_plane.codes.data_ptr()
    quantized.copy_(other)
    assert_same_tensor(quantized, EVERY[name]()(other))
    assert quantized.rowwise_plane.codes.data_ptr() == codes
    source = EVERY[name]()(x)
    quantized.copy_(source)
    assert_same_tensor(quantized, source)
    if name not in ("identity", "identity_bf16"):
        source.update_usage(columnwise=False)
        quantized.copy_(source)
        assert_same_tensor(quantized, EVERY[name]()(source.dequantize()))
    foreign = Int8Quantizer(limit=7)(other)
    quantized.copy_(foreign)
    assert_same_tensor(quantized, EVERY[name]()(foreign.dequantize()))
    quantized.copy_(torch.ones((), dtype=torch.int64))
    assert_same_tensor(quantized, EVERY[name]()(torch.ones_like(x)))


def test_copy_needs_the_same_columnwise_source():
    """Equal formats are not enough: the column would no longer follow from the row."""
    target, source = hybrid("user", "identity", "rowwise_dequantized"), hybrid("user", "identity")
    x = sample(48, 64)
    quantized = target(torch.zeros_like(x))
    quantized.copy_(source(x))
    assert torch.equal(quantized.columnwise_plane.decode().t(), quantized.dequantize())


def test_copy_refreshes_every_plane_held():
    """Also one that the tensor's quantizer no longer requests: it would keep the old values."""
    x, other = sample(48, 64), sample(48, 64, seed=1)
    quantizer = Int8Quantizer()
    both = quantizer(x)
    quantizer.set_usage(columnwise=False)
    quantized = QuantizedTensor(
        x.shape, x.dtype, both.rowwise_plane, both.columnwise_plane, quantizer=quantizer
    )
    quantized.copy_(other)
    assert_same_tensor(quantized, Int8Quantizer()(other))
    assert quantizer.columnwise_usage is False


@every
def test_quantize_with_noop_flag_leaves_the_bytes(name):
    quantized = EVERY[name]()(sample(48, 64))
    before = [part_bytes(quantized.plane(d)) for d in DIRECTIONS]
    other = sample(48, 64, seed=1)
    quantized.quantize_(other, noop_flag=torch.ones(1))
    assert [part_bytes(quantized.plane(d)) for d in DIRECTIONS] == before
    quantized.quantize_(other, noop_flag=torch.zeros(1))
    assert_same_tensor(quantized, EVERY[name]()(other))


@every
def test_new_zeros_keeps_formats_and_directions(name):
    quantized = EVERY[name]()(sample(48, 64))
    state = torch.get_rng_state()
    zeros = quantized.new_zeros((16, 32))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_tensor(zeros, EVERY[name]()(torch.zeros(16, 32, dtype=quantized.dtype)))
    assert not zeros.dequantize().any()
    assert type(quantized.new_zeros((16, 32), dtype=torch.int32)) is torch.Tensor
    quantized.update_usage(columnwise=False)
    assert quantized.new_zeros((2, 2)).get_usages() == quantized.get_usages()


def test_delayed_scaling_state():
    """The planes own their scale; casts record the amax, new_zeros does not."""
    quantizer, x = delayed(), sample(48, 64)
    quantized = quantizer(x)
    value = quantized.dequantize()
    assert quantizer.amax.item() == x.abs().max()
    quantizer.scale.fill_(100)
    assert torch.equal(quantized.dequantize(), value)
    quantizer.amax.fill_(-1)
    quantized.new_zeros((4, 16))
    assert quantizer.amax.item() == -1
    twin = copy.deepcopy(quantized)
    twin.copy_(x)
    assert quantizer.amax.item() == -1 and twin._quantizer.amax.item() == x.abs().max()
    quantized.copy_(x)
    assert quantizer.amax.item() == x.abs().max()


@every
def test_to_copy_moves_planes(name):
    quantized = EVERY[name]()(sample(48, 64))
    moved = quantized.to("cpu", copy=True)
    assert_same_tensor(moved, quantized)
    assert moved.rowwise_plane.codes.data_ptr() != quantized.rowwise_plane.codes.data_ptr()
    on_meta = quantized.to("meta")
    assert on_meta.device.type == on_meta.rowwise_plane.codes.device.type == "meta"
    assert all(t.device.type == "meta" for t in _state_tensors(on_meta._quantizer))
    assert all(t.device.type == "cpu" for t in _state_tensors(quantized._quantizer))
    on_meta.clear()
    assert on_meta.detach().device.type == "meta"


def _state_tensors(quantizer):
    owners = {quantizer.child(d) for d in DIRECTIONS}
    return [v for owner in owners for v in vars(owner).values() if isinstance(v, torch.Tensor)]


@every
def test_save_for_backward_round_trip(name):
    quantized = EVERY[name]()(sample(48, 64))
    buffers, shell = quantized.prepare_for_saving()
    assert all(part is None for d in DIRECTIONS for part in _parts(shell, d))
    assert quantized.dequantize().shape == (48, 64)
    extra = torch.ones(1)
    rest = shell.restore_from_saved([*buffers, extra])
    assert len(rest) == 1 and rest[0] is extra
    assert_same_tensor(shell, quantized)
    addresses = [b.data_ptr() for b in buffers if b is not None]
    assert len(addresses) == len(set(addresses))
    quantized.update_usage(rowwise=False)
    buffers, shell = quantized.prepare_for_saving()
    assert shell.restore_from_saved(buffers) == []
    assert_same_tensor(shell, quantized)


def _parts(tensor, direction):
    plane = tensor.plane(direction)
    return () if plane is None else plane.parts


@every
def test_parameter(name):
    """A quantized leaf takes a gradient of its dtype; a step re-quantizes every plane."""
    parameter = torch.nn.Parameter(EVERY[name]()(sample(48, 64)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf
    x = sample(8, 64, seed=1)
    torch.nn.functional.linear(x, parameter).sum().backward()
    assert type(parameter.grad) is torch.Tensor and parameter.grad.dtype == parameter.dtype
    assert torch.equal(parameter.grad, torch.ones(8, 48, dtype=x.dtype).t() @ x)
    value = parameter.dequantize().detach()
    stepped = torch.nn.Parameter(value.clone())
    stepped.grad = parameter.grad.clone()
    torch.optim.SGD([parameter], lr=0.5).step()
    torch.optim.SGD([stepped], lr=0.5).step()
    assert_same_tensor(parameter.detach(), EVERY[name]()(stepped.detach()))


@every
def test_deepcopy_of_a_parameter(name):
    x = sample(48, 64)
    parameter = torch.nn.Parameter(EVERY[name]()(x))
    parameter.tensor_model_parallel = True
    parameter.grad = torch.ones_like(x)
    module = torch.nn.Module()
    module.weight = module.tied = parameter
    twin = copy.deepcopy(module).weight
    assert isinstance(twin, torch.nn.Parameter) and twin.requires_grad
    assert twin.tensor_model_parallel and torch.equal(twin.grad, parameter.grad)
    assert_same_tensor(twin.detach(), parameter.detach())
    with torch.no_grad():
        twin.copy_(sample(48, 64, seed=1))
    assert_same_tensor(parameter.detach(), EVERY[name]()(x))
    tied = copy.deepcopy(module)
    assert tied.weight is tied.tied
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(EVERY[name]()(sample(4, 16).requires_grad_()))


@every
def test_module_to_and_data(name):
    module = torch.nn.Linear(64, 48, bias=False)
    module.weight = torch.nn.Parameter(EVERY[name]()(sample(48, 64, dtype=torch.float32)))
    value = module.weight.dequantize().detach()
    kind = type(module.weight)
    module.to(torch.float16)
    assert type(module.weight) is kind and module.weight.requires_grad
    if name != "identity_bf16":  # its result has the dtype of its buffer
        assert module.weight.dtype is torch.float16
    assert_same_tensor(module.weight.data, EVERY[name]()(value.half()))
    module.weight.update_usage(columnwise=False)
    module.to(torch.bfloat16)
    assert module.weight.get_usages() == {
        "rowwise": True,
        "columnwise": name in ("identity", "identity_bf16"),
    }
    other = EVERY[name]()(sample(24, 64))
    module.weight.data = other
    assert module.weight.shape == (24, 64) and module.weight.dtype is other.dtype
    assert_same_tensor(module.weight.data, other)


@every
def test_gradients_pass_straight_through(name):
    x = sample(16, 64, dtype=torch.float32).requires_grad_()
    weight = sample(16, 64, seed=1, dtype=torch.float32)
    (EVERY[name]()(x).dequantize(dtype=torch.float32) * weight).sum().backward()
    expected = weight.bfloat16().float() if name == "identity_bf16" else weight
    assert torch.equal(x.grad, expected)
    with torch.no_grad():
        assert not EVERY[name]()(x).requires_grad


def test_result_dtype_must_be_high_precision():
    assert Int8Quantizer().quantize(sample(4, 16), dtype=torch.float32).dtype is torch.float32
    with pytest.raises(TypeError, match="the result has dtype torch.int8"):
        Int8Quantizer().quantize(sample(4, 16), dtype=torch.int8)


def test_repr_reads_no_buffer():
    shell = Int8Quantizer()(sample(4, 16)).prepare_for_saving()[1]
    text = repr(shell)
    assert text.startswith("QuantizedTensor((4, 16), torch.bfloat16")
    assert "rowwise=user(Int8Quantizer)" in text
    shell.clear()
    assert "columnwise=None" in repr(shell)


def test_plane_of_another_shape_is_refused():
    plane = IdentityQuantizer()(sample(4, 16)).rowwise_plane
    with pytest.raises(ValueError, match=r"rowwise plane has shape \(4, 16\).*\(16, 4\)"):
        IdentityTensor((16, 4), torch.bfloat16, plane, None, quantizer=IdentityQuantizer())
