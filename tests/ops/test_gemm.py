"""The dispatch table and the emulated products, against FP64 of the decoded planes."""

from __future__ import annotations

import itertools

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain.formats.plane import DIRECTIONS
from dist_finegrain.formats.swizzle import with_swizzled_scales
from dist_finegrain.ops.gemm import (
    NATIVE,
    PairRefused,
    device_kind,
    gemm,
    gemm_counts,
    reset_gemm_counts,
    select,
)
from tests.recipes import ALL, PLAIN, emulated

E4M3, E5M2 = dfg.DType.kFloat8E4M3, dfg.DType.kFloat8E5M2
QUANTIZERS = {
    "identity": lambda: dfg.IdentityQuantizer(),
    "tensor e4m3": lambda: dfg.Float8CurrentScalingQuantizer(E4M3),
    "tensor e5m2": lambda: dfg.Float8CurrentScalingQuantizer(E5M2),
    "delayed": lambda: dfg.Float8Quantizer(torch.full((1,), 3.7), torch.zeros(1), E4M3),
    "row e4m3": lambda: dfg.Float8RowScalingQuantizer(E4M3),
    "block 1-D": lambda: dfg.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "block 2-D": lambda: dfg.Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "block f32": lambda: dfg.Float8BlockQuantizer(E4M3, force_pow_2_scales=False),
    "mxfp8": lambda: dfg.MXFP8Quantizer(E4M3),
    "mxfp8 e5m2": lambda: dfg.MXFP8Quantizer(E5M2),
    "nvfp4": lambda: dfg.NVFP4Quantizer(),
    "nvfp4 2-D": lambda: dfg.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 rows": lambda: dfg.NVFP4Quantizer(row_scaled_nvfp4=True),
}


def row_plane(name, x):
    return QUANTIZERS[name]()(x).plane("rowwise")


def format_of(name):
    return QUANTIZERS[name]().plane_format("rowwise")


def pairs_of_one_family():
    for a, b in itertools.product(QUANTIZERS, repeat=2):
        if format_of(a).family == format_of(b).family:
            yield a, b


@pytest.mark.parametrize("a, b", list(pairs_of_one_family()))
def test_emulated_product_is_exact_to_fp32(a, b):
    """Relative Frobenius error within 1e-6 of FP64 with FP32 output, ragged shapes included."""
    torch.manual_seed(0)
    left, right, bias = torch.randn(37, 130), torch.randn(21, 130), torch.randn(21)
    planes = row_plane(a, left), row_plane(b, right)
    kernel = select("fprop", *(p.format for p in planes), "cpu", "emulate", k=130, n=21)
    got = gemm(kernel, "fprop", *planes, torch.float32, bias=bias)
    exact = [p.format.decode(p).double() for p in planes]
    wanted = exact[0] @ exact[1].t() + bias.double()
    assert got.shape == (37, 21)
    assert (got.double() - wanted).norm() / wanted.norm() <= 1e-6
    low = gemm(kernel, "fprop", *planes, torch.bfloat16, bias=bias)
    assert torch.equal(low, got.to(torch.bfloat16)), "one rounding to the output"


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
@pytest.mark.parametrize("m, c, n", [(0, 64, 32), (32, 0, 16), (16, 32, 0)])
def test_empty_products(name, m, c, n):
    planes = row_plane(name, torch.randn(m, c)), row_plane(name, torch.randn(n, c))
    kernel = select("fprop", *(p.format for p in planes), "cpu", "emulate", k=c, n=n)
    bias = torch.randn(n)
    got = gemm(kernel, "fprop", *planes, torch.float32, bias=bias)
    assert torch.equal(got, bias.expand(m, n))


@pytest.mark.parametrize("name", sorted(set(QUANTIZERS) - {"identity"}))
def test_row_padding_never_influences_a_product(name):
    """Bug case 4: padding rows of codes and scales filled with 0xFF."""
    x, w = torch.randn(5, 64), torch.randn(21, 64)
    planes = [row_plane(name, x), row_plane(name, w)]
    kernel = select("fprop", *(p.format for p in planes), "cpu", "emulate", k=64, n=21)
    clean = gemm(kernel, "fprop", *planes, torch.float32)
    for plane in planes:
        rows = plane.shape[0]
        plane.codes.view(torch.uint8)[rows:] = 0xFF
        if plane.outer is not None and plane.outer.numel() > 1:
            plane.outer[rows:] = float("nan")
        if plane.scales is not None and plane.scales.shape[0] == plane.codes.shape[0]:
            plane.scales[rows:] = 0xFF
    assert torch.equal(gemm(kernel, "fprop", *planes, torch.float32), clean)


def test_families_do_not_mix_and_the_message_names_a_way():
    for a, b in itertools.product(QUANTIZERS, repeat=2):
        if format_of(a).family != format_of(b).family:
            for device in ("cpu", "sm_90", "sm_100"):
                with pytest.raises(PairRefused, match="family"):
                    select("fprop", format_of(a), format_of(b), device, "emulate", k=64, n=64)


def test_native_table_is_that_of_numerics_md():
    """Every pair × device: native, or refused in native mode and emulated on request."""
    native = {(a, b, device) for (a, b), kernel in NATIVE.items() for device in kernel.devices}
    assert native == {
        *(("tensor", "tensor", d) for d in ("sm_90", "sm_100")),
        *(("row", "row", d) for d in ("sm_90", "sm_100")),
        *(("tensor", "row", d) for d in ("sm_90", "sm_100")),
        *(("row", "tensor", d) for d in ("sm_90", "sm_100")),
        ("1x128", "128x128", "sm_90"),
        ("128x128", "1x128", "sm_90"),
        ("1x128", "1x128", "sm_90"),
        ("mxfp8", "mxfp8", "sm_100"),
        ("nvfp4", "nvfp4", "sm_100"),
    }

    def execution(a, b, device, mode="native"):
        return select("fprop", format_of(a), format_of(b), device, mode, k=64, n=64).execution

    for a, b, device in (
        ("tensor e5m2", "tensor e5m2", "sm_90"),
        ("block 2-D", "block 2-D", "sm_90"),
        ("block 1-D", "block 2-D", "sm_100"),
        ("mxfp8 e5m2", "mxfp8", "sm_100"),
        ("nvfp4 rows", "nvfp4", "sm_100"),
        ("mxfp8", "mxfp8", "sm_90"),
        ("nvfp4", "nvfp4", "sm_80"),
    ):
        with pytest.raises(PairRefused):
            execution(a, b, device)
        assert execution(a, b, device, "emulate") == "emulated"
    assert execution("tensor e5m2", "tensor e4m3", "sm_90") == "native"
    assert execution("tensor e4m3", "tensor e4m3", "sm_90", "reference") == "emulated"
    assert execution("identity", "identity", "cpu", "reference") == "native"


def test_identity_dtypes_must_agree_and_row_scaled_nvfp4_is_for_fprop():
    wide = dfg.IdentityQuantizer(dtype=torch.float32).plane_format("rowwise")
    with pytest.raises(PairRefused, match="one dtype"):
        select("fprop", wide, format_of("identity"), "cpu", "native", k=1, n=1)
    rows = format_of("nvfp4 rows")
    with pytest.raises(PairRefused, match="fprop only"):
        select("wgrad", rows, rows, "cpu", "emulate", k=64, n=64)


def test_counts_name_the_gemm_and_both_formats():
    reset_gemm_counts()
    module = dfg.Linear(32, 32, name="fc")
    with dfg.autocast(recipe=emulated(PLAIN["mxfp8"])):
        module(torch.randn(4, 32, requires_grad=True)).sum().backward()
    text = "mxfp8(e4m3)"
    assert gemm_counts() == {(g, text, text): 1 for g in ("fprop", "dgrad", "wgrad")}


def test_precision_settings_of_the_user_do_not_reach_emulation():
    planes = row_plane("mxfp8", torch.randn(64, 256)), row_plane("mxfp8", torch.randn(64, 256))
    kernel = select("fprop", *(p.format for p in planes), "cpu", "emulate", k=256, n=64)
    clean = gemm(kernel, "fprop", *planes, torch.float32)
    previous = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(gemm(kernel, "fprop", *planes, torch.float32), clean)
    finally:
        torch.set_float32_matmul_precision(previous)


def test_precision_settings_survive_nested_use():
    from dist_finegrain.ops.matmul import _ieee_fp32

    backend = torch.backends.mkldnn.matmul
    previous = backend.fp32_precision
    try:
        backend.fp32_precision = "tf32"
        with _ieee_fp32:
            with _ieee_fp32:
                pass
            assert backend.fp32_precision == "ieee"
        assert backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = previous


def test_every_recipe_describes_each_format_differently():
    texts = {}
    for name, factory in ALL.items():
        for tensor_type in ("input", "weight", "grad_output"):
            answer = factory(dfg.QuantizerRole("linear", tensor_type, "demo.fc1"))
            if isinstance(answer, dfg.QuantizerRequest) or name == "delayed_children":
                continue
            for direction in DIRECTIONS:
                plane_format = answer.plane_format(direction)
                assert texts.setdefault(plane_format.describe(), plane_format) == plane_format


def test_device_kind():
    assert device_kind(torch.device("cpu")) == "cpu"
    with pytest.raises(ValueError, match="device is mps"):
        device_kind(torch.device("mps"))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_only_native_sm_100_kernels_ask_for_swizzled_scales(name):
    """``stored`` is then another format; of any other kernel it is the operand's own."""
    format = format_of(name)
    for device in ("cpu", "sm_90", "sm_100"):
        kernel = select("fprop", format, format, device, "emulate", k=64, n=64)
        assert kernel.swizzled == (device == "sm_100")
        assert kernel.stored(format).swizzled == kernel.swizzled
    reference = select("fprop", format, format, "sm_100", "reference", k=64, n=64)
    assert reference.stored(format) is format


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 e5m2", "nvfp4", "nvfp4 2-D", "nvfp4 rows"])
def test_emulation_reads_swizzled_scales_too(name):
    torch.manual_seed(0)
    matrices = torch.randn(37, 130), torch.randn(21, 130)
    plain = [row_plane(name, x) for x in matrices]
    swizzled = [
        with_swizzled_scales(p.format).encode(x) for p, x in zip(plain, matrices, strict=True)
    ]
    kernel = select("fprop", plain[0].format, plain[1].format, "cpu", "emulate", k=130, n=21)
    got, wanted = (gemm(kernel, "fprop", *p, torch.float32) for p in (swizzled, plain))
    assert torch.equal(got, wanted)
