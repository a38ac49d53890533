"""cuBLASLt for each expert: FP8 GEMMs of sizes that the host knows, against FP64 and by name.

On a CPU the operator ``gemm``, which it calls, is plain torch.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain.ops import grouped
from dist_finegrain.ops.grouped import select_grouped

from .grouped_cases import FORMATS, GEMMS, NATIVE, SPLITS, Layer, relative_error, run
from .test_lt import stand_in_on_cpu

EXACT, FAST, BF16 = 2e-4, 2.5e-3, 2.5e-3
E5M2 = [("current_e5m2", "current"), ("current", "current_e5m2"), ("row", "row_e5m2_pow2")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    reason = dfg.build_info().cpu_reason
    if request.param == "cuda":
        reason = dfg.build_info().gemm_reason
    if reason:
        pytest.skip(f"no compiled part: {reason}")
    if request.param == "cuda":
        yield "cuda"
        return
    built = dataclasses.replace(dfg.build_info(), gemm_reason="")
    monkeypatch.setattr(grouped, "build_info", lambda: built)
    with stand_in_on_cpu():
        yield "cpu"


def choose(name, a, b, layer):
    return select_grouped(name, a, b, "sm_90", "native", k=layer.k, n=layer.n, sizes_known=True)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", GEMMS)
def test_every_native_pair_and_split(name, split, device):
    """Any tokens of an expert, none too; E5M2; a tensor's scale beside row scales."""
    layer = Layer(split, n=48, k=144, device=device)
    for a, b in [(a, b) for a in NATIVE for b in NATIVE] + E5M2:
        formats = FORMATS[a], FORMATS[b]
        kernel = choose(name, *formats, layer)
        assert kernel.name.endswith("for each expert") and not kernel.is_loop
        planes, wanted = layer.planes(name, *formats), layer.exact(name, *formats)
        for dtype, fast, limit in (
            (torch.float32, False, EXACT),
            (torch.float32, True, FAST),
            (torch.bfloat16, False, BF16),
        ):
            got = run(kernel, name, planes, layer, dtype, sizes=layer.split, fast=fast)
            assert got.dtype == dtype and got.shape == wanted.shape
            assert relative_error(got, wanted) <= limit, (a, b, dtype, fast)
        if name == "wgrad":
            assert not got[[e for e, m in enumerate(split) if m == 0]].any()


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", GEMMS)
def test_blocks(name, split, device):
    """1×128 tokens by 128×128 weights; experts of no whole tiles are copied."""
    layer = Layer(split, n=128, k=256, device=device)
    pairs = [("block", "block_2d"), ("block_fp32", "block_2d")]
    for a, b in [("block", "block"), ("block_fp32", "block")] if name == "wgrad" else pairs:
        formats = FORMATS[a], FORMATS[b]
        kernel = choose(name, *formats, layer)
        assert kernel.name.endswith("128-block for each expert") and not kernel.has_fast
        planes, wanted = layer.planes(name, *formats), layer.exact(name, *formats)
        for dtype, limit in ((torch.float32, EXACT), (torch.bfloat16, BF16)):
            got = run(kernel, name, planes, layer, dtype, sizes=layer.split)
            assert got.shape == wanted.shape and relative_error(got, wanted) <= limit, (a, b)


def test_blocks_that_would_reach_over_experts_go_one_by_one(device):
    block, square = FORMATS["block"], FORMATS["block_2d"]
    for name, n, k in (("fprop", 192, 256), ("dgrad", 256, 192)):
        layer = Layer([16, 16], n=n, k=k, device=device)
        assert choose(name, block, square, layer).is_loop
        assert choose("wgrad", block, block, layer).name.endswith("for each expert")
    assert choose("fprop", block, block, layer).is_loop


@pytest.mark.parametrize("name", ["fprop", "dgrad"])
def test_weights_cast_one_by_one(name, device):
    layer = Layer(SPLITS["zeros_anywhere"], n=48, k=144, device=device)
    for format in (FORMATS["row"], FORMATS["current"]):
        a, together, _ = layer.planes(name, format, format)
        kernel, options = choose(name, format, format, layer), {"sizes": layer.split}
        got = run(kernel, name, (a, layer.stacked(name, format), None), layer, **options)
        assert torch.equal(got, run(kernel, name, (a, together, None), layer, **options))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", [("row", "row"), ("current", "row"), ("block", "block")])
def test_each_wgrad_is_written_or_added_to_where_it_lies(
    pair, dtype, accumulate, device, monkeypatch
):
    """Without a temporary of all experts; experts of None are left out; one rounding of the sum."""
    layer = Layer(SPLITS["zeros_anywhere"], n=48, k=144, device=device)
    formats = [FORMATS[format] for format in pair]
    kernel, planes = choose("wgrad", *formats, layer), layer.planes("wgrad", *formats)
    wanted = layer.exact("wgrad", *formats)
    before = [torch.full((48, 144), float(e), dtype=dtype, device=device) for e in range(7)]
    given = [None if e in (2, 4) else matrix.clone() for e, matrix in enumerate(before)]
    monkeypatch.setattr(grouped.kernels.torch, "empty", None)
    result = run(
        kernel, "wgrad", planes, layer, dtype, sizes=layer.split, out=given, accumulate=accumulate
    )
    monkeypatch.undo()
    assert result is None
    limit = EXACT if dtype == torch.float32 else BF16
    for e, matrix in enumerate(given):
        if matrix is None:
            continue
        total = wanted[e] + before[e].double().cpu() if accumulate else wanted[e]
        assert relative_error(matrix, total) <= limit, e
        if not layer.split[e]:
            assert torch.equal(matrix, before[e] if accumulate else torch.zeros_like(matrix))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["FP16", "transposed", "odd address"])
def test_matrices_that_cuda_kernels_cannot_write_get_a_copy(kind, accumulate, device):
    layer, format = Layer([5, 0, 16], n=48, k=144, device=device), FORMATS["row"]
    kernel, planes = choose("wgrad", format, format, layer), layer.planes("wgrad", format, format)
    dtype = torch.float16 if kind == "FP16" else torch.float32

    def matrix():
        if kind == "transposed":
            return torch.ones(144, 48, device=device).t()
        return torch.ones(1 + 48 * 144, dtype=dtype, device=device)[1:].view(48, 144)

    given = [matrix(), matrix(), None]
    run(kernel, "wgrad", planes, layer, dtype, sizes=layer.split, out=given, accumulate=accumulate)
    for got, product in zip(given, layer.exact("wgrad", format, format), strict=False):
        if got is not None:
            total = product + 1 if accumulate else product
            assert relative_error(got, total) <= (BF16 if kind == "FP16" else EXACT)


def test_more_experts_than_torchs_kernels_take(device):
    layer, format = Layer([1] * 1030, n=16, k=16, device=device), FORMATS["current"]
    for name in GEMMS:
        kernel, planes = choose(name, format, format, layer), layer.planes(name, format, format)
        got = run(kernel, name, planes, layer, sizes=layer.split)
        assert relative_error(got, layer.exact(name, format, format)) <= EXACT
    of_torch = dataclasses.replace(kernel, needs_sizes=False)
    with pytest.raises(ValueError, match="ends of a wgrad is .*1030.* 1 to 1023 experts"):
        run(of_torch, name, planes, layer, sizes=layer.split)


def test_what_surrounds_an_experts_rows_never_reaches_its_result(device):
    """Rows of other experts, and padding, filled with 0xFF."""
    layer, format = Layer([5, 16, 3], n=48, k=144, device=device), FORMATS["row"]
    for name in GEMMS:
        kernel, planes = choose(name, format, format, layer), layer.planes(name, format, format)
        clean = run(kernel, name, planes, layer, sizes=layer.split)
        codes = planes[0].codes
        if name == "wgrad":
            codes[:, :16], part = 0xFF, (slice(1, 3),)
        else:
            codes[:5], codes[24:], part = 0xFF, 0xFF, (slice(5, 24),)
        got = run(kernel, name, planes, layer, sizes=layer.split)
        assert torch.equal(got[part], clean[part]) and not torch.equal(got, clean)


def test_what_does_not_fit_is_refused_by_name(device):
    codes = torch.zeros(16, 32, dtype=torch.uint8, device=device)
    weights = torch.zeros(96, 32, dtype=torch.uint8, device=device)
    ones, out = torch.ones(2, device=device), torch.zeros(16, 48, device=device)
    scalar = 3 | 1 << 4

    def call(**changes):
        arguments = {
            "a": codes, "b": weights, "a_options": scalar, "b_options": scalar, "a_scales": ones,
            "b_scales": ones, "gemm": 0, "sizes": [16, 0], "out": [out],
            "accumulate": [], "fast": False, **changes,
        }  # fmt: skip
        return torch.ops.dist_finegrain.gemm_groups.default(*arguments.values())

    call()
    for message, changes in (
        ("gemm is 3; accepted: 0", {"gemm": 3}),
        (r"sizes is \[17, -1\]", {"sizes": [17, -1]}),
        (r"which hold no \[16, 16\] rows", {"sizes": [16, 16]}),
        (r"which hold no \[8, 0\] rows", {"sizes": [8, 0]}),
        ("for 3 experts|hold no", {"sizes": [16, 0, 0]}),
        ("a_options is 83; accepted: FP8 with scales", {"a_options": 3 | 5 << 4}),
        ("blocks of 128 in both or in none", {"a_options": 3 | 3 << 4, "a_scales": ones[:, None]}),
        (r"b_scales is Float \[3\]", {"b_scales": torch.ones(3, device=device)}),
        ("one for each row of every expert", {"a_options": 3 | 2 << 4}),
        ("no .* rows of experts", {"gemm": 1}),
        ("one of each expert's wgrad", {"gemm": 2}),
        ("accumulate has 1 entries, out 1; accepted: as many of a wgrad", {"accumulate": [True]}),
        ("out has 0 entries", {"out": []}),
        (r"b and out have shapes .* \[16, 48, 1\]", {"out": [out[..., None]]}),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)
