"""Factories that the tests loop over: every format plain, and hybrids; importable by workers."""

from __future__ import annotations

import functools

import dist_finegrain as dfg
from dist_finegrain import factories, factory_zoo
from dist_finegrain.factories import E4M3, E5M2


def guide_factory(role):
    """The guide's factory, for a module called "demo.fc1" or "demo.fc2"."""
    if role is not None and role.name == "demo.fc1":
        if role.tensor_type == "input":
            return dfg.HybridQuantizer(
                rowwise_quantizer=factories.mxfp8_factory(role),
                columnwise_quantizer=dfg.IdentityQuantizer(),
                columnwise_source="original",
            )
        if role.tensor_type == "weight":
            return dfg.HybridQuantizer(
                rowwise_quantizer=factories.mxfp8_factory(role),
                columnwise_quantizer=factories.nvfp4_factory(role),
                columnwise_source="rowwise_dequantized",
            )
        if role.tensor_type == "grad_output":
            return dfg.HybridQuantizer(
                rowwise_quantizer=factories.nvfp4_factory(role),
                columnwise_quantizer=dfg.IdentityQuantizer(),
                columnwise_source="original",
            )
    if role is not None and role.name == "demo.fc2":
        return dfg.IdentityQuantizer()
    return factories.mxfp8_factory(role)


def mxfp8_2d_weight(role):
    """MXFP8 with 32×32 blocks for weights."""
    is_weight = role is not None and role.tensor_type == "weight"
    return dfg.MXFP8Quantizer(E4M3, with_2d_quantization=is_weight)


def block_1d(role):
    """FP8 in 1×128 blocks everywhere."""
    return dfg.Float8BlockQuantizer(E4M3, block_scaling_dim=1)


def block_f32_scales(role):
    """FP8 blocks whose scales are no powers of two."""
    dim = 2 if role is not None and role.tensor_type == "weight" else 1
    return dfg.Float8BlockQuantizer(E4M3, block_scaling_dim=dim, force_pow_2_scales=False)


def nvfp4_stochastic(role):
    """NVFP4 with stochastic rounding of every tensor, weights included."""
    return dfg.NVFP4Quantizer(stochastic_rounding=True)


def dequantized_columns(role):
    """Per-tensor rows, per-tensor columns made from the decoded rows."""
    element = E5M2 if role is not None and role.tensor_type == "grad_output" else E4M3
    return dfg.HybridQuantizer(
        rowwise_quantizer=dfg.Float8CurrentScalingQuantizer(element),
        columnwise_quantizer=dfg.Float8CurrentScalingQuantizer(element),
        columnwise_source="rowwise_dequantized",
    )


def delayed_children(role):
    """Delayed scaling in both directions of a hybrid."""
    return dfg.HybridQuantizer(
        rowwise_quantizer=dfg.DelayedScalingRequest(amax_history_len=4),
        columnwise_quantizer=dfg.DelayedScalingRequest(amax_history_len=2),
    )


def same_format_hybrid(role, *, factory):
    """``factory``'s quantizer for both directions, as two children of a hybrid."""
    return dfg.HybridQuantizer(rowwise_quantizer=factory(role), columnwise_quantizer=factory(role))


PLAIN = {
    "identity": factories.high_precision_factory,
    "delayed": functools.partial(factories.delayed_scaling_factory, amax_history_len=4),
    "current": factories.current_scaling_factory,
    "row": factories.row_scaling_factory,
    "block": factories.float8_block_scaling_factory,
    "block_1d": block_1d,
    "block_f32": block_f32_scales,
    "mxfp8": factories.mxfp8_factory,
    "mxfp8_2d": mxfp8_2d_weight,
    "nvfp4": factories.nvfp4_factory,
    "nvfp4_1d": factory_zoo.nvfp4_1d_weight,
    "nvfp4_stochastic": nvfp4_stochastic,
}
# Without the zoo's MoE recipe: it tells experts from Linears, which tests compare.
HYBRID = {
    "guide": guide_factory,
    "mxfp8_fwd_nvfp4_bwd": factory_zoo.mxfp8_fwd_nvfp4_bwd,
    "nvfp4_row_scaled_fwd_mxfp8_bwd": factory_zoo.nvfp4_row_scaled_fwd_mxfp8_bwd,
    "block_row_scaled_wgrad": factory_zoo.float8_block_row_scaled_wgrad,
    "dequantized_columns": dequantized_columns,
    "delayed_children": delayed_children,
}
ALL = {**PLAIN, **HYBRID}


def emulated(factory, **options) -> dfg.CustomRecipe:
    """A recipe that runs on any machine."""
    return dfg.CustomRecipe(qfactory=factory, execution="emulate", **options)
