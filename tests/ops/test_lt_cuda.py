"""The cuBLASLt call on Hopper: against FP64 of the decoded planes and against scaled_mm."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain.formats.plane import round_up
from dist_finegrain.ops import lt, native
from dist_finegrain.ops.gemm import device_kind, gemm, select
from tests.ops.test_native import (
    E4M3,
    EXACT_ACCUMULATION,
    FAST_ACCUMULATION,
    PAIRS,
    block,
    planes,
    relative_error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(dfg.build_info().gemm_reason), reason=f"no cuBLASLt: {dfg.build_info().gemm_reason}"
    ),
]
ROWS = (0, 1, 3, 7, 8, 15, 17, 31, 33, 127, 129, 1000)
N, K = 144, 1040
EMULATED = {
    "mxfp8": lambda: dfg.MXFP8Quantizer(E4M3),
    "nvfp4": lambda: dfg.NVFP4Quantizer(),
    "nvfp4 rows": lambda: dfg.NVFP4Quantizer(row_scaled_nvfp4=True),
    "tensor": lambda: dfg.Float8CurrentScalingQuantizer(E4M3),
    "row": lambda: dfg.Float8RowScalingQuantizer(E4M3),
    "block 2-D": lambda: block(2),
    "block f32": lambda: block(1, force_pow_2_scales=False),
}


def kernel_of(operands, execution="native", k=K, n=N):
    formats = [p.format for p in operands]
    kind = device_kind(torch.device("cuda"))
    kernel = select("fprop", *formats, kind, execution, k=k, n=n)
    assert execution != "native" or kernel.name.startswith("cublasLt ")
    return kernel


def emulated(name, m, n=N, k=K):
    torch.manual_seed(m)
    made = [EMULATED[name]()(torch.randn(r, k, device="cuda")).plane("rowwise") for r in (m, n)]
    return kernel_of(made, "reference", k, n), made


def biases(n=N):
    yield None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield torch.randn(n, device="cuda").to(dtype)


@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("m", ROWS)
def test_native_product_within_the_tensor_cores_accuracy(pair, m):
    """Every bias, output type and way to give ``out``; also what ``out`` held, NaN when unread."""
    operands = planes(pair, m, N, K, "cuda")
    kernel = kernel_of(operands)
    for dtype, bias in itertools.product((torch.float32, torch.bfloat16, torch.float16), biases()):
        limit = EXACT_ACCUMULATION if dtype == torch.float32 else 4e-3
        got = gemm(kernel, "fprop", *operands, dtype, bias=bias)
        assert got.shape == (m, N) and got.dtype == dtype
        if m:
            assert relative_error(got, operands, bias) <= limit, (dtype, bias)
        out = torch.full((m + 2, N + 16), float("nan"), dtype=dtype, device="cuda")
        inner = out[1 : m + 1, :N]
        gemm(kernel, "fprop", *operands, dtype, bias=bias, out=inner)
        assert not inner.isnan().any()
        if m:
            assert relative_error(inner, operands, bias) <= limit, (dtype, bias)
        inner.fill_(float("nan"))
        assert out.isnan().all(), "nothing else was written"


@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("m", [m for m in ROWS if m])
def test_scaled_mm_agrees(pair, m):
    operands = planes(pair, m, N, K, "cuda")
    kernel = kernel_of(operands)
    name = kernel.run.__self__.function
    for dtype in (torch.float32, torch.bfloat16):
        ours = gemm(kernel, "fprop", *operands, dtype).double()
        theirs = getattr(native, name)(*operands, dtype, None, False).double()
        assert (ours - theirs).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * theirs.norm()


@pytest.mark.parametrize("k", [272, 1040, 4112])
@pytest.mark.parametrize("pair", ["tensor", "row"])
def test_sizes_that_share_an_algorithm(pair, k):
    """It was asked for with the largest of them; others run it, from the first on."""
    for rows in (257, 300, 517, 1000, 1001, 2049, 3000, 4100):
        operands = planes(pair, rows, N, k, "cuda")
        kernel = kernel_of(operands, k=k)
        for fast, limit in ((False, EXACT_ACCUMULATION), (True, FAST_ACCUMULATION)):
            got = gemm(kernel, "fprop", *operands, torch.float32, fast=fast)
            assert relative_error(got, operands, None) <= limit, (rows, fast)


def poison(plane):
    """0x7F (NaN) and NaN wherever only padded rows are."""
    rows = plane.shape[0]
    plane.codes[rows:] = 0x7F
    if plane.outer is not None and plane.outer.numel() > 1:
        plane.outer[rows:] = float("nan")
    if plane.scales is not None and plane.scales.dtype == torch.uint8:
        plane.scales[rows:] = 0x7F
    elif plane.scales is not None and not plane.format.two_dimensional:
        plane.scales[:, rows:] = float("nan")


@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("m", [m for m in ROWS if m % 16])
def test_poisoned_row_padding_gives_the_bits_of_the_padded_call(pair, m):
    """Also those of a call with 16-padded rows of zeros: bits depend on the stored rows only."""
    torch.manual_seed(m)
    x = torch.zeros(round_up(m, 16), K, device="cuda", dtype=torch.bfloat16)
    x[:m] = torch.randn(m, K, device="cuda")
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    quantize_x, quantize_w = PAIRS[pair]
    weight = quantize_w(w).plane("rowwise")
    whole, cut = (quantize_x(rows).plane("rowwise") for rows in (x, x[:m]))
    poison(cut)
    kernel = kernel_of([whole, weight])
    for dtype in (torch.float32, torch.bfloat16):
        wanted = gemm(kernel, "fprop", whole, weight, dtype)[:m]
        assert torch.equal(gemm(kernel, "fprop", cut, weight, dtype), wanted)
        out = torch.empty(m, N, dtype=dtype, device="cuda")
        gemm(kernel, "fprop", cut, weight, dtype, out=out)
        assert (out.double() - wanted.double()).norm() <= 4e-3 * wanted.double().norm()


@pytest.mark.parametrize("pair", sorted(PAIRS))
@pytest.mark.parametrize("m", [0, 17, 128])
def test_main_grad_grows_by_the_product(pair, m):
    """FP32: old + product; BF16: the FP32 sum rounded once."""
    operands = planes(pair, m, N, K, "cuda")
    kernel = kernel_of(operands)
    for dtype in (torch.float32, torch.bfloat16):
        old = torch.randn(m, N, device="cuda").to(dtype)
        out = old.clone()
        assert gemm(kernel, "wgrad", *operands, dtype, out=out, accumulate=True) is out
        if m == 0:
            continue
        total = old.double() + gemm(kernel, "wgrad", *operands, torch.float32).double()
        limit = EXACT_ACCUMULATION if dtype == torch.float32 else 4e-3
        assert (out.double() - total).norm() <= limit * total.norm()


@pytest.mark.parametrize("pair", ["tensor", "row", "block 1-D 1-D", "block 1-D 2-D"])
def test_accumulation_needs_no_temporary(pair):
    size = 4096
    operands = planes(pair, size, size, 256, "cuda")
    kernel, main_grad = kernel_of(operands, k=256, n=size), torch.zeros(size, size, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gemm(kernel, "wgrad", *operands, torch.float32, out=main_grad, accumulate=True)
        assert torch.cuda.max_memory_allocated() - before <= 33 * 2**20  # the workspace
    assert relative_error(main_grad / 2, operands) <= EXACT_ACCUMULATION


@pytest.mark.parametrize("pair", ["tensor", "row"])
def test_fast_accumulation_is_a_little_less_exact(pair):
    operands = planes(pair, 512, 512, 8192, "cuda")
    kernel = kernel_of(operands, k=8192, n=512)
    exact, fast = (
        relative_error(gemm(kernel, "fprop", *operands, torch.float32, fast=f), operands)
        for f in (False, True)
    )
    assert exact <= EXACT_ACCUMULATION < fast <= FAST_ACCUMULATION


@pytest.mark.parametrize("name", sorted(EMULATED))
@pytest.mark.parametrize("m, n, k", [(1, 144, 1040), (33, 21, 130), (1000, 144, 1040), (7, 5, 3)])
def test_emulation_is_exact_to_fp32(name, m, n, k):
    """Any shape; every bias; into ``out`` that held NaN, with alpha and beta on the device."""
    kernel, operands = emulated(name, m, n, k)
    for bias in biases(n):
        got = gemm(kernel, "fprop", *operands, torch.float32, bias=bias)
        assert relative_error(got, operands, bias) <= 1e-6
        for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
            out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
            gemm(kernel, "fprop", *operands, dtype, bias=bias, out=out)
            assert relative_error(out, operands, bias) <= limit, dtype
            assert torch.equal(gemm(kernel, "fprop", *operands, dtype, bias=bias), out)
            out.fill_(3.0)
            gemm(kernel, "fprop", *operands, dtype, bias=bias, out=out, accumulate=True)
            total = gemm(kernel, "fprop", *operands, torch.float32, bias=bias).double() + 3.0
            assert (out.double() - total).norm() <= limit * total.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alpha_on_the_device_and_operands_of_any_strides(dtype):
    """Both Identity directions of one buffer: weight gradients of 16-bit tensors into FP32."""
    x, dy = (torch.randn(129, c, device="cuda").to(dtype) for c in (40, 24))
    alpha, out = torch.tensor([0.37], device="cuda"), torch.ones(24, 40, device="cuda")
    lt.high_precision(dy.t(), x.t(), torch.float32, None, out, True, alpha=alpha)
    wanted = 1.0 + 0.37 * (dy.double().t() @ x.double())
    assert (out.double() - wanted).norm() <= 1e-6 * wanted.norm()
    identity = [dfg.IdentityQuantizer()(t).plane("columnwise") for t in (dy, x)]
    assert identity[0].shape == (24, 129)
    kernel = kernel_of(identity, "reference", k=40, n=24)
    for out_dtype, limit in ((torch.float32, 1e-6), (dtype, 4e-3)):
        out = torch.ones(24, 40, device="cuda", dtype=out_dtype)
        gemm(kernel, "wgrad", *identity, out_dtype, out=out, accumulate=True)
        total = 1.0 + dy.double().t() @ x.double()
        assert (out.double() - total).norm() <= limit * total.norm()


@pytest.mark.parametrize("execution, pair", [("native", p) for p in sorted(PAIRS)] + [
    ("reference", "nvfp4"), ("reference", "tensor"),
])  # fmt: skip
def test_graph_replays_give_the_eager_bits(execution, pair):
    """Operands change between replays; the workspace is the graph's own."""
    if execution == "native":
        operands, others = planes(pair, 33, N, K, "cuda"), planes(pair, 34, N, K, "cuda")
        kernel = kernel_of(operands)
        others[0].shape = operands[0].shape  # 34 rows are stored as 48, as 33 are
    else:
        kernel, operands = emulated(pair, 33)
        others = emulated(pair, 34)[1]
    out = torch.zeros(33, N, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        made = gemm(kernel, "fprop", *operands, torch.bfloat16)
        gemm(kernel, "wgrad", *operands, torch.float32, out=out, accumulate=True)
    assert (out == 0).all()
    for source in (operands, others):
        for plane, new in zip(operands, source, strict=True):
            for mine, part in zip(plane.parts, new.parts, strict=True):
                if mine is not None and mine is not part:
                    mine.copy_(part)
        out.fill_(2.0)
        graph.replay()
        eager = torch.full((33, N), 2.0, device="cuda")
        gemm(kernel, "wgrad", *operands, torch.float32, out=eager, accumulate=True)
        assert torch.equal(out, eager)
        assert torch.equal(made, gemm(kernel, "fprop", *operands, torch.bfloat16))


def test_a_process_whose_first_call_is_captured():
    """The device's handle and its constants for beta are made during capture, not by the graph."""
    script = """
import torch
from dist_finegrain.ops import lt
a, b = (torch.randn(r, 64, device="cuda").bfloat16() for r in (32, 48))
alpha, out = torch.tensor([0.5], device="cuda"), torch.full((32, 48), 2.0, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    lt.high_precision(a, b, torch.float32, None, out, True, alpha=alpha)
eager = torch.full_like(out, 2.0)  # before any replay
lt.high_precision(a, b, torch.float32, None, eager, True, alpha=alpha)
wanted = 2.0 + 0.5 * (a.double() @ b.double().t())
assert (eager.double() - wanted).norm() <= 1e-6 * wanted.norm(), "eager"
graph.replay()
assert torch.equal(out, eager), "replay"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_streams_do_not_share_a_workspace():
    kernel, operands = emulated("tensor", 1000)
    native_operands = planes("block 1-D 2-D", 1000, N, K, "cuda")
    native_kernel = kernel_of(native_operands)
    wanted = gemm(kernel, "fprop", *operands, torch.float32)
    native_wanted = gemm(native_kernel, "fprop", *native_operands, torch.float32)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                one = gemm(kernel, "fprop", *operands, torch.float32)
                two = gemm(native_kernel, "fprop", *native_operands, torch.float32)
                results.append((one, two))
    torch.cuda.synchronize()
    for one, two in results:
        assert torch.equal(one, wanted) and torch.equal(two, native_wanted)


def test_nothing_waits_for_the_device():
    operands = planes("tensor row", 33, N, K, "cuda")
    kernel = kernel_of(operands)
    slow, slow_operands = emulated("nvfp4", 33)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gemm(kernel, "fprop", *operands, torch.bfloat16)
        gemm(slow, "fprop", *slow_operands, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_operator_passes_opcheck():
    a, b = (torch.randn(r, 64, device="cuda").bfloat16() for r in (32, 48))
    alpha, out = torch.tensor([0.5], device="cuda"), torch.zeros(32, 48, device="cuda")
    arguments = (a, b, 2, 2, None, None, alpha, None, out, True, False)
    torch.library.opcheck(torch.ops.dist_finegrain.gemm.default, arguments)


@pytest.mark.parametrize("layout", ["odd offset", "strided"])
def test_a_bias_of_any_layout_is_added(layout):
    """The epilogue reads it in vectors; the library is not told where it starts."""
    operands = planes("tensor", 33, N, K, "cuda")
    memory = torch.randn(2 * N + 1, device="cuda").bfloat16()
    bias = memory[1 : N + 1] if layout == "odd offset" else memory[: 2 * N : 2]
    got = gemm(kernel_of(operands), "fprop", *operands, torch.bfloat16, bias=bias)
    want = gemm(kernel_of(operands), "fprop", *operands, torch.bfloat16, bias=bias.clone())
    assert torch.equal(got, want)


def test_fp16_operands_with_a_bf16_result():
    """The library has no such product: FP32, then one rounding."""
    a, b = (torch.randn(r, 64, device="cuda").half() for r in (32, 48))
    formats = [dfg.IdentityQuantizer()(m).plane("rowwise") for m in (a, b)]
    kernel = select("fprop", *(p.format for p in formats), "sm_90", "native", k=64, n=48)
    got = gemm(kernel, "fprop", *formats, torch.bfloat16)
    want = (a.float() @ b.float().t()).bfloat16()
    assert got.dtype == torch.bfloat16 and (got.float() - want.float()).abs().max() <= 0.25


def test_a_problem_without_an_algorithm_is_named():
    """MXFP8 on sm_90: refused by dispatch, and by the library with its reasons."""
    if device_kind(torch.device("cuda")) != "sm_90":
        pytest.skip("newer devices have an algorithm for it")
    quantizer = dfg.MXFP8Quantizer(E4M3)
    a, b = (quantizer(torch.randn(r, 256, device="cuda")).plane("rowwise") for r in (32, 48))
    with pytest.raises(RuntimeError, match=r"m=32, n=48, k=256, A E4M3 \(1x32.*out FP32"):
        lt.mxfp8(a, b, torch.float32, None, False)
