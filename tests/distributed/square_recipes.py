"""Factories whose one scale per square block serves both planes, for every tensor."""

from __future__ import annotations

import functools

import dist_finegrain as dfg
from dist_finegrain.factories import E4M3


def square_blocks(role, *, format):
    """Square blocks of inputs, weights and gradients, in ``format``."""
    if format == "block":
        return dfg.Float8BlockQuantizer(E4M3, block_scaling_dim=2)
    if format == "mxfp8":
        return dfg.MXFP8Quantizer(E4M3, with_2d_quantization=True)
    return dfg.NVFP4Quantizer(with_2d_quantization=True)


SQUARE = {
    f"{format}_square": functools.partial(square_blocks, format=format)
    for format in ("block", "mxfp8", "nvfp4")
}
