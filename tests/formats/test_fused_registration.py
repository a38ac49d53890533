"""The compiled operators as torch sees them: schemas, fake kernels, compile, argument checks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dist_finegrain as dfg
from dist_finegrain.delayed import DelayedSlot, _update, update_slots
from dist_finegrain.formats import fused, fused_delayed, fused_grouped, fused_options
from dist_finegrain.formats.float8 import (
    Float8DelayedFormat,
    Float8RowFormat,
    Float8TensorFormat,
)
from dist_finegrain.formats.float8_block import Float8BlockFormat
from dist_finegrain.formats.identity import IdentityFormat
from dist_finegrain.formats.mxfp8 import MXFP8Format
from dist_finegrain.formats.nvfp4 import NVFP4Format
from dist_finegrain.formats.plane import Rounding
from dist_finegrain.formats.requests import DelayedScalingRequest

pytestmark = pytest.mark.skipif(
    not dfg.build_info().cpu, reason=f"no CPU kernels: {dfg.build_info().cpu_reason}"
)

ops = torch.ops.dist_finegrain
FORMATS = {
    "current": Float8TensorFormat("e4m3"),
    "delayed": Float8DelayedFormat("e5m2"),
    "row": Float8RowFormat("e4m3"),
    "block": Float8BlockFormat("e4m3"),
    "block_2d": Float8BlockFormat("e4m3", two_dimensional=True),
    "mxfp8": MXFP8Format("e4m3"),
    "nvfp4": NVFP4Format(),
    "nvfp4_rht_sr": NVFP4Format(rht="signed", stochastic=True),
    "nvfp4_row": NVFP4Format(row_scaled=True),
}
MXFP8, CURRENT, ROW = FORMATS["mxfp8"], FORMATS["current"], FORMATS["row"]


def matrix(rows=40, columns=48, dtype=torch.bfloat16):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def cast_arguments(row, column, x, dequantized=False, ends=None):
    """Positional arguments of the operator for the planes of ``x``."""
    seen = []

    def recorded(*call):
        seen.append(call)

    with pytest.MonkeyPatch.context() as patch:
        for module in (fused, fused_grouped):
            patch.setattr(module, "_ops", _Recorder(recorded))
        source = "rowwise_dequantized" if dequantized else "original"
        options = {
            "source": source,
            "row_statistic": statistic(row, x, ends, is_column=False),
            "column_statistic": statistic(column, x, ends, is_column=True),
            "rounding": {"rowwise": Rounding(1, 2, 3), "columnwise": Rounding(1, 5, 3, 16)},
        }
        if ends is None:
            fused.cast(x, row, column, **options)
        else:
            fused_grouped.cast_grouped(x, ends, row, column, **options)
    (arguments,) = seen
    return arguments


class _Recorder:
    def __init__(self, record):
        self.cast = self.measure = self
        self.default = record


def statistic(format, x, ends, is_column):
    if format is None or format.statistic == "none":
        return None
    experts = () if ends is None else (len(ends),)
    if format.statistic == "row":
        return torch.ones((*experts, x.shape[1]) if is_column else (x.shape[0],))
    return torch.full(experts or (1,), 3.0)


PAIRS = [
    ("current", "row", False),
    ("delayed", "block", False),
    ("block_2d", None, False),
    (None, "nvfp4_rht_sr", False),
    ("nvfp4_row", "mxfp8", False),
    ("mxfp8", "nvfp4", True),
]


@pytest.mark.parametrize("row, column, dequantized", PAIRS)
@pytest.mark.parametrize("is_grouped", [False, True])
def test_cast_passes_opcheck(row, column, dequantized, is_grouped):
    if is_grouped and "block_2d" in (row, column):
        pytest.skip("refused")
    ends = torch.tensor([16, 16, 40], dtype=torch.int32) if is_grouped else None
    arguments = cast_arguments(
        FORMATS.get(row), FORMATS.get(column), matrix(), dequantized, ends
    )  # fmt: skip
    # Padding is part of the result, so nothing may depend on what was in the buffers.
    for buffer in (*arguments[1], *arguments[2]):
        buffer.zero_()
    if is_grouped:
        arguments[-1].zero_()
    torch.library.opcheck(ops.cast.default, arguments)


def test_cast_with_every_optional_output_passes_opcheck():
    format = FORMATS["delayed"]
    arguments = list(cast_arguments(format, format, matrix()))
    arguments[10:12] = [torch.zeros(1), torch.zeros(1)]
    arguments[14] = torch.zeros(1, 48)
    for buffer in (*arguments[1], *arguments[2]):
        buffer.zero_()
    torch.library.opcheck(ops.cast.default, tuple(arguments))


def test_measure_decode_and_update_pass_opcheck():
    x = matrix()
    row, column = fused.options_of(CURRENT), fused.options_of(ROW)
    amaxes = (torch.zeros(1), torch.zeros(48))
    torch.library.opcheck(
        ops.measure.default,
        (x, *amaxes, row.packed, row.epsilon, column.packed, False, None, None),
    )
    torch.library.opcheck(
        ops.measure.default,
        (x, None, amaxes[1], row.packed, 0.0, column.packed, True, torch.ones(1), None),
    )
    for name in ("current", "block", "nvfp4_row"):
        plane = FORMATS[name].encode(x, statistic(FORMATS[name], x, None, False))
        options = fused.options_of(plane.format).packed
        out = torch.zeros(x.shape, dtype=torch.float16)
        torch.library.opcheck(
            ops.decode.default, (plane.codes, plane.scales, plane.outer, options, out)
        )
    scales, pendings = [torch.ones(1), torch.ones(1)], [torch.ones(1), -torch.ones(1)]
    histories = [torch.zeros(3), torch.zeros(1)]
    state = zip(scales, histories, pendings, strict=True)
    packed = b"".join(fused_delayed.DelayedState(*s, True, 448.0, 1).packed for s in state)
    table = torch.frombuffer(bytearray(packed), dtype=torch.int64).view(2, 5)
    torch.library.opcheck(ops.update_delayed.default, (scales, histories, pendings, table))


def test_fake_tensors_have_the_shapes_of_real_ones():
    real = fused.cast(matrix(33, 20), MXFP8, FORMATS["block"], bias_grad=True)
    stochastic = FORMATS["nvfp4_rht_sr"]
    with FakeTensorMode():
        x = torch.empty(33, 20, dtype=torch.bfloat16)
        fused.cast(x, stochastic, None, row_statistic=torch.empty(1))
        fake = fused.cast(x, MXFP8, FORMATS["block"], bias_grad=True)
        amaxes = fused.measure(x, CURRENT, ROW)
        assert [a.shape for a in amaxes] == [(1,), (20,)]
        values = fused.decode(fake.column, torch.float32)
    assert values.shape == (20, 33) and fake.bias_grad.shape == real.bias_grad.shape
    for plane, wanted in ((fake.row, real.row), (fake.column, real.column)):
        shapes = [
            [p if p is None else (p.shape, p.dtype) for p in q.parts] for q in (plane, wanted)
        ]
        assert shapes[0] == shapes[1]
    assert (
        type(fused_options._seed_step(matrix(), Rounding())) is torch.Tensor
    )  # no fake one was kept


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_compiles_as_one_graph_with_equal_bytes(name):
    """Bug case 37: no graph break."""
    format = FORMATS[name]
    rounding = {"columnwise": Rounding(seed=3, stream=9, step=2)}

    def both(x, row_statistic, column_statistic):
        made = fused.cast(
            x, MXFP8, format, column_statistic=column_statistic, rounding=rounding, bias_grad=True
        )
        parts = [p for p in (*made.row.parts, *made.column.parts) if p is not None]
        return [*parts, made.bias_grad, fused.decode(made.row, torch.float32)]

    x = matrix(64, 32)
    statistics = (None, statistic(format, x, None, True))
    wanted = both(x, *statistics)
    torch._dynamo.reset()
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(x, *statistics)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


LAYOUTS = {
    "rows_of_a_wider_matrix": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "transpose": lambda x: x.t().contiguous().t(),
    "columns_apart": lambda x: torch.stack((x, x), 2)[:, :, 0],
    "every_second_row": lambda x: torch.stack((x, x), 1)[:, 0],
    "expanded": lambda x: x[:1].expand(40, -1),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_every_layout_gives_the_planes_of_its_contiguous_copy(layout, source):
    x = LAYOUTS[layout](matrix())
    assert not x.is_contiguous()
    results = []
    for values in (x, x.contiguous()):
        row_amax, _ = fused.measure(values, CURRENT, None)
        options = {"source": source, "row_statistic": row_amax}
        _, column_amax = fused.measure(values, CURRENT, ROW, **options)
        if source == "original":
            _, column_amax = fused.measure(values, CURRENT, ROW)
        options["column_statistic"] = column_amax
        made = fused.cast(values, CURRENT, ROW, **options)
        results.append((made.row.codes, made.row.outer, made.column.codes, made.column.outer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_layouts_that_the_kernels_cannot_read_are_copied(monkeypatch):
    seen = []
    recorder = _Recorder(lambda x, *rest: seen.append(x))
    monkeypatch.setattr(fused, "_ops", recorder)
    for layout in sorted(LAYOUTS):
        x = LAYOUTS[layout](matrix())
        fused.cast(x, MXFP8, MXFP8)
        is_copied = seen[-1].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert is_copied == (layout in ("columns_apart", "expanded")), layout
        fused.cast(x, MXFP8, MXFP8, source="rowwise_dequantized")
        assert fused_options.is_readable(seen[-1])


def test_a_module_casts_with_one_call_per_tensor(monkeypatch):
    calls = []
    original = fused.cast

    def counted(x, *formats, **options):
        calls.append(type(x))
        return original(x, *formats, **options)

    monkeypatch.setattr(fused, "cast", counted)
    module = dfg.Linear(32, 48)
    recipe = dfg.CustomRecipe(dfg.factories.current_scaling_factory, execution="emulate")
    with dfg.autocast(recipe=recipe):
        y = module(torch.randn(16, 32))
    assert sorted(t.__name__ for t in calls) == ["Parameter", "Tensor"]
    y.sum().backward()
    assert len(calls) == 3  # grad_output, both planes


def test_identity_children_are_the_input():
    x = matrix()
    made = fused.cast(x, IdentityFormat(), MXFP8)
    assert made.row.codes is x and torch.equal(made.column.codes, MXFP8.encode(x.t()).codes)
    made = fused.cast(x, MXFP8, IdentityFormat(), source="rowwise_dequantized", bias_grad=True)
    assert torch.equal(made.column.codes, MXFP8.encode(x).decode().t())
    assert torch.equal(made.bias_grad, fused.cast(x, MXFP8, None, bias_grad=True).bias_grad)


def test_delayed_slots_of_one_call_are_those_of_the_reference():
    slots = []
    for i in range(6):
        algorithm = "max" if i % 2 else "most_recent"
        request = DelayedScalingRequest(
            amax_history_len=i + 1, margin=i, amax_compute_algo=algorithm
        )
        element = "e5m2" if i % 3 else "e4m3"
        slot = DelayedSlot((i,), "fc", request, element, torch.device("cpu"), 0)
        slot.history.copy_(torch.arange(i + 1) * 1.5)
        slots.append(slot)
    for amaxes in ([3.0, -1.0, 0.0, 1e-42, 7.5, 3e38], [1.0] * 6, [-1.0] * 6):
        copies = [copy.deepcopy(s) for s in slots]
        for slot, twin, amax in zip(slots, copies, amaxes, strict=True):
            slot.pending.fill_(amax)
            twin.pending.fill_(amax)
            _update(twin)
        update_slots(slots)
        for slot, twin in zip(slots, copies, strict=True):
            for got, wanted in ((slot.scale, twin.scale), (slot.history, twin.history)):
                assert torch.equal(got, wanted)
            assert slot.pending == -1 == twin.pending


def call_cast(**changes):
    """The operator with one argument of a good call replaced."""
    names = (
        "x row column row_options row_epsilon column_options column_epsilon dequantized "
        "row_statistic column_statistic row_amax column_amax places seed_step bias_partials ends "
        "column_ends"
    ).split()
    arguments = dict(zip(names, cast_arguments(CURRENT, FORMATS["block"], matrix()), strict=True))
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    ops.cast.default(*arguments.values())


def to(value):
    return lambda old: value


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"x": lambda x: x.double()}, TypeError, "x is Double; accepted: torch.float32"),
        ({"x": lambda x: x[0]}, ValueError, r"x has shape \[48\]; accepted: a matrix"),
        ({"x": lambda x: x.t()}, ValueError, r"x has strides .* e.g. x.contiguous\(\)"),
        ({"x": lambda x: x[:0]}, ValueError, "accepted: at least one element"),
        ({"row": lambda b: b[:1]}, ValueError, "row plane has 1 buffers; accepted: 2"),
        (
            {"row": lambda b: [b[0][:32], b[1]]}, ValueError,
            r"row codes is Byte \[32, 48\] on cpu; accepted: Byte \[48, 48\], contiguous, on cpu",
        ),
        (
            {"row": lambda b: [torch.zeros(48 * 48 + 1, dtype=torch.uint8)[1:].view(48, 48), b[1]]},
            ValueError, "row codes starts at an address that is no multiple of 16",
        ),
        (
            {"row": lambda b: [b[0].t().contiguous().t(), b[1]]}, ValueError,
            r"row codes .*\(not contiguous\)",
        ),
        (
            {"row": lambda b: [b[0], b[1].double()]}, ValueError,
            r"row outer is Double \[1\] .* accepted: Float \[1\]",
        ),
        (
            {"column": lambda b: [b[0], b[1].t()]}, ValueError,
            r"column scales .* accepted: Float \[1, 48\]",
        ),
        ({"row_statistic": to(None)}, ValueError, "row statistic is None; this format needs it"),
        (
            {"row_statistic": to(torch.ones(2))}, ValueError,
            r"row statistic is Float \[2\] .* accepted: Float \[1\]",
        ),
        (
            {"column_statistic": to(torch.ones(1))}, ValueError,
            "column statistic is given; accepted: None",
        ),
        ({"row_amax": to(torch.ones(2))}, ValueError, "row amax is .* accepted: Float"),
        ({"row_options": to(255)}, ValueError, "row options is 255"),
        ({"row_options": to(1 | 1 << 13)}, ValueError, "row options is 8193"),
        ({"row_epsilon": to(-1.0)}, ValueError, "epsilon -1"),
        ({"bias_partials": to(torch.ones(48))}, ValueError, "bias_partials is .* Float .1, 48."),
        ({"ends": to(torch.tensor([40]))}, ValueError, "ends is Long .* accepted: Int"),
        (
            {"column_ends": to(torch.tensor([40]))}, ValueError,
            "column_ends is given; accepted: None, without ends",
        ),
        (
            {"column": to([]), "column_options": to(0), "dequantized": to(True)}, ValueError,
            "dequantized is True without both planes",
        ),
    ],
)  # fmt: skip
def test_operator_checks_its_arguments_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        call_cast(**changes)


def test_stochastic_rounding_needs_its_seed_and_places():
    arguments = list(cast_arguments(FORMATS["nvfp4_rht_sr"], None, matrix()))
    for index, value, message in (
        (13, None, "seed_step is None; this format needs it"),
        (13, torch.zeros(2), "seed_step is Float .* accepted: Long"),
        (12, [1, 2], "places has 2 entries; accepted: stream"),
    ):
        changed = [*arguments[:index], value, *arguments[index + 1 :]]
        with pytest.raises(ValueError, match=message):
            ops.cast.default(*changed)


def test_devices_must_agree():
    with pytest.raises(ValueError, match="row outer is .* on meta; accepted: .* on cpu"):
        x, row, *rest = cast_arguments(CURRENT, None, matrix())
        ops.cast.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), x, [row[0], row[1].to("meta")], *rest
        )


def test_python_checks_name_the_way_out():
    x, ends = matrix(), torch.tensor([16, 40], dtype=torch.int32)
    user = dfg.Quantizer().plane_format("rowwise")
    rht = FORMATS["nvfp4_rht_sr"]
    for error, message, call in (
        (ValueError, "source is 'dequantized'",
         lambda: fused.cast(x, MXFP8, MXFP8, source="dequantized")),
        (ValueError, "row is nvfp4.* accepted: the format, without RHT",
         lambda: fused.cast(x, rht, MXFP8, source="rowwise_dequantized")),
        (ValueError, "row is None",
         lambda: fused.cast(x, None, MXFP8, source="rowwise_dequantized")),
        (ValueError, r"format is user\(Quantizer\); accepted", lambda: fused.cast(x, user, None)),
        (TypeError, "x has dtype torch.float64", lambda: fused.cast(x.double(), MXFP8, None)),
        (ValueError, r"x has shape \(48,\)", lambda: fused.measure(x[0], CURRENT, None)),
        (ValueError, "row_statistic is None",
         lambda: fused.measure(x, ROW, CURRENT, source="rowwise_dequantized")),
        (ValueError, "accepted: 1×128 blocks, e.g. Float8BlockQuantizer",
         lambda: fused_grouped.cast_grouped(x, ends, FORMATS["block_2d"], None)),
        (ValueError, r"ends is torch.int64 \(2,\)",
         lambda: fused_grouped.cast_grouped(x, ends.long(), MXFP8, None)),
        (ValueError, r"ends\[1\] is 20 after 30",
         lambda: fused_grouped.cast_grouped(x, ends.new_tensor([30, 20, 48]), MXFP8, None)),
        (ValueError, r"ends\[0\] is -5",
         lambda: fused_grouped.cast_grouped(x, ends.new_tensor([-5, 48]), MXFP8, MXFP8)),
        (ValueError, r"ends\[1\] is 4000",
         lambda: fused_grouped.measure_grouped(x, ends.new_tensor([16, 4000]), CURRENT, None)),
        (ValueError, "accepted: one seed and one step", lambda: fused.cast(
            x, FORMATS["nvfp4_rht_sr"], FORMATS["nvfp4_rht_sr"],
            row_statistic=torch.ones(1), column_statistic=torch.ones(1),
            rounding={"rowwise": Rounding(1), "columnwise": Rounding(2)})),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    assert "its own class" in fused.why_not(x.device, user)
    assert fused.why_not(x.device, MXFP8, IdentityFormat(), None) == ""
