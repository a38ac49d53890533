"""One read of a matrix, up to two planes: the Python face of the compiled kernels.

Formats stay the oracle: what ``Format.measure``, ``encode`` and ``decode`` do in plain torch is
done here with equal bytes. Identity never reaches a kernel. Legend: X [M, K]; its row plane is
(R, C) = (M, K), its column plane (K, M); E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..extension import why_unavailable
from .dtypes import HIGH_PRECISION_DTYPES
from .plane import Direction, Format, Plane, Rounding, saturating_to

_ops = torch.ops.dist_finegrain
# Option bits, as csrc/bindings_checks.cpp unpacks them.
_CODECS = {"float8": 1, "float8_block": 2, "mxfp8": 3, "nvfp4": 4}
_E5M2, _TWO_DIMENSIONAL, _POWER_OF_TWO, _ROW_SCALED = 1 << 8, 1 << 9, 1 << 10, 1 << 11
_SCALE_GIVEN, _STOCHASTIC = 1 << 12, 1 << 13
_RHT = {None: 0, "plain": 1 << 14, "signed": 2 << 14}
_NO_ROUNDING = Rounding()
BIAS_ROWS = 128  # rows of X whose sum is one row of partial bias gradients


@dataclasses.dataclass(frozen=True)
class Casted:
    """row: plane of X; column: plane of Xᵀ; bias_grad: FP32 [K]; None where not asked for."""

    row: Plane | None
    column: Plane | None
    bias_grad: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """A format as the kernels are told: packed options, least amax, and which buffers it has."""

    packed: int
    epsilon: float = 0.0

    @property
    def codec(self) -> int:
        return self.packed & 0xFF


NO_PLANE = Options(0)


@functools.lru_cache(maxsize=1024)
def _options(format: Format) -> Options | None:
    """Options of a format of this package; None for any other."""
    codec = _CODECS.get(format.family)
    if codec is None:
        return None
    flags = (
        (_E5M2, getattr(format, "element", "") == "e5m2"),
        (_TWO_DIMENSIONAL, getattr(format, "two_dimensional", False)),
        (_POWER_OF_TWO, getattr(format, "power_of_two", False)),
        (_ROW_SCALED, format.statistic == "row"),
        (_SCALE_GIVEN, format.statistic == "scale"),
        (_STOCHASTIC, getattr(format, "stochastic", False)),
    )
    packed = codec | _RHT[format.rht] | sum(flag for flag, on in flags if on)
    return Options(packed, getattr(format, "epsilon", 0.0))


def options_of(format: Format | None) -> Options:
    """What the kernels are told about a plane; no plane for None and Identity.

    Raises ValueError for a format that they do not know.
    """
    if format is None or format.family == "identity":
        return NO_PLANE
    options = None if format.family == "user" else _options(format)
    if options is None:
        raise ValueError(
            f"format is {format.describe()}; accepted: a format of this package, e.g. "
            "MXFP8Quantizer().plane_format('rowwise')"
        )
    return options


def why_not(device: torch.device, *formats: Format | None) -> str:
    """Why the compiled kernels do not cast these planes on ``device``; "" when they do."""
    for format in formats:
        if format is None or format.family == "identity":
            continue
        if format.family == "user" or _options(format) is None:
            return f"{format.describe()} is encoded by its own class, not by a compiled kernel"
    return why_unavailable(device)


def _check(what: str, x: torch.Tensor) -> None:
    reason = why_unavailable(x.device)
    if reason:
        raise RuntimeError(f"{what} needs a compiled kernel on {x.device}: {reason}")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; accepted: a matrix [M, K]")
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"x has dtype {x.dtype}; accepted: torch.float32, torch.float16, torch.bfloat16"
        )


def _check_source(source: str, row: Format | None) -> bool:
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


def _is_readable(x: torch.Tensor) -> bool:
    """Whether the kernels read this layout in place: last stride 1, rows that do not overlap."""
    rows, columns = x.shape
    return (columns <= 1 or x.stride(1) == 1) and (rows <= 1 or x.stride(0) >= columns)


def _readable(x: torch.Tensor) -> torch.Tensor:
    return x if _is_readable(x) else x.contiguous()


def _buffers(plane: Plane | None) -> list[torch.Tensor]:
    return [] if plane is None else [part for part in plane.parts if part is not None]


def _statistic(format: Format | None, statistic: torch.Tensor | None) -> torch.Tensor | None:
    """What the kernel is given; the caller may pass a statistic that the format has no use for."""
    return None if format is None or format.statistic == "none" else statistic


_seed_steps: dict[torch.device, tuple[torch.Tensor, list[int]]] = {}


def _seed_step(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """int64 [2] on the device of ``x``: seed and step, refreshed without a synchronisation."""
    device = x.device
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return torch.tensor([rounding.seed, rounding.step], device=device)  # not to be kept
    if device not in _seed_steps:
        with torch.inference_mode(False):
            tensor = torch.zeros(2, dtype=torch.int64, device=device)
        _seed_steps[device] = (tensor, [0, 0])
    tensor, held = _seed_steps[device]
    for i, value in enumerate((rounding.seed & 0xFFFFFFFF, rounding.step & 0xFFFFFFFF)):
        if held[i] != value:
            tensor[i].fill_(value)
            held[i] = value
    return tensor


def _rounding(
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


def cast(
    x: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    column_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
    row_amax: torch.Tensor | None = None,
    column_amax: torch.Tensor | None = None,
    bias_grad: bool = False,
) -> Casted:
    """Both planes of ``x`` [M, K] (FP32, FP16 or BF16) from one read and one launch.

    row, column: formats of the planes, None for one that is not wanted. source: what the column
    encodes, "original" or "rowwise_dequantized". row_statistic, column_statistic: what ``measure``
    gives, or its maximum over ranks: FP32 [1] or [R]; the scale FP32 [1] of delayed scaling.
    row_amax, column_amax: FP32 [1], raised to the amax of what that plane encodes. bias_grad: also
    the column sums of ``x``, FP32 [K]. Read in place: last stride 1 and any row stride, or (source
    "original", no bias_grad) the transpose of such; anything else is copied once.

    Raises RuntimeError where no compiled kernel runs (``why_not``), ValueError or TypeError for
    arguments that do not fit, by name.
    """
    _check("cast", x)
    rounding = rounding or {}
    is_dequantized = _check_source(source, row) and column is not None
    if x.numel() == 0:
        statistics = (row_statistic, column_statistic)
        return _cast_empty(x, row, column, is_dequantized, statistics, bias_grad)
    if row is not None and row.family == "identity" and is_dequantized:
        row_plane = row.encode(x)
        x_of_row = saturating_to(row.decode(row_plane), x.dtype, keep_inf=False)
        only_column = cast(
            x_of_row, None, column, column_statistic=column_statistic, rounding=rounding,
            column_amax=column_amax,
        )  # fmt: skip
        return Casted(row_plane, only_column.column, _sum_rows(x) if bias_grad else None)

    r, c = options_of(row), options_of(column)
    identity_row = row.encode(x) if row is not None and not r.packed else None
    identity_column = None
    if column is not None and not c.packed and not is_dequantized:
        identity_column = column.encode(x.t())
    row_plane = column_plane = sums = None
    if r.packed or c.packed:
        # The kernel makes the column plane of a row-major matrix; that of its transpose is a row.
        is_swapped = not (is_dequantized or bias_grad or _is_readable(x)) and _is_readable(x.t())
        matrix = x.t() if is_swapped else _readable(x)
        if r.packed:
            row_plane = row.empty((x.shape[0], x.shape[1]), x.dtype, x.device)
        if c.packed:
            column_plane = column.empty((x.shape[1], x.shape[0]), x.dtype, x.device)
        places, seed_step = _rounding(x, row, column, rounding)
        sides = [
            (_buffers(row_plane), r, _statistic(row, row_statistic), row_amax),
            (_buffers(column_plane), c, _statistic(column, column_statistic), column_amax),
        ]
        if is_swapped:
            sides.reverse()
            places = places[3:] + places[:3]
        (a, a_options, a_statistic, a_amax), (b, b_options, b_statistic, b_amax) = sides
        partials = None
        if bias_grad:
            blocks = -(-x.shape[0] // BIAS_ROWS)
            partials = torch.empty(blocks, x.shape[1], dtype=torch.float32, device=x.device)
        _ops.cast.default(
            matrix, a, b, a_options.packed, a_options.epsilon, b_options.packed, b_options.epsilon,
            is_dequantized and c.packed != 0, a_statistic, b_statistic, a_amax, b_amax, places,
            seed_step, partials, None, None,
        )  # fmt: skip
        sums = partials.sum(0) if bias_grad else None
    elif bias_grad:
        sums = _sum_rows(x)
    if column is not None and not c.packed and is_dequantized:
        identity_column = column.encode(_dequantized(row_plane, x.dtype).t())
    return Casted(row_plane or identity_row, column_plane or identity_column, sums)


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, dtype=torch.float32)


def _dequantized(row_plane: Plane, dtype: torch.dtype) -> torch.Tensor:
    """What the column of a "rowwise_dequantized" hybrid encodes: infinities saturate too."""
    return saturating_to(decode(row_plane, dtype), dtype, keep_inf=False)


def _cast_empty(x, row, column, is_dequantized, statistics, bias_grad) -> Casted:
    """Planes without any element: what the formats make of them."""
    row_statistic, column_statistic = statistics
    row_plane = None if row is None else row.encode(x, _statistic(row, row_statistic))
    column_plane = None
    if column is not None:
        values = x
        if is_dequantized:
            values = saturating_to(row.decode(row_plane), x.dtype, keep_inf=False)
        column_plane = column.encode(values.t(), _statistic(column, column_statistic))
    return Casted(row_plane, column_plane, _sum_rows(x) if bias_grad else None)


def is_measured(format: Format | None) -> bool:
    """Whether ``measure`` has something to find before this format can encode."""
    return format is not None and format.statistic in ("tensor", "row")


def shares_amax(row: Format | None, column: Format | None) -> bool:
    """Whether one tensor amax serves both planes of one matrix."""
    both = is_measured(row) and is_measured(column)
    both = both and row.statistic == column.statistic == "tensor"
    return both and row.rht is None and column.rht is None


def measure(
    x: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(row amax, column amax) that the formats need, FP32 [1] or [R], from one read of X [M, K].

    None where a format is None or measures nothing. One tensor is returned twice where one amax
    serves both planes. source "rowwise_dequantized": the column's amax is of the row's values;
    where the row has a statistic it must be given, and is not measured again. rounding: of the row,
    where it is stochastic: such rows are cast and decoded for their amax.

    Raises as ``cast`` does, and ValueError for a row statistic that is missing.
    """
    _check("measure", x)
    is_dequantized = _check_source(source, row) and is_measured(column)
    if is_dequantized and getattr(row, "stochastic", False) and row_statistic is not None:
        made = cast(x, row, None, row_statistic=row_statistic, rounding=rounding)
        x, row, is_dequantized = _dequantized(made.row, x.dtype), None, False
    return _measure(x, None, row, column, is_dequantized, row_statistic)


def _measure(x, ends, row, column, is_dequantized, row_statistic):
    if is_dequantized and row.family == "identity":
        values = saturating_to(row.decode(row.encode(x)), x.dtype, keep_inf=False)
        return _measure(values, ends, None, column, False, None)
    if is_dequantized and row.statistic != "none" and row_statistic is None:
        raise ValueError(
            f"row_statistic is None, but the column's amax is of values that {row.describe()} "
            "rounds; accepted: what measure(x, row, None) gives, reduced over the ranks"
        )
    measures_row = is_measured(row) and row_statistic is None
    is_shared = ends is None and not is_dequantized and measures_row and shares_amax(row, column)
    experts = 0 if ends is None else ends.shape[0]
    row_amax = _amax(row, x, x.shape[0], 0, experts) if measures_row else None
    column_amax = None
    if is_measured(column) and not is_shared:
        column_amax = _amax(column, x, x.shape[1], experts, experts)
    if x.numel() and (row_amax is not None or column_amax is not None):
        swapped = ends is None and not is_dequantized and not _is_readable(x)
        swapped = swapped and _is_readable(x.t())
        sides = [(row_amax, options_of(row)), (column_amax, options_of(column))]
        if swapped:
            sides.reverse()
        (a, a_options), (b, b_options) = sides
        _ops.measure.default(
            x.t() if swapped else _readable(x), a, b, a_options.packed, a_options.epsilon,
            b_options.packed, is_dequantized,
            _statistic(row, row_statistic) if is_dequantized else None, ends,
        )  # fmt: skip
    return row_amax, row_amax if is_shared else column_amax


def _amax(format, x, rows: int, experts_of_rows: int, experts: int) -> torch.Tensor:
    """Zeros to be raised: [1] or [R]; of experts [E], [M] for rows, [E, K] for columns."""
    shape: tuple[int, ...] = (max(experts, 1),)
    if format.statistic == "row":
        shape = (experts_of_rows, rows) if experts_of_rows else (rows,)
    return torch.zeros(shape, dtype=torch.float32, device=x.device)


def decode(plane: Plane, dtype: torch.dtype, *, outer: bool = True) -> torch.Tensor:
    """Values [R, C] of a plane in ``dtype``, nearest-even, saturating; NaN and infinities stay.

    ``outer=False`` leaves the outer scale out. With RHT: the rotated values of whole groups,
    [R, C rounded up to 16]. Raises RuntimeError where no compiled kernel runs.
    """
    format = plane.format
    options = options_of(format)
    if not options.packed or 0 in plane.shape:
        return saturating_to(format.decode(plane, outer=outer), dtype)
    reason = why_unavailable(plane.codes.device)
    if reason:
        raise RuntimeError(f"decode needs a compiled kernel on {plane.codes.device}: {reason}")
    rows, contraction = plane.shape
    extent = -(-contraction // 16) * 16 if format.rht else contraction
    out = torch.empty(rows, extent, dtype=dtype, device=plane.codes.device)
    _ops.decode.default(
        plane.codes, plane.scales, plane.outer if outer else None, options.packed, out
    )
    return out


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Planes of E consecutive groups of rows.

    row: plane of X [M, K]. column: plane [K, Ctot] in which expert e's part, its rows of Xᵀ padded
    to whole blocks and at least one, ends at ``column_ends[e]`` (int32 [E]). Outer scales are per
    expert, FP32 [E]; row-scaled ones [Mp] and [E, Kp].
    """

    row: Plane | None
    column: Plane | None
    column_ends: torch.Tensor | None


def _group_block(format: Format) -> int:
    """What every expert's part of a column plane starts at a multiple of."""
    if format.family == "float8_block":
        return format.block[1]
    return format.contraction_multiple


def grouped_contraction(format: Format, rows: int, experts: int) -> int:
    """Ctot: room for the column parts of any split of ``rows``, known without a synchronisation.

    Identity parts are not padded.
    """
    if format.family == "identity":
        return rows
    block = _group_block(format)
    return -(-rows // block) * block + experts * block


def _check_grouped(what: str, x, ends, *formats: Format | None) -> None:
    _check(what, x)
    if ends.dtype != torch.int32 or ends.dim() != 1 or not len(ends) or ends.device != x.device:
        raise ValueError(
            f"ends is {ends.dtype} {tuple(ends.shape)} on {ends.device}; accepted: torch.int32 [E] "
            f"on {x.device}, the cumulative row ends of at least one expert, e.g. "
            "torch.tensor([128, 256], dtype=torch.int32)"
        )
    for format in formats:
        if format is not None and format.family == "float8_block" and format.two_dimensional:
            raise ValueError(
                f"{format.describe()} has 128×128 blocks, which reach over experts; accepted: "
                "1×128 blocks, e.g. Float8BlockQuantizer(fp8_dtype, block_scaling_dim=1)"
            )


def cast_grouped(
    x: torch.Tensor,
    ends: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    column_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
    row_amax: torch.Tensor | None = None,
    column_amax: torch.Tensor | None = None,
) -> Grouped:
    """``cast`` of E experts, whose rows of ``x`` [M, K] end at ``ends`` int32 [E], in one launch.

    ends: non-decreasing, the last one M; an expert may have no row. Statistics, as
    ``measure_grouped`` gives them: FP32 [E]; row-scaled [M] for the row and [E, K] for the column.
    Other arguments as for ``cast``; ``x`` is read in place where its last stride is 1.

    Raises as ``cast`` does; ValueError for 128×128 blocks and for ends of another layout.
    """
    _check_grouped("cast_grouped", x, ends, row, column)
    is_dequantized = _check_source(source, row) and column is not None
    experts, rounding = ends.shape[0], rounding or {}
    if row is not None and row.family == "identity" and is_dequantized:
        row_plane = row.encode(x)
        values = saturating_to(row.decode(row_plane), x.dtype, keep_inf=False)
        options = {"column_statistic": column_statistic, "column_amax": column_amax}
        made = cast_grouped(values, ends, None, column, rounding=rounding, **options)
        return dataclasses.replace(made, row=row_plane)

    r, c = options_of(row), options_of(column)
    row_plane = row.encode(x) if row is not None and not r.packed else None
    column_plane = column_ends = None
    if r.packed:
        row_plane = _with_outer(row.empty((x.shape[0], x.shape[1]), x.dtype, x.device), experts)
    if c.packed:
        extent = grouped_contraction(column, x.shape[0], experts)
        column_plane = column.empty((x.shape[1], extent), x.dtype, x.device)
        column_plane = _with_outer(column_plane, experts, is_column=True)
        column_ends = torch.empty_like(ends)
    if r.packed or c.packed:
        places, seed_step = _rounding(x, row, column, rounding)
        _ops.cast.default(
            _readable(x), _buffers(row_plane) if r.packed else [], _buffers(column_plane),
            r.packed, r.epsilon, c.packed, c.epsilon, is_dequantized and c.packed != 0,
            _statistic(row, row_statistic), _statistic(column, column_statistic),
            row_amax, column_amax, places, seed_step, None, ends, column_ends,
        )  # fmt: skip
    if column is not None and not c.packed:
        values = x
        if is_dequantized:
            values = _dequantized_grouped(row_plane, ends, x.dtype)
        column_plane, column_ends = column.encode(values.t()), ends.clone()
    return Grouped(row_plane, column_plane, column_ends)


def _with_outer(plane: Plane, experts: int, *, is_column: bool = False) -> Plane:
    """The plane with an outer scale per expert in the place of its only one."""
    if plane.outer is None:
        return plane
    shape: tuple[int, ...] = (experts,)
    if plane.format.statistic == "row":
        if not is_column:
            return plane
        shape = (experts, *plane.outer.shape)
    outer = plane.outer.new_empty(shape)
    return dataclasses.replace(plane, parts=(*plane.parts[:2], outer))


def _dequantized_grouped(plane: Plane, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the column of a "rowwise_dequantized" hybrid encodes, of a grouped row plane."""
    if plane.outer is not None and plane.format.statistic != "row":
        rows = torch.arange(plane.codes.shape[0], dtype=torch.int32, device=ends.device)
        expert = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        plane = dataclasses.replace(plane, parts=(*plane.parts[:2], plane.outer[expert]))
    return saturating_to(plane.format.decode(plane), dtype, keep_inf=False)


def measure_grouped(
    x: torch.Tensor,
    ends: torch.Tensor,
    row: Format | None,
    column: Format | None,
    *,
    source: str = "original",
    row_statistic: torch.Tensor | None = None,
    rounding: Mapping[Direction, Rounding] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``measure`` of E experts: FP32 [E]; row-scaled [M] for the row and [E, K] for the column.

    Arguments and errors as for ``measure`` and ``cast_grouped``.
    """
    _check_grouped("measure_grouped", x, ends, row, column)
    is_dequantized = _check_source(source, row) and is_measured(column)
    if is_dequantized and getattr(row, "stochastic", False) and row_statistic is not None:
        made = cast_grouped(x, ends, row, None, row_statistic=row_statistic, rounding=rounding)
        x, row, is_dequantized = _dequantized_grouped(made.row, ends, x.dtype), None, False
    return _measure(x, ends, row, column, is_dequantized, row_statistic)


@dataclasses.dataclass(frozen=True)
class DelayedState:
    """Delayed scaling of one slot, FP32: scale [1], history [length], pending amax [1]."""

    scale: torch.Tensor
    history: torch.Tensor
    pending: torch.Tensor
    use_max: bool
    fp8_max: float
    margin: float


_tables: dict[torch.device, tuple[bytes, torch.Tensor]] = {}


def update_delayed(slots: Sequence[DelayedState]) -> None:
    """One launch that updates the scales of ``slots`` of one device, as delayed.py defines it.

    Raises RuntimeError where no compiled kernel runs, ValueError for tensors of another layout.
    """
    device = slots[0].scale.device
    reason = why_unavailable(device)
    if reason:
        raise RuntimeError(f"update_delayed needs a compiled kernel on {device}: {reason}")
    packed = b"".join(map(_packed, slots))
    held = _tables.get(device)
    if held is None or held[0] != packed:
        host = torch.frombuffer(bytearray(packed), dtype=torch.int64).view(len(slots), -1)
        held = _tables[device] = (packed, host.to(device, non_blocking=True))
    _ops.update_delayed.default(
        [s.scale for s in slots], [s.history for s in slots], [s.pending for s in slots], held[1]
    )


def _packed(slot: DelayedState) -> bytes:
    """csrc/kernels.h, DelayedSlot."""
    addresses = (t.data_ptr() for t in (slot.scale, slot.history, slot.pending))
    divisor = 2.0**slot.margin if slot.margin < 128 else math.inf  # as FP32
    settings = (len(slot.history), slot.use_max, slot.fp8_max, divisor)
    return struct.pack("<3q2i2f", *addresses, *settings)
