"""The compiled part, dist_finegrain._C: whether it is here, and if not, why.

Importing this module loads it, which defines torch.ops.dist_finegrain. Nothing here needs a GPU
or a driver, and an extension that cannot be used is a reason, not an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import sysconfig
import types
from pathlib import Path

import torch

_RECORD = Path(__file__).with_name("_build.json")  # written by setup.py
_REBUILD = "build it with: pip install --no-build-isolation -e ."
_OLDEST_SM = 90
_ABI = 6  # that of csrc/bindings.h
_OPERATORS = ("cast", "measure", "decode", "update_delayed", "gemm", "gemm_groups")


@dataclasses.dataclass(frozen=True)
class BuildInfo:
    """What of the compiled part can be used in this process; ``str()`` is one line per part.

    cpu: instruction set of the CPU kernels ("avx512", "avx2" or "generic"), "" without them.
    cuda: what the CUDA kernels were compiled for, e.g. ("sm_90a", "sm_100a"), () without them.
    torch: the version that they were built against, "" if never built.
    cpu_reason, cuda_reason, gemm_reason (the cuBLASLt call): why that part is missing, "" where it
    is there.
    """

    cpu: str
    cuda: tuple[str, ...]
    torch: str
    cpu_reason: str
    cuda_reason: str
    gemm_reason: str = ""

    def __str__(self) -> str:
        lines = [
            f"CPU kernels: {self.cpu or f'none, {self.cpu_reason}'}",
            f"CUDA kernels: {', '.join(self.cuda) or f'none, {self.cuda_reason}'}",
            f"cuBLASLt call: {f'none, {self.gemm_reason}' if self.gemm_reason else 'built'}",
        ]
        return "\n".join(lines + [f"built against torch {self.torch}"] * bool(self.torch))


def build_info() -> BuildInfo:
    """Which compiled kernels this installation has, and why it lacks the others.

    Without them every cast runs in plain torch; its planes are equal byte for byte.
    """
    return _info


@functools.lru_cache
def why_unavailable(device: torch.device) -> str:
    """Why compiled kernels do not run on ``device``; "" when they do."""
    if device.type == "cpu":
        return _info.cpu_reason
    if device.type != "cuda":
        return f"there are no compiled kernels for {device.type} tensors"
    if _info.cuda_reason:
        return _info.cuda_reason
    capability = torch.cuda.get_device_capability(device)
    if any(_runs_on(name, capability) for name in _info.cuda):
        return ""
    return (
        f"the CUDA kernels are built for {', '.join(_info.cuda)}, this GPU is "
        f"sm_{capability[0]}{capability[1]}; {_REBUILD}"
    )


def why_unsupported(kind: str) -> str:
    """Why this package has no compiled kernels for a kind of device such as "cpu" or "sm_90".

    "" when it has them, whether or not they are built here.
    """
    if kind == "cpu" or int(kind.removeprefix("sm_")) >= _OLDEST_SM:
        return ""
    return f"the CUDA kernels need sm_{_OLDEST_SM} or newer"


def compiled_module() -> types.ModuleType:
    """dist_finegrain._C; only where ``build_info()`` has some of it."""
    return importlib.import_module("dist_finegrain._C")


def _runs_on(name: str, capability: tuple[int, int]) -> bool:
    """Whether code such as "sm_90a" or "compute_90" runs on a GPU of this compute capability."""
    kind, major, minor, suffix = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name).groups()
    built_for = (int(major), int(minor))
    if suffix == "a":
        return built_for == capability
    if kind == "sm" or suffix:  # binary code, and family code, stay within a major version
        return built_for[0] == capability[0] and built_for <= capability
    return built_for <= capability


def _missing(reason: str, built_against: str = "") -> BuildInfo:
    return BuildInfo("", (), built_against, reason, reason, reason)


def _load(record: Path = _RECORD) -> BuildInfo:
    try:
        built = json.loads(record.read_text())
        built = {key: built[key] for key in ("python", "torch", "cpu", "cuda", "gemm", "archs")}
    except (OSError, ValueError, KeyError, TypeError):
        return _missing(f"not built; {_REBUILD}")
    if built["cpu"] and built["cuda"]:
        return BuildInfo("", (), "", built["cpu"], built["cuda"], built["gemm"])
    here = {"python": sysconfig.get_python_version(), "torch": torch.__version__}
    for what, version in here.items():
        if built[what] != version:
            # Loading it could crash: torch's C++ interface changes with every version.
            reason = f"built for {what} {built[what]}, this is {what} {version}; {_REBUILD}"
            return _missing(reason, built["torch"])
    try:
        module = importlib.import_module("dist_finegrain._C")
        if getattr(module, "ABI", 0) != _ABI:
            return _missing(f"built from another version of csrc; {_REBUILD}", built["torch"])
        variant = module.cpu_variant()
        gemm_reason = built["gemm"] or module.why_no_gemm()
    except (ImportError, OSError, RuntimeError) as error:
        return _missing(f"dist_finegrain._C cannot be loaded ({error}); {_REBUILD}", built["torch"])
    for name in _OPERATORS:
        torch.library.register_fake(f"dist_finegrain::{name}", _writes_its_arguments)
    torch.library.register_fake("dist_finegrain::linear", _of_linear)
    torch.library.register_fake("dist_finegrain::grouped_linear", _of_grouped_linear)
    reasons = (built["cpu"], built["cuda"], gemm_reason)
    return BuildInfo(variant, tuple(built["archs"]), built["torch"], *reasons)


def _writes_its_arguments(*args, **kwargs) -> None:
    """Fake kernel of every operator but whole layers: they allocate and return nothing."""


def _of_linear(x, weight, *args, **kwargs) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _of_grouped_linear(x, weights, *args, **kwargs) -> torch.Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0])


_info = _load()
