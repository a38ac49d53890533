"""What the cast benchmark runs: every cast row of the project's bars, and its plain-torch twin.

Legend: X [M, K]; the row plane is X's, the column plane Xᵀ's. Bars: microseconds for BF16
16384×8192 on an H200.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from dist_finegrain.formats import fused
from dist_finegrain.formats.float8 import (
    Float8DelayedFormat,
    Float8RowFormat,
    Float8TensorFormat,
)
from dist_finegrain.formats.float8_block import Float8BlockFormat
from dist_finegrain.formats.mxfp8 import MXFP8Format
from dist_finegrain.formats.nvfp4 import NVFP4Format
from dist_finegrain.formats.plane import Format, Plane, Rounding, saturating_to

BAR_SHAPE = (16384, 8192)
AMAX_BAR = 16384 * 8192 * 2 / 3.7e12 * 1e6  # a read at 3.7 TB/s
ROUNDING = {"rowwise": Rounding(seed=1, stream=2), "columnwise": Rounding(seed=1, stream=3)}

DELAYED, CURRENT = Float8DelayedFormat("e4m3"), Float8TensorFormat("e4m3")
ROW_SCALED = Float8RowFormat("e4m3")
BLOCK_1D, BLOCK_2D = Float8BlockFormat("e4m3"), Float8BlockFormat("e4m3", two_dimensional=True)
MXFP8 = MXFP8Format("e4m3")
NVFP4, NVFP4_SR = NVFP4Format(), NVFP4Format(stochastic=True)
NVFP4_RHT = NVFP4Format(rht="signed")
NVFP4_RHT_SR = NVFP4Format(rht="signed", stochastic=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    amax: "given" (or not needed), "included" in the time, "recorded" while casting (delayed
    scaling), or the whole "only" work; "decode": the row plane back to BF16.
    """

    name: str
    row: Format | None
    column: Format | None
    bar: float | None = None
    work: Literal["given", "included", "recorded", "only", "decode"] = "given"
    source: str = "original"
    bias_grad: bool = False

    @property
    def formats(self) -> tuple[Format | None, Format | None]:
        return self.row, self.column


def _nvfp4_both(name: str, row: Format, column: Format, bar: float) -> list[Case]:
    return [
        Case(f"NVFP4 both, {name}, amax given", row, column, bar),
        Case(f"NVFP4 both, {name}, amax included", row, column, bar + AMAX_BAR, "included"),
    ]


_DECODED = {
    "per-tensor FP8": CURRENT,
    "row-scaled FP8": ROW_SCALED,
    "block 1-D": BLOCK_1D,
    "block 2-D": BLOCK_2D,
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
}
CASES = [
    Case("block 1-D both", BLOCK_1D, BLOCK_1D, 145),
    Case("block 2-D both", BLOCK_2D, BLOCK_2D, 138),
    Case("hybrid block|block, original", BLOCK_1D, BLOCK_1D, 145),
    Case(
        "hybrid block|block, rowwise_dequantized",
        BLOCK_1D,
        BLOCK_1D,
        150,
        source="rowwise_dequantized",
    ),
    Case("hybrid block|per-tensor column, amax included", BLOCK_1D, CURRENT, None, "included"),
    Case("MXFP8 both", MXFP8, MXFP8, 145),
    Case("MXFP8|NVFP4, nearest, amax given", MXFP8, NVFP4, 132),
    Case("MXFP8|NVFP4, RHT, amax given", MXFP8, NVFP4_RHT, 165),
    Case("MXFP8|NVFP4, RHT + SR, amax given", MXFP8, NVFP4_RHT_SR, 200),
    *_nvfp4_both("nearest", NVFP4, NVFP4, 150),
    *_nvfp4_both("RHT column", NVFP4, NVFP4_RHT, 175),
    *_nvfp4_both("SR both + RHT column", NVFP4_SR, NVFP4_RHT_SR, 240),
    Case("per-tensor delayed both", DELAYED, DELAYED, 140, "recorded"),
    Case("per-tensor current both", CURRENT, CURRENT, 212, "included"),
    Case("row-scaled FP8 both, amax included", ROW_SCALED, ROW_SCALED, None, "included"),
    Case("per-tensor delayed, row only", DELAYED, None, None, "recorded"),
    Case("block 1-D, row only", BLOCK_1D, None),
    Case("MXFP8, row only", MXFP8, None),
    Case("block 1-D both + bias gradient", BLOCK_1D, BLOCK_1D, None, bias_grad=True),
    Case("delayed both + bias gradient", DELAYED, DELAYED, None, "recorded", bias_grad=True),
    Case("amax alone", CURRENT, None, AMAX_BAR, "only"),
    Case("amax of rows", ROW_SCALED, None, None, "only"),
    Case("amax of rows and columns", ROW_SCALED, ROW_SCALED, None, "only"),
    Case("amax of matrix | after RHT", NVFP4, NVFP4_RHT, None, "only"),
    *(Case(f"decode {name}", format, None, None, "decode") for name, format in _DECODED.items()),
]


def statistics_of(case: Case, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """What the cast is given: amaxes, or the scale of delayed scaling, of this very ``x``."""
    row, column = fused.measure(x, *case.formats)
    scale = torch.full((1,), 64.0, device=x.device)
    of_plane = {
        f"{side}_statistic": scale if isinstance(format, Float8DelayedFormat) else amax
        for side, format, amax in (("row", case.row, row), ("column", case.column, column))
    }
    return of_plane


def fused_call(case: Case, sample: torch.Tensor):
    """The work as a function of one input (an X, or a plane to decode)."""
    if case.work == "decode":
        return lambda plane: fused.decode(plane, torch.bfloat16)
    if case.work == "only":
        return lambda x: fused.measure(x, *case.formats)
    options = {"source": case.source, "rounding": ROUNDING, "bias_grad": case.bias_grad}
    given = statistics_of(case, sample)
    if case.work == "recorded":
        options["row_amax"] = torch.zeros(1, device=sample.device)
    if case.work != "included":
        return lambda x: fused.cast(x, *case.formats, **given, **options)

    def measured(x):
        row, column = fused.measure(x, *case.formats, source=case.source)
        return fused.cast(x, *case.formats, row_statistic=row, column_statistic=column, **options)

    return measured


def inputs_of(case: Case, matrices: list[torch.Tensor]) -> list[torch.Tensor | Plane]:
    """What the call takes one after another."""
    if case.work != "decode":
        return matrices
    return [fused.cast(x, case.row, None, **statistics_of(case, x)).row for x in matrices]


def least_bytes(case: Case, x: torch.Tensor) -> int:
    """Bytes that must move: X once per read that cannot be avoided, each result once."""
    if case.work == "only":
        return x.nbytes
    m, k = x.shape
    shapes = ((case.row, (m, k)), (case.column, (k, m)))
    planes = sum(f.empty(s, x.dtype, torch.device("meta")).nbytes for f, s in shapes if f)
    if case.work == "decode":
        return planes + m * k * 2
    return planes + x.nbytes * (2 if case.work == "included" else 1)


def reference_call(case: Case, sample: torch.Tensor):
    """The same work in plain torch: measure and encode per plane, one amax where it is shared."""
    if case.work == "decode":
        return lambda plane: saturating_to(case.row.decode(plane), torch.bfloat16)
    given = statistics_of(case, sample)
    is_shared = fused.shares_amax(*case.formats)

    def measure(x):
        row = case.row.measure(x)
        if case.column is None:
            return row, None
        return row, row if is_shared else case.column.measure(x.t())

    def cast(x):
        row, column = given["row_statistic"], given["column_statistic"]
        if case.work == "included":
            row, column = measure(x)
        elif case.work == "recorded":
            case.row.measure(x)
        planes = [case.row.encode(x, row, ROUNDING["rowwise"])]
        if case.column is not None:
            source = x
            if case.source == "rowwise_dequantized":
                source = saturating_to(case.row.decode(planes[0]), x.dtype, keep_inf=False)
            planes.append(case.column.encode(source.t(), column, ROUNDING["columnwise"]))
        return planes, x.sum(0, dtype=torch.float32) if case.bias_grad else None

    return measure if case.work == "only" else cast
