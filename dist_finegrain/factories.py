"""Factories for the native formats: role → quantizer. Use them as defaults or for hybrid children.

They mirror what Transformer Engine's named recipes choose per tensor. Pickled by these paths.
"""

from __future__ import annotations

from .formats.dtypes import DType
from .formats.float8 import Float8CurrentScalingQuantizer, Float8RowScalingQuantizer
from .formats.float8_block import Float8BlockQuantizer
from .formats.identity import IdentityQuantizer
from .formats.mxfp8 import MXFP8Quantizer
from .formats.nvfp4 import NVFP4Quantizer
from .formats.requests import DelayedScalingRequest, FP8Format
from .roles import QuantizerRole

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def _tensor_type(role: QuantizerRole | None) -> str:
    return "" if role is None else role.tensor_type


def _element(role: QuantizerRole | None, fp8_format: FP8Format) -> DType:
    """E5M2 for gradients under HYBRID, and everywhere under E5M2; else E4M3."""
    is_gradient = _tensor_type(role) == "grad_output"
    if fp8_format is FP8Format.E5M2 or (fp8_format is FP8Format.HYBRID and is_gradient):
        return E5M2
    return E4M3


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Everything stays in the compute dtype."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None, **options) -> DelayedScalingRequest:
    """Per-tensor FP8 with delayed scaling; options are the fields of DelayedScalingRequest."""
    return DelayedScalingRequest(**options)


def current_scaling_factory(
    role: QuantizerRole | None,
    *,
    fp8_format: FP8Format = FP8Format.HYBRID,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
) -> Float8CurrentScalingQuantizer:
    """Per-tensor FP8 with current scaling: by default E5M2 for grad_output, else E4M3."""
    return Float8CurrentScalingQuantizer(
        _element(role, fp8_format),
        force_pow_2_scales=force_pow_2_scales,
        amax_epsilon=amax_epsilon,
    )


def row_scaling_factory(
    role: QuantizerRole | None, *, fp8_format: FP8Format = FP8Format.E4M3
) -> Float8RowScalingQuantizer:
    """FP8 with one scale per plane row (per token, per channel): by default E4M3 everywhere."""
    return Float8RowScalingQuantizer(_element(role, fp8_format))


def float8_block_scaling_factory(
    role: QuantizerRole | None,
    *,
    fp8_format: FP8Format = FP8Format.E4M3,
    force_pow_2_scales: bool = True,
    x_block_scaling_dim: int = 1,
    w_block_scaling_dim: int = 2,
    grad_block_scaling_dim: int = 1,
) -> Float8BlockQuantizer:
    """FP8 blocks: by default 128×128 for weights, 1×128 for the rest, power-of-two scales, E4M3."""
    dims = {"weight": w_block_scaling_dim, "grad_output": grad_block_scaling_dim}
    return Float8BlockQuantizer(
        _element(role, fp8_format),
        force_pow_2_scales=force_pow_2_scales,
        block_scaling_dim=dims.get(_tensor_type(role), x_block_scaling_dim),
    )


def mxfp8_factory(
    role: QuantizerRole | None, *, fp8_format: FP8Format = FP8Format.E4M3
) -> MXFP8Quantizer:
    """MXFP8, blocks of 32 along each contraction; by default E4M3 everywhere."""
    return MXFP8Quantizer(_element(role, fp8_format))


def nvfp4_factory(
    role: QuantizerRole | None,
    *,
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
) -> NVFP4Quantizer:
    """NVFP4 as it is trained with: each of its three aids can be switched off.

    Weights get 16×16 blocks, the columnwise planes of input and grad_output the random Hadamard
    transform, grad_output stochastic rounding.
    """
    tensor_type = _tensor_type(role)
    with_rht = tensor_type in ("input", "grad_output") and not disable_rht
    return NVFP4Quantizer(
        with_rht=with_rht,
        with_post_rht_amax=with_rht,
        with_2d_quantization=tensor_type == "weight" and not disable_2d_quantization,
        stochastic_rounding=tensor_type == "grad_output" and not disable_stochastic_rounding,
    )
