"""NVIDIA's apex, probed by what it can do: its extension modules, not by the name of a package.

PyPI's ``apex`` is an unrelated web toolkit; NVIDIA's may be installed without its CUDA extensions.
Either imports fine and fails later, so each use asks here for exactly what it needs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

FUSED_NORM = "fused_layer_norm_cuda"
MULTI_TENSOR = "amp_C"
WGRAD_ACCUMULATION = "fused_weight_gradient_mlp_cuda"
EXTENSIONS = (FUSED_NORM, MULTI_TENSOR, WGRAD_ACCUMULATION)
_NORM_MODULE = "apex.normalization.fused_layer_norm"
_NORM_FUNCTIONS = ("fused_layer_norm_affine", "fused_rms_norm_affine")


@dataclasses.dataclass(frozen=True)
class ApexProbe:
    """What of apex is usable here; every field is "" where it is there, else why it is not.

    package: the Python package; extensions: (name, reason) of each of EXTENSIONS.
    """

    package: str
    extensions: tuple[tuple[str, str], ...]

    def why_no(self, extension: str) -> str:
        """Why one of EXTENSIONS is missing; "" if it is there. KeyError for another name."""
        return dict(self.extensions)[extension]

    def __str__(self) -> str:
        lines = [f"apex: {self.package or 'NVIDIA apex is installed'}"]
        lines += [f"  {name}: {reason or 'available'}" for name, reason in self.extensions]
        return "\n".join(lines)


@functools.cache
def probe() -> ApexProbe:
    """Look once for the package and its extensions. ``probe.cache_clear()`` looks again."""
    return ApexProbe(_why_no_package(), tuple((name, _why_no_import(name)) for name in EXTENSIONS))


@functools.cache
def norm_functions() -> tuple[dict[str, Callable], str]:
    """(apex's fused functions by name, "") or ({}, why they are not usable)."""
    reason = probe().why_no(FUSED_NORM) or probe().package or _why_no_import(_NORM_MODULE)
    if reason:
        return {}, reason
    module = importlib.import_module(_NORM_MODULE)
    missing = [name for name in _NORM_FUNCTIONS if not hasattr(module, name)]
    if missing:
        return {}, f"{_NORM_MODULE} has no {', '.join(missing)}"
    return {name: getattr(module, name) for name in _NORM_FUNCTIONS}, ""


def _why_no_import(name: str) -> str:
    """Why ``name`` cannot be imported; "" if it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a build for another torch or CUDA fails in many ways
        return f"{name} cannot be imported ({type(error).__name__}: {error})"
    return ""


def _why_no_package() -> str:
    """Why the package called apex is none or not NVIDIA's; "" if it is. Imports nothing."""
    module = sys.modules.get("apex")
    if module is not None:
        origin, folders = getattr(module, "__file__", None), getattr(module, "__path__", ())
    else:
        spec = importlib.util.find_spec("apex")
        if spec is None:
            return "no package called apex is installed"
        origin, folders = spec.origin, spec.submodule_search_locations or ()
    folders = list(folders)
    if any(Path(folder, "normalization").is_dir() for folder in folders):
        return ""
    place = origin or ", ".join(map(str, folders)) or "an unknown place"
    return (
        f"the package apex at {place} is not NVIDIA's (it has no apex.normalization); NVIDIA's is "
        "built from https://github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
    )
