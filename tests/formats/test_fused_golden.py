"""The kernels against what Transformer Engine 2.20.2 wrote (tests/data): 0 differing bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from dist_finegrain.formats import fused
from dist_finegrain.formats.float8 import Float8DelayedFormat, Float8TensorFormat
from dist_finegrain.formats.float8_block import Float8BlockFormat
from dist_finegrain.formats.nvfp4 import NVFP4Format
from dist_finegrain.formats.plane import Format

from .fused_cases import SCALE, dirty_buffers, each_device, require  # noqa: F401
from .golden import BUFFERS, GOLDEN, INPUTS, differing

each_input = pytest.mark.parametrize("source", INPUTS)
each_element = pytest.mark.parametrize("element", ["e4m3", "e5m2"])
each_power_of_two = pytest.mark.parametrize("power_of_two", [False, True])


def planes_of(source: str, device: str, row: Format | None, column: Format | None):
    """(direction → plane on the CPU, its amaxes) of a golden input: measured and cast on it."""
    require(device, *(f for f in (row, column) if f is not None))
    x = GOLDEN[f"{source}.x"].to(device)
    statistics = list(fused.measure(x, row, column))
    for index, format in enumerate((row, column)):
        if format is not None and format.statistic == "scale":
            statistics[index] = torch.tensor([SCALE], device=device)
        elif format is None or format.statistic == "none":
            statistics[index] = None
    amaxes = [torch.zeros(1, device=device) for _ in range(2)]
    recorded = zip(("row_amax", "column_amax"), amaxes, (row, column), strict=True)
    result = fused.cast(
        x,
        row,
        column,
        row_statistic=statistics[0],
        column_statistic=statistics[1],
        **{name: amax for name, amax, format in recorded if format is not None},
    )
    planes = {"rowwise": result.row, "columnwise": result.column}
    on_cpu = {d: p.map(torch.Tensor.cpu) for d, p in planes.items() if p is not None}
    return on_cpu, [amax.cpu() for amax in amaxes]


@each_device
@each_power_of_two
@each_input
@each_element
def test_current_scaling(element, source, power_of_two, device):
    format = Float8TensorFormat(element, power_of_two=power_of_two)
    planes, _ = planes_of(source, device, format, format)
    case = f"{source}.current.{element}.pow2_{power_of_two:d}"
    for direction, plane in planes.items():
        assert differing(plane.codes, GOLDEN[f"{case}.{BUFFERS[direction]}"]) == 0
        assert differing(plane.outer, GOLDEN[f"{case}.scale_inv"]) == 0


@each_device
@each_input
@each_element
def test_delayed_scaling(element, source, device):
    """The recorded amax too."""
    format = Float8DelayedFormat(element)
    planes, amaxes = planes_of(source, device, format, format)
    case = f"{source}.delayed.{element}.scale3p7"
    for (direction, plane), amax in zip(planes.items(), amaxes, strict=True):
        assert differing(plane.codes, GOLDEN[f"{case}.{BUFFERS[direction]}"]) == 0
        assert differing(plane.outer, GOLDEN[f"{case}.scale_inv"]) == 0
        assert torch.equal(amax, GOLDEN[f"{case}.amax"])


@each_device
@each_power_of_two
@pytest.mark.parametrize("dim", [1, 2])
@each_input
@each_element
def test_block_scaling(element, source, dim, power_of_two, device):
    format = Float8BlockFormat(element, two_dimensional=dim == 2, power_of_two=power_of_two)
    planes, _ = planes_of(source, device, format, format)
    for direction, plane in planes.items():
        case = f"{source}.block{dim}d.{element}.pow2_{power_of_two:d}.{direction}"
        assert differing(plane.codes, GOLDEN[f"{case}_data"]) == 0
        # The entries that round 128×128 scales up to 4 columns hold what was in memory there.
        used = slice(None) if dim == 1 else slice(0, -(-plane.shape[1] // 128))
        wanted = GOLDEN[f"{case}_scale_inv"]
        assert plane.scales.shape == wanted.shape
        assert differing(plane.scales[:, used], wanted[:, used]) == 0


NVFP4 = {
    "1d": (NVFP4Format(), NVFP4Format()),
    "2d": (NVFP4Format(two_dimensional=True), NVFP4Format(two_dimensional=True)),
    "1d_rht": (NVFP4Format(), NVFP4Format(rht="signed")),
    "row_scaled": (NVFP4Format(row_scaled=True), None),  # it wrote no row-scaled columns
}


@each_device
@pytest.mark.parametrize("kind", NVFP4)
@each_input
def test_nvfp4(source, kind, device):
    """Codes, scale bytes and the amaxes that fused.measure gives."""
    row, column = NVFP4[kind]
    planes, _ = planes_of(source, device, row, column)
    measured = fused.measure(GOLDEN[f"{source}.x"].to(device), row, column)
    prefix = f"{source}.nvfp4ref.{kind}"
    for (direction, plane), amax in zip(planes.items(), measured, strict=False):
        suffix, short = {"rowwise": ("", "row"), "columnwise": ("_t", "col")}[direction]
        assert differing(plane.codes, GOLDEN[f"{prefix}.data{suffix}"]) == 0
        assert differing(plane.scales, GOLDEN[f"{prefix}.scale{suffix}"]) == 0
        assert torch.equal(amax.cpu(), GOLDEN[f"{prefix}.global_amax_{short}"])


def test_every_cast_of_the_file_is_compared():
    """No kind of cast in the data is left out here."""
    kinds = {key.split(".")[1] for key in GOLDEN} - {"x"}
    assert kinds == {"current", "delayed", "block1d", "block2d", "nvfp4ref"}
    options = {key.split(".")[2] for key in GOLDEN if ".nvfp4ref." in key}
    assert options == set(NVFP4)
    assert len(INPUTS) * len(NVFP4) == len(list(itertools.product(INPUTS, options)))
