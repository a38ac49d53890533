"""Element types of the quantized formats, under the names that Transformer Engine users know."""

from __future__ import annotations

import enum

import torch


class DType(enum.Enum):
    """Element type of a plane's codes; ``fp8_dtype=`` takes one of these or the torch dtype."""

    kFloat8E4M3 = "e4m3"
    kFloat8E5M2 = "e5m2"
    kFloat4E2M1 = "e2m1"


_BY_TORCH_DTYPE = {
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
HIGH_PRECISION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fp8_element(fp8_dtype: DType | torch.dtype) -> str:
    """``"e4m3"`` or ``"e5m2"``; TypeError for anything that is not an 8-bit float type."""
    dtype = _BY_TORCH_DTYPE.get(fp8_dtype, fp8_dtype)
    if dtype in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        return dtype.value
    raise TypeError(
        f"fp8_dtype is {fp8_dtype!r}; accepted: DType.kFloat8E4M3, DType.kFloat8E5M2, "
        "torch.float8_e4m3fn or torch.float8_e5m2, e.g. fp8_dtype=DType.kFloat8E4M3"
    )


def check_high_precision(dtype: torch.dtype, what: str) -> None:
    """TypeError unless ``dtype`` is one that can be quantized."""
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{what} has dtype {dtype}; accepted: torch.float32, torch.float16, torch.bfloat16"
        )
