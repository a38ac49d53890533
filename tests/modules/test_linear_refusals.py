"""One clear error before anything runs, for everything that a user can get wrong about a Linear."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.resolution import Site, ask_factory, choose_kernel
from dist_finegrain.roles import LINEAR_GEMMS, linear_slots
from tests.recipes import emulated

E4M3 = dfg.DType.kFloat8E4M3


def forward(factory, *, execution="emulate", k=64, n=64, training=True):
    module = dfg.Linear(k, n, name="decoder.0.fc1")
    x = torch.randn(32, k, requires_grad=training)
    recipe = dfg.CustomRecipe(qfactory=factory, execution=execution)
    with dfg.autocast(recipe=recipe), torch.set_grad_enabled(training):
        return module(x)


def on_sm_90(factory, *, execution="native", k=64, n=64):
    """Resolve every GEMM for a Hopper GPU without having one."""
    recipe = dfg.CustomRecipe(qfactory=factory, execution=execution)
    site = Site("decoder.0.fc1", "linear", "sm_90", k, n)

    def no_delayed(slot, child, request):
        raise AssertionError(f"{slot} {child} {request}")

    quantizers = ask_factory(recipe, linear_slots(site.name), site, no_delayed)
    return [choose_kernel(g, quantizers, site, execution) for g in LINEAR_GEMMS]


def mismatched(role):
    is_weight = role is not None and role.tensor_type == "weight"
    return dfg.NVFP4Quantizer() if is_weight else dfg.MXFP8Quantizer(E4M3)


def backward_mismatched(role):
    """Fine in forward; dgrad would multiply MXFP8 by NVFP4."""
    if role is not None and role.tensor_type == "weight":
        return dfg.HybridQuantizer(
            rowwise_quantizer=dfg.MXFP8Quantizer(E4M3), columnwise_quantizer=dfg.NVFP4Quantizer()
        )
    return dfg.MXFP8Quantizer(E4M3)


def test_mismatched_pair_names_module_gemm_formats_and_device():
    with pytest.raises(ValueError, match="family") as error:
        forward(mismatched)
    for word in ("decoder.0.fc1", "fprop", "mxfp8", "nvfp4", "cpu"):
        assert word in str(error.value)


def test_mismatched_backward_pair_is_refused_in_forward_when_training_only():
    with pytest.raises(ValueError, match="dgrad of module 'decoder.0.fc1'"):
        forward(backward_mismatched)
    assert forward(backward_mismatched, training=False).shape == (32, 64)


def test_rht_disagreement():
    def factory(role):
        rht = role is not None and role.tensor_type == "input"
        return dfg.NVFP4Quantizer(with_rht=rht)

    with pytest.raises(ValueError, match="wgrad.*RHT"):
        forward(factory)


def test_unknown_columnwise_source():
    with pytest.raises(ValueError, match="columnwise_source.*rowwise_dequantized"):
        dfg.HybridQuantizer(
            rowwise_quantizer=dfg.IdentityQuantizer(),
            columnwise_quantizer=dfg.IdentityQuantizer(),
            columnwise_source="dequantised",
        )


def test_factory_that_returns_none_or_something_else():
    def answers_none(role):
        is_weight = role is not None and role.tensor_type == "weight"
        return None if is_weight else dfg.MXFP8Quantizer(E4M3)

    with pytest.raises(ValueError, match=r"None for forward slot 1 \(weight.*decoder.0.fc1"):
        forward(answers_none)
    with pytest.raises(TypeError, match="'mxfp8' for forward slot 0"):
        forward(lambda role: "mxfp8")


def test_mxfp8_on_hopper_in_native_mode_names_both_ways_out():
    with pytest.raises(ValueError, match="mxfp8 is not native on sm_90") as error:
        on_sm_90(factories.mxfp8_factory)
    assert "execution='emulate'" in str(error.value)
    assert "128-block" in str(error.value)
    kernels = on_sm_90(factories.mxfp8_factory, execution="emulate")
    assert [k.execution for k in kernels] == ["emulated"] * 3


def test_cpu_is_native_for_identity_only():
    with pytest.raises(ValueError, match="not native on cpu.*IdentityQuantizer"):
        forward(factories.current_scaling_factory, execution="native")
    assert forward(factories.high_precision_factory, execution="native").shape == (32, 64)


@pytest.mark.parametrize("k, n, dim", [(72, 64, "in_features"), (64, 40, "out_features")])
def test_size_that_is_no_multiple_is_refused_in_native_mode_and_runs_emulated(k, n, dim):
    """Bug case 42: only what failed is named, with the value and the required multiple."""
    with pytest.raises(ValueError, match=f"{dim} of this rank is .*multiple of 16") as error:
        on_sm_90(factories.current_scaling_factory, k=k, n=n)
    other = "out_features" if dim == "in_features" else "in_features"
    assert f"{other} of this rank" not in str(error.value)
    assert forward(factories.current_scaling_factory, k=k, n=n).shape == (32, n)


def test_dtype_mismatch_between_input_and_parameters():
    module = dfg.Linear(64, 64, params_dtype=torch.float32, name="fc")
    with pytest.raises(TypeError, match="bfloat16.*float32.*torch.autocast"):
        module(torch.randn(4, 64, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(4, 64)).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="int64"):
        module(torch.zeros(4, 64, dtype=torch.int64))


def test_wrong_shapes_and_arguments():
    """Bug case 42: ValueError before any launch; unsupported modes are refused by name."""
    module = dfg.Linear(767, 3072, name="fc1")
    with pytest.raises(ValueError, match=r"x of Linear 'fc1' has shape \(8, 768\).*767"):
        module(torch.randn(8, 768))
    with pytest.raises(ValueError, match="parallel_mode='both'.*column.*row"):
        dfg.Linear(8, 8, parallel_mode="both")
    with pytest.raises(ValueError, match="out_features=10 is not a multiple.*3.*out_features=12"):
        dfg.Linear(8, 10, parallel_mode="column", tp_size=3)
    with pytest.raises(ValueError, match="in_features=8 is not a multiple"):
        dfg.Linear(8, 10, parallel_mode="row", tp_size=3)
    with pytest.raises(ValueError, match="ub_overlap_ag=True is not supported"):
        dfg.Linear(8, 8, ub_overlap_ag=True)
    with pytest.raises(ValueError, match="symmetric_ar_type"):
        dfg.Linear(8, 8, symmetric_ar_type="multimem_all_reduce")
    with pytest.raises(TypeError, match="unexpected keyword argument 'activation'"):
        dfg.Linear(8, 8, activation="gelu")
    with pytest.raises(TypeError, match="params_dtype has dtype torch.int8"):
        dfg.Linear(8, 8, params_dtype=torch.int8)
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        dfg.Linear(8, 8, parallel_mode="column", tp_size=2)(torch.randn(2, 8))


def test_sizes_of_groups_and_other_arguments():
    with pytest.raises(ValueError, match="tp_size=0; accepted: a positive"):
        dfg.Linear(8, 8, parallel_mode="row", tp_size=0)
    with pytest.raises(TypeError, match="recipe is <function mxfp8_factory"):
        dfg.plan(dfg.Linear(8, 8), factories.mxfp8_factory)
    assert dfg.plan(torch.nn.Identity(), emulated(factories.mxfp8_factory)).rows == ()


def test_weight_and_input_at_odd_storage_offsets_run():
    """Bug case 42: views at storage offset 1 give the result of aligned copies."""
    module = dfg.Linear(64, 48, name="fc")
    weight = torch.randn(48 * 64 + 1)[1:].view(48, 64)
    x = torch.randn(32 * 64 + 1)[1:].view(32, 64)
    with dfg.autocast(recipe=emulated(factories.mxfp8_factory)):
        module.weight.data = weight
        got = module(x)
        module.weight.data = weight.clone()
        assert torch.equal(got, module(x.clone()))


def test_autocast_arguments():
    with pytest.raises(ValueError, match="recipe=None outside"), dfg.autocast():
        pass
    with pytest.raises(TypeError, match="recipe is 'mxfp8'"):
        dfg.autocast(recipe="mxfp8")
    with pytest.raises(ValueError, match="calibrating"):
        dfg.autocast(calibrating=True, recipe=emulated(factories.mxfp8_factory))
