"""Which kernel a grouped pair gets, and what is refused, by name."""

from __future__ import annotations

import pytest
import torch

from dist_finegrain.formats import fused
from dist_finegrain.formats.identity import IdentityFormat
from dist_finegrain.ops.experts import Experts
from dist_finegrain.ops.gemm import PairRefused
from dist_finegrain.ops.grouped import grouped_gemm, select_grouped
from tests.formats.fused_cases import SWIZZLED

from . import grouped_cases
from .grouped_cases import FORMATS, NATIVE, Layer

CHOICE = {"k": 64, "n": 48}


@pytest.fixture(autouse=True)
def compiled():
    if reason := fused.why_not(torch.device("cpu")):
        pytest.skip(reason)


def test_which_pairs_are_native():
    def choose(name, a, b, device="sm_90", mode="native", **options):
        return select_grouped(name, FORMATS[a], FORMATS[b], device, mode, **{**CHOICE, **options})

    for a in FORMATS:
        for b in FORMATS:
            is_native = a == b == "identity" or {a, b} <= set(NATIVE)
            if grouped_cases.runs("fprop", FORMATS[a], FORMATS[b]):
                if is_native:
                    assert choose("fprop", a, b).execution == "native"
                else:
                    with pytest.raises(PairRefused, match="ways out"):
                        choose("fprop", a, b)
                    assert choose("fprop", a, b, mode="emulate").execution == "emulated"
    assert choose("wgrad", "row", "row").has_fast
    assert "rounded to BF16" in choose("wgrad", "row", "row").reason
    assert choose("fprop", "row", "row").reason == ""
    with pytest.raises(PairRefused, match="sm_90 only, not on sm_100"):
        choose("fprop", "row", "row", "sm_100")
    with pytest.raises(PairRefused, match="E4M3 only"):
        choose("dgrad", "current_e5m2", "current")
    with pytest.raises(PairRefused, match=r"in_features of this rank is 767.*768"):
        choose("fprop", "row", "row", k=767)
    with pytest.raises(PairRefused, match="family"):
        choose("fprop", "row", "mxfp8", mode="emulate")
    with pytest.raises(PairRefused, match="RHT"):
        choose("wgrad", "nvfp4", "nvfp4_rht", mode="emulate")
    with pytest.raises(PairRefused, match="reach over experts"):
        choose("wgrad", "block_2d", "block", "cpu", "emulate")


def test_known_sizes_open_the_single_native_kernels():
    def choose(a, b, device="sm_90", mode="native", **options):
        options = {**CHOICE, "sizes_known": True, **options}
        return select_grouped("fprop", FORMATS[a], FORMATS[b], device, mode, **options)

    for a, b in (("block", "block_2d"), ("current_e5m2", "current"), ("mxfp8", "mxfp8")):
        kernel = choose(a, b, "sm_100" if a == "mxfp8" else "sm_90", n=64)
        assert kernel.execution == "native" and kernel.needs_sizes
        assert "one by one" in kernel.reason
    with pytest.raises(PairRefused, match="m_splits as a Python list"):
        choose("block", "block_2d", sizes_known=False)
    assert choose("row", "row").name == "scaled_grouped_mm rowwise"
    assert choose("block", "block", mode="reference").execution == "emulated"
    for dtype in (torch.float16, torch.float32):
        assert choose("identity", "identity", dtype=dtype).needs_sizes
        with pytest.raises(PairRefused, match="m_splits"):
            choose("identity", "identity", dtype=dtype, sizes_known=False)
    with pytest.raises(PairRefused, match="waits for the device"):
        choose("mxfp8", "mxfp8", "sm_80", "emulate", sizes_known=False)
    assert choose("mxfp8", "mxfp8", "sm_80", "emulate").needs_sizes


def test_arguments_that_do_not_fit_are_named():
    layer, format = Layer([16, 0, 21], n=48, k=64), FORMATS["row"]
    kernel = select_grouped("fprop", format, format, "cpu", "emulate", **CHOICE)
    a, b, _ = layer.planes("fprop", format, format)

    def call(*args, a=a, b=b, ends=layer.ends, name="fprop", **options):
        return grouped_gemm(kernel, name, a, b, ends, torch.float32, **options)

    for message, options in {
        "ends of a fprop is torch.int64": {"ends": layer.ends.long()},
        "b holds 3 experts, ends 2": {"ends": layer.ends[1:]},
        "which take 36 of 37 rows": {"ends": layer.ends - 1},
        "which take 16 of 37 rows": {"sizes": [16, 0, 0]},
        "at least 0 that account": {"sizes": [16, -1, 22]},
        "3 counts": {"sizes": [16, 21]},
        "name is 'forward'": {"name": "forward"},
        "out is torch.float32": {"out": torch.empty(37, 47)},
        "accumulate is True": {"accumulate": True},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**options)
    with pytest.raises(TypeError, match=r"b of a fprop is Plane; accepted: Experts"):
        call(b=a)
    narrow = Layer([16, 0, 21], n=48, k=32).planes("fprop", format, format)[0]
    with pytest.raises(ValueError, match="a has contraction 32, b 64"):
        call(a=narrow)
    dy, x, column_ends = layer.planes("wgrad", format, format)
    with pytest.raises(ValueError, match="column_ends of a wgrad is None"):
        call(name="wgrad", a=dy, b=x)
    with pytest.raises(ValueError, match=r"column_ends is \[17, 33, 65\]"):
        call(name="wgrad", a=dy, b=x, column_ends=column_ends + 1)


def test_experts_that_do_not_fit_are_named():
    layer = Layer([4, 4], n=24, k=40)
    row = grouped_cases.grouped(layer.x, layer.ends, FORMATS["row"], None).row
    with pytest.raises(ValueError, match="count is 3 for a plane of 8 rows"):
        Experts.of_rows(row, 3)
    column = grouped_cases.grouped(layer.x, layer.ends, None, FORMATS["mxfp8"]).column
    with pytest.raises(ValueError, match="rows is 97 and count 1, which take 128"):
        Experts.of_columns(column, 1, 97)
    planes = [grouped_cases.encoded(w, FORMATS["row"]) for w in layer.w]
    with pytest.raises(ValueError, match="planes is empty"):
        Experts.of_planes([])
    planes.append(grouped_cases.encoded(layer.w[0, :8], FORMATS["row"]))
    with pytest.raises(ValueError, match=r"planes\[2\] is float8_row"):
        Experts.of_planes(planes)
    swizzled = [grouped_cases.encoded(w, SWIZZLED["mxfp8"]) for w in layer.w]
    with pytest.raises(ValueError, match="cannot be stacked"):
        Experts.of_planes(swizzled)


def test_an_identity_dtype_of_its_own_decides():
    """A BF16 Identity of an FP32 model is grouped, an FP32 one of a BF16 model is not."""
    narrow, wide = IdentityFormat(torch.bfloat16), IdentityFormat(torch.float32)
    options = {**CHOICE, "dtype": torch.float32}
    assert (
        select_grouped("fprop", narrow, narrow, "sm_90", "native", **options).name == "grouped_mm"
    )
    with pytest.raises(PairRefused, match="not torch.float32"):
        select_grouped("fprop", wide, wide, "sm_90", "native", **CHOICE)
