"""The dispatch table: (format of A, format of B, device) → kernel, or the reason why not.

Every GEMM of the project is C = A · Bᵀ of two planes; ``select`` decides at build time, ``gemm``
runs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping

import torch

from ..extension import build_info, compiled_module
from ..formats.float8 import Float8DelayedFormat, Float8RowFormat, Float8TensorFormat
from ..formats.float8_block import Float8BlockFormat
from ..formats.mxfp8 import MXFP8Format
from ..formats.nvfp4 import NVFP4Format
from ..formats.plane import Format, Plane
from ..formats.swizzle import with_swizzled_scales
from . import lt, native
from .matmul import emulated_gemm, emulation_note, identity_gemm

DEVICES = ("cpu", "sm_90", "sm_100")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One way to run a GEMM.

    execution: "native" or "emulated"; reason: why not native; has_fast: offers fast accumulation;
    swizzled: reads block scales in 128×4 tiles, so both planes are best stored with such.
    """

    name: str
    execution: str
    run: Callable[..., torch.Tensor]
    reason: str = ""
    has_fast: bool = False
    swizzled: bool = False

    def stored(self, format: Format) -> Format:
        """The format in which an operand is stored, so that this kernel reads it as it is."""
        return with_swizzled_scales(format) if self.swizzled else format


class PairRefused(ValueError):
    """The two operand formats of a GEMM cannot be multiplied on this device in this mode."""


@dataclasses.dataclass(frozen=True)
class _Native:
    """A native kernel, its limits (devices, elements, multiple of K and N) and what it has.

    function: its name in lt.py, and in native.py where the cuBLASLt call is not built.
    """

    kind: str
    function: str
    devices: tuple[str, ...]
    multiple: int = 16
    e4m3_only: bool = False
    has_fast: bool = False
    swizzled: bool = False

    @property
    def name(self) -> str:
        """What plan() shows: which of the two is used in this process, and for which scales."""
        return f"{'scaled_mm' if build_info().gemm_reason else 'cublasLt'} {self.kind}"

    def run(self, a: Plane, *arguments) -> torch.Tensor:
        backend = native if lt.available(a.codes.device) else lt
        return getattr(backend, self.function)(a, *arguments)


_IDENTITY = Kernel("mm", "native", identity_gemm)
_TENSOR = _Native("tensorwise", "tensorwise", ("sm_90", "sm_100"), has_fast=True)
_ROW = _Native("rowwise", "rowwise", ("sm_90", "sm_100"), has_fast=True)
_BLOCK = _Native("128-block", "block", ("sm_90",), e4m3_only=True)
_MXFP8 = _Native("mxfp8", "mxfp8", ("sm_100",), multiple=32, e4m3_only=True, swizzled=True)
_NVFP4 = _Native("nvfp4", "nvfp4", ("sm_100",), multiple=32, swizzled=True)

NATIVE: dict[tuple[str, str], _Native] = {
    ("tensor", "tensor"): _TENSOR,
    ("row", "row"): _ROW,
    ("tensor", "row"): _ROW,
    ("row", "tensor"): _ROW,
    ("1x128", "128x128"): _BLOCK,
    ("128x128", "1x128"): _BLOCK,
    ("1x128", "1x128"): _BLOCK,
    ("mxfp8", "mxfp8"): _MXFP8,
    ("nvfp4", "nvfp4"): _NVFP4,
}


def scale_kind(format: Format) -> str:
    """The row or column of the native table that a format belongs to."""
    if isinstance(format, (Float8TensorFormat, Float8DelayedFormat)):
        return "tensor"
    if isinstance(format, Float8RowFormat):
        return "row"
    if isinstance(format, Float8BlockFormat):
        return "128x128" if format.two_dimensional else "1x128"
    if isinstance(format, MXFP8Format):
        return "mxfp8"
    if isinstance(format, NVFP4Format):
        return "nvfp4 row-scaled" if format.row_scaled else "nvfp4"
    return format.family


def device_kind(device: torch.device) -> str:
    """ "cpu", or "sm_<capability>" of a CUDA device; minor versions of 10 count as sm_100."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"device is {device}; accepted: cpu or cuda, e.g. device='cpu'")
    major, minor = torch.cuda.get_device_capability(device)
    return "sm_100" if major == 10 else f"sm_{major}{minor}"


def select(
    gemm: str, a: Format, b: Format, device: str, execution: str, *, k: int, n: int
) -> Kernel:
    """The kernel for one operand pair of a Linear with in_features ``k`` and out_features ``n``.

    execution: "native", "emulate" or "reference". Raises PairRefused with the reason.
    """
    _check_family(gemm, a, b)
    if "user" in (a.family, b.family):
        return Kernel("decode + mm", "emulated", emulated_gemm, "the user's own decode()")
    if a.family == "identity":
        return _IDENTITY
    reason = _why_not_native(a, b, device, k, n)
    if not reason and execution != "reference":
        found = NATIVE[scale_kind(a), scale_kind(b)]
        return Kernel(
            found.name, "native", found.run, has_fast=found.has_fast, swizzled=found.swizzled
        )
    if execution == "native":
        raise PairRefused(
            f"{reason}; ways out: execution='emulate' (or DIST_FINEGRAIN_EXECUTION=emulate) runs "
            f"it exactly but without tensor-core speed, or {_native_on(device)}"
        )
    note = f" ({emulation_note(a, b)})" if device != "cpu" else ""
    return Kernel(
        "decode + mm", "emulated", emulated_gemm, (reason or "execution='reference'") + note
    )


def _check_family(gemm: str, a: Format, b: Format) -> None:
    if {a.family, b.family} <= {"user", "identity"} and "user" in (a.family, b.family):
        return
    if a.family != b.family:
        raise PairRefused(
            "the two operands of a GEMM must share one family; "
            f"pick one, e.g. {a.describe()} for both"
        )
    if a.rht != b.rht:
        raise PairRefused(
            f"one operand has RHT {a.rht or 'off'}, the other {b.rht or 'off'}; the random "
            "Hadamard transform cancels only when both have it, e.g. with_rht=True for input and "
            "grad_output"
        )
    if a.family == "identity" and a.dtype != b.dtype:
        raise PairRefused(
            f"Identity operands hold {a.dtype or 'the compute dtype'} and "
            f"{b.dtype or 'the compute dtype'}; both must have one dtype, e.g. dtype=None"
        )
    if "nvfp4 row-scaled" in (scale_kind(a), scale_kind(b)) and gemm != "fprop":
        raise PairRefused("row-scaled NVFP4 is for fprop only; e.g. NVFP4Quantizer() for backward")


def _why_not_native(a: Format, b: Format, device: str, k: int, n: int) -> str:
    kernel = NATIVE.get((scale_kind(a), scale_kind(b)))
    if kernel is None:
        return f"no native kernel multiplies {scale_kind(a)} by {scale_kind(b)} on any device"
    if device not in kernel.devices:
        hint = "; MXFP8 is" if kernel is _BLOCK and device == "sm_100" else ""
        return f"{a.family} is not native on {device} (only {', '.join(kernel.devices)}{hint})"
    elements = {getattr(a, "element", "e2m1"), getattr(b, "element", "e2m1")}
    if elements == {"e5m2"}:
        return "no native kernel multiplies E5M2 by E5M2"
    if kernel.e4m3_only and "e5m2" in elements:
        return f"{kernel.name} takes E4M3 only"
    for dim, value in (("in_features", k), ("out_features", n)):
        if value % kernel.multiple:
            return (
                f"{dim} of this rank is {value}, but {kernel.name} needs a multiple of "
                f"{kernel.multiple}, e.g. {-(-value // kernel.multiple) * kernel.multiple}"
            )
    return ""


def _native_on(device: str) -> str:
    names = sorted({k.kind for k in NATIVE.values() if device in k.devices})
    if not names:
        return f"IdentityQuantizer, the only native format on {device}"
    return f"a format that is native on {device}: {', '.join(names)}, or IdentityQuantizer"


_counts: collections.Counter = collections.Counter()  # GEMMs run, by ``_key``
_compiled_keys: dict[int, tuple[tuple[str, str, str], ...]] = {}


def _key(gemm: str, a: Format, b: Format) -> tuple[str, str, str]:
    return gemm, a.describe(), b.describe()


def gemm_counter(operands: Mapping[str, tuple[Format, Format]]) -> int:
    """A counter for the operator ``linear``, which counts its GEMMs itself.

    operands: the formats of A and B of each GEMM that it runs, by name, in the order fprop, dgrad,
    wgrad.
    """
    keys = tuple(_key(name, a, b) for name, (a, b) in operands.items())
    for counter, known in _compiled_keys.items():
        if known == keys:
            return counter
    counter = compiled_module().gemm_counter()
    _compiled_keys[counter] = keys
    return counter


def gemm_counts() -> collections.Counter:
    """GEMMs run by this process since ``reset_gemm_counts``: (gemm, format A, format B) → count."""
    found = collections.Counter(_counts)
    if _compiled_keys:
        counts = compiled_module().gemm_counts()
        for counter, keys in _compiled_keys.items():
            found.update({key: n for key, n in zip(keys, counts[counter], strict=False) if n})
    return found


def reset_gemm_counts() -> None:
    """Set every count to zero."""
    _counts.clear()
    if _compiled_keys:
        compiled_module().reset_gemm_counts()


def gemm(
    kernel: Kernel,
    name: str,
    a: Plane,
    b: Plane,
    out_dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    fast: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """A · Bᵀ (+ bias [S]) of planes A [R, C] and B [S, C]: [R, S] in ``out_dtype``.

    name: "fprop", "dgrad" or "wgrad", for the counts; fast: fast accumulation where there is one.
    out: [R, S] of ``out_dtype``, written and returned, nothing beyond it; accumulate: what it held
    is added in FP32 before the only rounding, else it is not read. Raises ValueError for an ``out``
    that does not fit.
    """
    if out is not None or accumulate:
        _check_out(a, b, out_dtype, out)
    _counts[_key(name, a.format, b.format)] += 1
    if 0 in (a.shape[0], a.shape[1], b.shape[0]):
        return _gemm_of_nothing(a, b, out_dtype, bias, out, accumulate)
    return kernel.run(a, b, out_dtype, bias, fast and kernel.has_fast, out, accumulate)


def _check_out(a: Plane, b: Plane, out_dtype: torch.dtype, out: torch.Tensor | None) -> None:
    shape, device = (a.shape[0], b.shape[0]), a.parts[0].device
    if out is None:
        raise ValueError(
            "accumulate is True and out is None; accepted: the tensor to add to, "
            "e.g. out=weight.main_grad"
        )
    if out.shape != shape or out.dtype != out_dtype or out.device != device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; accepted: {out_dtype} {shape} "
            f"on {device}, e.g. torch.empty({shape[0]}, {shape[1]}, dtype={out_dtype})"
        )


def _gemm_of_nothing(a, b, out_dtype, bias, out, accumulate) -> torch.Tensor:
    """The sum of no products: zeros, or what ``out`` held; plus the bias."""
    if out is None:
        out = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.parts[0].device)
    elif not accumulate:
        out.zero_()
    return out if bias is None else out.copy_(out.float() + bias.float())
