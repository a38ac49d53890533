"""FP8 per-tensor and row scaling: Transformer Engine's bytes, statistics, and the quantizers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.float8 import (
    Float8CurrentScalingQuantizer,
    Float8DelayedFormat,
    Float8Quantizer,
    Float8RowFormat,
    Float8RowScalingQuantizer,
    Float8TensorFormat,
)
from dist_finegrain.formats.plane import DIRECTIONS

from .golden import BUFFERS, GOLDEN, INPUTS, differing

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
each_element = pytest.mark.parametrize("element", ["e4m3", "e5m2"])


def delayed(scale: float = 3.7, **options) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), E4M3, **options)


# Transformer Engine's bytes.
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("source", INPUTS)
@each_element
def test_current_scaling_is_transformer_engines(element, source, power_of_two):
    """0 differing codes in both planes, the same decode scale."""
    quantizer = Float8CurrentScalingQuantizer(TORCH[element], force_pow_2_scales=power_of_two)
    case = f"{source}.current.{element}.pow2_{power_of_two:d}"
    assert_golden(quantizer.quantize(GOLDEN[f"{source}.x"]), case)


@pytest.mark.parametrize("source", INPUTS)
@each_element
def test_delayed_scaling_is_transformer_engines(element, source):
    """Scale 3.7: 0 differing codes in both planes, the same decode scale and recorded amax."""
    amax = torch.zeros(1)
    quantizer = Float8Quantizer(torch.tensor([3.7]), amax, TORCH[element])
    case = f"{source}.delayed.{element}.scale3p7"
    assert_golden(quantizer.quantize(GOLDEN[f"{source}.x"]), case)
    assert torch.equal(amax, GOLDEN[f"{case}.amax"])


def assert_golden(result, case: str) -> None:
    for direction in DIRECTIONS:
        plane = result.plane(direction)
        assert differing(plane.codes, GOLDEN[f"{case}.{BUFFERS[direction]}"]) == 0
        assert differing(plane.outer, GOLDEN[f"{case}.scale_inv"]) == 0


# Formats.
def test_statistics_and_measures():
    """tensor: amax [1]; row: amax [R]; scale: amax [1] to record. FP32, of finite elements."""
    x = torch.tensor([[1.0, -5.0, torch.nan], [2.0, torch.inf, 3.0]], dtype=torch.bfloat16)
    for format, statistic, amax in (
        (Float8TensorFormat("e4m3"), "tensor", [5.0]),
        (Float8RowFormat("e4m3"), "row", [5.0, 3.0]),
        (Float8DelayedFormat("e4m3"), "scale", [5.0]),
    ):
        assert format.statistic == statistic and format.family == "float8"
        assert format.block == (1, 1) and format.contraction_multiple == 16
        measured = format.measure(x)
        assert measured.dtype == torch.float32 and measured.tolist() == amax


@pytest.mark.parametrize("format", [Float8TensorFormat("e4m3"), Float8RowFormat("e4m3")])
def test_encode_uses_the_amax_that_it_is_given(format):
    """An amax reduced over ranks, 4 × the own one: a quarter of the scale. None measures."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    own = format.encode(x)
    assert torch.equal(own.codes, format.encode(x, format.measure(x)).codes)
    shared = format.encode(x, 4 * format.measure(x))
    assert torch.equal(shared.outer, 4 * own.outer)
    assert shared.codes.amax() < own.codes.amax()


def test_formats_are_values():
    """Equal by their options, hashable, told apart by kind; texts name the options."""
    assert Float8TensorFormat("e4m3", 0.0, True) == Float8TensorFormat("e4m3", power_of_two=True)
    kinds = [kind("e4m3") for kind in (Float8TensorFormat, Float8RowFormat, Float8DelayedFormat)]
    assert len(set(kinds)) == 3
    assert not isinstance(kinds[1], Float8TensorFormat)  # gemm tells the kinds apart by class
    assert [f.describe() for f in kinds] == [
        "float8(e4m3)",
        "float8_row(e4m3)",
        "float8_delayed(e4m3)",
    ]
    assert Float8RowFormat("e5m2", 1e-12, True).describe() == (
        "float8_row(e5m2, pow2, epsilon=1e-12)"
    )


def test_epsilon_is_the_least_amax():
    """Per row: amax 1e-9 counts as 1e-6, amax 1 as itself."""
    x = torch.tensor([[1e-9, 0.0], [1.0, -0.5]])
    plane = Float8RowFormat("e4m3", epsilon=1e-6).encode(x)
    plain = Float8RowFormat("e4m3").encode(torch.tensor([[1e-6, 0.0], [1.0, -0.5]]))
    assert torch.equal(plane.outer, plain.outer)


# Quantizers.
def test_constructors_take_transformer_engines_arguments():
    """device, scale and amax are accepted and unused; the reduction options are kept."""
    group = object()
    quantizer = Float8CurrentScalingQuantizer(
        E5M2,
        torch.device("cpu"),
        rowwise=False,
        columnwise=True,
        use_existing_amax=False,
        with_amax_reduction=True,
        amax_reduction_group=group,
        force_pow_2_scales=True,
        amax_epsilon=1e-9,
        scale=torch.ones(1),
        amax=torch.ones(1),
    )
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (False, True)
    assert quantizer.with_amax_reduction and quantizer.amax_reduction_group is group
    assert quantizer.plane_format("rowwise") == Float8TensorFormat("e5m2", 1e-9, True)
    row = Float8RowScalingQuantizer(torch.float8_e4m3fn, force_pow_2_scales=True, amax_epsilon=0.5)
    assert row.plane_format("columnwise") == Float8RowFormat("e4m3", 0.5, True)
    assert delayed(rowwise=False).plane_format("rowwise") == Float8DelayedFormat("e4m3")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Float8CurrentScalingQuantizer(torch.int8), TypeError, "fp8_dtype is torch.int8"),
        (lambda: Float8RowScalingQuantizer(DType.kFloat4E2M1), TypeError, "fp8_dtype is"),
        (
            lambda: Float8CurrentScalingQuantizer(E4M3, use_existing_amax=True),
            ValueError,
            "use_existing_amax is True; accepted: use_existing_amax=False",
        ),
        (
            lambda: Float8RowScalingQuantizer(E4M3, amax_epsilon=-1.0),
            ValueError,
            "amax_epsilon is -1.0; accepted: .* e.g. amax_epsilon=0.0",
        ),
        (
            lambda: Float8CurrentScalingQuantizer(E4M3, amax_epsilon=float("nan")),
            ValueError,
            "amax_epsilon is nan",
        ),
        (
            lambda: Float8Quantizer(torch.ones(2), torch.ones(1), E4M3),
            ValueError,
            r"scale is torch.float32 of shape \(2,\); accepted: .* e.g. scale=torch.ones\(1\)",
        ),
        (
            lambda: Float8Quantizer(torch.ones(1), torch.ones(1).double(), E4M3),
            ValueError,
            "amax is torch.float64",
        ),
    ],
)
def test_refusals_name_argument_value_and_way_out(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_recorded_amax_only_grows():
    """Each cast raises amax, in place, to its largest finite |x|; a smaller one leaves it."""
    quantizer = delayed()
    amax = quantizer.amax
    for values, expected in (([2.0, -3.0], 3.0), ([1.0, 0.5], 3.0), ([torch.inf, 7.0], 7.0)):
        quantizer.quantize(torch.tensor([values]))
        assert amax.tolist() == [expected]
    quantizer.record_amax(torch.tensor([9.0]))
    assert quantizer.amax is amax and amax.tolist() == [9.0]


@pytest.mark.parametrize("amax", [1e-38, 1e-40, 1.4e-45])
def test_tiny_tensor_is_recorded_as_it_is(amax):
    """bug case 6: delayed scaling records a subnormal amax; the current scale is finite."""
    quantizer = delayed(scale=torch.finfo(torch.float32).max)
    x = torch.tensor([[0.0, amax]])
    plane = quantizer.quantize(x).plane("rowwise")
    assert torch.equal(quantizer.amax, x[0, 1:])
    assert plane.outer.isfinite().all() and plane.outer > 0
    assert plane.format.decode(plane).isfinite().all()


def test_plane_owns_its_scale():
    """The next scale, written in place, is read by later casts and changes no earlier plane."""
    scale = torch.tensor([4.0])
    quantizer = Float8Quantizer(scale, torch.zeros(1), E4M3)
    x = torch.tensor([[1.0, -2.0]])
    result = quantizer.quantize(x)
    scale.fill_(64.0)
    assert torch.equal(result.dequantize(), x)
    assert result.plane("rowwise").outer.tolist() == [0.25]
    assert quantizer.quantize(x).plane("rowwise").outer.tolist() == [1 / 64]


def test_copies_keep_the_configuration():
    """copy shares the delayed state, deepcopy does not; pickle drops the reduction group."""
    quantizer = delayed()
    assert quantizer.copy().scale is quantizer.scale
    assert copy.deepcopy(quantizer).scale is not quantizer.scale
    assert pickle.loads(pickle.dumps(quantizer)).scale.tolist() == quantizer.scale.tolist()
    current = Float8CurrentScalingQuantizer(E5M2, amax_epsilon=1e-9, with_amax_reduction=True)
    for twin in (current.copy(), copy.deepcopy(current), pickle.loads(pickle.dumps(current))):
        assert twin.plane_format("rowwise") == current.plane_format("rowwise")
        assert twin.with_amax_reduction and twin.amax_reduction_group is None
