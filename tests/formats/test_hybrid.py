"""HybridQuantizer: children, sources, usage, updates, and requests as children."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

from dist_finegrain.formats.hybrid import HybridQuantizer
from dist_finegrain.formats.identity import IdentityQuantizer
from dist_finegrain.formats.plane import DIRECTIONS, Plane, saturating_to
from dist_finegrain.formats.requests import DelayedScalingRequest
from dist_finegrain.formats.tensors import (
    HybridQuantizedTensor,
    IdentityTensor,
    QuantizedTensor,
)

from .cases import (
    HYBRIDS,
    PLAIN,
    SOURCES,
    assert_same_plane,
    assert_same_tensor,
    direct_plane,
    hybrid,
    part_bytes,
    sample,
)
from .user_quantizers import Int8Quantizer, PassThrough

hybrids = pytest.mark.parametrize(("row", "column", "source"), HYBRIDS)


def expected_planes(quantizer: HybridQuantizer, x: torch.Tensor) -> dict[str, Plane]:
    """The planes of x [M, K] from the children alone."""
    row = direct_plane(quantizer, "rowwise", x)
    column_input = x
    if quantizer.columnwise_source == "rowwise_dequantized":
        column_input = saturating_to(row.format.decode(row), x.dtype, keep_inf=False)
    # Planes of Xᵀ's rows: hand the child X, and take its columnwise plane.
    return {"rowwise": row, "columnwise": direct_plane(quantizer, "columnwise", column_input)}


# Construction.
@pytest.mark.parametrize("bad", [None, "mxfp8", IdentityQuantizer, torch.ones(1)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_child_that_is_no_quantizer_is_refused(direction, bad):
    children = {"rowwise_quantizer": IdentityQuantizer(), "columnwise_quantizer": Int8Quantizer()}
    children[f"{direction}_quantizer"] = bad
    with pytest.raises(TypeError, match=f"{direction}_quantizer is .*accepted: a Quantizer"):
        HybridQuantizer(**children)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nested_hybrid_is_refused(direction):
    children = {"rowwise_quantizer": IdentityQuantizer(), "columnwise_quantizer": Int8Quantizer()}
    children[f"{direction}_quantizer"] = hybrid("user", "identity")
    with pytest.raises(TypeError, match=f"{direction}_quantizer.*do not nest"):
        HybridQuantizer(**children)


def test_one_instance_for_both_directions_is_refused():
    child = Int8Quantizer()
    with pytest.raises(ValueError, match="one instance"):
        HybridQuantizer(rowwise_quantizer=child, columnwise_quantizer=child)
    assert child.rowwise_usage and child.columnwise_usage


def test_unknown_source_is_refused():
    with pytest.raises(ValueError, match="'original', 'rowwise_dequantized'"):
        hybrid("user", "identity", "columnwise_dequantized")


def test_arguments_are_keywords_and_the_default_source_is_original():
    with pytest.raises(TypeError):
        HybridQuantizer(IdentityQuantizer(), IdentityQuantizer())
    quantizer = HybridQuantizer(
        rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=IdentityQuantizer()
    )
    assert quantizer.columnwise_source == "original"


def test_children_are_owned_and_pinned_to_their_direction():
    row, column = Int8Quantizer(), Int8Quantizer()
    quantizer = HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)
    assert quantizer.rowwise_quantizer is row and quantizer.columnwise_quantizer is column
    assert (row.rowwise_usage, row.columnwise_usage) == (True, False)
    assert (column.rowwise_usage, column.columnwise_usage) == (False, True)
    assert quantizer.child("rowwise") is row and quantizer.child("columnwise") is column
    for direction in DIRECTIONS:
        own = quantizer.child(direction).plane_format(direction)
        assert quantizer.plane_format(direction) == own


# Results.
@pytest.mark.parametrize(("row", "column", "source"), [*product(PLAIN, PLAIN, SOURCES)])
def test_each_storage_is_what_its_child_makes_alone(row, column, source):
    for shape, dtype in product([(48, 64), (3, 16, 64), (0, 64)], [torch.bfloat16, torch.float32]):
        x = sample(*shape, dtype=dtype)
        quantizer = hybrid(row, column, source)
        quantized = quantizer(x)
        assert type(quantized) is HybridQuantizedTensor and quantized.columnwise_source == source
        for direction, want in expected_planes(quantizer, x.view(-1, 64)).items():
            assert_same_plane(quantized.plane(direction), want)
            storage = getattr(quantized, f"{direction}_storage")
            assert type(storage) is quantizer.child(direction).tensor_class
            assert storage.shape == x.shape
            assert_same_plane(storage.plane(direction), want)


@pytest.mark.parametrize("name", PLAIN)
def test_one_format_twice_is_the_plain_quantizer(name):
    x = sample(48, 64)
    plain, twice = PLAIN[name](), hybrid(name, name)
    for direction in DIRECTIONS:
        assert_same_plane(twice(x).plane(direction), plain(x).plane(direction))
    if name == "delayed":
        for direction in DIRECTIONS:
            assert torch.equal(twice.child(direction).amax, plain.amax)
        assert plain.amax.item() == x.abs().max()


@pytest.mark.parametrize("name", PLAIN)
def test_identity_column_is_the_original_or_the_row_values(name):
    """What backward_override "high_precision" and "dequantized" ask for."""
    x = sample(48, 64)
    row = PLAIN[name]()(x).dequantize(dtype=x.dtype)
    for source, want in zip(SOURCES, (x, row), strict=True):
        column = hybrid(name, "identity", source)(x).columnwise_storage
        assert torch.equal(column.dequantize(), want)


def test_storages_of_the_children_have_one_plane_and_share_buffers():
    quantized = hybrid("user", "identity")(sample(48, 64))
    row, column = quantized.rowwise_storage, quantized.columnwise_storage
    assert type(row) is QuantizedTensor and type(column) is IdentityTensor
    assert row.columnwise_plane is None and row.rowwise_plane is quantized.rowwise_plane
    assert column.columnwise_plane.codes.data_ptr() == quantized.columnwise_plane.codes.data_ptr()
    assert torch.equal(row.dequantize(), quantized.dequantize())
    assert torch.equal(column.dequantize(), sample(48, 64))
    row.copy_(torch.zeros(48, 64))
    assert torch.equal(quantized.dequantize(), torch.zeros(48, 64, dtype=torch.bfloat16))


def test_sources_differ_in_the_column_only():
    x = sample(48, 64)
    original, derived = (hybrid("user", "identity", source)(x) for source in SOURCES)
    assert_same_plane(original.rowwise_plane, derived.rowwise_plane)
    assert not torch.equal(original.columnwise_plane.codes, derived.columnwise_plane.codes)


class Doubling(PassThrough):
    """Decodes to twice its input: past the largest finite value of the input's dtype."""

    def decode(self, parts, shape, dtype):
        return parts[0].to(dtype) * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_derived_column_is_saturated_and_keeps_nan(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest, 1.0, float("nan"), float("inf"), -0.0]], dtype=dtype)
    quantizer = HybridQuantizer(
        rowwise_quantizer=Doubling(),
        columnwise_quantizer=IdentityQuantizer(),
        columnwise_source="rowwise_dequantized",
    )
    column = quantizer(x).columnwise_plane.codes.t()
    want = torch.tensor([[largest, -largest, 2.0, float("nan"), largest, -0.0]], dtype=dtype)
    assert column.dtype == dtype
    torch.testing.assert_close(column, want, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(column[0, 5])


def test_derived_column_is_rounded_to_the_input_dtype():
    class Third(PassThrough):
        def decode(self, parts, shape, dtype):
            return parts[0].to(dtype) / 3

    quantizer = HybridQuantizer(
        rowwise_quantizer=Third(),
        columnwise_quantizer=IdentityQuantizer(dtype=torch.float32),
        columnwise_source="rowwise_dequantized",
    )
    x = sample(48, 64)
    column = quantizer(x).columnwise_plane.codes
    assert column.dtype is torch.float32
    assert torch.equal(column, (x.float() / 3).bfloat16().float().t())


# Usage.
@hybrids
def test_parent_usage_gates_the_planes(row, column, source):
    x = sample(48, 64)
    quantizer = hybrid(row, column, source)
    both = quantizer(x)
    for rowwise, columnwise in ((True, False), (False, True), (False, False)):
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        quantized = quantizer(x)
        assert quantized.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert_same_plane(quantized.rowwise_plane, both.rowwise_plane if rowwise else None)
        assert_same_plane(quantized.columnwise_plane, both.columnwise_plane if columnwise else None)
        assert (quantized.rowwise_storage is None) is not rowwise
        assert (quantized.columnwise_storage is None) is not columnwise
        empty = quantizer.make_empty((48, 64))
        assert type(empty) is HybridQuantizedTensor and empty.get_usages() == quantized.get_usages()
        assert quantized.device == empty.device == x.device


def test_unrequested_work_is_not_done():
    row, column = PassThrough(), PassThrough()
    quantizer = HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)
    quantizer.set_usage(rowwise=False)
    quantizer(sample(4, 16))
    assert (row.calls, column.calls) == (0, 1)
    derived = HybridQuantizer(
        rowwise_quantizer=row.copy(),
        columnwise_quantizer=column.copy(),
        columnwise_source="rowwise_dequantized",
    )
    derived.set_usage(rowwise=False)
    derived(sample(4, 16))
    assert (derived.rowwise_quantizer.calls, derived.columnwise_quantizer.calls) == (1, 2)


# Updates.
@hybrids
def test_out_and_make_empty(row, column, source):
    x, other = sample(48, 64), sample(48, 64, seed=1)
    quantizer = hybrid(row, column, source)
    out = quantizer(x)
    addresses = [out.plane(d).codes.data_ptr() for d in DIRECTIONS]
    assert quantizer.quantize(other, out=out) is out
    assert_same_tensor(out, quantizer(other))
    assert [out.plane(d).codes.data_ptr() for d in DIRECTIONS] == addresses
    empty = quantizer.make_empty((48, 64))
    assert_same_tensor(quantizer.update_quantized(other, empty), out)


@hybrids
@pytest.mark.parametrize("requested", DIRECTIONS)
def test_update_touches_only_directions_present_and_requested(row, column, source, requested):
    x, other = sample(48, 64), sample(48, 64, seed=1)
    quantizer = hybrid(row, column, source)
    old, new = quantizer(x), quantizer(other)
    quantizer.set_usage(rowwise=requested == "rowwise", columnwise=requested == "columnwise")
    target = quantizer.with_children(*(quantizer.child(d).copy() for d in DIRECTIONS))
    target.set_usage(rowwise=True, columnwise=True)
    target = target(x)
    quantizer.update_quantized(other, target)
    for direction in DIRECTIONS:
        want = new if direction == requested else old
        assert_same_plane(target.plane(direction), want.plane(direction))
    quantizer.set_usage(rowwise=True, columnwise=True)
    alone = quantizer(x)
    alone.update_usage(**{d: d == requested for d in DIRECTIONS})
    quantizer.update_quantized(other, alone)
    want = {d: new.plane(d) if d == requested else None for d in DIRECTIONS}
    for direction in DIRECTIONS:
        assert_same_plane(alone.plane(direction), want[direction])


@hybrids
def test_noop_flag_leaves_every_byte(row, column, source):
    x, other = sample(48, 64), sample(48, 64, seed=1)
    quantizer = hybrid(row, column, source)
    target = quantizer(x)
    before = [part_bytes(target.plane(d)) for d in DIRECTIONS]
    quantizer.update_quantized(other, target, noop_flag=torch.ones(1))
    assert [part_bytes(target.plane(d)) for d in DIRECTIONS] == before
    quantizer.update_quantized(other, target, noop_flag=torch.zeros(1))
    assert_same_tensor(target, quantizer(other))


def test_update_refuses_what_does_not_fit_and_writes_nothing():
    x = sample(48, 64)
    quantizer = hybrid("user", "identity")
    target = quantizer(x)
    before = [part_bytes(target.plane(d)) for d in DIRECTIONS]
    refusals = [
        (ValueError, "src has shape", sample(64, 48), quantizer),
        (ValueError, "rowwise plane of dst is user", x + 1, hybrid("identity", "identity")),
        (ValueError, "columnwise plane of dst is identity", x + 1, hybrid("user", "user")),
        (TypeError, "src has dtype torch.float64", x.double(), quantizer),
    ]
    for error, message, source, writer in refusals:
        with pytest.raises(error, match=message):
            writer.update_quantized(source, target)
        assert [part_bytes(target.plane(d)) for d in DIRECTIONS] == before
    with pytest.raises(TypeError, match="dst is a Tensor"):
        quantizer.update_quantized(x, torch.empty(48, 64))


# Copies.
def test_copy_copies_the_children_and_keeps_usage():
    quantizer = hybrid("user", "identity", "rowwise_dequantized")
    quantizer.set_usage(columnwise=False)
    twin = quantizer.copy()
    assert type(twin) is HybridQuantizer and twin.columnwise_source == "rowwise_dequantized"
    assert (twin.rowwise_usage, twin.columnwise_usage) == (True, False)
    for direction in DIRECTIONS:
        assert twin.child(direction) is not quantizer.child(direction)
        assert type(twin.child(direction)) is type(quantizer.child(direction))
    twin.set_usage(rowwise=False)
    twin.rowwise_quantizer.limit = 7
    assert quantizer.rowwise_usage and quantizer.rowwise_quantizer.limit == 127
    assert copy.copy(quantizer).rowwise_quantizer is not quantizer.rowwise_quantizer


def test_result_keeps_a_copy_of_the_quantizer():
    quantizer = hybrid("user", "identity")
    quantized = quantizer(sample(48, 64))
    quantizer.set_usage(rowwise=False, columnwise=False)
    quantized.copy_(torch.zeros(48, 64))
    assert not quantized.dequantize().any()


# Requests.
def test_requests_are_children_until_they_are_bound():
    request = DelayedScalingRequest()
    quantizer = HybridQuantizer(rowwise_quantizer=request, columnwise_quantizer=request)
    assert quantizer.requests == {"rowwise": request, "columnwise": request}
    mixed = HybridQuantizer(
        rowwise_quantizer=IdentityQuantizer(),
        columnwise_quantizer=request,
        columnwise_source="rowwise_dequantized",
    )
    mixed.set_usage(columnwise=False)
    assert mixed.copy().requests == mixed.requests == {"columnwise": request}
    x = sample(48, 64)
    target = hybrid("identity", "user")(x)
    for use in (
        lambda: mixed(x),
        lambda: mixed.update_quantized(x, target),
        lambda: mixed.make_empty((4, 16)),
        lambda: mixed.plane_format("rowwise"),
        lambda: mixed.child("rowwise"),
    ):
        with pytest.raises(RuntimeError, match="columnwise_quantizer is a DelayedScalingRequest"):
            use()
    bound = mixed.with_children(IdentityQuantizer(), Int8Quantizer())
    assert bound.requests == {} and mixed.requests and bound.columnwise_source == SOURCES[1]
    assert (bound.rowwise_usage, bound.columnwise_usage) == (True, False)
    assert_same_plane(bound(x).rowwise_plane, target.rowwise_plane)
    with pytest.raises(ValueError, match="one instance"):
        mixed.with_children(*[IdentityQuantizer()] * 2)


# The tensor's own constructor.
def test_tensor_takes_storages_by_keyword():
    quantizer = hybrid("user", "identity")
    x = sample(3, 16, 64)
    whole = quantizer(x)
    built = HybridQuantizedTensor(
        shape=x.shape,
        dtype=x.dtype,
        rowwise_storage=whole.rowwise_storage,
        columnwise_storage=whole.columnwise_storage,
        quantizer=quantizer,
        requires_grad=True,
    )
    assert built.requires_grad and built.is_leaf
    assert_same_tensor(built.detach(), whole)
    half = HybridQuantizedTensor(
        shape=x.shape,
        dtype=x.dtype,
        rowwise_storage=None,
        columnwise_storage=whole.columnwise_storage,
        quantizer=quantizer,
    )
    assert torch.equal(half.dequantize(), x) and half.rowwise_storage is None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tensor_refuses_wrong_storages(direction):
    quantizer = hybrid("user", "identity")
    x = sample(48, 64)
    whole = quantizer(x)
    options = {
        "shape": x.shape,
        "dtype": x.dtype,
        "rowwise_storage": None,
        "columnwise_storage": None,
        "quantizer": quantizer,
    }
    for bad in (x, whole, whole.rowwise_plane):
        with pytest.raises(TypeError, match=f"{direction}_storage is a {type(bad).__name__}"):
            HybridQuantizedTensor(**options | {f"{direction}_storage": bad})
    missing = Int8Quantizer(rowwise=direction != "rowwise", columnwise=direction == "rowwise")(x)
    with pytest.raises(ValueError, match=f"holds no {direction} plane"):
        HybridQuantizedTensor(**options | {f"{direction}_storage": missing})
