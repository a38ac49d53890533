"""Every CUDA kernel on small shapes, for compute-sanitizer: python -m tests.formats.small_shapes.

What is computed is checked elsewhere; here only accesses count.
"""

from __future__ import annotations

import torch

from dist_finegrain.formats import fused, fused_grouped

from .fused_cases import EVERY, PLACES, SOURCES, as_measured_row

SHAPES = ((1, 1), (17, 33), (130, 129), (300, 257))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENDS = (64, 64, 193, 300)


def use(format, source: str, x: torch.Tensor) -> None:
    """measure, cast and decode, both planes of one format."""
    row = as_measured_row(format, source)
    row_amax, _ = fused.measure(x, row, None)
    _, column_amax = fused.measure(x, row, format, source=source, row_statistic=row_amax)
    statistics = {"row_statistic": row_amax, "column_statistic": column_amax}
    made = fused.cast(x, row, format, source=source, rounding=PLACES, bias_grad=True, **statistics)
    for plane in (made.row, made.column):
        fused.decode(plane, x.dtype)


def use_grouped(format, x: torch.Tensor) -> None:
    """Both planes of four experts, one of them without rows."""
    ends = torch.tensor(ENDS, dtype=torch.int32, device=x.device)
    row_amax, column_amax = fused_grouped.measure_grouped(x, ends, format, format)
    statistics = {"row_statistic": row_amax, "column_statistic": column_amax}
    fused_grouped.cast_grouped(x, ends, format, format, rounding=PLACES, **statistics)


def main() -> None:
    """Run all of it once; the last line says how many formats."""
    count = 0
    for format in EVERY.values():
        if format.family == "identity" or format.statistic == "scale":
            continue
        for dtype in DTYPES:
            for rows, columns in SHAPES:
                x = torch.randn(rows, columns + 3, device="cuda").to(dtype)[:, 3:]
                for source in SOURCES:
                    use(format, source, x)
        is_square = format.family == "float8_block" and format.two_dimensional
        if not is_square:
            use_grouped(format, torch.randn(300, 130, device="cuda", dtype=torch.bfloat16))
        count += 1
    torch.cuda.synchronize()
    print(f"{count} formats done")


if __name__ == "__main__":
    main()
