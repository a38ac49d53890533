"""Registers what a saved quantized tensor names, for ``torch.load(weights_only=True)``.

Importing dist_finegrain.formats runs it. Only classes of this package are registered: for a
quantizer of your own call ``torch.serialization.add_safe_globals([YourQuantizer])``.
"""

from __future__ import annotations

import torch

from . import float8, float8_block, hybrid, identity, mxfp8, nvfp4, user  # noqa: F401
from .dtypes import DType
from .plane import Format, Plane
from .quantizer import Quantizer
from .requests import DelayedScalingRequest, FP8Format
from .tensors import HybridQuantizedTensor, IdentityTensor, QuantizedTensor, rebuild_tensor


# The modules above are imported for the classes that they define.
def _with_subclasses(cls: type) -> list[type]:
    return [cls] + [found for sub in cls.__subclasses__() for found in _with_subclasses(sub)]


SAFE_GLOBALS = [
    rebuild_tensor,
    QuantizedTensor,
    HybridQuantizedTensor,
    IdentityTensor,
    Plane,
    DType,
    FP8Format,
    DelayedScalingRequest,
] + [
    cls
    for base in (Format, Quantizer)
    for cls in _with_subclasses(base)
    if cls.__module__.startswith(f"{__package__}.")
]
torch.serialization.add_safe_globals(SAFE_GLOBALS)
