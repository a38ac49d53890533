"""What travels of a sharded operand: the fewest bytes, and the same planes whichever way."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import dist_finegrain as dfg
from dist_finegrain.delayed import DelayedSlot
from dist_finegrain.distributed import plane_gather
from dist_finegrain.distributed.plane_gather import HIGH_PRECISION, PLANE, ROW_PLANE, Wire
from dist_finegrain.modules import gathered
from dist_finegrain.modules.binding import Binding
from dist_finegrain.modules.linear_function import LinearCall
from dist_finegrain.roles import QuantizerRole
from tests.distributed.launch import run_ranks
from tests.distributed.square_recipes import SQUARE
from tests.recipes import ALL

ROWS, FEATURES = 128, 256


def quantizer_of(recipe, tensor_type="input"):
    answer = {**ALL, **SQUARE}[recipe](QuantizerRole("linear", tensor_type, "demo.fc1"))
    if isinstance(answer, dfg.DelayedScalingRequest):
        return delayed_quantizer("both")
    if recipe == "delayed_children":
        return answer.with_children(delayed_quantizer("row"), delayed_quantizer("column"))
    return answer


def delayed_quantizer(child):
    """As a module makes it, with a scale that is not 1."""
    slot = DelayedSlot((child,), "fc", dfg.DelayedScalingRequest(), "e5m2", torch.device("cpu"), 0)
    slot.scale.fill_(3.0 if child == "column" else 5.0)
    return slot.quantizer()


def wire_of(recipe, rowwise, columnwise, rows=ROWS, dtype=torch.bfloat16, tensor_type="input"):
    quantizer = quantizer_of(recipe, tensor_type)
    return plane_gather.choose_wire(quantizer, rowwise, columnwise, rows, FEATURES, dtype)


def ratio(wire: Wire, rows=ROWS) -> float:
    return wire.nbytes / (2 * rows * FEATURES)


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [("current", 0.52), ("row", 0.52), ("block", 0.52), ("mxfp8", 0.52), ("nvfp4", 0.29)],
)
@pytest.mark.parametrize("direction", [(True, False), (False, True)])
def test_one_plane_takes_its_share_of_the_bytes(recipe, limit, direction):
    wire = wire_of(recipe, *direction)
    assert PLANE in (wire.rowwise, wire.columnwise) and ratio(wire) <= limit


@pytest.mark.parametrize(
    ("recipe", "ways", "limit"),
    [
        ("identity", (HIGH_PRECISION, HIGH_PRECISION), 1.0),
        ("current", (PLANE, ROW_PLANE), 0.51),
        ("dequantized_columns", (PLANE, ROW_PLANE), 0.51),
        ("block_square", (PLANE, ROW_PLANE), 0.51),
        ("mxfp8_square", (PLANE, ROW_PLANE), 0.52),
        ("nvfp4_square", (PLANE, ROW_PLANE), 0.29),
        ("nvfp4", (PLANE, PLANE), 0.57),
        ("mxfp8_fwd_nvfp4_bwd", (PLANE, PLANE), 0.80),
        ("mxfp8", (HIGH_PRECISION, HIGH_PRECISION), 1.0),
        ("block_1d", (HIGH_PRECISION, HIGH_PRECISION), 1.0),
        ("guide", (HIGH_PRECISION, HIGH_PRECISION), 1.0),
    ],
)
def test_two_planes_go_the_cheapest_way(recipe, ways, limit):
    wire = wire_of(recipe, True, True)
    assert (wire.rowwise, wire.columnwise) == ways and ratio(wire) <= limit


def test_wider_inputs_and_other_rows_choose_anew():
    assert wire_of("mxfp8", True, True, dtype=torch.float32).planes == ("rowwise", "columnwise")
    assert wire_of("mxfp8", False, True, rows=1).columnwise == HIGH_PRECISION
    assert wire_of("nvfp4_stochastic", True, True).columnwise == PLANE


class Doubler(dfg.Quantizer):
    """A user's own format."""

    def encode(self, x):
        return (x * 2,)

    def decode(self, parts, shape, dtype):
        return (parts[0] / 2).to(dtype)


def test_formats_of_users_travel_in_high_precision():
    wire = plane_gather.choose_wire(Doubler(), True, True, 8, 8, torch.bfloat16)
    assert wire == Wire(HIGH_PRECISION, HIGH_PRECISION, 2 * 8 * 8)


def gathered_every_way(recipes):
    """Names of the planes that depend on how they travelled."""
    torch.set_num_threads(1)
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    differing, ways_tried = [], 0
    for recipe, rows in itertools.product(recipes, (128, 48, 7, 0)):
        quantizer = quantizer_of(recipe, "grad_output")
        binding = Binding(None, {"grad_output": quantizer})
        call = LinearCall(binding, torch.bfloat16, "row", True, group, True, True, False)
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(2 * rows, FEATURES, generator=generator).bfloat16()
        x[-1:, 3] = 50.0  # of one rank only
        x = x[rank * rows : (rank + 1) * rows].contiguous()
        first = None
        for ways in itertools.product((PLANE, HIGH_PRECISION), (PLANE, ROW_PLANE, HIGH_PRECISION)):
            if not is_possible(quantizer, ways, rows):
                continue
            ways_tried += 1
            operand = gathered.Gathered(call, "grad_output", x, Wire(*ways, 0), "")
            call.cast(*operand.jobs())
            operand.start()
            planes = operand.wait()
            first = first or planes
            for direction, plane in planes.items():
                if not same(plane, first[direction]):
                    differing.append(f"{recipe}, {rows} rows, {direction} by {ways}")
    return differing, ways_tried


def is_possible(quantizer, ways, rows) -> bool:
    row, column = map(quantizer.plane_format, ("rowwise", "columnwise"))
    waits = quantizer.columnwise_source == "rowwise_dequantized"
    is_cut = row.block[0] > 1 and rows % row.block[0]
    if is_cut and ways[0] == HIGH_PRECISION:
        return False
    if ways[1] == ROW_PLANE:
        follows = waits or plane_gather._is_transpose(row, column, quantizer.child is None)
        return follows and ways[0] == PLANE
    return not (waits and ways == (PLANE, HIGH_PRECISION))


def same(a, b) -> bool:
    if (a.shape, a.format) != (b.shape, b.format):
        return False
    pairs = zip(a.parts, b.parts, strict=True)
    return all(p is q or torch.equal(p, q) for p, q in pairs)


def test_no_way_changes_a_byte():
    recipes = sorted({**ALL, **SQUARE})
    for differing, ways_tried in run_ranks(gathered_every_way, 2, recipes):
        assert ways_tried > 4 * len(recipes) and not differing, "\n".join(differing)
