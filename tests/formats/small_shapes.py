"""Every CUDA kernel on small shapes, for compute-sanitizer: python -m tests.formats.small_shapes.

What is computed is checked elsewhere; here only accesses count.
"""

from __future__ import annotations

import torch

from dist_finegrain.formats import fused, fused_grouped
from dist_finegrain.formats.fused_delayed import DelayedState, update_delayed

from .fused_cases import EVERY, PLACES, SOURCES, SWIZZLED

SHAPES = ((1, 1), (17, 33), (130, 129), (300, 257))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENDS = (0, 1, 128, 256, 385)  # experts of 0, 1, 127, 128 and 129 rows
SCALE = torch.full((1,), 3.7)
# Row and column of different codecs: those with an instance of their own, and some without.
PAIRS = (
    ("mxfp8", "nvfp4"),
    ("mxfp8", "nvfp4_rht"),
    ("mxfp8", "nvfp4_rht_sr"),
    ("nvfp4", "nvfp4_rht"),
    ("nvfp4_sr", "nvfp4_rht_sr"),
    ("nvfp4", "mxfp8"),
    ("block", "current"),
    ("row", "block_2d"),
    ("mxfp8_2d", "block_2d"),
    ("block_2d", "nvfp4_2d"),
)


def use(row, column, source: str, x: torch.Tensor) -> None:
    """measure, cast and decode."""
    statistics = [SCALE.to(x.device) if f.statistic == "scale" else None for f in (row, column)]
    if row.statistic != "scale":
        statistics[0], _ = fused.measure(x, row, None)
    if column.statistic != "scale":
        options = {"source": source, "row_statistic": statistics[0], "rounding": PLACES}
        _, statistics[1] = fused.measure(x, row, column, **options)
    made = fused.cast(
        x, row, column, source=source, row_statistic=statistics[0], column_statistic=statistics[1],
        rounding=PLACES, row_amax=torch.zeros_like(SCALE, device=x.device), bias_grad=True,
    )  # fmt: skip
    for plane in (made.row, made.column):
        fused.decode(plane, x.dtype)


def use_one_scale(format, x: torch.Tensor) -> None:
    """One statistic for both planes, whose codes are then made once; with the bias gradient."""
    statistic = SCALE.to(x.device)
    fused.cast(
        x, format, format, row_statistic=statistic, column_statistic=statistic, bias_grad=True
    )


def use_grouped(format, source: str, x: torch.Tensor) -> None:
    """Both planes of the experts of ENDS, one of them without rows."""
    ends = torch.tensor(ENDS, dtype=torch.int32, device=x.device)
    row_amax, _ = fused_grouped.measure_grouped(x, ends, format, None)
    options = {"source": source, "row_statistic": row_amax, "rounding": PLACES}
    _, column_amax = fused_grouped.measure_grouped(x, ends, format, format, **options)
    fused_grouped.cast_grouped(x, ends, format, format, column_statistic=column_amax, **options)


def main() -> None:
    """Run all of it once; the last line says how many pairs."""
    formats = [f for f in EVERY.values() if f.family != "identity"]
    pairs = [(f, f) for f in (*formats, *SWIZZLED.values())]
    pairs += [(EVERY[a], EVERY[b]) for a, b in PAIRS]
    for row, column in pairs:
        for source in SOURCES:
            if row.rht and source != "original":
                continue
            for dtype in DTYPES:
                for rows, columns in SHAPES:
                    x = torch.randn(rows, columns + 3, device="cuda").to(dtype)[:, 3:]
                    use(row, column, source, x)
                    if row is column and row.family in ("float8", "float8_block"):
                        if row.statistic in ("tensor", "scale"):
                            use_one_scale(row, x)
            is_square = row.family == "float8_block" and row.two_dimensional
            if row in formats and row is column and not is_square and row.statistic != "scale":
                x = torch.randn(ENDS[-1], 130, device="cuda", dtype=torch.bfloat16)
                use_grouped(row, source, x)
    # Rows of whole vectors, which the amaxes of lines are read by: a whole tile, and a ragged one.
    for name in ("row", "nvfp4_row"):
        for dtype in DTYPES:
            for columns in (128, 136):
                x = torch.randn(ENDS[-1], columns, device="cuda").to(dtype)
                use_grouped(EVERY[name], "original", x)
    states = [
        DelayedState(
            torch.ones(1, device="cuda"), torch.zeros(n, device="cuda"),
            torch.full((1,), 2.0, device="cuda"), True, 448.0, 0.0,
        )
        for n in (1, 16, 1000)
    ]  # fmt: skip
    update_delayed(states)
    torch.cuda.synchronize()
    print(f"{len(pairs)} pairs done")


if __name__ == "__main__":
    main()
