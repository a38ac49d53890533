"""What the compiled kernels are told about a cast: formats as option bits, seeds, layouts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..extension import why_unavailable
from .dtypes import HIGH_PRECISION_DTYPES
from .plane import Direction, Format, Plane, Rounding

# Option bits, as csrc/bindings_checks.cpp unpacks them.
_CODECS = {"float8": 1, "float8_block": 2, "mxfp8": 3, "nvfp4": 4}  # by Format.codec
_E5M2, _TWO_DIMENSIONAL, _POWER_OF_TWO, _ROW_SCALED = 1 << 8, 1 << 9, 1 << 10, 1 << 11
_SCALE_GIVEN, _STOCHASTIC = 1 << 12, 1 << 13
_RHT = {None: 0, "plain": 1 << 14, "signed": 2 << 14}
_SWIZZLED = 1 << 16
_NO_ROUNDING = Rounding()


@dataclasses.dataclass(frozen=True)
class Options:
    """A format as the kernels are told: packed options and least amax."""

    packed: int
    epsilon: float = 0.0


NO_PLANE = Options(0)


@functools.lru_cache(maxsize=1024)
def _options(format: Format) -> Options:
    """Options of a format of this package."""
    flags = (
        (_E5M2, getattr(format, "element", "") == "e5m2"),
        (_TWO_DIMENSIONAL, getattr(format, "two_dimensional", False)),
        (_POWER_OF_TWO, getattr(format, "power_of_two", False)),
        (_ROW_SCALED, format.statistic == "row"),
        (_SCALE_GIVEN, format.statistic == "scale"),
        (_STOCHASTIC, getattr(format, "stochastic", False)),
        (_SWIZZLED, getattr(format, "swizzled", False)),
    )
    packed = _CODECS[format.codec] | _RHT[format.rht] | sum(flag for flag, on in flags if on)
    return Options(packed, getattr(format, "epsilon", 0.0))


def options_of(format: Format | None) -> Options:
    """What the kernels are told about a plane; no plane for None and Identity.

    Raises ValueError for a format that they do not know.
    """
    if format is None or format.family == "identity":
        return NO_PLANE
    if format.codec is None:
        raise ValueError(
            f"format is {format.describe()}; accepted: a format of this package, e.g. "
            "MXFP8Quantizer().plane_format('rowwise')"
        )
    return _options(format)


def why_not(device: torch.device, *formats: Format | None) -> str:
    """Why the compiled kernels do not cast these planes on ``device``; "" when they do."""
    for format in formats:
        if format is None or format.family == "identity":
            continue
        if format.codec is None:
            return f"{format.describe()} is encoded by its own class, not by a compiled kernel"
    return why_unavailable(device)


def is_measured(format: Format | None) -> bool:
    """Whether ``measure`` has something to find before this format can encode."""
    return format is not None and format.statistic in ("tensor", "row")


def shares_amax(row: Format | None, column: Format | None) -> bool:
    """Whether one tensor amax serves both planes of one matrix."""
    both = is_measured(row) and is_measured(column)
    both = both and row.statistic == column.statistic == "tensor"
    return both and row.rht is None and column.rht is None


def check_matrix(what: str, x: torch.Tensor) -> None:
    """Refuse ``x`` where no kernel runs, or none reads it; ``what`` names the caller."""
    reason = why_unavailable(x.device)
    if reason:
        raise RuntimeError(f"{what} needs a compiled kernel on {x.device}: {reason}")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; accepted: a matrix [M, K]")
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"x has dtype {x.dtype}; accepted: torch.float32, torch.float16, torch.bfloat16"
        )


def check_source(source: str, row: Format | None) -> bool:
    """Whether the column is made from the row's values; ValueError for what cannot be."""
    if source == "original":
        return False
    if source != "rowwise_dequantized":
        raise ValueError(
            f"source is {source!r}; accepted: 'original' or 'rowwise_dequantized', "
            "e.g. source='original'"
        )
    if row is None or row.rht:
        got = "None" if row is None else row.describe()
        raise ValueError(
            f"row is {got} with source='rowwise_dequantized'; accepted: the format, without RHT, "
            "whose values the column plane encodes, or source='original'"
        )
    return True


def is_readable(x: torch.Tensor) -> bool:
    """Whether the kernels read this layout in place: last stride 1, rows that do not overlap."""
    rows, columns = x.shape
    return (columns <= 1 or x.stride(1) == 1) and (rows <= 1 or x.stride(0) >= columns)


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy that the kernels read."""
    return x if is_readable(x) else x.contiguous()


def oriented(x: torch.Tensor, is_fixed: bool) -> tuple[torch.Tensor, bool]:
    """(what the kernels are given, whether it is ``x.t()``, whose row plane is x's column plane).

    is_fixed: the rows must be those of ``x``; another layout is copied then.
    """
    if not is_fixed and not is_readable(x) and is_readable(x.t()):
        return x.t(), True
    return readable(x), False


def buffers(plane: Plane | None) -> list[torch.Tensor]:
    """Those that the plane's format has, in its order."""
    return [] if plane is None else [part for part in plane.parts if part is not None]


def statistic_of(format: Format | None, statistic: torch.Tensor | None) -> torch.Tensor | None:
    """What the kernel is given; the caller may pass a statistic that the format has no use for."""
    return None if format is None or format.statistic == "none" else statistic


_seed_steps: dict[torch.device, tuple[torch.Tensor, list[int]]] = {}


def advance_rounding_step(step: int) -> None:
    """Tell each device, in its current stream's order, that ``step`` steps are completed now.

    Called when a step ends, so that casts of any stream that waits for that one, and replays of
    captured casts, draw the noise of the new step. The next step is counted on the device: where
    that is captured, each replay ends one more step there, which the host does not see.
    """
    for tensor, held in _seed_steps.values():
        if (held[1] + 1) & 0xFFFFFFFF == step:
            tensor[1].add_(1)
            held[1] = step
        else:
            _hold(tensor, held, 1, step)


def _hold(tensor: torch.Tensor, held: list[int], index: int, value: int) -> None:
    value &= 0xFFFFFFFF
    if held[index] == value:
        return
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the rounding {('seed', 'step')[index]} is {value} but the device holds "
            f"{held[index]}; it must not change inside a captured graph: run one stochastic cast, "
            "or end_step(), before the capture"
        )
    tensor[index].fill_(value)
    held[index] = value


def _seed_step(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """int64 [2] on the device of ``x``: seed and step, refreshed without a synchronisation."""
    device = x.device
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return torch.tensor([rounding.seed, rounding.step], device=device)  # not to be kept
    if device not in _seed_steps:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first stochastic cast on {device} is inside a captured graph, whose replays "
                "would all draw the same noise; run one before the capture"
            )
        with torch.inference_mode(False):
            tensor = torch.zeros(2, dtype=torch.int64, device=device)
        _seed_steps[device] = (tensor, [0, 0])
    tensor, held = _seed_steps[device]
    _hold(tensor, held, 0, rounding.seed)
    _hold(tensor, held, 1, rounding.step)
    return tensor


def rounding_places(
    x: torch.Tensor,
    row: Format | None,
    column: Format | None,
    rounding: Mapping[Direction, Rounding],
) -> tuple[list[int], torch.Tensor | None]:
    """(stream and origins of both planes, seed and step) for stochastic rounding; ([], None)."""
    used = [
        rounding.get(direction) or _NO_ROUNDING
        for direction, format in (("rowwise", row), ("columnwise", column))
        if getattr(format, "stochastic", False)
    ]
    if not used:
        return [], None
    if any((r.seed, r.step) != (used[0].seed, used[0].step) for r in used):
        raise ValueError(
            f"rounding has seeds and steps {[(r.seed, r.step) for r in used]}; accepted: one seed "
            "and one step for both directions, e.g. Rounding(seed=0, step=0)"
        )
    places = []
    for direction in ("rowwise", "columnwise"):
        place = rounding.get(direction) or _NO_ROUNDING
        places += [place.stream, place.row_origin, place.contraction_origin]
    return places, _seed_step(x, used[0])
