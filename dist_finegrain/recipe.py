"""CustomRecipe: a factory and the options around it; the named recipes; recipe identity."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import pickle
import types
from collections.abc import Callable
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
        if isinstance(self.fast_accumulation, str) or self.fast_accumulation is None:
            raise TypeError(
                f"fast_accumulation={self.fast_accumulation!r}; accepted: a tuple of GEMM names, "
                "e.g. fast_accumulation=('fprop',)"
            )
        object.__setattr__(self, "fast_accumulation", tuple(self.fast_accumulation))
        for gemm in self.fast_accumulation:
            _accepted("fast_accumulation", gemm, GEMM_NAMES, "('fprop',)")
        if not isinstance(self.rounding_seed, int) or not 0 <= self.rounding_seed < 2**32:
            raise ValueError(
                f"rounding_seed={self.rounding_seed}; accepted: an integer in 0 … 2**32-1, "
                "e.g. rounding_seed=0"
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
        _tokens.forget(_recipe_key(self))

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
class _Tokens:
    """Numbers for recipe keys; the most recently used are kept, with a snapshot of their key."""

    def __init__(self, kept: int):
        self.kept = kept
        self.hashable: collections.OrderedDict[Any, int] = collections.OrderedDict()
        self.others: list[tuple[Any, int]] = []
        self.numbers = itertools.count()

    def of(self, key: Any) -> int:
        """The number of this key: its old one if the key is known, else a new one."""
        try:
            token = self.hashable.pop(key, None)
        except TypeError:
            return self._of_unhashable(key)
        self.hashable[key] = next(self.numbers) if token is None else token
        if len(self.hashable) > self.kept:
            self.hashable.popitem(last=False)
        return self.hashable[key]

    def _of_unhashable(self, key: Any) -> int:
        for known, token in self.others:
            if _are_equal(known, key):
                return token
        self.others.append((key, next(self.numbers)))
        del self.others[: -self.kept]
        return self.others[-1][1]

    def forget(self, key: Any) -> None:
        """Give this key a new number the next time."""
        try:
            self.hashable.pop(key, None)
        except TypeError:
            self.others = [entry for entry in self.others if not _are_equal(entry[0], key)]


_tokens = _Tokens(kept=256)


def recipe_token(recipe: CustomRecipe) -> int:
    """An int that is equal for recipes that answer alike (contracts.md, "Change tracking")."""
    return _tokens.of(_recipe_key(recipe))


def _recipe_key(recipe: CustomRecipe) -> tuple:
    return (
        _callable_key(recipe.qfactory),
        recipe.fp8_dpa,
        recipe.fp8_mha,
        recipe.backward_override,
        recipe.quantization_alignment,
        recipe.resolved_execution,
        recipe.rounding_seed,
        recipe.fast_accumulation,
    )


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # arrays and tensors have no single answer; then they count as changed
        return False


def _callable_key(value: Any, depth: int = 8) -> Any:
    """What a factory is compared by: its recipe_key(), its code and captured values, or itself."""

    def inner(captured):
        return _callable_key(captured, depth - 1)

    # As they are now: the owner of a captured list may go on changing it.
    if depth and isinstance(value, (list, set)):
        return (type(value), tuple(map(inner, value)))
    if depth and isinstance(value, dict):
        return (dict, tuple((k, inner(v)) for k, v in value.items()))
    if depth == 0 or not callable(value) or isinstance(value, type):
        return value
    recipe_key = getattr(value, "recipe_key", None)
    if callable(recipe_key):
        return ("recipe_key", type(value), recipe_key())
    if isinstance(value, functools.partial):
        keywords = tuple((k, inner(v)) for k, v in sorted(value.keywords.items()))
        return ("partial", inner(value.func), tuple(map(inner, value.args)), keywords)
    if isinstance(value, types.MethodType):
        return ("method", inner(value.__func__), inner(value.__self__))
    if isinstance(value, types.FunctionType):
        captured = (
            *(cell.cell_contents for cell in value.__closure__ or ()),
            *(value.__defaults__ or ()),
            *(default for _, default in sorted((value.__kwdefaults__ or {}).items())),
        )
        return ("function", value.__module__, value.__code__, tuple(map(inner, captured)))
    return value


# Named recipes: Transformer Engine's names and arguments over the matching factory.
def DelayedScaling(
    *,
    margin: int = 0,
    fp8_format: FP8Format = FP8Format.HYBRID,
    amax_history_len: int = 1024,
    amax_compute_algo: str = "max",
    scaling_factor_compute_algo: None = None,
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
        scaling_factor_compute_algo=scaling_factor_compute_algo,
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


def MXFP8BlockScaling(
    *, margin: int = 0, fp8_format: FP8Format = FP8Format.E4M3, **options
) -> CustomRecipe:
    """MXFP8; margin is accepted and unused as in TE, options are those of CustomRecipe."""
    factory = functools.partial(factories.mxfp8_factory, fp8_format=fp8_format)
    return CustomRecipe(qfactory=factory, fp8_format=fp8_format, **options)


def NVFP4BlockScaling(
    *,
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
    nvfp4_use_4over6: bool = False,
    **options,
) -> CustomRecipe:
    """NVFP4; options are those of CustomRecipe. ValueError for nvfp4_use_4over6=True."""
    _accepted("nvfp4_use_4over6", nvfp4_use_4over6, (False,), "False")
    factory = functools.partial(
        factories.nvfp4_factory,
        disable_rht=disable_rht,
        disable_stochastic_rounding=disable_stochastic_rounding,
        disable_2d_quantization=disable_2d_quantization,
    )
    return CustomRecipe(qfactory=factory, **options)
