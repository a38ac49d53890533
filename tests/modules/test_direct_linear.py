"""The short way through Linear against the long one, bit for bit, and when each is taken."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.utils.checkpoint

import dist_finegrain as dfg
from dist_finegrain import factories, factory_zoo
from dist_finegrain.extension import compiled_module
from dist_finegrain.factories import E4M3, E5M2
from dist_finegrain.modules import base
from dist_finegrain.modules.direct_linear import DirectLinear
from dist_finegrain.ops import lt
from dist_finegrain.ops.gemm import gemm_counter, gemm_counts, reset_gemm_counts
from tests import recipes
from tests.ops.test_lt import stand_in_on_cpu

M, K, N = 48, 160, 288


def hybrid(row, column, source="original"):
    """A factory of hybrids of two factories' quantizers."""

    def factory(role):
        return dfg.HybridQuantizer(
            rowwise_quantizer=row(role), columnwise_quantizer=column(role), columnwise_source=source
        )

    return factory


def block_columns_for_wgrad(role):
    """Block rows; BF16 columns where wgrad reads them."""
    if role is not None and role.tensor_type == "weight":
        return recipes.block_1d(role)
    return hybrid(recipes.block_1d, factories.high_precision_factory)(role)


def delayed_rows(role):
    """Delayed rows, current columns: one amax recorded, one measured."""
    return hybrid(
        lambda _: dfg.DelayedScalingRequest(amax_history_len=4), factories.current_scaling_factory
    )(role)


DIRECT = {
    "current": factories.current_scaling_factory,
    "pow2": lambda role: dfg.Float8CurrentScalingQuantizer(
        E5M2 if role is not None and role.tensor_type == "grad_output" else E4M3,
        force_pow_2_scales=True,
        amax_epsilon=1e-3,
    ),
    "delayed": factories.delayed_scaling_factory,
    "delayed children": recipes.delayed_children,
    "delayed rows": delayed_rows,
    "row": factories.row_scaling_factory,
    "block": factories.float8_block_scaling_factory,
    "block, row-scaled wgrad": factory_zoo.float8_block_row_scaled_wgrad,
    "block, BF16 wgrad": block_columns_for_wgrad,
    "block of dequantized rows": hybrid(
        recipes.block_1d, recipes.block_1d, source="rowwise_dequantized"
    ),
    "identity": factories.high_precision_factory,
}
LONG = {
    "nvfp4": factories.nvfp4_factory,
    "mxfp8": factories.mxfp8_factory,
    "amax of dequantized rows": recipes.dequantized_columns,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A GPU, or a CPU that stands in for one: the operator that multiplies is plain torch."""
    if request.param == "cpu":
        request.getfixturevalue("gemm_on_cpu")
        monkeypatch.setattr(lt, "available", lambda device: "")
        monkeypatch.setattr(base, "device_kind", lambda device: "sm_90")
    if dfg.build_info().cpu_reason if request.param == "cpu" else dfg.build_info().gemm_reason:
        pytest.skip("no compiled part: every linear layer goes the long way")
    return request.param


@pytest.fixture
def gemm_on_cpu():
    with stand_in_on_cpu() as fast:
        yield fast


@pytest.fixture
def taken(monkeypatch):
    """How often the short way was taken."""
    count, call = [], DirectLinear.__call__

    def noting(*arguments):
        count.append(1)
        return call(*arguments)

    monkeypatch.setattr(DirectLinear, "__call__", noting)
    return count


def training(
    name, device, monkeypatch, is_short, frozen="", bias=True, dtype=torch.bfloat16, main_grad=None
):
    """y, dX, dW, db of three steps, the delayed scales after each, and the GEMMs counted.

    main_grad: where dW goes instead.
    """
    if not is_short:
        monkeypatch.setattr(DirectLinear, "takes", staticmethod(lambda *_: False))
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": main_grad is not None, "name": "demo.fc1"}
    module = dfg.Linear(K, N, bias=bias, params_dtype=dtype, device=device, **options)
    module.weight.requires_grad_(frozen != "weight")
    if main_grad is not None:
        module.weight.main_grad = main_grad.clone()
    with torch.no_grad():
        module.weight.mul_(10)
        if bias:
            module.bias.normal_()
    factory = {**DIRECT, **LONG}[name]
    execution = "native" if name in DIRECT else "emulate"
    recipe, found = dfg.CustomRecipe(factory, execution=execution), []
    reset_gemm_counts()
    for step in range(3):
        x = (torch.randn(2, M // 2, K) * 2.0**step).to(dtype).to(device)
        x.requires_grad_(frozen != "input")
        dy = torch.randn(2, M // 2, N).to(dtype).to(device)
        with dfg.autocast(recipe=recipe):
            y = module(x)
        y.backward(dy)
        found += [y.detach(), x.grad, module.weight.grad, module.bias.grad if bias else None]
        found += [] if main_grad is None else [module.weight.main_grad.clone()]
        module.zero_grad()
        dfg.end_step()
        found += [slot.scale.clone() for _, slot in sorted(module._delayed.items())]
    monkeypatch.undo()
    return found, gemm_counts()


def assert_same_bits(got, wanted):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("frozen", ["", "weight", "input"])
@pytest.mark.parametrize("name", sorted(DIRECT))
def test_bits_and_counts_are_those_of_the_long_way(name, frozen, device, taken):
    results = []
    for is_short in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            results.append(training(name, device, patch, is_short, frozen))
        assert len(taken) == 3
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("kind", ["FP32", "BF16", "FP16", "transposed"])
@pytest.mark.parametrize("frozen", ["", "weight", "input"])
@pytest.mark.parametrize("name", sorted(set(DIRECT) - {"identity"}))
def test_main_grad_is_that_of_the_long_way(name, frozen, kind, device, taken):
    """Added to over three steps; a matrix that no GEMM writes is added to from a copy."""
    dtype = {"BF16": torch.bfloat16, "FP16": torch.float16}.get(kind, torch.float32)
    main_grad = torch.full((N, K), 0.5, dtype=dtype, device=device)
    if kind == "transposed":
        main_grad = main_grad.t().contiguous().t()
    results = []
    for is_short in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            results.append(training(name, device, patch, is_short, frozen, main_grad=main_grad))
    has_fp8_wgrad = name != "block, BF16 wgrad" or frozen == "weight"
    assert len(taken) == (3 if has_fp8_wgrad else 0)
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][0][4], main_grad) == (frozen == "weight")


def test_main_grad_is_the_one_that_backward_finds(device, taken):
    """Overwritten where the weight says so; autograd's hooks get zeros where they want some."""
    recipe = dfg.CustomRecipe(factories.current_scaling_factory, execution="native")
    x, dy = (torch.randn(M, width, device=device).bfloat16() for width in (K, N))
    results = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        module = dfg.Linear(
            K, N, params_dtype=torch.bfloat16, device=device, fuse_wgrad_accumulation=is_fused
        )
        weight = module.weight
        weight.main_grad = old = torch.ones(N, K, dtype=torch.bfloat16, device=device)
        weight.grad_added_to_main_grad, weight.overwrite_main_grad = False, True
        with dfg.autocast(recipe=recipe):
            y = module(x)
        weight.main_grad = torch.ones_like(old)
        y.backward(dy)
        assert (old == 1).all() and weight.grad_added_to_main_grad == is_fused
        assert weight.grad.any() != is_fused
        results.append([weight.main_grad if is_fused else weight.grad, module.bias.grad])
    assert_same_bits(*results)
    assert len(taken) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["current", "block, BF16 wgrad"])
def test_without_a_bias_and_in_fp16(name, dtype, device, taken):
    results = []
    for is_short in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            options = {"bias": False, "dtype": dtype}
            results.append(training(name, device, patch, is_short, **options))
    assert len(taken) == 3
    assert_same_bits(results[0][0], results[1][0])


@pytest.mark.parametrize("name", sorted(LONG))
def test_what_needs_more_goes_the_long_way(name, device, taken):
    with pytest.MonkeyPatch.context() as patch:
        training(name, device, patch, is_short=True)
    assert not taken


def test_shapes_and_uses_that_go_the_long_way(device, taken):
    recipe = dfg.CustomRecipe(factories.current_scaling_factory, execution="native")

    def run(module, rows=M, dtype=torch.bfloat16, **forward):
        x = torch.randn(rows, K, device=device).to(dtype).requires_grad_()
        with dfg.autocast(recipe=recipe):
            module(x, **forward).sum().backward()
        return len(taken)

    def linear(dtype=torch.bfloat16, **options):
        return dfg.Linear(K, N, params_dtype=dtype, device=device, name="fc", **options)

    assert run(linear()) == 1
    assert run(linear(), rows=17) == 1 and run(linear(), rows=0) == 1
    assert run(linear(torch.float32), dtype=torch.float32) == 1
    assert run(linear(), is_first_microbatch=True) == 1
    assert run(linear(save_original_input=True)) == 1
    assert run(linear(delay_wgrad_compute=True)) == 1
    shifted = linear()
    shifted.bias = torch.nn.Parameter(torch.zeros(N + 1, device=device).to(torch.bfloat16)[1:])
    assert run(shifted) == 1
    spread = linear()
    spread.bias = torch.nn.Parameter(torch.zeros(2 * N, device=device).to(torch.bfloat16)[::2])
    assert run(spread) == 1
    with torch.autocast(device, torch.bfloat16):
        assert run(linear()) == 2


def test_a_tensor_scale_beside_row_scales_goes_the_long_way(device, taken):
    """It is repeated for every row first."""

    def factory(role):
        is_weight = role is not None and role.tensor_type == "weight"
        return (factories.current_scaling_factory if is_weight else factories.row_scaling_factory)(
            role
        )

    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    with dfg.autocast(recipe=dfg.CustomRecipe(factory, execution="native")):
        module(torch.randn(M, K, device=device).bfloat16()).sum().backward()
    assert not taken


def test_the_gradient_of_a_gradient_is_refused(device, taken):
    """As the long way does: torch's once_differentiable."""
    recipe = dfg.CustomRecipe(factories.current_scaling_factory, execution="native")
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    x = torch.randn(M, K, device=device).bfloat16().requires_grad_()
    for shorten in (True, False):
        with dfg.autocast(recipe=recipe), pytest.MonkeyPatch.context() as patch:
            if not shorten:
                patch.setattr(DirectLinear, "takes", staticmethod(lambda *_: False))
            y = module(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate"):
            dx.sum().backward()
    assert len(taken) == 1


def test_what_is_saved_passes_the_hooks(device, taken):
    """Activations can be moved or compressed: planes, and not the matrices they were made of."""
    recipe = dfg.CustomRecipe(factories.float8_block_scaling_factory, execution="native")
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    x = torch.randn(M, K, device=device).bfloat16().requires_grad_()
    packed = []

    def pack(tensor):
        packed.append((tensor.dtype, tuple(tensor.shape)))
        return tensor.cpu()

    results = []
    for is_hooked in (True, False):
        unpack = torch.Tensor.cpu if device == "cpu" else torch.Tensor.cuda
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with dfg.autocast(recipe=recipe), hooks if is_hooked else contextlib.nullcontext():
            y = module(x)
        results.append(torch.autograd.grad(y.float().sum(), (x, module.weight)))
    assert packed[:2] == [(torch.uint8, (K, M)), (torch.float32, (1, K))]
    assert all(dtype in (torch.uint8, torch.float32) for dtype, _ in packed) and len(taken) == 2
    assert_same_bits(*results)


@pytest.mark.parametrize("fast", [(), ("fprop",), ("dgrad", "wgrad")])
def test_each_gemm_accumulates_as_the_recipe_says(fast, gemm_on_cpu, monkeypatch, taken):
    if dfg.build_info().cpu_reason:
        pytest.skip("no compiled part: every linear layer goes the long way")
    monkeypatch.setattr(lt, "available", lambda device: "")
    monkeypatch.setattr(base, "device_kind", lambda device: "sm_90")
    recipe = dfg.CustomRecipe(
        factories.current_scaling_factory, execution="native", fast_accumulation=fast
    )
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, name="fc")
    x = torch.randn(M, K).bfloat16().requires_grad_()
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()
    assert gemm_on_cpu == [name in fast for name in ("fprop", "dgrad", "wgrad")] and taken


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", ["current", "block, BF16 wgrad", "delayed", "identity"])
def test_recomputed_in_backward(name, reentrant, device, taken):
    """A hook of saved tensors runs the forward again; None is dfg.recompute()."""
    torch.manual_seed(0)
    make = functools.partial(dfg.Linear, K, K, params_dtype=torch.bfloat16, device=device)
    first, second = make(name="demo.fc1"), make(name="demo.fc2")
    recipe, results = dfg.CustomRecipe(DIRECT[name], execution="native"), []
    x = torch.randn(M, K, device=device).bfloat16().requires_grad_()

    def block(x):
        return x + second(torch.relu(first(x)))

    for is_recomputed in (False, True):
        run = block
        if is_recomputed and reentrant is None:
            run = functools.partial(dfg.recompute, block)
        elif is_recomputed:
            checkpoint = torch.utils.checkpoint.checkpoint
            run = functools.partial(checkpoint, block, use_reentrant=reentrant)
        inputs = (x, first.weight, first.bias, second.weight, second.bias)
        for tensor in inputs:
            tensor.grad = None
        with dfg.autocast(recipe=recipe):
            y = run(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *(tensor.grad for tensor in inputs)])
    assert_same_bits(*results)
    assert len(taken) == 6


def test_unpack_hooks_run_with_autograd_and_may_return_any_layout(device, taken):
    recipe = dfg.CustomRecipe(block_columns_for_wgrad, execution="native")
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    x = torch.randn(M, K, device=device).bfloat16().requires_grad_()
    seen = []

    def unpack(tensor):
        with torch.enable_grad():
            seen.append((x * 2).requires_grad)
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:]
        return flat.view(tensor.shape).copy_(tensor)  # at an address that kernels refuse

    results = []
    for is_hooked in (False, True):
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack)
        with dfg.autocast(recipe=recipe), hooks if is_hooked else contextlib.nullcontext():
            y = module(x)
        results.append(torch.autograd.grad(y.float().sum(), (x, module.weight)))
    assert_same_bits(*results)
    assert all(seen) and len(seen) >= 2 and len(taken) == 2


class Negated(dfg.Quantizer):
    """A user's own: −x."""

    def encode(self, x):
        return (-x,)

    def decode(self, parts, shape):
        return -parts[0]


def test_a_users_column_that_no_gemm_reads_yet(device, taken):
    factory = hybrid(factories.high_precision_factory, lambda role: Negated())
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    with torch.no_grad(), dfg.autocast(recipe=dfg.CustomRecipe(factory)):
        module(torch.randn(M, K, device=device).bfloat16())
    assert not taken


def test_amaxes_of_dequantized_columns_are_recorded_beside_those_of_rows(device, taken):
    """Also where a copy of the row's quantizer, which shares its amax, is the column's."""
    amaxes = []
    for is_short in (True, False):
        state = [torch.full((1,), 0.1, device=device), torch.zeros(1, device=device)]
        row = dfg.Float8Quantizer(*state, E4M3)

        def factory(role, row=row):
            return dfg.HybridQuantizer(
                rowwise_quantizer=row.copy(),
                columnwise_quantizer=row.copy(),
                columnwise_source="rowwise_dequantized",
            )

        torch.manual_seed(0)
        module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
        x = (torch.randn(M, K, device=device) * 1e-3).bfloat16().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            if not is_short:
                patch.setattr(DirectLinear, "takes", staticmethod(lambda *_: False))
            with dfg.autocast(recipe=dfg.CustomRecipe(factory, execution="native")):
                module(x).sum().backward()
        amaxes.append(state[1])
    assert torch.equal(*amaxes) and len(taken) == 1


def test_counters_are_shared_by_bindings_of_the_same_formats(device, taken):
    recipe = dfg.CustomRecipe(factories.current_scaling_factory, execution="native")
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    x, counters = torch.randn(M, K, device=device).bfloat16().requires_grad_(), []
    for _ in range(3):
        recipe.invalidate()
        with dfg.autocast(recipe=recipe):
            module(x).sum().backward()
        counters.append(len(compiled_module().gemm_counts()))
    assert counters[0] == counters[2] and len(taken) == 3


def test_inference_mode(device, taken):
    recipe = dfg.CustomRecipe(factories.current_scaling_factory, execution="native")
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    x = torch.randn(M, K, device=device).bfloat16()
    with dfg.autocast(recipe=recipe):
        wanted = module(x).detach()
        with torch.inference_mode():
            assert torch.equal(module(x.clone()), wanted)
    assert len(taken) == 2


def test_the_operator_refuses_by_name(device):
    x, weight = (torch.zeros(r, 32, dtype=torch.bfloat16, device=device) for r in (16, 48))
    plan = [0] * 12 + [gemm_counter({})]

    def call(x=x, weight=weight, plan=plan, epsilons=(0.0,) * 6):
        op = torch.ops.dist_finegrain.linear.default
        return op(x, weight, None, plan, epsilons, [], False, False, False)

    assert call().shape == (16, 48)
    for error, match, arguments in (
        (ValueError, r"shapes \[3, 32\] and \[48, 32\]; accepted: \[M, K\]", {"x": x[:3]}),
        (TypeError, "x is Float and weight", {"x": x.float()}),
        (ValueError, "plan and epsilons have 12 and 6 entries", {"plan": plan[1:]}),
        (ValueError, "counter -1; accepted: one of gemm_counter", {"plan": plan[:-1] + [-1]}),
        (ValueError, "a plane has options 3; accepted: FP8", {"plan": [3, 0, 0, 3] + plan[4:]}),
    ):
        with pytest.raises(error, match=match):
            call(**arguments)


def test_no_grad_eval_and_an_identity_gradient_under_another_autocast(device, taken):
    """autocast of FP16 around backward() must not turn the BF16 products into FP16."""
    recipe = dfg.CustomRecipe(block_columns_for_wgrad, execution="native")
    module = dfg.Linear(K, N, params_dtype=torch.bfloat16, device=device, name="fc")
    x = torch.randn(M, K, device=device).bfloat16()
    with dfg.autocast(recipe=recipe), torch.no_grad():
        quiet = module.eval()(x)
    with dfg.autocast(recipe=recipe):
        y = module.train()(x)
    assert torch.equal(quiet, y.detach()) and len(taken) == 2
    gradients = []
    for inside in (False, True):
        with torch.autocast(device, torch.float16, enabled=inside):
            gradients.append(
                torch.autograd.grad(y.float().square().sum(), module.weight, retain_graph=True)[0]
            )
    assert gradients[1].dtype == torch.bfloat16 and torch.equal(*gradients)
