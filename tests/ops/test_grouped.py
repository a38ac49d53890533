"""Grouped GEMMs: on the CPU a loop of single ones bit for bit, on CUDA against FP64.

The CUDA kernels' arguments are also checked on the CPU, by stand-ins that assert what torch's
grouped kernels assert on the device.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from dist_finegrain.formats import fused
from dist_finegrain.ops import grouped_kernels
from dist_finegrain.ops.experts import Experts
from dist_finegrain.ops.gemm import gemm, gemm_counts, reset_gemm_counts, select
from dist_finegrain.ops.grouped import select_grouped
from tests.formats.user_quantizers import Int8Quantizer

from . import grouped_cases
from .grouped_cases import (
    FORMATS,
    GEMMS,
    IDENTITY,
    NATIVE,
    SPLITS,
    Layer,
    pairs,
    relative_error,
    run,
)

LIMIT = 2.5e-3  # of a product rounded to BF16 once or twice
FAST_LIMIT = 3.2e-3  # that beside the 2.5e-3 of fast accumulation over 8192 elements
each_gemm = pytest.mark.parametrize("name", GEMMS)
each_split = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module"
)


@pytest.fixture(autouse=True)
def compiled():
    if reason := fused.why_not(torch.device("cpu")):
        pytest.skip(reason)


@pytest.fixture
def kernels_for(monkeypatch):
    """Makes the sm_90 kernels run on a device: on the CPU through the stand-ins."""

    def prepare(device: str) -> str:
        if device == "cpu":
            for name in ("grouped_mm", "scaled_grouped_mm"):
                monkeypatch.setattr(grouped_kernels, name, getattr(grouped_cases, name))
        elif torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs an sm_90 GPU")
        return "sm_90"

    return prepare


def on_cpu(name, layer, a, b, out_dtype=torch.float32, **options):
    kernel = select_grouped(name, a, b, "cpu", "emulate", k=layer.k, n=layer.n)
    return run(kernel, name, layer.planes(name, a, b), layer, out_dtype, **options)


def one_by_one(name, layer, a, b, out_dtype=torch.float32):
    kernel = select(name, a, b, "cpu", "emulate", k=layer.k, n=layer.n)
    parts = [gemm(kernel, name, *planes, out_dtype) for planes in layer.singles(name, a, b)]
    return torch.stack(parts) if name == "wgrad" else torch.cat(parts)


# CPU: the very bits of a loop of single GEMMs.
@each_gemm
def test_every_pair_is_a_loop_of_single_gemms(name):
    for a, b in pairs(name):
        for split in (SPLITS["zeros_anywhere"], SPLITS["ragged_mxfp8"]):
            layer = Layer(split, n=40, k=72)
            got = on_cpu(name, layer, FORMATS[a], FORMATS[b])
            wanted = one_by_one(name, layer, FORMATS[a], FORMATS[b])
            assert torch.equal(got, wanted), (a, b, split)


@each_split
@each_gemm
def test_every_split(name, split):
    """Bug cases 1 and 2: experts without tokens anywhere, all of them, one row, no multiple."""
    layer = Layer(split, n=64, k=64)
    for format in FORMATS.values():
        if not grouped_cases.runs(name, format, format):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            got = on_cpu(name, layer, format, format, dtype)
            wanted = one_by_one(name, layer, format, format, dtype)
            assert got.dtype == dtype and torch.equal(got, wanted), format.describe()
            if name == "wgrad":
                empty = [e for e, m in enumerate(split) if m == 0]
                assert not got[empty].any()


def test_sizes_on_the_host_change_nothing():
    layer = Layer(SPLITS["zeros_anywhere"], n=40, k=72)
    for name in GEMMS:
        for format in (FORMATS["row"], FORMATS["block"], IDENTITY):
            got = on_cpu(name, layer, format, format, sizes=layer.split)
            assert torch.equal(got, on_cpu(name, layer, format, format))


@each_gemm
def test_accumulate_adds_and_out_receives(name):
    layer = Layer(SPLITS["zeros_anywhere"], n=48, k=64)
    for format in (FORMATS["row"], FORMATS["mxfp8"], IDENTITY):
        product = on_cpu(name, layer, format, format)
        out = torch.full_like(product, 3.0)
        assert on_cpu(name, layer, format, format, out=out) is out
        assert torch.equal(out, product)
        out = torch.full_like(product, 3.0)
        on_cpu(name, layer, format, format, out=out, accumulate=True)
        assert torch.equal(out, product + 3.0)


def test_accumulating_nothing_changes_nothing():
    layer = Layer(SPLITS["nothing"], n=48, k=64)
    out = torch.randn(4, 48, 64)
    before = out.clone()
    for format in (FORMATS["row"], IDENTITY):
        on_cpu("wgrad", layer, format, format, out=out, accumulate=True)
        assert torch.equal(out, before)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_weights_cast_one_by_one_or_together_give_the_same(format):
    layer = Layer(SPLITS["ragged_block"], n=40, k=72)
    partner = FORMATS["block"] if format.family == "float8_block" else format
    for name in ("fprop", "dgrad"):
        if not grouped_cases.runs(name, partner, format):
            continue
        kernel = select_grouped(name, partner, format, "cpu", "emulate", k=72, n=40)
        a, together, _ = layer.planes(name, partner, format)
        got = run(kernel, name, (a, layer.stacked(name, format), None), layer)
        assert torch.equal(got, run(kernel, name, (a, together, None), layer))


def test_counts_are_those_of_the_loop():
    layer, format = Layer([3, 0, 4], n=32, k=32), FORMATS["row"]
    reset_gemm_counts()
    on_cpu("fprop", layer, format, format)
    assert gemm_counts() == {("fprop", format.describe(), format.describe()): 3}


# The CUDA kernels, on the CPU through stand-ins.
@each_device
@each_split
@each_gemm
def test_native_products(name, split, device, kernels_for):
    """Row- and tensor-scaled E4M3 in any mix and BF16 within 2.5e-3; no expert's zeros matter."""
    kind = kernels_for(device)
    layer = Layer(split, n=48, k=144, device=device)
    formats = [(FORMATS[a], FORMATS[b]) for a in NATIVE for b in NATIVE]
    for a, b in (*formats, (IDENTITY, IDENTITY)):
        kernel = select_grouped(name, a, b, kind, "native", k=144, n=48)
        assert kernel.execution == "native" and not kernel.needs_sizes
        for fast in (False, True):
            got = run(kernel, name, layer.planes(name, a, b), layer, fast=fast)
            assert relative_error(got, layer.exact(name, a, b)) <= LIMIT, (a, b, fast)


@each_device
@each_gemm
def test_emulated_products(name, device, kernels_for):
    """Every pair of one family within 2.5e-3, K and N no multiple of anything."""
    kind = kernels_for(device)
    layer = Layer(SPLITS["zeros_anywhere"], n=37, k=75, device=device)
    for a, b in pairs(name):
        formats = FORMATS[a], FORMATS[b]
        if "identity" in (a, b):
            continue
        kernel = select_grouped(name, *formats, kind, "reference", k=75, n=37)
        assert kernel.execution == "emulated" and "rounded to BF16" in kernel.reason
        for dtype in (torch.float32, torch.bfloat16):
            got = run(kernel, name, layer.planes(name, *formats), layer, dtype)
            assert relative_error(got, layer.exact(name, *formats)) <= LIMIT, (a, b)


@each_device
@each_gemm
def test_identity_of_any_shape_and_storage_offset(name, device, kernels_for):
    """Bug case 42: 767 features, or views that start in the middle of 16 bytes, are copied."""
    kind = kernels_for(device)
    for n, k in ((37, 75), (64, 75), (37, 64), (8, 8), (1, 1)):
        layer = Layer(SPLITS["zeros_anywhere"], n=n, k=k, device=device)
        wide = torch.zeros(layer.x.shape[0], k + 3, dtype=torch.bfloat16, device=device)
        wide[:, 3:] = layer.x
        kernel = select_grouped(name, IDENTITY, IDENTITY, kind, "native", k=k, n=n)
        for x in (layer.x, wide[:, 3:]):
            layer.x = x
            got = run(kernel, name, layer.planes(name, IDENTITY, IDENTITY), layer, torch.bfloat16)
            assert relative_error(got, layer.exact(name, IDENTITY, IDENTITY)) <= LIMIT


@pytest.mark.parametrize("name", GEMMS)
def test_bf16_and_aligned_fp8_planes_are_not_copied(name, kernels_for, monkeypatch):
    kind = kernels_for("cpu")
    layer = Layer(SPLITS["ragged_current"], n=48, k=64)
    seen = []

    def spy(function):
        def call(left, right, *args, **options):
            seen.append({left.data_ptr(), right.data_ptr()})
            return function(left, right, *args, **options)

        return call

    for attribute in ("grouped_mm", "scaled_grouped_mm"):
        original = getattr(grouped_kernels, attribute)
        monkeypatch.setattr(grouped_kernels, attribute, spy(original))
    for format in (IDENTITY, FORMATS["row"]):
        planes = layer.planes(name, format, format)
        kernel = select_grouped(name, format, format, kind, "native", k=64, n=48)
        run(kernel, name, planes, layer)
        b = planes[1].plane if isinstance(planes[1], Experts) else planes[1]
        assert seen.pop() == {planes[0].codes.data_ptr(), b.codes.data_ptr()}


@each_device
@each_gemm
@pytest.mark.parametrize("a", ["row", "current", "block", "mxfp8", "nvfp4"])
def test_row_padding_never_reaches_a_result(a, name, device, kernels_for):
    """Bug case 4: codes and scales of the rows R…Rp filled with 0xFF."""
    kind, format = kernels_for(device), FORMATS[a]
    layer = Layer(SPLITS["zeros_anywhere"], n=37, k=75, device=device)
    if a in NATIVE:
        layer = Layer(SPLITS["zeros_anywhere"], n=48, k=80, device=device)
    kernel = select_grouped(name, format, format, kind, "emulate", k=layer.k, n=layer.n)
    planes = layer.planes(name, format, format)
    clean = run(kernel, name, planes, layer)
    for plane in planes[:2]:
        plane = plane.plane if isinstance(plane, Experts) else plane
        rows = plane.shape[0]
        for part in plane.parts:
            if part is None:
                continue
            for dim, extent in enumerate(part.shape):
                if extent == plane.codes.shape[0] and (dim == 0 or part is not plane.codes):
                    part.view(torch.uint8 if part.dtype == torch.uint8 else torch.int32).narrow(
                        dim, rows, extent - rows
                    ).fill_(-1 if part.dtype != torch.uint8 else 0xFF)
    assert torch.equal(run(kernel, name, planes, layer), clean)


def test_blocks_with_fp32_scales_keep_infinities_apart(kernels_for):
    """E5M2's Inf meets the other operand's leading term only: Inf, not NaN."""
    kind = kernels_for("cpu")
    format = grouped_cases.EVERY["block_e5m2_fp32_epsilon"]
    layer = Layer([4, 3], n=16, k=32)
    layer.x = layer.x.clone()
    layer.x[1, 3] = torch.inf
    for name in ("fprop", "wgrad"):
        kernel = select_grouped(name, format, format, kind, "emulate", k=32, n=16)
        got = run(kernel, name, layer.planes(name, format, format), layer)
        wanted = layer.exact(name, format, format)
        assert wanted.isinf().any() and torch.equal(got.isinf(), wanted.isinf())
        assert torch.equal(got.isnan(), wanted.isnan())


@each_device
@each_gemm
def test_a_users_own_format_beside_identity(name, device, kernels_for):
    """From its decode(), in every mode; on the CPU as a loop of single GEMMs too."""
    kind, user = kernels_for(device), Int8Quantizer().plane_format("rowwise")
    layer = Layer(SPLITS["zeros_anywhere"], n=37, k=75, device=device)
    a, b, column_ends = layer.planes(name, IDENTITY, IDENTITY)
    a = user.encode(a.codes)
    values = a.format.decode(a).to(torch.bfloat16)
    exact = IDENTITY.encode(values)
    kernels = [select_grouped(name, user, IDENTITY, kind, "native", k=75, n=37)]
    if device == "cpu":
        kernels.append(select_grouped(name, user, IDENTITY, "cpu", "native", k=75, n=37))
    reference = select_grouped(name, IDENTITY, IDENTITY, kind, "native", k=75, n=37)
    wanted = run(reference, name, (exact, b, column_ends), layer).cpu().double()
    for kernel in kernels:
        assert kernel.execution == "emulated" and "decode()" in kernel.reason
        got = run(kernel, name, (a, b, column_ends), layer)
        assert relative_error(got, wanted) <= 2 * LIMIT  # of which ``values`` is one rounding


# CUDA alone.
@contextlib.contextmanager
def no_synchronisation():
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous)


WITHOUT_SIZES = ("identity", "row", "current", "block", "block_fp32", "mxfp8", "nvfp4")


@pytest.mark.gpu
@each_gemm
@pytest.mark.parametrize("a", WITHOUT_SIZES)
def test_nothing_waits_for_the_device(a, name, kernels_for):
    kind, format = kernels_for("cuda"), FORMATS[a]
    layer = Layer(SPLITS["zeros_anywhere"], n=48, k=64, device="cuda")
    kernel = select_grouped(name, format, format, kind, "emulate", k=64, n=48)
    planes = layer.planes(name, format, format)
    out = torch.zeros_like(run(kernel, name, planes, layer))
    with no_synchronisation():
        run(kernel, name, planes, layer)
        run(kernel, name, planes, layer, out=out, accumulate=True)


@pytest.mark.gpu
@each_gemm
@pytest.mark.parametrize("a", WITHOUT_SIZES)
def test_a_captured_call_follows_the_split(a, name, kernels_for):
    """Replayed with other tokens and another split in the same buffers: eager's bits."""
    kind, format = kernels_for("cuda"), FORMATS[a]
    first, second = (Layer(s, 48, 64, "cuda") for s in ([0, 33, 20, 75], [128, 0, 0, 0]))
    second.x, second.dy = second.x.flip(0), second.dy.flip(0)
    kernel = select_grouped(name, format, format, kind, "emulate", k=64, n=48)
    planes, others = (layer.planes(name, format, format) for layer in (first, second))
    wanted = run(kernel, name, others, second)
    run(kernel, name, planes, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(kernel, name, planes, first)
    for plane, other in zip(planes[:2], others[:2], strict=True):
        plane, other = (p.plane if isinstance(p, Experts) else p for p in (plane, other))
        for part, new in zip(plane.parts, other.parts, strict=True):
            if part is not None:
                part.copy_(new)
    first.ends.copy_(second.ends)
    if planes[2] is not None:
        planes[2].copy_(others[2])
    graph.replay()
    assert torch.equal(result, wanted)


@pytest.mark.gpu
@each_split
@each_gemm
def test_experts_one_by_one_on_cuda(name, split, kernels_for):
    """What has no grouped kernel, natively when the sizes are known."""
    kind = kernels_for("cuda")
    layer = Layer(split, n=144, k=256, device="cuda")
    partner = {"fprop": "block_2d", "dgrad": "block_2d", "wgrad": "block"}[name]
    for a, b in (("block", partner), ("current_e5m2", "current")):
        formats = FORMATS[a], FORMATS[b]
        kernel = select_grouped(name, *formats, kind, "native", k=256, n=144, sizes_known=True)
        planes = layer.planes(name, *formats)
        got = run(kernel, name, planes, layer, sizes=split)
        assert relative_error(got, layer.exact(name, *formats)) <= 2e-4
        with pytest.raises(ValueError, match="sizes is None"):
            run(kernel, name, planes, layer)


@pytest.mark.gpu
def test_another_device_than_the_current_one(kernels_for):
    """Bug case 35."""
    kind = kernels_for("cuda")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name in GEMMS:
        for format in (IDENTITY, FORMATS["row"], FORMATS["current"], FORMATS["mxfp8"]):
            kernel = select_grouped(name, format, format, kind, "emulate", k=64, n=48)
            results = []
            for device in ("cuda:0", "cuda:1"):
                layer = Layer(SPLITS["zeros_anywhere"], n=48, k=64, device=device)
                results.append(run(kernel, name, layer.planes(name, format, format), layer))
            assert results[1].device == torch.device("cuda:1")
            assert torch.equal(results[0].cpu(), results[1].cpu())


@pytest.mark.gpu
def test_fast_accumulation_is_a_little_less_exact(kernels_for):
    kind, format = kernels_for("cuda"), FORMATS["row"]
    layer = Layer([300, 0, 212], n=256, k=8192, device="cuda")
    kernel = select_grouped("fprop", format, format, kind, "native", k=8192, n=256)
    planes, exact = layer.planes("fprop", format, format), layer.exact("fprop", format, format)
    errors = [
        relative_error(run(kernel, "fprop", planes, layer, fast=f), exact) for f in (False, True)
    ]
    assert errors[0] <= LIMIT and errors[0] < errors[1] <= FAST_LIMIT


def test_parts_of_weights_that_were_cast_as_one_matrix():
    """Whole 128×128 blocks for each expert: the bytes of a cast of its own, in either direction."""
    square, weights = FORMATS["block_2d"], torch.randn(3, 128, 640)
    flat = weights.flatten(0, 1)
    rows = Experts.of_rows(grouped_cases.encoded(flat, square), 3)
    columns = Experts.of_columns(grouped_cases.encoded(flat.t(), square), 3, 128)
    for e, weight in enumerate(weights):
        for got, wanted in ((rows.expert(e), weight), (columns.expert(e), weight.t())):
            wanted = grouped_cases.encoded(wanted, square)
            assert got.shape == wanted.shape
            assert all(map(torch.equal, got.parts[:2], wanted.parts[:2]))
