"""The short way through GroupedLinear against the long one and a loop of Linears."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.utils.checkpoint

import dist_finegrain as dfg
from dist_finegrain import factories, factory_zoo
from dist_finegrain.modules import base, grouped_linear
from dist_finegrain.modules.direct_grouped import DirectGrouped
from dist_finegrain.modules.grouped_binding import choose_grouped
from dist_finegrain.modules.grouped_linear_function import GroupedCall
from dist_finegrain.ops import grouped, lt
from dist_finegrain.ops.gemm import PairRefused, gemm_counts, reset_gemm_counts
from dist_finegrain.resolution import Site
from dist_finegrain.roles import LINEAR_GEMMS
from tests import recipes
from tests.modules.grouped_linear_cases import loop_of, make
from tests.modules.test_direct_linear import assert_same_bits, delayed_rows, hybrid
from tests.ops.test_lt import stand_in_on_cpu

K, N, EXPERTS = 128, 256, 4
SPLITS = {
    "ragged": [5, 0, 33, 10],
    "tiles": [16, 48, 0, 16],
    "only one": [0, 0, 7, 0],
}


def rows_forward(role):
    """Row scales for fprop, tensor scales for dgrad and wgrad."""
    if role is not None and role.tensor_type == "grad_output":
        return factories.current_scaling_factory(role)
    return hybrid(factories.row_scaling_factory, factories.current_scaling_factory)(role)


def bf16_wgrad(role):
    """Blocks, and BF16 columns where wgrad reads them."""
    if role is not None and role.tensor_type == "weight":
        return factories.float8_block_scaling_factory(role)
    return hybrid(factories.float8_block_scaling_factory, factories.high_precision_factory)(role)


SHORT = {
    "current": factories.current_scaling_factory,
    "row": factories.row_scaling_factory,
    "delayed": factories.delayed_scaling_factory,
    "delayed children": recipes.delayed_children,
    "delayed rows": delayed_rows,
    "rows forward": rows_forward,
    "columns of dequantized rows": hybrid(
        factories.current_scaling_factory, recipes.ALL["delayed"], source="rowwise_dequantized"
    ),
    "block": factories.float8_block_scaling_factory,
    "block, BF16 wgrad": bf16_wgrad,
    "block, row-scaled wgrad": factory_zoo.float8_block_row_scaled_wgrad,
}
LONG = {
    "identity": factories.high_precision_factory,
    "mxfp8": factories.mxfp8_factory,
    "nvfp4": factories.nvfp4_factory,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A GPU, or a CPU that stands in for one: the operator that multiplies is plain torch."""
    reason = dfg.build_info().cpu_reason
    if request.param == "cuda":
        reason = dfg.build_info().gemm_reason
    if reason:
        pytest.skip(f"no compiled part: {reason}")
    if request.param == "cuda":
        yield "cuda"
        return
    built = dataclasses.replace(dfg.build_info(), gemm_reason="")
    monkeypatch.setattr(grouped, "build_info", lambda: built)
    monkeypatch.setattr(lt, "available", lambda device: "")
    for module in (base, grouped_linear):
        monkeypatch.setattr(module, "device_kind", lambda device: "sm_90")
    with stand_in_on_cpu():
        yield "cpu"


@pytest.fixture
def taken(monkeypatch):
    """How often the short way was taken."""
    count, call = [], DirectGrouped.__call__

    def noting(*arguments):
        count.append(1)
        return call(*arguments)

    monkeypatch.setattr(DirectGrouped, "__call__", noting)
    return count


def layer(device, **options):
    options = {"k": K, "n": N, "experts": EXPERTS, **options}
    module = make(torch.bfloat16, **options).to(device)
    with torch.no_grad():
        for weight in module.weights:
            weight.mul_(10)
    return module


def recipe_of(name, **options):
    execution = "native" if name in SHORT else "emulate"
    return dfg.CustomRecipe({**SHORT, **LONG}[name], execution=execution, **options)


def training(name, device, monkeypatch, is_short, split, frozen=(), main_grads=(), **options):
    """y, dX, dW of three steps, the delayed scales after each, and the GEMMs counted.

    main_grads: of the experts' weights, where their gradients go instead.
    """
    if not is_short:
        monkeypatch.setattr(DirectGrouped, "takes", staticmethod(lambda *_: False))
    module, recipe, found = layer(device, **options), recipe_of(name), []
    for e in frozen:
        module.weights[e].requires_grad_(False)
    for weight, main_grad in zip(module.weights, main_grads, strict=False):
        weight.main_grad = main_grad.clone()
    reset_gemm_counts()
    torch.manual_seed(1)
    for step in range(3):
        rows = sum(split)
        x = (torch.randn(rows, K) * 2.0**step).bfloat16().to(device).requires_grad_()
        dy = torch.randn(rows, N).bfloat16().to(device)
        with dfg.autocast(recipe=recipe):
            y = module(x, split)
        y.backward(dy)
        found += [y.detach(), x.grad, *(w.grad for w in module.weights)]
        found += [w.main_grad.clone() for w in module.weights if main_grads]
        module.zero_grad()
        dfg.end_step()
        found += [slot.scale.clone() for _, slot in sorted(module._delayed.items())]
        split = split[1:] + split[:1]
    monkeypatch.undo()
    return found, gemm_counts()


@pytest.mark.parametrize("frozen", [(), (2,), tuple(range(EXPERTS))])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", sorted(SHORT))
def test_bits_and_counts_are_those_of_the_long_way(name, split, frozen, device, taken):
    results = []
    for is_short in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            results.append(training(name, device, patch, is_short, split, frozen))
        assert len(taken) == 3
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def main_grads_of(kind, device):
    """One for each expert; those that a GEMM cannot write are added to from a copy."""
    dtype = {"BF16": torch.bfloat16, "FP16": torch.float16}.get(kind, torch.float32)
    made = [torch.full((N, K), e / 8, dtype=dtype, device=device) for e in range(EXPERTS)]
    return [m.t().contiguous().t() for m in made] if kind == "transposed" else made


@pytest.mark.parametrize("kind", ["FP32", "BF16", "FP16", "transposed"])
@pytest.mark.parametrize("frozen", [(), (2,), tuple(range(EXPERTS))])
@pytest.mark.parametrize("name", sorted(SHORT))
def test_main_grads_are_those_of_the_long_way(name, frozen, kind, device, taken):
    """Added to over three steps; those of frozen experts stay, and autograd gets nothing."""
    results, split = [], SPLITS["ragged"]
    given = main_grads_of(kind, device)
    for is_short in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            results.append(
                training(
                    name, device, patch, is_short, split, frozen, given,
                    fuse_wgrad_accumulation=True,
                )
            )  # fmt: skip
        assert len(taken) == 3
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    found = results[0][0][2 : 2 + 2 * EXPERTS]  # of the first step
    assert found[:EXPERTS] == [None] * EXPERTS
    for e, (before, after) in enumerate(zip(given, found[EXPERTS:], strict=True)):
        assert torch.equal(before, after) == (e in frozen or split[e] == 0)


def test_main_grad_is_the_one_that_backward_finds(device, taken):
    """Overwritten where the weight says so; autograd's hooks get zeros where they want some."""
    recipe, results = recipe_of("current"), []
    x, dy = (torch.randn(48, width, device=device).bfloat16() for width in (K, N))
    for is_fused in (False, True):
        module = layer(device, fuse_wgrad_accumulation=is_fused)
        for weight in module.weights:
            weight.main_grad = torch.ones(N, K, dtype=torch.bfloat16, device=device)
            weight.grad_added_to_main_grad, weight.overwrite_main_grad = False, True
        with dfg.autocast(recipe=recipe):
            y = module(x, SPLITS["ragged"])
        old = [weight.main_grad for weight in module.weights]
        for weight in module.weights:
            weight.main_grad = torch.ones(N, K, dtype=torch.bfloat16, device=device)
        y.backward(dy)
        assert all((main_grad == 1).all() for main_grad in old)
        assert all(weight.grad_added_to_main_grad == is_fused for weight in module.weights)
        assert not (is_fused and any(weight.grad.any() for weight in module.weights))
        results.append([w.main_grad if is_fused else w.grad for w in module.weights])
    assert_same_bits(*results)
    assert len(taken) == 2


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", sorted(SHORT))
def test_it_is_a_loop_of_linears(name, split, device, taken):
    """Equal codes and scales; a GEMM may add in another order for another number of rows."""
    module, recipe = layer(device), recipe_of(name)
    x = torch.randn(sum(split), K).bfloat16().to(device).requires_grad_()
    dy = torch.randn(sum(split), N).bfloat16().to(device)
    with dfg.autocast(recipe=recipe):
        y = module(x, split)
    got = [y, *torch.autograd.grad(y, (x, *module.weights), dy)]
    layers = [each.to(device) for each in loop_of(module)]
    with dfg.autocast(recipe=recipe):
        parts = [each(part) for each, part in zip(layers, x.split(split), strict=True)]
    y = torch.cat(parts)
    wanted = [y, *torch.autograd.grad(y, (x, *(each.weight for each in layers)), dy)]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * b.abs().max().item())
    assert len(taken) == 1


@pytest.mark.parametrize("name", sorted(LONG))
def test_what_needs_more_goes_the_long_way(name, device, taken):
    with pytest.MonkeyPatch.context() as patch:
        training(name, device, patch, True, SPLITS["tiles"])
    assert not taken


def test_shapes_and_uses_that_go_the_long_way(device, taken):
    recipe, split = recipe_of("current"), SPLITS["ragged"]

    def run(module, split=split, dtype=torch.bfloat16, **forward):
        rows = sum(split)
        x = torch.randn(1, rows, K, device=device).to(dtype).requires_grad_()
        with dfg.autocast(recipe=recipe):
            y = module(x, split, **forward)
            y = y[0] if module.return_bias else y
            y.sum().backward()
        assert y.shape == (1, rows, N)
        return len(taken)

    assert run(layer(device)) == 1
    assert run(layer(device, bias=True, return_bias=True)) == 2
    assert run(layer(device), split=torch.tensor(split)) == 3  # read on the host
    assert run(layer(device), split=[0] * EXPERTS) == 3
    assert run(layer(device, bias=True)) == 3
    assert run(layer(device), is_first_microbatch=True) == 3
    assert run(layer(device, save_original_input=True)) == 3
    assert run(layer(device, delay_wgrad_compute=True)) == 3
    assert run(layer(device).float(), dtype=torch.float32) == 3


def test_a_tensor_scale_beside_row_scales_goes_the_long_way(device, taken):
    """It is repeated for every row first."""
    mixed = hybrid(factories.row_scaling_factory, factories.current_scaling_factory)
    module, results = layer(device), []
    x = torch.randn(48, K).bfloat16().to(device).requires_grad_()
    for factory in (mixed, factories.high_precision_factory):
        with dfg.autocast(recipe=dfg.CustomRecipe(factory, execution="native")):
            y = module(x, SPLITS["ragged"])
        results.append(torch.autograd.grad(y.float().sum(), (x, *module.weights)))
    assert not taken
    for got, wanted in zip(*results, strict=True):
        assert (got.float() - wanted.float()).norm() <= 0.1 * wanted.float().norm() + 1e-12


def test_weights_in_blocks_beside_other_columns_go_the_long_way(device, taken):
    """Blocks are cast as one matrix of all experts, the other plane expert by expert."""

    def squares(role):
        return dfg.Float8BlockQuantizer(dfg.DType.kFloat8E4M3, block_scaling_dim=2)

    def factory(role):
        if role is not None and role.tensor_type == "grad_output":
            return factories.row_scaling_factory(role)
        rows = squares if role is not None and role.tensor_type == "weight" else recipes.block_1d
        return hybrid(rows, factories.row_scaling_factory)(role)

    module = layer(device)
    x = torch.randn(48, K).bfloat16().to(device).requires_grad_()
    with dfg.autocast(recipe=dfg.CustomRecipe(factory, execution="native")):
        module(x, SPLITS["ragged"]).sum().backward()
    assert not taken and x.grad.isfinite().all()


def test_weights_that_lie_apart_are_copied(device, taken):
    """To the same bits; frozen or not, they get the gradients of the joined ones."""
    results = []
    for is_apart in (False, True):
        module = layer(device)
        if is_apart:
            for weight in module.weights:
                weight.data = weight.data.clone()
        torch.manual_seed(1)
        x = torch.randn(48, K).bfloat16().to(device).requires_grad_()
        with dfg.autocast(recipe=recipe_of("current")):
            y = module(x, SPLITS["ragged"])
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *(w.grad for w in module.weights)])
    assert_same_bits(*results)
    assert len(taken) == 2


def shifted(x):
    """Equal values that start two bytes behind an aligned address."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


@pytest.mark.parametrize("name", ["current", "row", "block, BF16 wgrad"])
def test_matrices_at_odd_addresses_give_the_same_bits(name, device, taken):
    """torch's grouped kernel, which a BF16 wgrad takes, refuses such operands."""
    module, recipe, results = layer(device), recipe_of(name), []
    x, dy = (torch.randn(48, width, device=device).bfloat16() for width in (K, N))
    for place in (torch.clone, shifted):
        moved = place(x).requires_grad_()
        with dfg.autocast(recipe=recipe):
            y = module(moved, SPLITS["ragged"])
        results.append([y.detach(), *torch.autograd.grad(y, (moved, *module.weights), place(dy))])
    assert_same_bits(*results)
    assert len(taken) == 2


def test_experts_that_share_scales_are_not_cast_with_others_that_do_not(device, taken):
    """Equal formats; expert 1 keeps a delayed scale for each plane, the others one for both."""

    def factory(role):
        made = factories.delayed_scaling_factory
        is_apart = role is not None and role.expert_index == 1
        return hybrid(made, made)(role) if is_apart else made(role)

    module = layer(device)
    x = torch.randn(48, K).bfloat16().to(device).requires_grad_()
    for _ in range(2):
        with dfg.autocast(recipe=dfg.CustomRecipe(factory, execution="native")):
            module(x, [12] * EXPERTS).float().square().sum().backward()
        dfg.end_step()
    moved = [slot for slot in module._delayed.values() if slot.scale.item() != 1]
    assert not taken and len(moved) == 3 * (EXPERTS + 1)


def test_more_experts_than_torchs_kernel_takes(device, taken):
    """An FP8 wgrad has no limit; a BF16 one goes expert by expert, or is refused in the forward."""
    experts = 1032
    module = layer(device, k=128, n=128, experts=experts)
    x = torch.randn(experts, 128).bfloat16().to(device)
    for name in ("current", "block, BF16 wgrad"):
        with dfg.autocast(recipe=recipe_of(name)):
            module(x, [1] * experts).sum().backward()
        assert all(weight.grad.any() for weight in module.weights) and len(taken) == 1
        module.zero_grad()
    limit = "1023 experts at most, not 1032"
    (row,) = (
        row
        for row in dfg.plan(module, recipe_of("block, BF16 wgrad"), device="sm_90").rows
        if row.gemm == "wgrad"
    )
    assert limit in row.reason
    on_device = torch.ones(experts, dtype=torch.int32, device=device)
    if device == "cuda":
        with pytest.raises(ValueError, match=f"{limit}.*accepted: a list, e.g. m_splits"):
            with dfg.autocast(recipe=recipe_of("identity")):
                module(x, on_device)


def test_the_limit_of_torchs_kernel_is_known_when_a_layer_is_built():
    """One expert more goes one by one where the host knows the sizes, and is refused elsewhere."""
    site = Site("experts", "grouped_linear", "sm_90", 128, 128)
    (wgrad,) = (gemm for gemm in LINEAR_GEMMS if gemm.gemm == "wgrad")

    def choose(experts, sizes_known):
        quantizers = dict.fromkeys((wgrad.a, wgrad.b), [dfg.IdentityQuantizer()] * experts)
        return choose_grouped(wgrad, quantizers, site, "native", torch.bfloat16, sizes_known, "")

    for sizes_known in (True, False):
        assert choose(1023, sizes_known)[0].name == "grouped_mm"
    assert choose(1024, True) == (None, "grouped_mm takes 1023 experts at most, not 1024")
    with pytest.raises(PairRefused, match="at most, not 1024.*accepted: a list, e.g. m_splits="):
        choose(1024, False)


@pytest.mark.gpu
def test_a_captured_graph_holds_nothing_that_eager_steps_read(monkeypatch):
    """What is made while capturing has no values before the first replay."""
    if dfg.build_info().gemm_reason:
        pytest.skip(dfg.build_info().gemm_reason)
    module, recipe = layer("cuda"), recipe_of("current")
    x = torch.randn(48, K, device="cuda").bfloat16()
    used, call = [], DirectGrouped.__call__

    def noting(self, *arguments):
        used.append(self)
        return call(self, *arguments)

    monkeypatch.setattr(DirectGrouped, "__call__", noting)

    def step():
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            return module(x, SPLITS["ragged"])

    wanted = step()
    used[0].weight_ends.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert torch.equal(step(), wanted)  # before any replay
    graph.replay()
    assert torch.equal(captured, wanted)


def test_the_gradient_of_a_gradient_is_refused(device, taken):
    module = layer(device)
    x = torch.randn(48, K, device=device).bfloat16().requires_grad_()
    with dfg.autocast(recipe=recipe_of("current")):
        y = module(x, SPLITS["ragged"])
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate"):
        dx.sum().backward()
    assert len(taken) == 1


def test_what_is_saved_passes_the_hooks(device, taken):
    """Activations can be moved or compressed: planes, and not the matrices they were made of."""
    module, packed = layer(device), []
    x = torch.randn(48, K, device=device).bfloat16().requires_grad_()

    def pack(tensor):
        packed.append((tensor.dtype, tensor.shape[0]))
        return tensor.cpu()

    results = []
    for is_hooked in (True, False):
        unpack = torch.Tensor.cpu if device == "cpu" else torch.Tensor.cuda
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with (
            dfg.autocast(recipe=recipe_of("row")),
            hooks if is_hooked else contextlib.nullcontext(),
        ):
            y = module(x, SPLITS["ragged"])
        results.append(torch.autograd.grad(y.float().sum(), (x, *module.weights)))
    assert packed[:2] == [(torch.uint8, K), (torch.float32, EXPERTS)]
    assert all(dtype in (torch.uint8, torch.float32) for dtype, _ in packed) and len(taken) == 2
    assert_same_bits(*results)


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_recomputed_in_backward(name, device, taken):
    module, recipe, results = layer(device), recipe_of(name), []
    x = torch.randn(48, K, device=device).bfloat16().requires_grad_()
    for is_recomputed in (False, True):
        module.zero_grad()
        x.grad = None
        with dfg.autocast(recipe=recipe):
            if is_recomputed:
                y = dfg.recompute(module, x, SPLITS["ragged"])
            else:
                y = module(x, SPLITS["ragged"])
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *(w.grad for w in module.weights)])
    assert_same_bits(*results)
    assert len(taken) == 3


def test_eval_and_inference_record_nothing(device, taken):
    module, recipe = layer(device), recipe_of("delayed")
    x = torch.randn(48, K, device=device).bfloat16()
    with dfg.autocast(recipe=recipe):
        module(x.clone().requires_grad_(), SPLITS["ragged"]).sum().backward()
        dfg.end_step()
        with torch.no_grad():
            wanted = module.eval()(x, SPLITS["ragged"])
        with torch.inference_mode():
            got = module(x.clone(), SPLITS["ragged"])
    assert torch.equal(got, wanted) and len(taken) == 3
    assert all(slot.pending.item() == -1 for slot in module._delayed.values())


def test_plan_names_the_kernels_of_both_kinds_of_sizes(device):
    model = torch.nn.ModuleDict({"experts": layer(device)})
    rows = dfg.plan(model, recipe_of("row"), device="sm_90").rows
    assert {row.bucket for row in rows} == {"fast"}
    assert all(row.kernel.endswith("rowwise for each expert") for row in rows)
    assert all("on the device: scaled_grouped_mm rowwise" in row.reason for row in rows)


@pytest.mark.parametrize("width", [N, 192])
def test_weights_in_whole_blocks_are_cast_as_one_matrix(width, device, taken, monkeypatch):
    """The long way's bits are those of weights cast one by one and put together."""
    results, cast_each = [], GroupedCall._cast_each
    alone = []

    def noting(self, kind, *arguments):
        alone.append(kind)
        return cast_each(self, kind, *arguments)

    monkeypatch.setattr(GroupedCall, "_cast_each", noting)
    x = torch.randn(48, K, device=device).bfloat16().requires_grad_()
    for is_one in (True, False):
        module = layer(device, n=width, bias=True)
        if not is_one:
            monkeypatch.setattr(GroupedCall, "has_whole_blocks", lambda self, weight: False)
        with dfg.autocast(recipe=dfg.CustomRecipe(SHORT["block"], execution="emulate")):
            y = module(x, SPLITS["ragged"])
        results.append([y.detach(), *torch.autograd.grad(y.float().sum(), (x, *module.weights))])
    assert_same_bits(*results)
    assert alone.count("weight") == (1 if width == N else 2) and not taken
