"""The cuBLASLt call without a GPU: what it is given, what it refuses, and what is done around it.

The compiled operator checks its arguments on the CPU too, then says that it needs CUDA. Behind
those checks a product of what the arguments decode to, by the documented layouts, stands in for it.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import extension
from dist_finegrain.formats.plane import round_up
from dist_finegrain.formats.swizzle import unswizzle_128x4
from dist_finegrain.ops import gemm as dispatch
from dist_finegrain.ops import lt
from dist_finegrain.reference.elements import decode_e4m3, decode_e5m2, decode_e8m0
from dist_finegrain.reference.nvfp4 import decode as decode_nvfp4
from tests.ops.test_native import E4M3, PAIRS, stored_swizzled

needs_extension = pytest.mark.skipif(
    not dfg.build_info().cpu, reason="needs the compiled CPU kernels"
)
QUANTIZERS = {
    **PAIRS,
    "mxfp8": (dfg.MXFP8Quantizer(E4M3), dfg.MXFP8Quantizer(E4M3)),
    "nvfp4": (dfg.NVFP4Quantizer(), dfg.NVFP4Quantizer()),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def planes(pair, m, n, k, *, swizzled=False):
    torch.manual_seed(m + n + k)
    made = [
        q(torch.randn(r, k)).plane("rowwise") for q, r in zip(QUANTIZERS[pair], (m, n), strict=True)
    ]
    return [stored_swizzled(plane) for plane in made] if swizzled else made


def function_of(pair):
    name = pair.split(" ")[0]
    if "row" in pair:
        name = "rowwise"
    return getattr(lt, {"tensor": "tensorwise"}.get(name, name))


def dense(matrix, options, scales):
    """FP32 [R, C] of one operand: element | scale mode << 4, scales as cuBLASLt documents them."""
    element, mode = options & 15, options >> 4
    if element < 3:
        return matrix.float()
    rows, width = matrix.shape
    if mode == 6:
        blocks = unswizzle_128x4(scales, rows, width // 8)
        return decode_nvfp4(matrix, blocks, torch.ones(1))
    values = {3: decode_e4m3, 4: decode_e5m2}[element](matrix)
    if mode <= 2:
        return values * scales.reshape(-1, 1)
    if mode == 5:
        return values * decode_e8m0(unswizzle_128x4(scales, rows, width // 32)).repeat_interleave(
            32, 1
        )
    blocks = -(-width // 128)
    if mode == 3:  # [blocks, R]: the rows are the fastest dimension
        scales = scales.reshape(blocks, rows).t()
    else:
        scales = scales.reshape(-1, round_up(blocks, 4)).repeat_interleave(128, 0)[:rows, :blocks]
    return values * scales.repeat_interleave(128, 1)[:, :width]


class StandIn:
    """What the operator does, for CPU tensors; keeps the arguments of the last call."""

    def default(self, *arguments):
        if dfg.build_info().cpu:
            with pytest.raises(RuntimeError, match="a is on cpu; accepted: CUDA tensors"):
                torch.ops.dist_finegrain.gemm.default(*arguments)
        self.multiply(*arguments)

    def multiply(self, *arguments):
        a, b, a_options, b_options, a_scales, b_scales, alpha, bias, out, accumulate, _ = arguments
        self.arguments = arguments
        left, right = dense(a, a_options, a_scales), dense(b, b_options, b_scales)
        result = left[: out.shape[0]] @ right[: out.shape[1]].t()
        result = result if alpha is None else result * alpha
        result = result if bias is None else result + bias.float()
        out.copy_(result + out.float() if accumulate else result)


@contextlib.contextmanager
def stand_in_on_cpu():
    """The operator ``gemm`` in plain torch, for CPU tensors, which it otherwise refuses.

    Gives a list of what each call was told about fast accumulation.
    """
    library, stand_in, fast = torch.library.Library("dist_finegrain", "IMPL"), StandIn(), []

    def multiply(*arguments):
        fast.append(arguments[-1])
        stand_in.multiply(*arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        library.impl("gemm", multiply, "CPU", allow_override=True)
    try:
        yield fast
    finally:
        library._destroy()


@pytest.fixture
def call(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(lt, "_ops", types.SimpleNamespace(gemm=stand_in))
    return stand_in


def outputs(rows, columns, dtype):
    """Ways to pass ``out``: where cuBLASLt can write, and where it cannot; all else stays 7."""
    whole = torch.full((rows + 2, columns + 32), 7.0, dtype=dtype)
    yield "aligned rows of a wider matrix", whole, whole[1 : rows + 1, 16 : 16 + columns]
    yield "rows at odd addresses", whole, whole[1 : rows + 1, 1 : 1 + columns]
    whole = torch.full((columns, rows), 7.0, dtype=dtype)
    yield "transposed", whole, whole.t()


@pytest.mark.parametrize("pair", sorted(QUANTIZERS))
@pytest.mark.parametrize("m", [1, 17, 48])
def test_product_bias_and_accumulation_into_any_output(pair, m, call):
    """Against the decoded planes: with and without bias and ``out``, nothing else is written."""
    n, k = 144, 288
    operands = planes(pair, m, n, k)
    product = operands[0].format.decode(operands[0]) @ operands[1].format.decode(operands[1]).t()
    for dtype, bias_dtype in itertools.product(DTYPES, (None, *DTYPES)):
        bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
        wanted = product if bias is None else product + bias.float()
        eps = max(torch.finfo(dtype).eps, 1e-6)
        got = function_of(pair)(*operands, dtype, bias, False)
        assert got.shape == (m, n) and got.dtype == dtype
        assert (got.float() - wanted).norm() <= eps * wanted.norm()
        for accumulate in (False, True):
            for kind, whole, out in outputs(m, n, dtype):
                out.fill_(2.0 if accumulate else float("nan"))
                got = function_of(pair)(*operands, dtype, bias, False, out, accumulate)
                assert got is out, kind
                total = wanted + 2.0 if accumulate else wanted
                assert (out.float() - total).norm() <= eps * total.norm(), (kind, dtype, bias_dtype)
                out.fill_(7.0)
                assert (whole == 7.0).all(), kind


@pytest.mark.parametrize("pair", ["tensor", "row", "block 1-D 2-D"])
def test_main_grad_is_written_in_place(pair, call):
    """No temporary, but for 1×128 scales of padded rows."""
    for rows in (32, 17):
        out = torch.zeros(rows, 144)
        function_of(pair)(*planes(pair, rows, 144, 256), torch.float32, None, False, out, True)
        target, accumulate = call.arguments[8], call.arguments[9]
        is_in_place = target.data_ptr() == out.data_ptr()
        assert is_in_place == (rows == 32 or "block" not in pair)
        assert accumulate == is_in_place
        assert is_in_place or target.shape == (32, 144)


def test_a_bias_is_rounded_with_the_product_only(call):
    """Epilogue for its own 16-bit dtype; any other bias is what the FP32 product is added to."""
    operands = planes("tensor", 32, 144, 256)
    for dtype, bias_dtype in itertools.product(DTYPES, DTYPES):
        bias = torch.randn(144).to(bias_dtype)
        lt.tensorwise(*operands, dtype, bias, False)
        given, target, accumulate = call.arguments[7:10]
        in_epilogue = dtype == bias_dtype != torch.float32
        assert (given is bias) == in_epilogue and accumulate == (not in_epilogue)
        assert target.dtype == (dtype if in_epilogue else torch.float32)


def test_padding_rows_never_influence_a_result(call):
    for pair in sorted(QUANTIZERS):
        operands = planes(pair, 17, 144, 288)
        clean = function_of(pair)(*operands, torch.float32, None, False)
        out = torch.empty(17, 144)
        a = operands[0]
        a.codes[17:] = 0x7F
        if a.outer is not None and a.outer.numel() > 1:
            a.outer[17:] = float("nan")
        if a.scales is not None and a.scales.dtype == torch.uint8:
            a.scales[17:] = 0x7F
        elif a.scales is not None and not a.format.two_dimensional:
            a.scales[:, 17:] = float("nan")
        assert torch.equal(function_of(pair)(*operands, torch.float32, None, False), clean), pair
        function_of(pair)(*operands, torch.float32, None, False, out)
        assert torch.equal(out, clean), pair


@pytest.mark.parametrize("pair", sorted(QUANTIZERS))
def test_parts_of_larger_buffers_are_operands_too(pair, call):
    """As one expert's planes are: scales that start anywhere."""
    operands = planes(pair, 32, 48, 288)
    wanted = function_of(pair)(*operands, torch.float32, None, False)
    for plane in operands:
        shifted = [
            None if p is None else torch.cat((p.flatten()[:1], p.flatten()))[1:].view(p.shape)
            for p in plane.parts[1:]
        ]
        plane.parts = (plane.codes, *shifted)
    assert torch.equal(function_of(pair)(*operands, torch.float32, None, False), wanted)


@pytest.mark.parametrize("pair", ["mxfp8", "nvfp4"])
def test_sm_100_scales_as_the_cast_stores_them_and_alpha(pair, call):
    """Documented layouts, not run on hardware: 128×4 tiles, NVFP4's alpha = g_A · g_B."""
    plain, swizzled = (planes(pair, 40, 48, 160, swizzled=s) for s in (False, True))
    wanted = function_of(pair)(*plain, torch.float32, None, False)
    assert torch.equal(function_of(pair)(*swizzled, torch.float32, None, False), wanted)
    assert all(given is p.scales for given, p in zip(call.arguments[4:6], swizzled, strict=True))
    alpha = call.arguments[6]
    if pair == "mxfp8":
        assert alpha is None
    else:
        assert torch.equal(alpha, plain[0].outer * plain[1].outer) and alpha.shape == (1,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_high_precision_operands_of_any_strides(dtype, call):
    """As Identity planes are: either dimension fastest, extents of 1, alpha on the device."""
    alpha = torch.tensor([0.37])
    for m, n, k in ((5, 3, 7), (1, 1, 1), (1, 8, 16), (33, 1, 1)):
        left, right = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        wanted = 0.37 * (left.float() @ right.float().t())
        for a, b in itertools.product(strided(left), strided(right)):
            got = lt.high_precision(a, b, torch.float32, alpha=alpha)
            assert torch.allclose(got, wanted, rtol=1e-6)
            out = torch.ones(m, n)
            assert lt.high_precision(a, b, torch.float32, None, out, True, alpha=alpha) is out
            assert torch.allclose(out, 1 + wanted, rtol=1e-6)


def strided(matrix):
    rows, columns = matrix.shape
    yield matrix
    yield matrix.t().contiguous().t()
    yield torch.cat((matrix, matrix), 1)[:, :columns]
    yield torch.stack((matrix, matrix), 2)[:, :, 0]
    if matrix.shape[0] == 1:
        yield matrix.expand(1, -1).as_strided(matrix.shape, (0, 1))


E, SCALAR, ROW, VEC128, BLOCK128, VEC32 = 3, 1, 2, 3, 4, 5


def arguments(**changes):
    """A call that only lacks a GPU: E4M3 [32, 64] times E4M3 [16, 64], one scale each."""
    one, code = torch.ones(1), torch.zeros(32, 64, dtype=torch.uint8)
    given = {
        "a": code, "b": code[:16], "a_options": E | SCALAR << 4, "b_options": E | SCALAR << 4,
        "a_scales": one, "b_scales": one, "alpha": None, "bias": None, "out": torch.zeros(32, 16),
        "accumulate": False, "fast": False, **changes,
    }  # fmt: skip
    return tuple(given.values())


@needs_extension
@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "a is on cpu; accepted: CUDA tensors"),
        ({"fast": True, "alpha": torch.ones(1)}, "a is on cpu; accepted: CUDA tensors"),
        ({"a": torch.zeros(32, 64)}, "a is Float.*accepted: Byte of at least 32 rows"),
        ({"a": torch.zeros(16, 64, dtype=torch.uint8)}, r"a is Byte \[16, 64\].*at least 32 rows"),
        ({"b": torch.zeros(16, 48, dtype=torch.uint8)}, "a contracts over 64 elements, b over 48"),
        ({"b": torch.zeros(16, 8, dtype=torch.uint8)}, "b has rows of 8 bytes.*multiples of 16"),
        ({"b": torch.zeros(64, 16, dtype=torch.uint8).t()}, "b has strides.*aligned rows of codes"),
        (
            {
                **dict.fromkeys(("a_options", "b_options"), 2),
                **dict.fromkeys(("a_scales", "b_scales")),
                **dict.fromkeys(("a", "b"), torch.zeros(64, dtype=torch.bfloat16).expand(32, 64)),
            },
            "a has strides.*one of them 1, the other the extent or more",
        ),
        ({"a_options": 15}, "a_options is 15; accepted: element"),
        ({"a_options": E}, "a_options is 3; accepted: element"),
        ({"b_options": 2}, "a holds E4M3 and b BF16; accepted: one 16-bit type"),
        ({"a_scales": None}, "a_scales is None; this operand needs them"),
        ({"b_scales": torch.ones(2)}, r"b_scales is Float \[2\].*Float with 1 elements"),
        ({"b_options": E | ROW << 4}, r"b_scales is Float \[1\].*Float with 16 elements"),
        ({"b_options": E | VEC32 << 4}, "b_scales is Float.*Byte with 512 elements"),
        (
            {"a_options": E | VEC128 << 4, "a_scales": torch.ones(32), "out": torch.ones(20, 16)},
            "out has 20 rows; accepted: 32, all stored rows of a with 1x128 scales",
        ),
        (
            dict.fromkeys(("a_options", "b_options"), E | BLOCK128 << 4),
            "both have 128x128 scales; accepted: at least one with 1x128",
        ),
        ({"out": torch.zeros(32, 16, dtype=torch.float64)}, "out is Double.*FP32, FP16 or BF16"),
        ({"out": torch.zeros(0, 16)}, r"out is Float \[0, 16\].*with elements"),
        ({"out": torch.zeros(16, 32).t()}, "out has strides.*last stride 1"),
        ({"out": torch.zeros(32, 8)}, "out is .*columns a multiple of 16"),
        ({"out": torch.zeros(32, 17)[:, 1:]}, "out is .*rows and address of 16 bytes"),
        ({"alpha": torch.ones(2)}, r"alpha is Float \[2\].*one torch.float32 element"),
        ({"bias": torch.ones(16)}, "bias is Float.*FP16 or BF16"),
        (
            {"a_options": E | VEC128 << 4, "a_scales": torch.ones(32), "fast": True},
            "fast is True; accepted: False",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_before_any_launch(changes, message):
    error = RuntimeError if "CUDA tensors" in message else ValueError
    with pytest.raises(error, match=message):
        torch.ops.dist_finegrain.gemm.default(*arguments(**changes))


@needs_extension
def test_fake_tensors_run_the_fake_kernel():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fakes = [
            torch.empty(a.shape, dtype=a.dtype, device="cuda") if torch.is_tensor(a) else a
            for a in arguments()
        ]
        assert torch.ops.dist_finegrain.gemm.default(*fakes) is None


@needs_extension
@pytest.mark.skipif(not dfg.build_info().gemm_reason, reason="the cuBLASLt call is built here")
def test_without_the_part_the_operator_says_so():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="dist_finegrain::gemm: the CUDA.*build_info"):
        torch.ops.dist_finegrain.gemm.default.redispatch(keys, *arguments())


def test_a_device_without_the_call_has_its_reason(monkeypatch):
    assert lt.available(torch.device("cpu")) == "cuBLASLt runs on CUDA tensors, not on cpu"
    for reason in ("no cublasLt.h", ""):
        info = extension.BuildInfo("", (), "2.13.0", "", "", reason)
        monkeypatch.setattr(lt, "build_info", lambda info=info: info)
        assert lt.available.__wrapped__(torch.device("cuda", 0)) == reason


@pytest.mark.parametrize("reason, backend", [("", "cublasLt"), ("no cublasLt.h", "scaled_mm")])
def test_kernels_say_which_of_the_two_runs(reason, backend, monkeypatch):
    info = extension.BuildInfo("", (), "2.13.0", "", "", reason)
    monkeypatch.setattr(dispatch, "build_info", lambda: info)
    formats = [p.format for p in planes("block 1-D 2-D", 16, 16, 32)]
    kernel = dispatch.select("fprop", *formats, "sm_90", "native", k=32, n=16)
    assert kernel.name == f"{backend} 128-block"


def test_the_call_runs_where_it_is_there_and_scaled_mm_elsewhere(monkeypatch):
    operands = planes("tensor", 16, 16, 32)
    formats = [p.format for p in operands]
    kernel = dispatch.select("fprop", *formats, "sm_90", "native", k=32, n=16)
    for module in (dispatch.lt, dispatch.native):
        monkeypatch.setattr(module, "tensorwise", lambda *_, name=module.__name__: name)
    for reason, module in (("", dispatch.lt), ("no cublasLt.h", dispatch.native)):
        monkeypatch.setattr(dispatch.lt, "available", lambda device, reason=reason: reason)
        assert dispatch.gemm(kernel, "fprop", *operands, torch.float32) == module.__name__
