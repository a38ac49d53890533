"""Fine-grained low-precision training for Megatron-style models.

One factory picks a quantizer per module, tensor role and GEMM direction:

    import dist_finegrain as dfg

    recipe = dfg.CustomRecipe(qfactory=my_factory)
    with dfg.autocast(recipe=recipe):
        y = model(x)

The API is experimental: names, roles and validation may grow between releases.
"""

from . import factories, factory_zoo, recipe
from .context import autocast
from .extension import build_info
from .formats.dtypes import DType
from .formats.float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowScalingQuantizer,
)
from .formats.float8_block import Float8BlockQuantizer
from .formats.hybrid import HybridQuantizer
from .formats.identity import IdentityQuantizer
from .formats.mxfp8 import MXFP8Quantizer
from .formats.nvfp4 import NVFP4Quantizer
from .formats.quantizer import Quantizer
from .formats.requests import DelayedScalingRequest, FP8Format, QuantizerRequest
from .formats.tensors import HybridQuantizedTensor, IdentityTensor, QuantizedTensor
from .model_init import quantized_model_init
from .modules.grouped_linear import GroupedLinear
from .modules.layernorm_linear import LayerNormLinear
from .modules.layernorm_mlp import LayerNormMLP
from .modules.linear import Linear
from .naming import assign_names
from .planning import plan
from .recipe import CustomRecipe
from .recomputation import recompute
from .reporting import comm_report
from .roles import QuantizerRole
from .stepping import end_step

__version__ = "0.1.0"

__all__ = [
    "CustomRecipe",
    "DType",
    "DelayedScalingRequest",
    "FP8Format",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8RowScalingQuantizer",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "assign_names",
    "autocast",
    "build_info",
    "comm_report",
    "end_step",
    "factories",
    "factory_zoo",
    "plan",
    "quantized_model_init",
    "recipe",
    "recompute",
]
