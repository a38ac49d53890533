"""Slots, names, parameters and refusals of LayerNormLinear and LayerNormMLP."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.modules.layernorm_cases import MODULES, F, H, make, run
from tests.recipes import PLAIN, emulated


def asked(module, training=True, x=None):
    """The roles that a factory is asked with, in order."""
    roles = []

    def factory(role):
        roles.append(role if role is None else str(role))
        return dfg.IdentityQuantizer()

    x = torch.randn(4, H) if x is None else x
    with torch.set_grad_enabled(training), dfg.autocast(recipe=dfg.CustomRecipe(factory)):
        module(x)
    return roles


FORWARD = [
    "linear|input|m.fc1", "linear|weight|m.fc1", "linear|input|m.fc2",
    "linear|input|m.fc2", "linear|weight|m.fc2", None,
]  # fmt: skip
BACKWARD = [
    "linear|grad_output|m.fc1",
    None,
    "linear|grad_output|m.fc2",
    "linear|grad_output|m.fc1",
]


def test_ordered_roles_of_layernorm_mlp():
    """te-features §1.4, in the calls that the factory gets and in get_quantizer_slots()."""
    assert asked(make("mlp", name="m")) == FORWARD + BACKWARD
    module = make("mlp", name="m")
    assert asked(module, training=False) == FORWARD
    slots = module.get_quantizer_slots()
    assert [s.role and str(s.role) for s in slots] == FORWARD + BACKWARD
    places = [("forward", i) for i in range(6)] + [("backward", i) for i in range(4)]
    assert [(s.direction, s.position) for s in slots] == places


def test_ordered_roles_of_layernorm_linear():
    wanted = ["linear|input|m", "linear|weight|m", None, "linear|grad_output|m", None]
    assert asked(make("linear", name="m")) == wanted


def test_second_recipe_and_boundary_roles_keep_the_order():
    module = make("mlp", name="m")
    asked(module)
    module.output_quantizer_role = dfg.QuantizerRole("dpa", "qkv", "next")
    module.grad_input_quantizer_role = dfg.QuantizerRole("linear", "grad_output", "before")
    wanted = [role or boundary for role, boundary in zip(
        FORWARD + BACKWARD,
        [None] * 5 + ["dpa|qkv|next", None, "linear|grad_output|before", None, None],
        strict=True,
    )]  # fmt: skip
    assert asked(module) == wanted
    assert module.fc2.output_quantizer_role.name == "next"
    assert str(module.fc1.output_quantizer_role) == "linear|input|m.fc2"


def test_parts_follow_the_name_and_unnamed_ones_are_bare():
    module = make("mlp", name=None)
    assert asked(module)[:2] == ["linear|input|fc1", "linear|weight|fc1"]
    module.name = "late"
    assert asked(module)[0] == "linear|input|late.fc1"


class Counting:
    """Identity everywhere; counts its calls without becoming another recipe."""

    calls = 0

    def __call__(self, role):
        self.calls += 1
        return dfg.IdentityQuantizer()


def test_an_unchanged_recipe_asks_nothing_again():
    module, factory = make("mlp"), Counting()
    recipe = dfg.CustomRecipe(factory)
    for _ in range(3):
        run(module, torch.randn(4, H), recipe)
    assert factory.calls == 10


def test_assigned_names_and_plan():
    model = torch.nn.ModuleDict({"a": make("mlp", name=None), "b": make("mlp", name=None),
                                 "c": make("linear", name=None)})  # fmt: skip
    table = dfg.plan(model, emulated(factories.mxfp8_factory), device="sm_100")
    assert [m.name for m in model.values()] == ["a", "b", "c"]
    gemms = ("fprop", "dgrad", "wgrad")
    wanted = [(m, g) for m in ("a.fc1", "a.fc2", "b.fc1", "b.fc2", "c") for g in gemms]
    assert [(row.module, row.gemm) for row in table.rows] == wanted
    assert not any(m.is_bound for m in model.values())
    unfused = {(row.module, row.gemm) for row in table.rows if "the norm before" in row.reason}
    assert unfused == {("a.fc1", "fprop"), ("b.fc1", "fprop"), ("c", "fprop")}
    assert table.counts()["unoptimized"] == 3
    exact = dfg.plan(model, emulated(factories.high_precision_factory), device="sm_100")
    assert exact.counts()["fast"] == 15
    asked(model["a"])
    assert model["a"].is_bound
    dfg.assign_names(model, "decoder", overwrite=True)
    assert model["a"].fc2.name == "decoder.a.fc2"
    model["b"].name = "decoder.a"
    with pytest.raises(ValueError, match="two modules have the name 'decoder.a'"):
        dfg.assign_names(model)


@pytest.mark.parametrize(
    "kind, options, names",
    [
        ("linear", {}, "layer_norm_weight layer_norm_bias weight bias"),
        ("linear", {"normalization": "RMSNorm", "bias": False}, "layer_norm_weight weight"),
        ("mlp", {}, "layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias"),
        ("mlp", {"normalization": "RMSNorm", "bias": False},
         "layer_norm_weight fc1_weight fc2_weight"),
    ],
)  # fmt: skip
def test_parameters_are_transformer_engines(kind, options, names):
    module = make(kind, **options)
    assert list(module.state_dict()) == names.split()
    assert [name for name, _ in module.named_parameters()] == names.split()
    twin = make(kind, **options)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(module.state_dict(), strict=True)
    x = torch.randn(4, H)
    assert torch.equal(twin(x), module(x))


def test_initial_values_and_shapes():
    module = dfg.LayerNormMLP(H, F, activation="swiglu", zero_centered_gamma=True)
    assert module.fc1_weight.shape == (2 * F, H) and module.fc2_weight.shape == (H, F)
    assert module.layer_norm_weight.count_nonzero() == 0
    assert module.fc1_weight.std().item() == pytest.approx(0.023, rel=0.05)
    linear = dfg.LayerNormLinear(H, F)
    assert (linear.layer_norm_weight == 1).all() and (linear.layer_norm_bias == 0).all()
    filled = dfg.LayerNormMLP(
        H, F, init_method=torch.nn.init.ones_, output_layer_init_method=torch.nn.init.zeros_
    )
    assert (filled.fc1_weight == 1).all() and (filled.fc2_weight == 0).all()


def mismatched_in_fc2(role):
    """Fine everywhere but in fc2's dgrad."""
    if role is not None and role.name.endswith("fc2") and role.tensor_type == "weight":
        return dfg.HybridQuantizer(
            rowwise_quantizer=dfg.MXFP8Quantizer(), columnwise_quantizer=dfg.NVFP4Quantizer()
        )
    return dfg.MXFP8Quantizer()


def mismatched(role):
    is_weight = role is not None and role.tensor_type == "weight"
    return PLAIN["nvfp4" if is_weight else "mxfp8"](role)


def test_pairs_are_refused_before_anything_runs(monkeypatch):
    from dist_finegrain.modules import norms

    def fail(*args):
        raise AssertionError("the norm ran before the recipe was refused")

    monkeypatch.setattr(norms.Norm, "__call__", fail)
    with pytest.raises(ValueError, match=r"dgrad of module 'demo\.fc2'"):
        run(make("mlp"), torch.randn(4, H), emulated(mismatched_in_fc2))
    with pytest.raises(ValueError, match="fprop of module 'demo'"):
        run(make("linear"), torch.randn(4, H), emulated(mismatched))


@pytest.mark.parametrize("kind", MODULES)
def test_wrong_inputs_and_norm_arguments(kind):
    label = {"linear": "LayerNormLinear 'demo'", "mlp": "LayerNormMLP 'demo.fc1'"}[kind]
    module = make(kind)
    with pytest.raises(ValueError, match=rf"x of {label} has shape \(4, 7\).*must be {H}"):
        module(torch.randn(4, 7))
    with pytest.raises(TypeError, match=f"x of {label} has dtype torch.bfloat16"):
        module(torch.randn(4, H, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="normalization='GroupNorm'; accepted"):
        make(kind, normalization="GroupNorm")
    with pytest.raises(ValueError, match="eps=-1"):
        make(kind, eps=-1)
    with pytest.raises(ValueError, match="return_layernorm_output_gathered=True with"):
        make(kind, return_layernorm_output_gathered=True)
    with pytest.raises(ValueError, match="ub_bulk_dgrad=True is not supported"):
        make(kind, ub_bulk_dgrad=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'layer_norm'"):
        make(kind, layer_norm=True)
    with pytest.raises(TypeError, match="params_dtype has dtype torch.int8"):
        make(kind, torch.int8)


def test_modes_and_sizes():
    with pytest.raises(ValueError, match="parallel_mode='row' in LayerNormLinear.*'column'"):
        dfg.LayerNormLinear(8, 8, parallel_mode="row")
    with pytest.raises(ValueError, match="activation='relu2'"):
        dfg.LayerNormMLP(8, 8, activation="relu2")
    with pytest.raises(ValueError, match="ffn_hidden_size=10.*size 4; e.g. ffn_hidden_size=12"):
        dfg.LayerNormMLP(8, 10, set_parallel_mode=True, tp_size=4)
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        dfg.LayerNormMLP(8, 12, set_parallel_mode=True, tp_size=4)(torch.randn(2, 8))
    with pytest.raises(ValueError, match="tp_size=0; accepted"):
        dfg.LayerNormMLP(8, 12, set_parallel_mode=True, tp_size=0)


def test_missing_main_grad_of_fc2_is_refused_before_fc1_runs():
    module = make("mlp", fuse_wgrad_accumulation=True)
    module.fc1_weight.main_grad = torch.zeros(F, H)
    with pytest.raises(ValueError, match="LayerNormMLP 'demo.fc2' has no main_grad"):
        run(module, torch.randn(4, H), None)
