"""CustomRecipe: validation, identity, pickling; the named recipes."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest

import dist_finegrain as dfg
from dist_finegrain import factories, recipe
from dist_finegrain.recipe import CustomRecipe, recipe_token


@pytest.mark.parametrize(
    "options, message",
    [
        ({"execution": "fast"}, "execution='fast'.*native.*emulate.*reference"),
        ({"backward_override": "bf16"}, "backward_override='bf16'.*high_precision"),
        ({"quantization_alignment": 0}, "quantization_alignment=0.*128"),
        ({"fast_accumulation": ("bprop",)}, "fast_accumulation='bprop'.*fprop"),
        ({"rounding_seed": -1}, "rounding_seed=-1"),
        ({"rounding_seed": 1.5}, "rounding_seed=1.5"),
    ],
)
def test_wrong_fields_name_what_was_got_and_what_is_accepted(options, message):
    with pytest.raises(ValueError, match=message):
        CustomRecipe(qfactory=factories.mxfp8_factory, **options)


def test_tokens_do_not_pile_up():
    from dist_finegrain.recipe import _tokens

    for value in range(600):
        recipe_token(CustomRecipe(qfactory=closure(value), execution="emulate"))
        recipe_token(CustomRecipe(qfactory=closure([value]), execution="emulate"))
    assert len(_tokens.hashable) <= 256 and len(_tokens.others) <= 256


def test_qfactory_must_be_callable():
    with pytest.raises(TypeError, match="qfactory is 'mxfp8'"):
        CustomRecipe(qfactory="mxfp8")


def test_environment_gives_the_execution_unless_the_field_does(monkeypatch):
    plain = CustomRecipe(qfactory=factories.mxfp8_factory)
    monkeypatch.delenv("DIST_FINEGRAIN_EXECUTION", raising=False)
    assert plain.resolved_execution == "native"
    native_token = recipe_token(plain)
    monkeypatch.setenv("DIST_FINEGRAIN_EXECUTION", "emulate")
    assert plain.resolved_execution == "emulate"
    assert recipe_token(plain) != native_token
    explicit = CustomRecipe(qfactory=factories.mxfp8_factory, execution="reference")
    assert explicit.resolved_execution == "reference"
    monkeypatch.setenv("DIST_FINEGRAIN_EXECUTION", "yes")
    with pytest.raises(ValueError, match="DIST_FINEGRAIN_EXECUTION='yes'"):
        _ = plain.resolved_execution


def closure(value):
    def factory(role):
        return value

    return factory


def test_tokens_compare_what_a_factory_answers_with():
    def token(factory, **options):
        return recipe_token(CustomRecipe(qfactory=factory, execution="emulate", **options))

    assert token(factories.mxfp8_factory) == token(factories.mxfp8_factory)
    assert token(factories.mxfp8_factory) != token(factories.nvfp4_factory)
    assert token(factories.mxfp8_factory) != token(factories.mxfp8_factory, rounding_seed=1)
    assert token(closure(1)) == token(closure(1)) != token(closure(2))
    assert token(closure([1])) == token(closure([1])) != token(closure([2]))  # unhashable
    assert token(functools.partial(closure, closure(1))) == token(
        functools.partial(closure, closure(1))
    )
    partial = functools.partial
    first = partial(factories.nvfp4_factory, disable_rht=True)
    assert token(first) == token(partial(factories.nvfp4_factory, disable_rht=True))
    assert token(first) != token(partial(factories.nvfp4_factory, disable_rht=False))


def test_pickling_keeps_importable_factories_and_refuses_lambdas():
    """Bug case 26 (the recipe object): importable factories round-trip, lambdas raise by name."""
    for original in (
        CustomRecipe(qfactory=factories.mxfp8_factory, rounding_seed=5),
        recipe.NVFP4BlockScaling(disable_rht=True, execution="emulate"),
    ):
        loaded = pickle.loads(pickle.dumps(original))
        assert recipe_token(loaded) == recipe_token(original)
        assert loaded.rounding_seed == original.rounding_seed
    lambda_recipe = CustomRecipe(qfactory=lambda role: None)
    with pytest.raises(pickle.PicklingError, match=r"module-level function or functools\.partial"):
        pickle.dumps(lambda_recipe)
    assert copy.deepcopy(lambda_recipe) is lambda_recipe


@pytest.mark.parametrize(
    "build, kind",
    [
        (recipe.DelayedScaling, dfg.DelayedScalingRequest),
        (recipe.Float8CurrentScaling, dfg.Float8CurrentScalingQuantizer),
        (recipe.Float8BlockScaling, dfg.Float8BlockQuantizer),
        (recipe.MXFP8BlockScaling, dfg.MXFP8Quantizer),
        (recipe.NVFP4BlockScaling, dfg.NVFP4Quantizer),
    ],
)
def test_named_recipes_answer_every_role(build, kind):
    named = build(execution="emulate")
    for role in (None, dfg.QuantizerRole("linear", "weight", "fc"), dfg.QuantizerRole()):
        assert isinstance(named.qfactory(role), kind)
    assert named.execution == "emulate"


def test_arguments_of_transformer_engine_are_known_by_name():
    assert recipe.DelayedScaling(scaling_factor_compute_algo=None)
    assert recipe.MXFP8BlockScaling(margin=0)
    with pytest.raises(ValueError, match="nvfp4_use_4over6=True; accepted"):
        recipe.NVFP4BlockScaling(nvfp4_use_4over6=True)
    with pytest.raises(TypeError, match="fast_accumulation='fprop'"):
        CustomRecipe(qfactory=factories.mxfp8_factory, fast_accumulation="fprop")


def test_options_of_named_recipes_reach_the_quantizers():
    grad = dfg.QuantizerRole("linear", "grad_output", "fc")
    weight = dfg.QuantizerRole("linear", "weight", "fc")
    assert recipe.DelayedScaling(margin=2, amax_history_len=3).qfactory(grad).margin == 2
    hybrid = recipe.Float8CurrentScaling().qfactory(grad).plane_format("rowwise")
    e4m3 = recipe.Float8CurrentScaling(fp8_format=dfg.FP8Format.E4M3, use_power_2_scales=True)
    assert (hybrid.element, hybrid.power_of_two) == ("e5m2", False)
    one = e4m3.qfactory(grad).plane_format("rowwise")
    assert (one.element, one.power_of_two) == ("e4m3", True)
    block = recipe.Float8BlockScaling(use_f32_scales=True, w_block_scaling_dim=1)
    plane = block.qfactory(weight).plane_format("rowwise")
    assert not plane.power_of_two and not plane.two_dimensional
    quiet = recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    )
    plane = quiet.qfactory(grad).plane_format("columnwise")
    assert plane.rht is None and not plane.stochastic
    assert not quiet.qfactory(weight).plane_format("rowwise").two_dimensional
