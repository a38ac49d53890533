"""Where a GroupedLinear's weights lie, what is copied, and what is worked out again."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.modules import grouped_binding, grouped_casting
from dist_finegrain.modules.grouped_linear_function import GroupedCall
from dist_finegrain.modules.grouped_weights import view_in_one
from dist_finegrain.ops.experts import Experts
from dist_finegrain.ops.gemm import select
from dist_finegrain.ops.grouped import GroupedKernel
from dist_finegrain.ops.grouped_kernels import one_by_one
from tests.modules.grouped_linear_cases import EXPERTS, K, N, assert_equal, data, make, run
from tests.recipes import ALL, emulated

SPLIT = [5, 0, 33, 1]


def scatter(module):
    """Put the weights where they do not follow each other, as a trainer's buffer may."""
    buffer = torch.stack([w.data for w in reversed(module.weights)])
    for weight, place in zip(reversed(module.weights), buffer, strict=True):
        weight.data = place
    return buffer


def places(module):
    return [weight.data_ptr() for weight in module.weights]


# One storage.
def test_weights_lie_in_one_storage_after_all_that_moves_them():
    module = make(torch.bfloat16)
    objects, values = module.weights, [w.detach().clone() for w in module.weights]
    meta = dfg.GroupedLinear(EXPERTS, K, N, bias=False, device="meta")
    moved = [
        module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), meta,
        meta.to_empty(device="cpu"), dfg.GroupedLinear(1, K, N), module.float().bfloat16(),
    ]  # fmt: skip
    for one in moved:
        joined = view_in_one(one.weights)
        assert joined.shape == (len(one.weights) * N, K) and joined.device == one.weight0.device
        assert all(type(w) is torch.nn.Parameter and w.is_leaf for w in one.weights)
    assert all(a is b for a, b in zip(module.weights, objects, strict=True))
    assert_equal(module.weights, values)
    assert_equal(moved[1].weights, values)
    assert not set(places(moved[1])) & set(places(module))
    versions = [weight._version for weight in module.weights]
    with torch.no_grad():
        module.weight1.zero_()
    assert [w._version for w in module.weights] == [v + (e == 1) for e, v in enumerate(versions)]


def test_a_saved_module_is_as_large_as_its_weights():
    module = make()
    size = EXPERTS * N * K * 4
    for what in (module.state_dict(), module):
        file = io.BytesIO()
        torch.save(what, file)
        assert size < file.tell() < size + 20_000
        file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert view_in_one(loaded.weights) is not None
    assert_equal(loaded.weights, module.weights)


def test_a_trainers_buffer_stays_where_it_is():
    """Moves that change nothing must not take weights out of a flat buffer."""
    module = make()
    scatter(module)
    before = places(module)
    module.to("cpu").float()
    assert places(module) == before and view_in_one(module.weights) is None
    assert view_in_one(copy.deepcopy(module).weights) is None


@pytest.mark.parametrize("name", sorted(ALL))
def test_where_weights_lie_changes_no_bit(name):
    (x, grad), recipe = data(SPLIT), emulated(ALL[name])
    wanted = run(make(), x, SPLIT, recipe, grad)
    elsewhere = make()
    scatter(elsewhere)
    assert_equal(run(elsewhere, x, SPLIT, recipe, grad), wanted)
    elsewhere = make()
    elsewhere.weight2 = torch.nn.Parameter(elsewhere.weight2.detach().t().contiguous().t())
    assert_equal(run(elsewhere, x, SPLIT, recipe, grad), wanted)
    turned, copied = make(n=K), make(n=K)
    turned.weight2.data = turned.weight2.data.t()  # at its place, but no longer row by row
    with torch.no_grad():
        copied.weight2.copy_(turned.weight2)
    got, wanted = (run(module, x, SPLIT, recipe, x) for module in (turned, copied))
    assert_equal(got, wanted)


def test_weights_are_read_where_they_lie(monkeypatch):
    read, original = [], grouped_casting.cast_grouped

    def noting(x, *args, **options):
        read.append((x.shape[0], x.data_ptr()))
        return original(x, *args, **options)

    monkeypatch.setattr(grouped_casting, "cast_grouped", noting)
    (x, grad), module = data(SPLIT), make()
    run(module, x, SPLIT, emulated(factories.row_scaling_factory), grad)
    assert read[1] == (EXPERTS * N, module.weight0.data_ptr())


def test_other_dtypes_are_converted_in_one_piece():
    """FP32 weights under torch.autocast: rounded once, then quantized."""
    (x, grad), recipe = data(SPLIT, torch.bfloat16), emulated(factories.mxfp8_factory)
    wanted = run(make().bfloat16(), x, SPLIT, recipe, grad)
    module, other = make(), make()
    scatter(other)
    for one in (module, other):
        with torch.autocast("cpu", dtype=torch.bfloat16), dfg.autocast(recipe=recipe):
            y = one(x, SPLIT)
        assert torch.equal(y, wanted[0])


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_weights_changed_before_backward_are_noticed(expert):
    """Planes in high precision are the weights themselves."""
    (x, grad), module = data(SPLIT), make()
    y = module(x.requires_grad_(), SPLIT)
    with torch.no_grad():
        module.weights[expert].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)
    with dfg.autocast(recipe=emulated(factories.mxfp8_factory)):
        y = module(x, SPLIT)
    with torch.no_grad():
        module.weights[expert].mul_(2)
    y.backward(grad)  # quantized ones are copies


# What is worked out again.
def test_kernels_are_chosen_once(monkeypatch):
    asked, original = [], grouped_binding.choose_grouped

    def noting(operands, *args):
        asked.append(operands.gemm)
        return original(operands, *args)

    monkeypatch.setattr(grouped_binding, "choose_grouped", noting)
    (x, grad), module = data(SPLIT), make()
    first, second = emulated(factories.mxfp8_factory), emulated(factories.row_scaling_factory)
    for _ in range(3):
        for recipe in (first, second, None):
            run(module, x, SPLIT, recipe, grad)
    assert sorted(asked) == ["dgrad"] * 3 + ["fprop"] * 3 + ["wgrad"] * 3
    asked.clear()
    with torch.no_grad(), dfg.autocast(recipe=first):
        module(x, torch.tensor(SPLIT))  # on a CPU as good as a list
    assert not asked
    module.name = "other"
    run(module, x, SPLIT, first, grad)
    assert sorted(asked) == ["dgrad", "fprop", "wgrad"]
    monkeypatch.setattr(type(module), "_checked_sizes", lambda self, m_splits, x: None)
    run(module, x, torch.tensor(SPLIT), first, grad)
    assert len(asked) == 6


def test_a_recipe_that_is_gone_leaves_nothing_behind():
    """Bug case 9: another recipe's ways are never taken for this one's."""
    (x, grad), module = data(SPLIT), make()
    for index in range(12):
        name = ("mxfp8", "nvfp4_stochastic", "block")[index % 3]
        recipe = emulated(ALL[name])
        got = run(module, x, SPLIT, dfg.CustomRecipe(ALL[name], execution="emulate"), grad)
        assert_equal(got, run(make(), x, SPLIT, recipe, grad))


@pytest.mark.parametrize("sizes_known", [True, False])
def test_square_blocks_are_stacked_only_for_grouped_kernels(sizes_known, monkeypatch):
    stacked, original = [], Experts.of_planes.__func__

    def noting(cls, planes):
        stacked.append(len(planes))
        return original(cls, planes)

    monkeypatch.setattr(Experts, "of_planes", classmethod(noting))
    (x, grad), recipe = data(SPLIT), emulated(ALL["block"])
    wanted = run(make(), x, SPLIT, recipe, grad)
    assert not stacked
    module = make()
    run(module, x, SPLIT, recipe, grad, is_first_microbatch=True)
    if not sizes_known:
        monkeypatch.setattr(type(module), "_checked_sizes", lambda self, m_splits, x: None)
    got = run(module, x, torch.tensor(SPLIT), recipe, grad, is_first_microbatch=False)
    assert_equal(got, wanted)
    assert stacked == ([] if sizes_known else [EXPERTS] * 2)


# Kernels that round to BF16, as the native ones do.
@pytest.fixture
def rounding_kernels(monkeypatch):
    def select_rounding(gemm, a, b, device, execution, *, k, n, **_):
        single = select(gemm, a, b, device, execution, k=k, n=n)
        return GroupedKernel(
            "rounding", "native", lambda p: one_by_one(single, p).bfloat16(), rounds_to_bf16=True
        )

    monkeypatch.setattr(grouped_binding, "select_grouped", select_rounding)
    monkeypatch.setattr(GroupedCall, "_is_loop", lambda call, name: call.kernels[name] is None)


@pytest.mark.parametrize("sizes_known", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_are_added_in_fp32_to_what_the_kernel_rounded(
    dtype, sizes_known, rounding_kernels, monkeypatch
):
    (x, grad), recipe = data(SPLIT, dtype), emulated(factories.row_scaling_factory)
    module = make(dtype, bias=True)
    if not sizes_known:
        monkeypatch.setattr(type(module), "_checked_sizes", lambda self, m_splits, x: None)
    split = SPLIT if sizes_known else torch.tensor(SPLIT)
    product = run(make(dtype), x, split, recipe, grad)[0].float()
    parts = [p + b.float() for p, b in zip(product.split(SPLIT), module.biases, strict=True)]
    assert torch.equal(run(module, x, split, recipe, grad)[0], torch.cat(parts).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
def test_main_grad_takes_rounded_products_without_a_copy(dtype, rounding_kernels):
    """Bug case 19: one rounding of the sum, to main_grad's dtype."""
    (x, grad), recipe = data(SPLIT, torch.bfloat16), emulated(factories.row_scaling_factory)
    module, plain = (make(torch.bfloat16, fuse_wgrad_accumulation=f) for f in (True, False))
    torch.manual_seed(1)
    for weight in module.weights:
        weight.main_grad = torch.randn(N, K).to(dtype)
        weight.grad_added_to_main_grad = False
    sums = [w.main_grad.clone() for w in module.weights]
    gradients, wider = (
        run(plain, x, SPLIT, recipe, grad)[2:],
        torch.promote_types(dtype, torch.float32),
    )
    for _ in range(2):
        run(module, x, SPLIT, recipe, grad)
        sums = [
            (total.to(wider) + gradient.to(wider)).to(dtype)
            for total, gradient in zip(sums, gradients, strict=True)
        ]
    assert_equal([w.main_grad for w in module.weights], sums)


@pytest.mark.parametrize("name", ["row", "mxfp8", "current", "identity"])
def test_biases_are_added_before_the_only_rounding(name, monkeypatch):
    """With sizes that only the device knows, as with a list, in kernels that do not round."""
    (x, grad), recipe = data(SPLIT, torch.bfloat16), emulated(ALL[name])
    wanted = run(make(torch.bfloat16, bias=True), x, SPLIT, recipe, grad)
    module = make(torch.bfloat16, bias=True)
    monkeypatch.setattr(type(module), "_checked_sizes", lambda self, m_splits, x: None)
    assert torch.equal(run(module, x, torch.tensor(SPLIT), recipe, grad)[0], wanted[0])
