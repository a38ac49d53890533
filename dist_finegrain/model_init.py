"""quantized_model_init: inside it modules are made with their weights quantized."""

from __future__ import annotations

import dataclasses
import threading

from .context import current_frame
from .recipe import CustomRecipe


@dataclasses.dataclass(frozen=True)
class ModelInit:
    """How weights are made: in the formats of ``recipe``'s weight slots."""

    recipe: CustomRecipe
    preserves_initial_value: bool


class _Stack(threading.local):
    def __init__(self):
        self.entered: list[ModelInit | None] = []


_stack = _Stack()


def current_model_init() -> ModelInit | None:
    """What the innermost open quantized_model_init of this thread asks for; None for nothing."""
    return _stack.entered[-1] if _stack.entered else None


class quantized_model_init:
    """Context in which modules hold their weights only as the recipe's weight slots quantize them.

    Every weight matrix of Linear, LayerNormLinear, LayerNormMLP and GroupedLinear made inside
    becomes a QuantizedTensor parameter with the planes of both directions; where the slot is an
    IdentityQuantizer, and for biases and norms, nothing changes. The factory is asked for the
    weight slots, by the names that the modules have then; forwards need a recipe whose weight
    slots have the same formats, and cast no weight. Outside of autocast the dequantized weight is
    used. Gradients are ordinary tensors. What is written in place (by an optimizer, by
    load_state_dict) is quantized again.

    enabled: False makes ordinary weights, also inside another quantized_model_init.
    recipe: a CustomRecipe; None takes that of the enclosing quantized_model_init or autocast.
    preserve_high_precision_init_val: keep each initial weight on the CPU, for a master copy: the
    parameters get Transformer Engine's ``get_high_precision_init_val()`` (a tensor, None once
    cleared) and ``clear_high_precision_init_val()``.

    Raises ValueError when enabled without any recipe, TypeError when recipe is not a CustomRecipe.
    Constructors inside raise ValueError for what a stored weight cannot be: delayed scaling,
    stochastic rounding, parameters_split, tp_mesh, device="meta", and under tensor parallelism a
    scale of the whole matrix.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: CustomRecipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ):
        if recipe is not None and not isinstance(recipe, CustomRecipe):
            raise TypeError(
                f"recipe is {recipe!r}; accepted: a CustomRecipe, "
                "e.g. recipe=CustomRecipe(qfactory=dist_finegrain.factories.mxfp8_factory)"
            )
        self.enabled = enabled
        self.recipe = recipe
        self.preserve_high_precision_init_val = preserve_high_precision_init_val

    def __enter__(self):
        _stack.entered.append(self._model_init() if self.enabled else None)
        return self

    def __exit__(self, *exc_info):
        _stack.entered.pop()

    def _model_init(self) -> ModelInit:
        outer = current_model_init()
        recipe = self.recipe or (outer.recipe if outer else current_frame().recipe)
        if recipe is None:
            raise ValueError(
                "quantized_model_init(enabled=True) got recipe=None outside of any other and of "
                "autocast; e.g. "
                "quantized_model_init(recipe=CustomRecipe(dist_finegrain.factories.mxfp8_factory))"
            )
        return ModelInit(recipe, self.preserve_high_precision_init_val)
