"""Named fine-grained factories: whole recipes that mix formats per GEMM. Pickled by these paths."""

from __future__ import annotations

from .factories import (
    E4M3,
    _tensor_type,
    float8_block_scaling_factory,
    mxfp8_factory,
    nvfp4_factory,
)
from .formats.float8 import Float8RowScalingQuantizer
from .formats.float8_block import Float8BlockQuantizer
from .formats.hybrid import HybridQuantizer
from .formats.identity import IdentityQuantizer
from .formats.nvfp4 import NVFP4Quantizer
from .formats.quantizer import Quantizer
from .roles import QuantizerRole


def _per_gemm(role: QuantizerRole | None, fprop, dgrad, wgrad) -> Quantizer:
    """One format per GEMM: each tensor gets a hybrid of the formats of the two that read it."""
    tensor_type = _tensor_type(role)
    if tensor_type == "weight":
        row, column = fprop(role), dgrad(role)
    elif tensor_type == "grad_output":
        row, column = dgrad(role), wgrad(role)
    else:
        row, column = fprop(role), wgrad(role)
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)


def _identity(role: QuantizerRole | None) -> IdentityQuantizer:
    return IdentityQuantizer()


def _nvfp4_row_scaled(role: QuantizerRole | None) -> NVFP4Quantizer:
    return NVFP4Quantizer(row_scaled_nvfp4=True)


def high_precision_fwd_mxfp8_bwd(role: QuantizerRole | None) -> Quantizer:
    """fprop in the compute dtype, dgrad and wgrad in MXFP8."""
    return _per_gemm(role, _identity, mxfp8_factory, mxfp8_factory)


def mxfp8_fwd_nvfp4_bwd(role: QuantizerRole | None) -> Quantizer:
    """fprop in MXFP8, dgrad and wgrad in NVFP4."""
    return _per_gemm(role, mxfp8_factory, nvfp4_factory, nvfp4_factory)


def mxfp8_fwd_high_precision_bwd(role: QuantizerRole | None) -> Quantizer:
    """fprop in MXFP8, dgrad and wgrad in the compute dtype."""
    return _per_gemm(role, mxfp8_factory, _identity, _identity)


def nvfp4_1d_weight(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with 1×16 blocks for weights too."""
    if _tensor_type(role) == "weight":
        return NVFP4Quantizer()
    return nvfp4_factory(role)


def nvfp4_row_scaled_fwd_mxfp8_bwd(role: QuantizerRole | None) -> Quantizer:
    """fprop in row-scaled NVFP4, dgrad and wgrad in MXFP8."""
    return _per_gemm(role, _nvfp4_row_scaled, mxfp8_factory, mxfp8_factory)


def nvfp4_row_scaled_fwd_high_precision_bwd(role: QuantizerRole | None) -> Quantizer:
    """fprop in row-scaled NVFP4, dgrad and wgrad in the compute dtype."""
    return _per_gemm(role, _nvfp4_row_scaled, _identity, _identity)


def float8_block_row_scaled_wgrad(role: QuantizerRole | None) -> Quantizer:
    """Block FP8 for fprop and dgrad, row-scaled FP8 for wgrad: avoids Hopper's slow 1×128·1×128."""
    if _tensor_type(role) == "weight":
        return Float8BlockQuantizer(E4M3, block_scaling_dim=2)
    return HybridQuantizer(
        rowwise_quantizer=float8_block_scaling_factory(role),
        columnwise_quantizer=Float8RowScalingQuantizer(E4M3),
    )


def moe_nvfp4_row_scaled_fwd_mxfp8_bwd(role: QuantizerRole | None) -> Quantizer:
    """Experts: fprop in row-scaled NVFP4, dgrad and wgrad in MXFP8; all other modules MXFP8.

    Most weights are the experts', so they get the smallest format. With a scale per row what a
    token becomes does not depend on which others its expert got.
    """
    if role is not None and role.module_type == "grouped_linear":
        return nvfp4_row_scaled_fwd_mxfp8_bwd(role)
    return mxfp8_factory(role)
