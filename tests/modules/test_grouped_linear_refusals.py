"""One clear error before anything runs; how each GEMM is chosen; what plan() says about it."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.formats import fused
from dist_finegrain.modules import grouped_binding
from dist_finegrain.modules.grouped_binding import choose_grouped, why_not_together
from dist_finegrain.ops.gemm import PairRefused
from dist_finegrain.resolution import Site, ask_factory
from dist_finegrain.roles import LINEAR_GEMMS, grouped_linear_slots
from tests.modules.grouped_linear_cases import EXPERTS, K, assert_equal, data, make, run
from tests.recipes import ALL, emulated


@pytest.mark.parametrize(
    ("splits", "error", "words"),
    [
        ([4, 4, 4], ValueError, "3 counts that add up to 12, inp has 16 rows"),
        ([4, 4, 4, 3], ValueError, "add up to 15, inp has 16 rows"),
        ([4, 4, 4, 5], ValueError, "add up to 17, inp has 16 rows"),
        ([20, -4, 0, 0], ValueError, "m_splits of GroupedLinear 'demo.fc1'"),
        ([4.0, 4, 4, 4], TypeError, "accepted: a list of 4 counts"),
        ([True, 7, 4, 4], TypeError, "accepted: a list of 4 counts"),
        (16, TypeError, "m_splits of GroupedLinear 'demo.fc1' is 16"),
        (torch.tensor([4.0, 4, 4, 4]), ValueError, "torch.float32"),
        (torch.tensor([8, 8]), ValueError, r"torch.int64 \(2,\) on cpu"),
        (torch.tensor([4, 4, 4, 3]), ValueError, "add up to 15, inp has 16 rows"),
        (torch.zeros(4, dtype=torch.int32, device="meta"), ValueError, "on meta"),
    ],
)
def test_splits_that_do_not_fit(splits, error, words):
    def never(role):
        raise AssertionError("asked before the arguments were checked")

    with dfg.autocast(recipe=emulated(never)), pytest.raises(error, match=words):
        make()(torch.randn(16, K), splits)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bias": True, "tp_size": 2}, ValueError, "bias=True with tp_size=2"),
        ({"num_gemms": 0}, ValueError, "num_gemms=0"),
        ({"first_expert": -1}, ValueError, "first_expert=-1"),
        ({"parallel_mode": "rows"}, ValueError, "parallel_mode='rows'"),
        ({"tp_size": 3, "parallel_mode": "column", "bias": False}, ValueError, "multiple"),
        ({"single_grouped_weight": True}, ValueError, "single_grouped_weight=True"),
        ({"use_grouped_tensor": True}, ValueError, "use_grouped_tensor=True"),
        ({"ub_overlap_ag": True}, ValueError, "ub_overlap_ag=True"),
        ({"parameters_split": ("a",)}, TypeError, "unexpected keyword argument"),
        ({"params_dtype": torch.float8_e4m3fn}, TypeError, "params_dtype"),
    ],
)
def test_constructor_arguments_that_do_not_fit(options, error, words):
    options = {"num_gemms": 2, "in_features": 64, "out_features": 64, **options}
    with pytest.raises(error, match=words):
        dfg.GroupedLinear(**options)


def test_default_values_of_what_is_not_supported_pass():
    dfg.GroupedLinear(
        2, 64, 64, single_grouped_weight=False, use_grouped_tensor=None, ub_name=None,
        ub_overlap_ag=False,
    )  # fmt: skip


def test_inputs_that_do_not_fit():
    split = [4, 4, 4, 4]
    with pytest.raises(ValueError, match="last dimension must be 96"):
        make()(torch.randn(16, 95), split)
    with pytest.raises(TypeError, match="dtype torch.bfloat16, its parameters torch.float32"):
        make()(torch.randn(16, K, dtype=torch.bfloat16), split)
    with pytest.raises(ValueError, match="weight0 of GroupedLinear .* no main_grad"):
        make(fuse_wgrad_accumulation=True)(torch.randn(16, K), split)
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        make(parallel_mode="row", tp_size=2)(torch.randn(16, K // 2), split)


def test_pair_of_one_expert_that_does_not_fit_names_it():
    def factory(role):
        is_odd = role is not None and (role.expert_index, role.tensor_type) == (2, "weight")
        return factories.nvfp4_factory(role) if is_odd else factories.mxfp8_factory(role)

    with dfg.autocast(recipe=emulated(factory)):
        with pytest.raises(
            ValueError, match="fprop of expert 2 of module 'demo.fc1'.*mxfp8.*nvfp4"
        ):
            make()(torch.randn(16, K), [4, 4, 4, 4])


def quantizers_of(factory, name="experts"):
    site, made = Site(name, "grouped_linear", "sm_90", 256, 128), {}
    for expert in range(2):
        slots = grouped_linear_slots(name, range(expert, expert + 1))
        for kind, q in ask_factory(emulated(factory), slots, site, None).items():
            made.setdefault(kind, []).append(q)
    return site, made


def choose(gemm, factory, sizes_known, execution="emulate", why_unfused=""):
    site, quantizers = quantizers_of(factory)
    operands = next(g for g in LINEAR_GEMMS if g.gemm == gemm)
    dtype = torch.bfloat16
    return choose_grouped(operands, quantizers, site, execution, dtype, sizes_known, why_unfused)


def one_differs(role):
    is_first = role is not None and role.expert_index == 0
    return factories.row_scaling_factory(role) if is_first else factories.mxfp8_factory(role)


@pytest.mark.parametrize(
    ("factory", "gemm", "words"),
    [
        (one_differs, "fprop", "input of experts 0 and 1 differ in format"),
        (factories.nvfp4_factory, "dgrad", "stochastic rounding of grad_output"),
        (factories.nvfp4_factory, "wgrad", "stochastic rounding of grad_output"),
    ],
)
def test_sizes_on_the_device_are_refused_where_experts_run_one_by_one(factory, gemm, words):
    kernel, reason = choose(gemm, factory, True)
    assert kernel is None and words in reason
    with pytest.raises(PairRefused, match=f"{gemm} of module 'experts'.*{words}.*a list"):
        choose(gemm, factory, False)


def test_sizes_on_the_device_run_where_experts_agree():
    kernel, _ = choose("fprop", factories.row_scaling_factory, False, "native")
    assert kernel.execution == "native" and not kernel.needs_sizes
    kernel, _ = choose("fprop", factories.nvfp4_factory, False)
    assert kernel.execution == "emulated"
    with pytest.raises(
        PairRefused, match="fprop of module 'experts' cannot run on sm_90.*a Python"
    ):
        choose("fprop", factories.float8_block_scaling_factory, False, "native")
    assert choose("fprop", factories.float8_block_scaling_factory, True, "native")[0].needs_sizes


def test_forward_with_device_sizes_is_refused_before_any_cast(monkeypatch):
    """As on a GPU: the host is not told the sizes."""
    module = make()
    monkeypatch.setattr(type(module), "_checked_sizes", lambda self, m_splits, x: None)
    monkeypatch.setattr(fused, "cast", None)
    x = torch.randn(16, K, requires_grad=True)
    with dfg.autocast(recipe=emulated(factories.nvfp4_factory)):
        with pytest.raises(ValueError, match="dgrad of module 'demo.fc1' runs expert by expert"):
            module(x, torch.tensor([4, 4, 4, 4]))


@pytest.mark.parametrize("name", sorted(set(ALL) - {"nvfp4_stochastic"}))
def test_sizes_that_only_the_device_knows_give_the_same_bits(name, monkeypatch):
    """The path of sizes on a GPU, where it is not refused; kernels read the ends themselves."""
    split = [5, 0, 33, 1]
    x, grad = data(split)
    recipe = emulated(ALL[name])
    wanted = run(make(bias=True), x, split, recipe, grad)
    module = make(bias=True)
    monkeypatch.setattr(type(module), "_checked_sizes", lambda self, m_splits, x: None)
    try:
        got = run(module, x, torch.tensor(split), recipe, grad)
    except PairRefused as refusal:
        assert "stochastic" in str(refusal) and name in STOCHASTIC
        return
    assert name not in STOCHASTIC
    assert_equal(got[: 2 + EXPERTS], wanted[: 2 + EXPERTS])
    for a, b in zip(got[-EXPERTS:], wanted[-EXPERTS:], strict=True):
        torch.testing.assert_close(a, b)


STOCHASTIC = {"nvfp4", "nvfp4_1d", "guide", "mxfp8_fwd_nvfp4_bwd"}


@pytest.mark.parametrize("name", sorted(ALL))
def test_without_compiled_kernels_experts_are_cast_one_by_one(name, monkeypatch):
    split = [5, 0, 33, 1]
    x, grad = data(split)
    wanted = run(make(), x, split, emulated(ALL[name]), grad)
    monkeypatch.setattr(grouped_binding, "why_unfused", lambda device: "asked for")
    assert_equal(run(make(), x, split, emulated(ALL[name]), grad), wanted)
    _, quantizers = quantizers_of(factories.mxfp8_factory)
    assert "compiled" in why_not_together("input", quantizers["input"], "asked for")


# plan().
def one_identity(role):
    is_third = role is not None and role.expert_index == 2
    return dfg.IdentityQuantizer() if is_third else factories.mxfp8_factory(role)


def planned(factory, device, execution="emulate", **options):
    model = torch.nn.ModuleDict(
        {"experts": dfg.GroupedLinear(4, 128, 256, params_dtype=torch.bfloat16)}
    )
    recipe = dfg.CustomRecipe(factory, execution=execution)
    result = dfg.plan(model, recipe, device=device, **options)
    return {row.gemm: row for row in result.rows}


def test_plan_of_experts_that_agree():
    rows = planned(factories.row_scaling_factory, "sm_90", "native")
    assert {g: r.bucket for g, r in rows.items()} == dict.fromkeys(rows, "fast")
    assert rows["fprop"].kernel == "scaled_grouped_mm rowwise" and len(rows) == 3
    assert "main_grad" in rows["wgrad"].reason and rows["fprop"].module == "experts"
    assert rows["dgrad"].saved_bytes == 4 * (128 * 256 + 128 * 4)
    rows = planned(factories.float8_block_scaling_factory, "sm_90", "native", training=False)
    assert rows["fprop"].bucket == "unoptimized" and "m_splits must be a list" in (
        rows["fprop"].reason
    )
    rows = planned(factories.mxfp8_factory, "sm_90", "native")
    assert rows["fprop"].bucket == "rejected" and "emulate" in rows["fprop"].reason


def test_plan_of_experts_that_differ():
    rows = planned(one_identity, "sm_90")
    assert set(rows) == {
        f"{g} of experts {e}" for g in ("fprop", "dgrad", "wgrad") for e in ("0, 1, 3", "2")
    }
    assert rows["fprop of experts 0, 1, 3"].bucket == "emulated"
    assert rows["fprop of experts 2"].bucket == "unoptimized"
    assert "experts 0 and 2 differ" in rows["fprop of experts 2"].reason
    assert rows["wgrad of experts 2"].saved_bytes == 2 * 128 * 1024


def test_splits_that_only_the_device_knows_never_leave_the_rows():
    from dist_finegrain.modules.grouped_linear import _ends

    sizes = torch.tensor([3, -2, 0, 5, 2**40])
    assert _ends(sizes, sizes.device, 6).tolist() == [3, 3, 3, 6, 6]
