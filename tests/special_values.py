"""Inputs that every format must survive, per dtype, and data of every magnitude."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NONFINITE = {"nan": math.nan, "negative_nan": -math.nan, "inf": math.inf, "negative_inf": -math.inf}


def special_values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Name → matrix [R, C] of ``dtype``; every one but the empty ones has one value of interest."""
    limits = torch.finfo(dtype)
    cases = {
        "zero": torch.zeros(4, 64),
        "negative_zero": -torch.zeros(4, 64),
        "tiny": torch.full((4, 64), limits.tiny),
        "subnormal": torch.full((4, 64), limits.smallest_normal * limits.eps),
        "huge": torch.full((4, 64), limits.max),
        "one_element": torch.full((1, 1), -3.0),
        "no_rows": torch.zeros(0, 64),
        "no_columns": torch.zeros(64, 0),
    }
    cases = {name: x.to(dtype) for name, x in cases.items()}
    zero_row = every_magnitude(4, 64, dtype, seed=1)
    zero_row[1] = 0
    cases["zero_row"] = zero_row
    for name, value in NONFINITE.items():
        cases[name] = with_value(every_magnitude(4, 64, dtype, seed=2), value)
        cases[f"only_{name}"] = _scalar(value, dtype).expand(2, 64).contiguous()
    return cases


def with_value(x: torch.Tensor, value: float, at: tuple[int, int] = (1, 5)) -> torch.Tensor:
    """A copy of ``x`` with one element replaced."""
    x = x.clone()
    x[at] = _scalar(value, x.dtype)
    return x


def with_nonfinite(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A copy of ``x`` with about one element in 100 replaced by NaN, -NaN, Inf or -Inf."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(0, 400, x.shape, generator=generator)
    x = x.clone()
    for index, value in enumerate(NONFINITE.values()):
        x[which == index] = _scalar(value, x.dtype)
    return x


def _scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    # Conversions may drop the sign of a NaN; a negation in the dtype itself sets it.
    magnitude = torch.tensor(abs(value)).to(dtype)
    return -magnitude if math.copysign(1, value) < 0 else magnitude


def fp32_patterns(x: torch.Tensor) -> list:
    """The values as unsigned FP32 bit patterns, in nested lists of ``x``'s shape."""
    return (x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF).tolist()


def every_magnitude(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Finite values [rows, columns]: each row lies around a magnitude of its own.

    A row spans up to 16 binades below its largest exponent, which is drawn from all of the dtype's,
    subnormals included; both signs, about one value in 16 is ±0, about one row in 32 is all ±0.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    limits = torch.finfo(dtype)
    least = round(math.log2(limits.smallest_normal * limits.eps))
    greatest = math.floor(math.log2(limits.max))
    top = draw(least, greatest + 1, rows, 1)
    exponent = (top - draw(0, 17, rows, columns)).clamp(min=least)
    mantissa = 1 + draw(0, 2**23, rows, columns).double() / 2**23
    sign = 1 - 2 * draw(0, 2, rows, columns).double()
    kept = (draw(0, 16, rows, columns) > 0) & (draw(0, 32, rows, 1) > 0)
    values = torch.ldexp(mantissa, exponent.double()) * kept
    return (sign * values.clamp(max=limits.max)).to(dtype)
