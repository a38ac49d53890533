"""The recipe factories of the examples; ``--recipe examples.recipes:<name>`` picks one.

``--recipe dist_finegrain.factory_zoo:<name>`` picks one of the zoo: ``zoo_recipes`` lists them.
"""

from __future__ import annotations

import inspect

import dist_finegrain as dfg
from dist_finegrain import factory_zoo
from dist_finegrain.factories import mxfp8_factory, nvfp4_factory

HYBRID_MODULE = "decoder.1.fc1"
HIGH_PRECISION_MODULE = "decoder.2.fc2"


def guide_factory(role: dfg.QuantizerRole | None) -> dfg.Quantizer:
    """The user guide's assignment: one module with a format per GEMM, one in BF16, the rest MXFP8.

    Module           fprop     dgrad     wgrad
    decoder.1.fc1    MXFP8     NVFP4     compute dtype
    decoder.2.fc2    compute dtype in all three
    others           MXFP8     MXFP8     MXFP8
    """
    if role is not None and role.name == HYBRID_MODULE:
        if role.tensor_type == "input":
            return dfg.HybridQuantizer(
                rowwise_quantizer=mxfp8_factory(role),
                columnwise_quantizer=dfg.IdentityQuantizer(),
                columnwise_source="original",
            )
        if role.tensor_type == "weight":
            return dfg.HybridQuantizer(
                rowwise_quantizer=mxfp8_factory(role),
                columnwise_quantizer=nvfp4_factory(role),
                columnwise_source="rowwise_dequantized",
            )
        if role.tensor_type == "grad_output":
            return dfg.HybridQuantizer(
                rowwise_quantizer=nvfp4_factory(role),
                columnwise_quantizer=dfg.IdentityQuantizer(),
                columnwise_source="original",
            )
    if role is not None and role.name == HIGH_PRECISION_MODULE:
        return dfg.IdentityQuantizer()
    return mxfp8_factory(role)


def zoo_recipes() -> list[str]:
    """The import path, for ``--recipe``, of every recipe of the zoo, in the order of its file."""
    return [
        f"{factory_zoo.__name__}:{name}"
        for name, value in vars(factory_zoo).items()
        if inspect.isfunction(value)
        and value.__module__ == factory_zoo.__name__
        and not name.startswith("_")
    ]
