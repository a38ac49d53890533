"""A user's own Quantizer subclass: what it is called with, alone and as a hybrid's child."""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.formats.hybrid import HybridQuantizer
from dist_finegrain.formats.identity import IdentityQuantizer
from dist_finegrain.formats.plane import DIRECTIONS
from dist_finegrain.formats.quantizer import Quantizer
from dist_finegrain.formats.tensors import QuantizedTensor
from dist_finegrain.formats.user import UserFormat

from .cases import assert_same_tensor, part_bytes, sample
from .user_quantizers import Int8Quantizer, PassThrough


class Recording(Int8Quantizer):
    """Notes the matrices it is given."""

    def __init__(self):
        super().__init__()
        self.encoded, self.decoded = [], []

    def encode(self, x):
        self.encoded.append(x.clone())
        return super().encode(x)

    def decode(self, parts, shape, dtype):
        self.decoded.append((tuple(shape), dtype))
        return super().decode(parts, shape, dtype)


def test_encode_and_decode_see_the_contraction_last():
    x = sample(3, 16, 64)
    quantizer = Recording()
    quantized = quantizer(x)
    row, column = quantizer.encoded
    assert torch.equal(row, x.view(48, 64)) and torch.equal(column, x.view(48, 64).t())
    quantized.dequantize()
    quantized.update_usage(rowwise=False)
    value = quantized.dequantize(dtype=torch.float16)
    assert [shape for shape, _ in quantizer.decoded] == [(48, 64), (64, 48)]
    assert value.shape == x.shape and value.dtype is torch.float16
    assert (value.float() - x.float()).abs().max() < 0.05


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_as_a_child_of_a_hybrid(direction):
    x = sample(48, 64)
    own = Recording()
    children = {
        f"{d}_quantizer": own if d == direction else IdentityQuantizer() for d in DIRECTIONS
    }
    quantized = HybridQuantizer(**children)(x)
    (seen,) = own.encoded
    assert torch.equal(seen, x if direction == "rowwise" else x.t())
    assert quantized.plane(direction).format.family == "user"
    storage = getattr(quantized, f"{direction}_storage")
    assert type(storage) is QuantizedTensor
    assert (storage.dequantize() - x).abs().max() < 0.05


def test_derived_column_reads_the_row_that_the_user_decodes():
    x = sample(48, 64)
    column = Recording()
    HybridQuantizer(
        rowwise_quantizer=Int8Quantizer(limit=7),
        columnwise_quantizer=column,
        columnwise_source="rowwise_dequantized",
    )(x)
    assert torch.equal(column.encoded[0], Int8Quantizer(limit=7)(x).dequantize().t())


def test_usage_follows_the_constructor_and_set_usage():
    quantizer = Int8Quantizer(columnwise=False)
    assert quantizer(sample(4, 16)).get_usages() == {"rowwise": True, "columnwise": False}
    quantizer.set_usage(rowwise=False, columnwise=True)
    assert quantizer(sample(4, 16)).get_usages() == {"rowwise": False, "columnwise": True}


def test_subclass_without_init_and_with_state():
    """Counters and other state of the quantizer do not make its tensors unwritable."""
    quantizer = PassThrough()
    x, other = sample(4, 16), sample(4, 16, seed=1)
    quantized = quantizer(x)
    assert quantizer.calls == 2 and quantized._quantizer.calls == 2
    quantizer.update_quantized(other, quantized)
    assert torch.equal(quantized.dequantize(), other) and quantizer.calls == 4
    assert x.eq(sample(4, 16)).all(), "the result must not share memory with the input"


def test_decode_uses_the_attributes_of_the_quantizer_that_wrote():
    quantizer, x = Int8Quantizer(limit=127), sample(4, 16)
    quantized = quantizer(x)
    Int8Quantizer(limit=7).update_quantized(x, quantized)
    assert torch.equal(quantized.dequantize(), Int8Quantizer(limit=7)(x).dequantize())
    assert quantized.rowwise_plane.format == UserFormat(Int8Quantizer(limit=7))


def test_formats_are_equal_by_class_and_attributes():
    one = UserFormat(Int8Quantizer())
    assert one == UserFormat(Int8Quantizer(rowwise=False)) == UserFormat(Int8Quantizer(127))
    assert hash(one) == hash(UserFormat(Int8Quantizer(7)))
    assert one != UserFormat(Int8Quantizer(7)) and one != UserFormat(PassThrough()) and one != 1
    a, b = Int8Quantizer(), Int8Quantizer()
    a.table, b.table = torch.ones(2), torch.ones(2)
    assert UserFormat(a) == UserFormat(b)
    b.table = torch.zeros(2)
    assert UserFormat(a) != UserFormat(b)


@pytest.mark.parametrize(
    ("returned", "named"), [(torch.ones(1), "Tensor"), ([], "list"), ((1.0,), "float")]
)
def test_encode_that_returns_something_else_is_refused(returned, named):
    class Wrong(Int8Quantizer):
        def encode(self, x):
            return returned

    with pytest.raises(TypeError, match=f"Wrong.encode returned .*{named}"):
        Wrong()(sample(4, 16))


def test_missing_methods_are_named():
    class Nothing(Quantizer):
        pass

    class OnlyEncode(Quantizer):
        def encode(self, x):
            return (x, None)

    with pytest.raises(TypeError, match="Nothing implements neither encode"):
        Nothing()(sample(4, 16))
    with pytest.raises(TypeError, match="OnlyEncode implements neither decode"):
        OnlyEncode()(sample(4, 16)).dequantize()


def test_buffers_of_another_shape_are_refused_before_any_write():
    class Growing(Int8Quantizer):
        extra = 0

        def encode(self, x):
            codes, scale = super().encode(x)
            return codes, torch.cat([scale, torch.ones(self.extra)])

    quantizer = Growing()
    quantized = quantizer(sample(4, 16))
    before = part_bytes(quantized.rowwise_plane)
    quantizer.extra = 1
    with pytest.raises(ValueError, match=r"buffer 1 of the user\(Growing\) plane"):
        quantizer.update_quantized(sample(4, 16, seed=1), quantized)
    assert part_bytes(quantized.rowwise_plane) == before


def test_copy_is_independent_but_shares_state_tensors():
    quantizer = Int8Quantizer()
    quantizer.table = torch.ones(2)
    twin = quantizer.copy()
    twin.limit = 7
    twin.set_usage(rowwise=False)
    assert quantizer.limit == 127 and quantizer.rowwise_usage
    assert twin.table is quantizer.table
    assert_same_tensor(quantizer(sample(4, 16)), Int8Quantizer.quantize(quantizer, sample(4, 16)))
