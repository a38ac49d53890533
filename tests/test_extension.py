"""Building and finding the compiled kernels: what is built, what is not and why (bug case 39)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import extension
from dist_finegrain.formats import fused, fused_delayed, fused_grouped, fused_options
from dist_finegrain.formats.mxfp8 import MXFP8Format

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = ("DIST_FINEGRAIN_SKIP_CPU", "DIST_FINEGRAIN_SKIP_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX")
OLDER = ("75", "80", "90")  # what the nvcc of CUDA 12.6 knows, in part
NEWER = ("80", "90", "100", "103", "120")


@pytest.fixture
def script(monkeypatch):
    """setup.py as a module, with no build variable set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("dist_finegrain_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cuda(script, monkeypatch, tmp_path):
    """Makes setup.py see a CUDA build of torch, an nvcc of some version and some GPUs."""

    def see(archs=NEWER, release="13.0", torch_cuda="13.0", gpus=()):
        nvcc = tmp_path / "bin/nvcc"
        nvcc.parent.mkdir(exist_ok=True)
        listed = "\\n".join(f"compute_{arch}" for arch in archs)
        nvcc.write_text(
            f'#!/bin/sh\ncase "$1" in --version) echo "release {release}, V{release}.1" ;;\n'
            f'*) printf "{listed}\\n" ;; esac\n'
        )
        nvcc.chmod(0o755)
        devices = types.SimpleNamespace(
            device_count=lambda: len(gpus), get_device_capability=gpus.__getitem__
        )
        fake = types.SimpleNamespace(
            __version__="2.13.0", version=types.SimpleNamespace(cuda=torch_cuda), cuda=devices
        )
        monkeypatch.setattr(script, "torch", fake)
        monkeypatch.setattr(script.cpp_extension, "CUDA_HOME", str(tmp_path))

    return see


@pytest.mark.parametrize(
    "requested, known, visible, chosen, dropped",
    [
        ("", NEWER, [], ["9.0a", "10.0a"], []),
        ("", OLDER, [], ["9.0a"], ["10.0a"]),
        ("", NEWER, [(9, 0)], ["9.0a"], []),
        ("", OLDER, [(10, 0)], [], ["10.0a"]),
        ("", NEWER, [(8, 0)], [], ["8.0a"]),
        ("9.0", NEWER, [], ["9.0"], []),
        ("9.0a", NEWER, [(10, 0)], ["9.0a"], []),
        ("10.0a", NEWER, [], ["10.0a"], []),
        ("10.0a", OLDER, [], [], ["10.0a"]),
        ("8.0;9.0a 10.0a,9.0a", OLDER, [], ["9.0a"], ["8.0", "10.0a"]),
        ("7.5 9.0 10.0 12.0+PTX", NEWER, [], ["9.0", "10.0", "12.0+PTX"], ["7.5"]),
        ("Hopper", NEWER, [], [], ["Hopper"]),
    ],
)
def test_architectures_are_those_that_nvcc_knows(
    script, requested, known, visible, chosen, dropped
):
    got, notes = script.choose_archs(requested, set(known), visible)
    assert got == chosen
    assert [note.split(" dropped: ")[0] for note in notes] == dropped


@pytest.mark.parametrize("requested", ["", "9.0", "9.0a", "10.0a"])
@pytest.mark.parametrize("known", [OLDER, NEWER])
def test_no_gpu_is_needed_and_an_older_nvcc_is_not_asked_for_more(
    script, cuda, monkeypatch, capsys, requested, known
):
    """DeepGEMM#172: nvcc was asked for an architecture that its version does not know."""
    cuda(archs=known)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    archs, reason = script.plan_cuda()
    names = {number for arch in archs for number in script.gencode(arch)}
    wanted = {"": {"90a", "100a"}, "9.0": {"90"}, "9.0a": {"90a"}, "10.0a": {"100a"}}[requested]
    wanted = {a for a in wanted if a.rstrip("a") in known}
    assert names == {f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted}
    has_dropped = known is OLDER and requested in ("", "10.0a")
    assert ("10.0a dropped: this nvcc does not know it" in capsys.readouterr().err) == has_dropped
    assert bool(reason) == (not wanted)
    if reason:
        assert reason.startswith("no architecture is left: 10.0a dropped")


def test_ptx_is_emitted_where_asked_for(script):
    assert script.gencode("12.0+PTX") == [
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


def test_every_way_to_have_no_cuda_part_has_its_reason(script, cuda, monkeypatch):
    cuda(torch_cuda=None)
    assert script.plan_cuda() == ([], "torch 2.13.0 is not a CUDA build")
    cuda(release="12.4")
    assert script.plan_cuda() == ([], "nvcc is 12.4, torch was built with 13.0")
    cuda(gpus=[(8, 0), (8, 0)])
    assert "8.0a dropped: the kernels need 9.0 or newer" in script.plan_cuda()[1]
    cuda(gpus=[(9, 0)])
    assert script.plan_cuda() == (["9.0a"], "")
    monkeypatch.setattr(script.cpp_extension, "CUDA_HOME", None)
    assert script.plan_cuda()[1].startswith("nvcc was not found")
    monkeypatch.setenv("DIST_FINEGRAIN_SKIP_CUDA", "1")
    assert script.plan_cuda() == ([], "DIST_FINEGRAIN_SKIP_CUDA was set")


def test_either_part_can_be_skipped(script, monkeypatch):
    monkeypatch.setattr(script, "plan_cuda", lambda: ([], "no nvcc"))
    made, record = script.plan_extension()
    assert record["cpu"] == "" and record["torch"] == torch.__version__
    assert any(source.startswith("csrc/cpu/") for source in made.sources)
    assert all(not Path(source).is_absolute() for source in made.sources)
    monkeypatch.setenv("DIST_FINEGRAIN_SKIP_CPU", "1")
    made, record = script.plan_extension()
    assert record["cpu"] == "DIST_FINEGRAIN_SKIP_CPU was set" and not made.sources
    assert record["gemm"] == "it needs the CUDA part, which is not built"
    monkeypatch.setattr(script, "plan_cuda", lambda: (["9.0a"], ""))
    monkeypatch.setattr(script, "plan_gemm", lambda: ([], "no cublasLt.h"))
    monkeypatch.setattr(script.cpp_extension, "CUDAExtension", script.Extension)
    made, record = script.plan_extension()
    assert record["gemm"] == "no cublasLt.h" and ("DFG_WITH_GEMM", None) not in made.define_macros
    assert not any(source.startswith("csrc/gemm/") for source in made.sources)
    assert record["archs"] == ["sm_90a"] and ("DFG_WITH_CUDA", None) in made.define_macros
    assert not any(source.startswith("csrc/cpu/") for source in made.sources)
    flags = made.extra_compile_args["nvcc"]
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags and "-fmad=false" in flags
    assert not any("fast" in flag for flag in flags + made.extra_compile_args["cxx"])


def test_the_cublaslt_call_needs_a_header_of_12_9_or_newer(script, monkeypatch, tmp_path):
    """Of the toolkit first; that of a wheel comes after every other folder, for C++ only."""
    wheels = tmp_path / "nvidia"
    spec = types.SimpleNamespace(submodule_search_locations=[str(wheels)])
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(script.cpp_extension, "CUDA_HOME", str(tmp_path / "cuda"))
    assert script.plan_gemm()[1].startswith("cublasLt.h was not found in CUDA_HOME/include nor")
    new = "CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F = 5,"
    for folder, flags in (
        (wheels / "cu13/include", [f"-idirafter{wheels / 'cu13/include'}"]),
        (tmp_path / "cuda/include", []),
    ):
        folder.mkdir(parents=True)
        (folder / "cublasLt.h").write_text("CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0,")
        assert script.plan_gemm() == (
            [],
            "cublasLt.h is older than 12.9, whose block scales are needed",
        )
        (folder / "cublasLt.h").write_text(new)
        assert script.plan_gemm() == (flags, "")
    monkeypatch.setattr(script, "plan_cuda", lambda: (["9.0a"], ""))
    monkeypatch.setattr(script, "plan_gemm", lambda: (["-idirafter/wheel"], ""))
    monkeypatch.setattr(script.cpp_extension, "CUDAExtension", script.Extension)
    made, record = script.plan_extension()
    assert record["gemm"] == "" and ("DFG_WITH_GEMM", None) in made.define_macros
    assert "-idirafter/wheel" in made.extra_compile_args["cxx"]
    assert "-idirafter/wheel" not in made.extra_compile_args["nvcc"]
    assert "csrc/gemm/lt.cpp" in made.sources


def test_without_torch_or_compiler_the_package_is_plain_python(script, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    made, record = script.plan_extension()
    assert not made.sources and made.optional
    reason = "no C++ compiler: no-such-compiler was not found"
    assert record["cpu"] == record["cuda"] == record["gemm"] == reason
    monkeypatch.setattr(script, "torch", None)
    monkeypatch.setattr(script, "no_torch", "torch is not importable at build time", raising=False)
    made, record = script.plan_extension()
    assert not made.sources and "--no-build-isolation" in record["cpu"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_failed_compile_installs_without_the_extension(tmp_path):
    shutil.copy(ROOT / "setup.py", tmp_path)
    for name, text in (("bindings.cpp", "#error broken\n"), ("cpu/cast.cpp", "")):
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).write_text(text)
    (tmp_path / "dist_finegrain").mkdir()
    (tmp_path / "dist_finegrain/__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    info = extension._load(tmp_path / "dist_finegrain/_build.json")
    assert not info.cpu and "the build failed" in info.cpu_reason
    assert not list((tmp_path / "dist_finegrain").glob("*.so"))


def record(tmp_path, **changes):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    built = {
        "torch": torch.__version__,
        "python": python,
        "cpu": "",
        "cuda": "",
        "gemm": "",
        "archs": [],
    }
    path = tmp_path / "_build.json"
    path.write_text(json.dumps({**built, **changes}))
    return path


def test_info_says_why_nothing_can_be_used(tmp_path, monkeypatch):
    """Bug case 38: extension trouble is one message with cause and build command."""
    missing = extension._load(tmp_path / "none.json")
    assert missing.cpu == "" and missing.cuda == () and missing.torch == ""
    assert missing.cpu_reason == missing.cuda_reason == missing.gemm_reason
    assert missing.cpu_reason.startswith("not built; build it with: pip install")

    for text in ("{}", "[]", '{"cpu": ""}', "no json"):
        (tmp_path / "odd.json").write_text(text)
        assert extension._load(tmp_path / "odd.json") == missing

    reasons = {"cpu": "first reason", "cuda": "second reason", "gemm": "third reason"}
    skipped = extension._load(record(tmp_path, **reasons))
    assert (skipped.cpu_reason, skipped.cuda_reason) == ("first reason", "second reason")
    assert str(skipped) == (
        "CPU kernels: none, first reason\nCUDA kernels: none, second reason\n"
        "cuBLASLt call: none, third reason"
    )

    def refuse(name):
        raise AssertionError("must not be loaded")

    monkeypatch.setattr(importlib, "import_module", refuse)
    other = extension._load(record(tmp_path, torch="2.0.0+cu118"))
    assert f"torch 2.0.0+cu118, this is torch {torch.__version__}" in other.cpu_reason
    assert other.torch == "2.0.0+cu118" and "pip install" in other.cuda_reason
    other = extension._load(record(tmp_path, python="3.8"))
    assert "python 3.8, this is python" in other.cpu_reason

    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(ABI=0))
    older = extension._load(record(tmp_path))
    assert "another version of csrc" in older.gemm_reason
    assert "another version of csrc" in older.cpu_reason and "pip install" in older.cuda_reason

    def undefined_symbol(name):
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(importlib, "import_module", undefined_symbol)
    broken = extension._load(record(tmp_path))
    assert "undefined symbol" in broken.cpu_reason and "pip install" in broken.cpu_reason


def test_a_library_that_cannot_be_loaded_is_the_reason(tmp_path, monkeypatch):
    """The header was there at build time, libcublasLt is not now; the other parts still run."""
    module = types.SimpleNamespace(
        ABI=extension._ABI, cpu_variant=lambda: "avx2", why_no_gemm=lambda: "no libcublasLt.so.13"
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(torch.library, "register_fake", lambda *_: None)
    info = extension._load(record(tmp_path, archs=["sm_90a"]))
    assert (info.cpu, info.cuda, info.gemm_reason) == ("avx2", ("sm_90a",), "no libcublasLt.so.13")
    module.why_no_gemm = lambda: ""
    assert extension._load(record(tmp_path)).gemm_reason == ""
    assert str(extension._load(record(tmp_path))).splitlines()[2] == "cuBLASLt call: built"


def test_info_of_this_installation_is_consistent():
    info = dfg.build_info()
    assert bool(info.cpu) == (not info.cpu_reason) and bool(info.cuda) == (not info.cuda_reason)
    assert extension.why_unavailable(torch.device("cpu")) == info.cpu_reason
    assert "meta" in extension.why_unavailable(torch.device("meta"))
    assert str(info).startswith("CPU kernels: ")
    if info.cpu:
        assert info.cpu in ("avx512", "avx2", "generic") and info.torch == torch.__version__


@pytest.mark.skipif(not dfg.build_info().cpu, reason="needs the compiled CPU kernels")
def test_another_instruction_set_runs_until_the_best_is_chosen_again():
    from dist_finegrain import _C

    before = _C.cpu_variant()
    try:
        with pytest.raises(RuntimeError, match='name is "mmx"; accepted .*: generic.*e.g. choose'):
            _C.choose_cpu_variant("mmx")
        assert _C.cpu_variant() == before
        _C.choose_cpu_variant("generic")
        assert _C.cpu_variant() == "generic"
        _C.choose_cpu_variant("")
        assert _C.cpu_variant() in ("avx512", "avx2", "generic")
    finally:
        _C.choose_cpu_variant(before)


@pytest.mark.parametrize(
    "built, capability, runs",
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_100", (10, 3), True),
        ("sm_103", (10, 0), False),
        ("sm_90", (12, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_120", (9, 0), False),
    ],
)
def test_a_gpu_that_nothing_was_built_for_is_named(monkeypatch, built, capability, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(extension, "_info", extension.BuildInfo("", (built,), "2.13.0", "", ""))
    reason = extension.why_unavailable.__wrapped__(torch.device("cuda", 0))
    assert (reason == "") == runs
    assert runs or (built in reason and f"sm_{capability[0]}{capability[1]}" in reason)


def test_kinds_of_devices_that_the_package_has_kernels_for():
    assert [extension.why_unsupported(kind) for kind in ("cpu", "sm_90", "sm_100")] == [""] * 3
    assert "sm_90 or newer" in extension.why_unsupported("sm_80")


def as_if_not_built(monkeypatch, reason: str) -> None:
    for module in (fused, fused_options, fused_delayed):
        monkeypatch.setattr(module, "why_unavailable", lambda device: reason)


def test_fused_functions_that_were_not_built_raise_by_name(monkeypatch):
    as_if_not_built(monkeypatch, "DIST_FINEGRAIN_SKIP_CPU was set")
    x, format = torch.ones(4, 32), MXFP8Format("e4m3")
    assert fused.why_not(x.device, format, None) == "DIST_FINEGRAIN_SKIP_CPU was set"
    state = fused_delayed.DelayedState(torch.ones(1), torch.zeros(2), torch.ones(1), True, 448.0, 0)
    ends = torch.tensor([4], dtype=torch.int32)
    for name, call in (
        ("cast", lambda: fused.cast(x, format, None)),
        ("measure", lambda: fused.measure(x, format, None)),
        ("cast_grouped", lambda: fused_grouped.cast_grouped(x, ends, format, None)),
        ("decode", lambda: fused.decode(format.encode(x), torch.float32)),
        ("update_delayed", lambda: fused_delayed.update_delayed([state])),
    ):
        with pytest.raises(RuntimeError, match=f"{name} needs .* on cpu: .*SKIP_CPU was set"):
            call()


@pytest.mark.skipif(
    not dfg.build_info().cpu or bool(dfg.build_info().cuda), reason="needs a build without CUDA"
)
def test_operators_of_a_part_that_was_not_built_raise_by_name():
    """Row 39: a kernel that was not built raises by name when called."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    codes, out = torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(16, 32)
    with pytest.raises(RuntimeError, match="dist_finegrain::decode: the CUDA.*build_info"):
        torch.ops.dist_finegrain.decode.default.redispatch(keys, codes, None, None, 3, out)


def test_a_subclass_of_a_format_is_encoded_by_itself():
    class Doubled(MXFP8Format):
        def encode(self, x, statistic=None, rounding=None):
            return super().encode(x * 2, statistic, rounding)

    assert "its own class" in fused.why_not(torch.device("cpu"), Doubled("e4m3"))


def test_plain_torch_casts_what_was_not_built(monkeypatch):
    """Same planes with and without the extension."""
    x = torch.randn(40, 48, dtype=torch.bfloat16)
    quantizer = dfg.HybridQuantizer(
        rowwise_quantizer=dfg.MXFP8Quantizer(), columnwise_quantizer=dfg.NVFP4Quantizer(),
        columnwise_source="rowwise_dequantized",
    )  # fmt: skip
    compiled = quantizer(x)
    as_if_not_built(monkeypatch, "not built")
    monkeypatch.setattr(fused, "cast", None)
    plain = quantizer(x)
    for direction in ("rowwise", "columnwise"):
        parts = zip(compiled.plane(direction).parts, plain.plane(direction).parts, strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in parts)


def test_plan_answers_a_kind_for_the_package_and_a_device_for_this_build(monkeypatch):
    from dist_finegrain import planning
    from tests.test_planning import demo_model

    recipe = dfg.CustomRecipe(dfg.factories.current_scaling_factory, execution="native")
    rows = dfg.plan(demo_model(), recipe, device="sm_90").rows
    assert {(row.bucket, row.reason) for row in rows} == {("fast", "")}
    monkeypatch.setattr(planning, "device_kind", lambda device: "sm_90")
    monkeypatch.setattr(planning, "why_unavailable", lambda device: "no nvcc")
    rows = dfg.plan(demo_model(), recipe, device=torch.device("cpu")).rows
    reason = "casts are plain torch, not one fused kernel (no nvcc)"
    assert {(row.bucket, row.reason) for row in rows} == {("unoptimized", reason)}
