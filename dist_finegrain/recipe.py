"""CustomRecipe: a factory and the options around it; the named recipes; recipe identity."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import types
from collections.abc import Callable, Hashable
from typing import Any

from . import factories
from .formats.requests import FP8Format

EXECUTIONS = ("native", "emulate", "reference")
EXECUTION_VARIABLE = "DIST_FINEGRAIN_EXECUTION"
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
GEMM_NAMES = ("fprop", "dgrad", "wgrad")


def _accepted(name: str, got: Any, accepted: tuple, valid: str) -> None:
    if got not in accepted:
        raise ValueError(f"{name}={got!r}; accepted: {accepted}, e.g. {name}={valid}")


@dataclasses.dataclass(frozen=True)
class CustomRecipe:
    """Asks ``qfactory(role)`` for the quantizer of every slot of every module.

    qfactory: role (or None at a boundary slot) → Quantizer or QuantizerRequest, fresh each call.
    execution: "native", "emulate", "reference"; None reads DIST_FINEGRAIN_EXECUTION, else native.
    rounding_seed: seed of stochastic rounding, equal on all ranks.
    fast_accumulation: the GEMMs that may use the tensor cores' fast accumulation.
    backward_override: None, or "high_precision" / "dequantized": backward GEMMs run in the compute
    dtype on the original / the dequantized rowwise values.
    fp8_format is accepted for Transformer Engine's signature and unused; fp8_dpa and fp8_mha select
    attention; quantization_alignment is read by padding helpers only.

    Frozen: a changed recipe is a new object. What the factory reads and ``recipe_key()`` (if the
    callable has one) does not cover needs ``invalidate()`` after it is mutated.
    Raises TypeError / ValueError naming the field, what was got and what is accepted.
    """

    qfactory: Callable[[Any], Any]
    fp8_format: FP8Format = FP8Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128
    execution: str | None = None
    rounding_seed: int = 0
    fast_accumulation: tuple[str, ...] = ("fprop",)
    _generation: int = dataclasses.field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self):
        if not callable(self.qfactory):
            raise TypeError(
                f"qfactory is {self.qfactory!r}; accepted: a callable role → Quantizer, "
                "e.g. qfactory=dist_finegrain.factories.mxfp8_factory"
            )
        _accepted("execution", self.execution, (None, *EXECUTIONS), "'emulate'")
        _accepted("backward_override", self.backward_override, BACKWARD_OVERRIDES, "None")
        if self.quantization_alignment <= 0:
            raise ValueError(
                f"quantization_alignment={self.quantization_alignment}; accepted: a positive "
                "integer, e.g. quantization_alignment=128"
            )
        object.__setattr__(self, "fast_accumulation", tuple(self.fast_accumulation))
        for gemm in self.fast_accumulation:
            _accepted("fast_accumulation", gemm, GEMM_NAMES, "('fprop',)")
        if not 0 <= self.rounding_seed < 2**32:
            raise ValueError(
                f"rounding_seed={self.rounding_seed}; accepted: 0 … 2**32-1, e.g. rounding_seed=0"
            )

    @property
    def resolved_execution(self) -> str:
        """The execution in force: the field, else the environment variable, else "native"."""
        if self.execution is not None:
            return self.execution
        value = os.environ.get(EXECUTION_VARIABLE) or "native"
        _accepted(EXECUTION_VARIABLE, value, EXECUTIONS, "emulate")
        return value

    def invalidate(self) -> None:
        """Make every module ask the factory again: something that it reads was mutated."""
        object.__setattr__(self, "_generation", self._generation + 1)

    def __deepcopy__(self, memo):
        return self  # frozen; configs that hold a recipe are deep-copied by Megatron

    def __reduce__(self):
        try:
            pickle.dumps(self.qfactory)
        except Exception as error:
            raise pickle.PicklingError(
                f"qfactory {self.qfactory!r} cannot be pickled; use a module-level function or "
                "functools.partial of one"
            ) from error
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return (functools.partial(type(self), **values), ())


# Recipe identity: equal tokens mean that no module has to ask the factory again.
_token_of_key: dict[Hashable, int] = {}
_unhashable_keys: list[tuple[Any, int]] = []


def recipe_token(recipe: CustomRecipe) -> int:
    """An int that is equal for recipes that answer alike (contracts.md, "Change tracking")."""
    key = (
        _callable_key(recipe.qfactory),
        recipe.fp8_dpa,
        recipe.fp8_mha,
        recipe.backward_override,
        recipe.quantization_alignment,
        recipe.resolved_execution,
        recipe.rounding_seed,
        recipe.fast_accumulation,
        recipe._generation,
    )
    try:
        return _token_of_key.setdefault(key, _next_token())
    except TypeError:
        for known, token in _unhashable_keys:
            if known == key:
                return token
        _unhashable_keys.append((key, _next_token()))
        return _unhashable_keys[-1][1]


def _next_token() -> int:
    return len(_token_of_key) + len(_unhashable_keys)


def _callable_key(function: Callable) -> Any:
    """What a factory is compared by: its recipe_key(), its code and captured values, or itself."""
    recipe_key = getattr(function, "recipe_key", None)
    if callable(recipe_key):
        return ("recipe_key", type(function), recipe_key())
    if isinstance(function, functools.partial):
        keywords = tuple(sorted(function.keywords.items()))
        return ("partial", _callable_key(function.func), function.args, keywords)
    if isinstance(function, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        keyword_defaults = tuple(sorted((function.__kwdefaults__ or {}).items()))
        return (
            "function",
            function.__module__,
            function.__code__,
            function.__defaults__,
            keyword_defaults,
            cells,
        )
    return ("callable", function)


# Named recipes: Transformer Engine's names and arguments over the matching factory.
def DelayedScaling(
    *,
    margin: int = 0,
    fp8_format: FP8Format = FP8Format.HYBRID,
    amax_history_len: int = 1024,
    amax_compute_algo: str = "max",
    reduce_amax: bool = True,
    **options,
) -> CustomRecipe:
    """Per-tensor FP8 with delayed scaling; options are those of CustomRecipe."""
    factory = functools.partial(
        factories.delayed_scaling_factory,
        margin=margin,
        fp8_format=fp8_format,
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        reduce_amax=reduce_amax,
    )
    return CustomRecipe(qfactory=factory, fp8_format=fp8_format, **options)


def Float8CurrentScaling(
    *,
    fp8_format: FP8Format = FP8Format.HYBRID,
    use_power_2_scales: bool = False,
    amax_epsilon: float = 0.0,
    **options,
) -> CustomRecipe:
    """Per-tensor FP8 with current scaling; options are those of CustomRecipe."""
    factory = functools.partial(
        factories.current_scaling_factory,
        fp8_format=fp8_format,
        force_pow_2_scales=use_power_2_scales,
        amax_epsilon=amax_epsilon,
    )
    return CustomRecipe(qfactory=factory, fp8_format=fp8_format, **options)


def Float8BlockScaling(
    *,
    fp8_format: FP8Format = FP8Format.E4M3,
    use_f32_scales: bool = False,
    x_block_scaling_dim: int = 1,
    w_block_scaling_dim: int = 2,
    grad_block_scaling_dim: int = 1,
    **options,
) -> CustomRecipe:
    """FP8 in 1×128 or 128×128 blocks; options are those of CustomRecipe."""
    factory = functools.partial(
        factories.float8_block_scaling_factory,
        fp8_format=fp8_format,
        force_pow_2_scales=not use_f32_scales,
        x_block_scaling_dim=x_block_scaling_dim,
        w_block_scaling_dim=w_block_scaling_dim,
        grad_block_scaling_dim=grad_block_scaling_dim,
    )
    return CustomRecipe(qfactory=factory, fp8_format=fp8_format, **options)


def MXFP8BlockScaling(*, fp8_format: FP8Format = FP8Format.E4M3, **options) -> CustomRecipe:
    """MXFP8; options are those of CustomRecipe."""
    factory = functools.partial(factories.mxfp8_factory, fp8_format=fp8_format)
    return CustomRecipe(qfactory=factory, fp8_format=fp8_format, **options)


def NVFP4BlockScaling(
    *,
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
    **options,
) -> CustomRecipe:
    """NVFP4; options are those of CustomRecipe."""
    factory = functools.partial(
        factories.nvfp4_factory,
        disable_rht=disable_rht,
        disable_stochastic_rounding=disable_stochastic_rounding,
        disable_2d_quantization=disable_2d_quantization,
    )
    return CustomRecipe(qfactory=factory, **options)
