"""The FP8 formats and quantizers that the tests of planes loop over."""

from __future__ import annotations

import torch

from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.float8 import (
    Float8CurrentScalingQuantizer,
    Float8DelayedFormat,
    Float8Quantizer,
    Float8RowFormat,
    Float8RowScalingQuantizer,
    Float8TensorFormat,
)
from dist_finegrain.formats.float8_block import Float8BlockFormat, Float8BlockQuantizer
from dist_finegrain.formats.mxfp8 import MXFP8Format, MXFP8Quantizer
from dist_finegrain.formats.plane import Format, Plane
from dist_finegrain.formats.quantizer import Quantizer

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
SCALE = 3.7  # of delayed scaling


def formats_of(element: str) -> list[Format]:
    return [
        Float8TensorFormat(element),
        Float8TensorFormat(element, power_of_two=True),
        Float8DelayedFormat(element),
        Float8RowFormat(element),
        Float8BlockFormat(element),
        Float8BlockFormat(element, power_of_two=False),
        Float8BlockFormat(element, two_dimensional=True),
        MXFP8Format(element),
        MXFP8Format(element, two_dimensional=True),
    ]


FORMATS = {f.describe(): f for element in ("e4m3", "e5m2") for f in formats_of(element)}
QUANTIZERS = {
    "delayed": lambda: Float8Quantizer(torch.tensor([SCALE]), torch.zeros(1), E4M3),
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "current_e5m2": lambda: Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True),
    "row": lambda: Float8RowScalingQuantizer(E4M3),
    "block_1d": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "block_2d": lambda: Float8BlockQuantizer(E4M3),
    "block_e5m2": lambda: Float8BlockQuantizer(E5M2, block_scaling_dim=1, force_pow_2_scales=False),
    "mxfp8": MXFP8Quantizer,
    "mxfp8_2d": lambda: MXFP8Quantizer(E5M2, with_2d_quantization=True),
}


def make(name: str) -> Quantizer:
    return QUANTIZERS[name]()


def encoded(format: Format, x: torch.Tensor) -> Plane:
    """The plane of ``x`` [R, C] as a cast makes it: measured first, or with the delayed SCALE."""
    if format.statistic == "scale":
        return format.encode(x, torch.tensor([SCALE], device=x.device))
    return format.encode(x, format.measure(x))
