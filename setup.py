"""Builds dist_finegrain: Python, and the extension dist_finegrain._C where it can be built.

The extension has a CPU part (csrc/cpu), a CUDA part (csrc/cuda) and with it the cuBLASLt call
(csrc/gemm), which needs that library's header only. What is left out, and why, is kept in
dist_finegrain/_build.json for dist_finegrain.build_info(). No GPU is needed. Read at build time
only: DIST_FINEGRAIN_SKIP_CPU=1, DIST_FINEGRAIN_SKIP_CUDA=1, TORCH_CUDA_ARCH_LIST, CXX, and
MAX_JOBS. pyproject.toml holds the tools' settings.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    torch, no_torch = None, f"torch is not importable at build time ({error})"

ROOT = Path(__file__).resolve().parent
NAME = "dist_finegrain._C"
RECORD = Path("dist_finegrain", "_build.json")
CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fopenmp", "-Wall"]  # -std is what this torch needs
# A compiler that links its C++ runtime statically would mix it with torch's: numbers in messages
# are then printed by a facet of the other one, or crash.
LINK_FLAGS = ["-Wl,--exclude-libs,libstdc++.a"]
NVCC_FLAGS = [
    "-O3", "-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true",
    "-lineinfo", "-Xcompiler=-ffp-contract=off",
    # torch defines these; without them code means what CUDA's headers say.
    "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]  # fmt: skip
DEFAULT_ARCHS = ("9.0a", "10.0a")
OLDEST_ARCH = (9, 0)
USE_NO_ISOLATION = "install with: pip install --no-build-isolation -e ."


def known_archs(nvcc: str) -> set[str]:
    """What this nvcc can compile for, e.g. {"90", "100"}."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return set(re.findall(r"compute_(\d+)", listed.stdout))


def choose_archs(
    requested: str, known: set[str], visible: list[tuple[int, int]]
) -> tuple[list[str], list[str]]:
    """(architectures such as "9.0a" or "9.0+PTX", notes on what was dropped).

    requested: TORCH_CUDA_ARCH_LIST; "" means the visible GPUs, or without any DEFAULT_ARCHS.
    known: what nvcc knows; visible: compute capabilities.
    """
    wanted = re.split(r"[\s;,]+", requested.strip()) if requested.strip() else []
    if not wanted:
        wanted = [f"{major}.{minor}a" for major, minor in visible] or list(DEFAULT_ARCHS)
    chosen, notes = [], []
    for arch in dict.fromkeys(wanted):
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if match is None:
            notes.append(f"{arch} dropped: not of the form 9.0, 9.0a or 9.0+PTX")
        elif (int(match[1]), int(match[2])) < OLDEST_ARCH:
            notes.append(f"{arch} dropped: the kernels need 9.0 or newer")
        elif match[1] + match[2] not in known:
            notes.append(f"{arch} dropped: this nvcc does not know it")
        else:
            chosen.append(arch)
    return chosen, notes


def arch_names(arch: str) -> list[str]:
    """ "9.0+PTX" → ["sm_90", "compute_90"]: what -gencode is told to emit."""
    number = arch.removesuffix("+PTX").replace(".", "")
    return [f"sm_{number}", *([f"compute_{number}"] if arch.endswith("+PTX") else [])]


def gencode(arch: str) -> list[str]:
    """The nvcc flags of one architecture."""
    number = arch.removesuffix("+PTX").replace(".", "")
    return [f"-gencode=arch=compute_{number},code={code}" for code in arch_names(arch)]


def is_set(variable: str) -> bool:
    """Whether a switch such as DIST_FINEGRAIN_SKIP_CUDA is on."""
    return os.environ.get(variable, "") not in ("", "0")


def why_no_cpu() -> str:
    """Why the CPU part is not built; "" when it is."""
    if is_set("DIST_FINEGRAIN_SKIP_CPU"):
        return "DIST_FINEGRAIN_SKIP_CPU was set"
    return "" if sources("csrc/cpu/*.cpp") else "csrc/cpu holds no sources"


def plan_cuda() -> tuple[list[str], str]:
    """(architectures, "") of the CUDA part, or ([], why it is not built)."""
    if is_set("DIST_FINEGRAIN_SKIP_CUDA"):
        return [], "DIST_FINEGRAIN_SKIP_CUDA was set"
    if torch.version.cuda is None:
        return [], f"torch {torch.__version__} is not a CUDA build"
    home = cpp_extension.CUDA_HOME
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    if nvcc is None:
        return [], "nvcc was not found; put it on PATH or set CUDA_HOME"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release and release[1] != torch.version.cuda.split(".")[0]:
        return [], f"nvcc is {release[1]}.{release[2]}, torch was built with {torch.version.cuda}"
    if not sources("csrc/cuda/*.cu"):
        return [], "csrc/cuda holds no sources"
    devices = range(torch.cuda.device_count())
    visible = sorted({torch.cuda.get_device_capability(device) for device in devices})
    requested = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    archs, notes = choose_archs(requested, known_archs(nvcc), visible)
    for note in notes:
        print(f"dist_finegrain: {note}", file=sys.stderr)
    return archs, "" if archs else f"no architecture is left: {'; '.join(notes)}"


def plan_gemm() -> tuple[list[str], str]:
    """(compiler flags, "") of the cuBLASLt call, or ([], why it is not built)."""
    if not sources("csrc/gemm/*.cpp"):
        return [], "csrc/gemm holds no sources"
    spec = importlib.util.find_spec("nvidia")  # the wheels that torch's own depend on
    wheels = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    toolkit = Path(cpp_extension.CUDA_HOME, "include")
    folders = [toolkit, *sorted(folder for w in wheels for folder in w.glob("*/include"))]
    headers = [folder / "cublasLt.h" for folder in folders if (folder / "cublasLt.h").is_file()]
    if not headers:
        return [], "cublasLt.h was not found in CUDA_HOME/include nor in an nvidia wheel"
    if "CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F" not in headers[0].read_text(errors="replace"):
        return [], "cublasLt.h is older than 12.9, whose block scales are needed"
    # A wheel's folder has all of CUDA's headers: the toolkit's, which nvcc is of, come first.
    found = headers[0].parent
    return [] if found == toolkit else [f"-idirafter{found}"], ""


def why_no_compiler() -> str:
    """Why no C++ can be compiled; "" when a compiler is there."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    found = shutil.which(command[0]) or (command == ["c++"] and shutil.which("g++"))
    return "" if found else f"no C++ compiler: {command[0]} was not found"


def sources(pattern: str) -> list[str]:
    """Files of csrc, relative to the repository: setuptools wants them so."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def plan_extension() -> tuple[Extension, dict]:
    """The extension, and the record of what it holds: why not ("" = built), per part."""
    if torch is None:
        reason = f"{no_torch}; {USE_NO_ISOLATION}"
    else:
        reason = why_no_compiler()
    no_cpu, (archs, no_cuda), gemm_flags = why_no_cpu(), ([], ""), []
    if not reason:
        archs, no_cuda = plan_cuda()
    no_gemm = "it needs the CUDA part, which is not built"
    if not (reason or no_cuda):
        gemm_flags, no_gemm = plan_gemm()
    record = {
        "torch": "" if torch is None else torch.__version__,
        "python": sysconfig.get_python_version(),
        "cpu": reason or no_cpu,
        "cuda": reason or no_cuda,
        "gemm": reason or no_gemm,
        "archs": [name for arch in archs for name in arch_names(arch)],
    }
    if reason or (no_cpu and no_cuda):
        return Extension(NAME, [], optional=True), record
    files = sources("csrc/bindings*.cpp")
    arguments = {
        "define_macros": [],
        "extra_compile_args": {"cxx": CXX_FLAGS},
        "extra_link_args": LINK_FLAGS,
        "depends": sources("csrc/**/*.h") + sources("csrc/**/*.cuh"),
        "optional": True,
    }
    if not no_cpu:
        files += sources("csrc/cpu/*.cpp")
        arguments["define_macros"].append(("DFG_WITH_CPU", None))
    if no_cuda:
        return cpp_extension.CppExtension(NAME, files, **arguments), record
    files += sources("csrc/cuda/*.cu")
    arguments["define_macros"].append(("DFG_WITH_CUDA", None))
    if not no_gemm:
        files += sources("csrc/gemm/*.cpp")
        arguments["define_macros"].append(("DFG_WITH_GEMM", None))
        arguments["extra_compile_args"]["cxx"] = [*CXX_FLAGS, *gemm_flags]
    flags = [flag for arch in archs for flag in gencode(arch)]
    arguments["extra_compile_args"]["nvcc"] = [*NVCC_FLAGS, f"--threads={len(archs)}", *flags]
    return cpp_extension.CUDAExtension(NAME, files, **arguments), record


def build_command(record: dict) -> type[build_ext]:
    """A build_ext that keeps ``record``, and a failed build's reason, beside the extension."""
    base = build_ext if torch is None else cpp_extension.BuildExtension

    class Build(base):
        def finalize_options(self):
            super().finalize_options()
            # One place per torch and Python, so that a second build compiles what changed only.
            kind = f"{sysconfig.get_python_version()}-torch-{record['torch'] or 'none'}"
            self.build_temp = str(ROOT / "build" / f"temp-{kind}")
            self.force = True  # ninja knows better than timestamps what flags have changed

        def run(self):
            super().run()
            text = json.dumps(record, indent=2) + "\n"
            for folder in [Path(self.build_lib), *([ROOT] if self.inplace else [])]:
                path = folder / RECORD
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

        def build_extensions(self):
            Path(self.get_ext_fullpath(NAME)).unlink(missing_ok=True)
            if self.extensions[0].sources:
                try:
                    super().build_extensions()
                except Exception as error:
                    self.note_failure(error)
            if not Path(self.get_ext_fullpath(NAME)).exists():
                self.note_failure("nothing was built")
                # What an earlier build left is no longer what csrc says.
                self.inplace_result.unlink(missing_ok=True)

        def build_extension(self, extension):
            try:
                super().build_extension(extension)
            except Exception as error:
                self.note_failure(error)
                raise

        @property
        def inplace_result(self) -> Path:
            return ROOT / Path(*NAME.split(".")[:-1]) / Path(self.get_ext_fullpath(NAME)).name

        def note_failure(self, error):
            reason = f"the build failed ({error}); python setup.py build_ext --inplace shows how"
            for part in ("cpu", "cuda", "gemm"):
                if not record[part]:
                    record[part] = reason
                    print(f"dist_finegrain: {part} kernels: {reason}", file=sys.stderr)
            record["archs"] = []

    Build.__name__ = "build_ext"
    return Build


def main() -> None:
    """Run setuptools."""
    extension, record = plan_extension()
    setup(
        name="dist_finegrain",
        version="0.1.0",
        description="Fine-grained low-precision training for Megatron-style models",
        license="Apache-2.0",
        packages=find_packages(include=["dist_finegrain", "dist_finegrain.*"]),
        ext_modules=[extension],
        cmdclass={"build_ext": build_command(record)},
        python_requires=">=3.11",
        install_requires=["torch>=2.11"],
        extras_require={
            "test": ["numpy", "pytest", "safetensors"],
            "plot": ["matplotlib"],
            "dev": ["clang-format", "codespell", "pre-commit", "ruff"],
        },
    )


if __name__ == "__main__":
    main()
