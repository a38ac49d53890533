"""What a Linear computes: against torch.nn.Linear, against FP64, and in every order of calls."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.recipes import ALL, PLAIN, emulated, same_format_hybrid

E4M3_DB, E5M2_DB, NVFP4_DB = 31, 25, 20
STOCHASTIC = {"nvfp4", "nvfp4_1d", "guide", "mxfp8_fwd_nvfp4_bwd"}


def make(k=96, n=80, dtype=torch.float32, name="demo.fc1", **options):
    torch.manual_seed(0)
    return dfg.Linear(k, n, params_dtype=dtype, name=name, **options)


def run(module, x, recipe, grad=None, **forward):
    """y, dX, dW, dbias of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    with dfg.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **forward)
    y.backward(torch.ones_like(y) if grad is None else grad)
    bias_grad = None if module.bias is None else module.bias.grad
    return y.detach(), x.grad, module.weight.grad, bias_grad


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["disabled", "identity"])
def test_high_precision_equals_nn_linear_over_three_steps(dtype, how):
    ours = make(dtype=dtype)
    plain = torch.nn.Linear(96, 80, dtype=dtype)
    plain.load_state_dict(ours.state_dict())
    recipe = emulated(factories.high_precision_factory) if how == "identity" else None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        x, grad = torch.randn(24, 96, dtype=dtype), torch.randn(24, 80, dtype=dtype)
        got = run(ours, x, recipe, grad)
        plain.zero_grad()
        x.requires_grad_()
        y = plain(x)
        y.backward(grad)
        assert_equal(got[:3], (y.detach(), x.grad, plain.weight.grad))
        torch.testing.assert_close(got[3], plain.bias.grad, rtol=1e-2, atol=1e-2)
        plain.bias.grad.copy_(got[3])
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(ours.weight, plain.weight), step


def sqnr_db(got, wanted):
    got, wanted = got.double(), wanted.double()
    return 10 * torch.log10(wanted.square().sum() / (got - wanted).square().sum()).item()


@pytest.mark.parametrize("name", sorted(set(ALL) - {"guide"}))
def test_every_gemm_meets_the_sqnr_of_its_formats(name):
    """Y, dX, dW against FP64 of the unquantized matrices, for random normal data."""
    module = make(256, 192, bias=False, name="fc")
    x, grad = torch.randn(320, 256), torch.randn(320, 192)
    recipe = emulated(ALL[name])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(2):  # delayed scaling has its scales in the second step
        got = run(module, x, recipe, grad)
        optimizer.step()
    w, xd, gd = module.weight.double(), x.double(), grad.double()
    binding = next(iter(module._bindings.values()))
    for gemm, value, wanted in (
        ("fprop", got[0], xd @ w.t()),
        ("dgrad", got[1], gd @ w),
        ("wgrad", got[2], gd.t() @ xd),
    ):
        limit = gemm_limit_db(binding, gemm)
        assert sqnr_db(value, wanted) >= limit, (gemm, limit)


def gemm_limit_db(binding, gemm):
    """3 dB below the worse operand's cast."""
    from dist_finegrain.roles import LINEAR_GEMMS

    operands = next(g for g in LINEAR_GEMMS if g.gemm == gemm)
    formats = [
        binding.quantizers[slot].plane_format(direction)
        for slot, direction in (
            (operands.a, operands.a_direction),
            (operands.b, operands.b_direction),
        )
    ]
    return min([100, *(f.cast_sqnr_db for f in formats)]) - 3  # FP32 sums: over 100 dB


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_same_format_as_plain_and_as_hybrid(name):
    """Bit-identical outputs and gradients (te-features item 19)."""
    import functools

    x = torch.randn(64, 96)
    plain = run(make(name="fc"), x, emulated(PLAIN[name]))
    twice = functools.partial(same_format_hybrid, factory=PLAIN[name])
    assert_equal(run(make(name="fc"), x, emulated(twice)), plain)


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("shape", [(1, 96), (0, 96), (7, 96), (2, 3, 96)])
def test_few_rows_none_and_three_dimensions(name, shape):
    """Bug case 3: (0, K) gives (0, N) and dW = 0; a normal batch afterwards is unaffected."""
    recipe, module = emulated(ALL[name]), make(bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x = torch.randn(shape)
    y, dx, dw, _ = run(module, x, recipe)
    optimizer.step()
    assert y.shape == (*shape[:-1], 80) and dx.shape == shape
    if x.numel() == 0:
        assert dw.count_nonzero() == 0
        assert all(s.scale == 1 for s in module._delayed.values() if s.key[2] == "input")
    assert all(t.isfinite().all() for t in (y, dx, dw))
    module.eval()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        assert module(x).shape == y.shape
    if shape == (2, 3, 96) and name not in STOCHASTIC and not module._delayed:
        flat = run(module, x.reshape(6, 96), recipe)
        assert torch.equal(flat[0], y.reshape(6, 80)) and torch.equal(flat[2], dw)
    other = make(bias=False)
    if not module._delayed:
        batch = torch.randn(32, 96)
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            assert torch.equal(module(batch), other(batch))


@pytest.mark.parametrize("name", sorted(ALL))
def test_any_memory_layout_gives_the_result_of_the_contiguous_copy(name):
    """Bug case 21: stride-0 gradients, column slices, transposed views."""
    recipe, x = emulated(ALL[name]), torch.randn(96, 96)
    module = make()
    wide = torch.randn(96, 200)
    layouts = {
        "expanded": torch.randn(1, 80).expand(96, 80),
        "scalar": torch.tensor(0.5).expand(96, 80),
        "slice": wide[:, 7:87],
        "transposed": torch.randn(80, 96).t(),
    }
    for grad in layouts.values():
        fresh, twin = copy.deepcopy(module), copy.deepcopy(module)
        strided = run(fresh, x.t().contiguous().t(), recipe, grad)
        assert_equal(strided, run(twin, x, recipe, grad.contiguous()))
    module.zero_grad()
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()
    assert module.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "nvfp4", "block", "row"])
def test_zero_blocks_and_lora_pair(name):
    """Bug case 5: zeros stay zeros, never NaN; a LoRA pair whose B is 0 trains."""
    recipe = emulated(PLAIN[name])
    module = make(64, 64, bias=False)
    y, dx, dw, _ = run(module, torch.zeros(64, 64), recipe)
    assert y.count_nonzero() == 0 and dw.count_nonzero() == 0 and dx.isfinite().all()
    down, up = make(64, 16, bias=False, name="a"), make(16, 64, bias=False, name="b")
    with torch.no_grad():
        up.weight.zero_()
    optimizer = torch.optim.SGD([*down.parameters(), *up.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with dfg.autocast(recipe=recipe):
            out = up(down(torch.randn(32, 64)))
        (out - 1).square().mean().backward()
        optimizer.step()
        assert up.weight.isfinite().all() and down.weight.isfinite().all()
    assert up.weight.count_nonzero() > 0


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_fp16_is_scaled_in_fp32(name):
    """Bug case 8: FP16 values whose scale exceeds 65504; no Inf that plain FP16 does not give."""
    module = make(64, 64, dtype=torch.float16)
    with torch.no_grad():
        module.weight.fill_(2.0**-17)
    for value in (2.0**-17, 6e-8, 1.0):
        x = torch.full((32, 64), value, dtype=torch.float16)
        grad = torch.full((32, 64), 2.0**10 / 2**11, dtype=torch.float16)
        got = run(module, x, emulated(PLAIN[name]), grad)
        assert all(t.dtype == torch.float16 and t.isfinite().all() for t in got)


def test_gradient_elements_keep_their_type():
    """Bug case 11: E4M3 forward, E5M2 gradients; dX and dW have the norm of the exact ones."""
    module, x, grad = make(128, 128, bias=False), torch.randn(128, 128), torch.randn(128, 128)
    _, dx, dw, _ = run(module, x, emulated(factories.current_scaling_factory), grad)
    for got, wanted in ((dx, grad @ module.weight.detach()), (dw, grad.t() @ x)):
        assert got.norm() / wanted.norm() == pytest.approx(1, abs=0.05)
        assert sqnr_db(got, wanted) >= 20


# Order of calls: caches, eval and train, nesting.


@pytest.mark.parametrize("name", sorted(set(ALL) - {"delayed", "delayed_children"}))
def test_cached_weight_equals_an_uncached_one(name):
    """Bug case 12: five microbatches with a cached weight, bit for bit, for stateless formats."""
    recipe, x = emulated(ALL[name]), torch.randn(40, 96)
    cached, fresh = make(), make()
    for first in (True, False, False, False, False):
        got = run(cached, x, recipe, is_first_microbatch=first)
        assert_equal(got, run(fresh, x, recipe))


def test_cached_weight_with_delayed_scaling_keeps_its_scale():
    """Bug case 12: a cached plane is read with the scale that made it, in all five microbatches."""
    recipe, x = emulated(PLAIN["delayed"]), torch.randn(768, 768)
    module = make(768, 768, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    run(module, x, recipe)
    optimizer.step()
    errors = []
    for first in (True, False, False, False, False):
        y = run(module, x, recipe, is_first_microbatch=first)[0]
        errors.append(-sqnr_db(y, x @ module.weight.t()))
    assert max(errors) < -20 and max(errors) - min(errors) < 1


def test_cached_weight_is_refreshed_when_the_step_ends_and_on_load():
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(8, 96)
    module = make(bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    run(module, x, recipe, is_first_microbatch=True)
    optimizer.step()
    stale_free = run(module, x, recipe, is_first_microbatch=False)
    assert_equal(stale_free, run(module, x, recipe))
    state = {k: v * 2 for k, v in module.state_dict().items()}
    module.load_state_dict(state)
    assert_equal(run(module, x, recipe, is_first_microbatch=False), run(module, x, recipe))
    module.double().float()
    assert module._weight_cache is None


def test_eval_mode_with_gradients_ends_steps_too():
    """Fine-tuning in eval() mode (no dropout): the cached weight follows the optimizer."""
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(8, 96)
    module = make(bias=False).eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    run(module, x, recipe, is_first_microbatch=True)
    optimizer.step()
    cached = run(module, x, recipe, is_first_microbatch=False)
    assert_equal(cached, run(module, x, recipe))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "guide", "current", "delayed", "identity"])
def test_recomputation_outside_of_autocast_uses_the_recipe_of_the_step(name, reentrant):
    """backward() after autocast was left recomputes under the forward's recipe, bit for bit."""
    from torch.utils.checkpoint import checkpoint

    recipe, x = emulated(ALL[name]), torch.randn(24, 96)
    plain, module = make(), make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, module)]
    for _ in range(2):
        wanted = run(plain, x, recipe)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with dfg.autocast(recipe=recipe):
            y = checkpoint(module, leaf, use_reentrant=reentrant)
        y.backward(torch.ones_like(y))
        assert_equal((y.detach(), leaf.grad, module.weight.grad, module.bias.grad), wanted)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(module._delayed.values(), plain._delayed.values(), strict=True):
        assert torch.equal(ours.history, theirs.history)


def test_recomputation_after_two_recipes_in_a_step_is_refused():
    from torch.utils.checkpoint import checkpoint

    module, x = make(), torch.randn(24, 96, requires_grad=True)
    with dfg.autocast(recipe=emulated(PLAIN["mxfp8"])):
        y = checkpoint(module, x, use_reentrant=True)
    with dfg.autocast(recipe=emulated(PLAIN["nvfp4"])):
        module(x)
    with pytest.raises(RuntimeError, match="ran under 2 recipes.*checkpointed function"):
        y.sum().backward()


@pytest.mark.parametrize("name", sorted(set(ALL) - {"delayed", "delayed_children"}))
def test_validation_before_training_leaves_no_half_cached_weight(name):
    """Bug case 13: the missing direction is made on demand."""
    recipe, x = emulated(ALL[name]), torch.randn(40, 96)
    module, fresh = make(), make()
    module.eval()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        module(x, is_first_microbatch=True)
        module(x, is_first_microbatch=False)
    module.train()
    got = run(module, x, recipe, is_first_microbatch=False)
    assert_equal(got, run(fresh, x, recipe))


def test_shared_layer_nesting_and_exceptions():
    """Bug case 16: one layer twice in a region, nested enabled=False, an exception inside."""
    from dist_finegrain.context import current_frame

    module, x = make(96, 96), torch.randn(16, 96)
    recipe = emulated(factories.mxfp8_factory)
    plain = torch.nn.functional.linear(x, module.weight, module.bias)
    for _ in range(3):
        module.zero_grad()
        with pytest.raises(ZeroDivisionError), dfg.autocast(recipe=recipe):
            quantized = module(x)
            with dfg.autocast(enabled=False):
                assert torch.equal(module(x), plain)
                with dfg.autocast():
                    assert torch.equal(module(x), quantized)
            module(module(x)).sum().backward()
            raise ZeroDivisionError
        assert not current_frame().enabled and current_frame().recipe is None
        assert torch.equal(module(x), plain)
    assert not torch.equal(quantized, plain)


def test_amax_of_a_layer_used_twice_is_the_maximum_of_both_calls():
    """Bug case 16: delayed scaling records the larger of two uses in one step."""
    module, x = make(96, 96, bias=False), torch.randn(16, 96)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with dfg.autocast(recipe=emulated(PLAIN["delayed"])):
        (module(x) + module(5 * x)).sum().backward()
    optimizer.step()
    slot = next(s for k, s in module._delayed.items() if k[2] == "input")
    assert slot.history[-1] == (5 * x).abs().max()


def test_eval_and_no_grad_do_not_record():
    module, x = make(bias=False), torch.randn(16, 96)
    recipe = emulated(PLAIN["delayed"])
    run(module, x, recipe)
    pending = {k: s.pending.item() for k, s in module._delayed.items()}
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        module(100 * x)
    module.eval()
    with dfg.autocast(recipe=recipe):
        module(100 * x)
    assert pending == {k: s.pending.item() for k, s in module._delayed.items()}


# Frozen tensors, accumulation, tied weights.


class Counting(dfg.Quantizer):
    """Identity that counts encodes per instance label."""

    counts: dict = {}

    def __init__(self, label):
        super().__init__()
        self.label = label

    def encode(self, x):
        self.counts[self.label] = self.counts.get(self.label, 0) + 1
        return (x.clone(),)

    def decode(self, parts, shape, dtype):
        return parts[0].to(dtype)


def counting_factory(role):
    kind = "boundary" if role is None else role.tensor_type
    return dfg.HybridQuantizer(
        rowwise_quantizer=Counting(f"{kind}.row"), columnwise_quantizer=Counting(f"{kind}.col")
    )


def test_frozen_weight_or_input_needs_no_columns():
    """Bug case 17: no columnwise work whose product nobody reads."""
    module, x = make(bias=False), torch.randn(16, 96)
    recipe = emulated(counting_factory)
    module.weight.requires_grad_(False)
    Counting.counts.clear()
    _, dx, dw, _ = run(module, x, recipe)
    assert dw is None and torch.equal(dx, torch.ones(16, 80) @ module.weight)
    assert Counting.counts == {
        "input.row": 1, "weight.row": 1, "weight.col": 1, "grad_output.row": 1,
    }  # fmt: skip
    module.weight.requires_grad_(True)
    Counting.counts.clear()
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()  # x needs no gradient
    assert Counting.counts == {
        "input.row": 1, "input.col": 1, "weight.row": 1, "grad_output.col": 1,
    }  # fmt: skip
    assert torch.allclose(module.weight.grad, torch.ones(80, 16) @ x, atol=1e-4)
    Counting.counts.clear()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        module(x)
    assert Counting.counts == {"input.row": 1, "weight.row": 1}


@pytest.mark.parametrize("name", ["identity", "mxfp8", "current"])
@pytest.mark.parametrize("fuse", [False, True])
def test_first_layer_trains_though_its_input_needs_no_gradient(name, fuse):
    """Bug case 18."""
    recipe, x = emulated(PLAIN[name]), torch.randn(16, 96)
    module, reference = make(bias=False, fuse_wgrad_accumulation=fuse), make(bias=False)
    if fuse:
        module.weight.main_grad = torch.zeros(80, 96)
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()
    wanted = run(reference, x, recipe)[2]
    assert torch.equal(module.weight.main_grad if fuse else module.weight.grad, wanted)


@pytest.mark.parametrize("name", ["identity", "mxfp8", "delayed", "row"])
@pytest.mark.parametrize("flag", [False, True])
def test_main_grad_adds_up_over_microbatches(name, flag):
    """Bug case 19: four microbatches into an FP32 main_grad, Megatron's flag cleared per step."""
    recipe = emulated(PLAIN[name])
    fused = make(dtype=torch.bfloat16, bias=False, fuse_wgrad_accumulation=True)
    plain = make(dtype=torch.bfloat16, bias=False)
    fused.weight.main_grad = torch.zeros(80, 96)
    if flag:
        fused.weight.grad_added_to_main_grad = False
    total = torch.zeros(80, 96, dtype=torch.float64)
    for _ in range(4):
        x = torch.randn(16, 96, dtype=torch.bfloat16)
        with dfg.autocast(recipe=recipe):
            fused(x).sum().backward()
        if fused.weight.grad is not None:  # Megatron's hook
            assert flag and fused.weight.grad.count_nonzero() == 0
            if not fused.weight.grad_added_to_main_grad:
                fused.weight.main_grad.add_(fused.weight.grad)
            fused.weight.grad = None
        total += run(plain, x, recipe)[2].double()
    error = (fused.weight.main_grad.double() - total).norm() / total.norm()
    assert error < 2.0**-8  # plain gradients were rounded to BF16, main_grad was not
    fused.weight.overwrite_main_grad = True
    with dfg.autocast(recipe=recipe):
        fused(x).sum().backward()
    error = (fused.weight.main_grad - plain.weight.grad.float()).norm()
    assert error < 2.0**-8 * plain.weight.grad.norm()


@pytest.mark.parametrize("main_grad", ["missing", None, torch.zeros(1, 80, 96)])
def test_fused_accumulation_without_a_fitting_main_grad_is_refused(main_grad):
    module = make(fuse_wgrad_accumulation=True)
    if not isinstance(main_grad, str):
        module.weight.main_grad = main_grad
    with pytest.raises(ValueError, match=r"no main_grad of its shape \(80, 96\)"):
        module(torch.randn(4, 96))


@pytest.mark.parametrize("name", sorted(ALL))
def test_delayed_weight_gradient_equals_the_immediate_one(name):
    recipe = emulated(ALL[name])
    late, now = make(delay_wgrad_compute=True), make()
    total = torch.zeros_like(now.weight)
    for seed in (1, 2):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed))
        total += run(now, x, recipe)[2]
        with dfg.autocast(recipe=recipe):
            late(x).sum().backward()
    assert late.weight.grad is None
    late.backward_dw()
    late.backward_dw()
    assert torch.equal(late.weight.grad, total)
    with pytest.raises(RuntimeError, match="backward_dw"):
        late.backward_dw()


def test_backward_dw_ignores_torch_autocast_and_keeps_other_gradients():
    x = torch.randn(16, 96)
    late, now = make(delay_wgrad_compute=True), make()
    wanted = run(now, x, None)[2]
    late(x).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        late.backward_dw()
    assert torch.equal(late.weight.grad, wanted)
    fused = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.zeros(80, 96)
    fused.weight.grad_added_to_main_grad = False
    fused.weight.grad = torch.ones(80, 96)
    fused(x).sum().backward()
    fused.backward_dw()
    assert torch.equal(fused.weight.main_grad, wanted) and (fused.weight.grad == 1).all()
    fused.weight.requires_grad_(False)
    fused.backward_dw()


@pytest.mark.parametrize("name", sorted(set(ALL) - {"delayed", "delayed_children"}))
def test_saving_the_original_input_changes_nothing(name):
    recipe, x = emulated(ALL[name]), torch.randn(48, 96)
    assert_equal(run(make(save_original_input=True), x, recipe), run(make(), x, recipe))


def test_split_parameters_are_one_weight():
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(16, 96)
    split, whole = make(parameters_split=("query_", "key_")), make()
    with torch.no_grad():
        split.query_weight.copy_(whole.weight[:40])
        split.key_weight.copy_(whole.weight[40:])
    with dfg.autocast(recipe=recipe):
        y = split(x)
    y.sum().backward()
    wanted = run(whole, x, recipe)
    assert torch.equal(y, wanted[0])
    assert torch.equal(torch.cat((split.query_weight.grad, split.key_weight.grad)), wanted[2])


def test_tied_weights_with_different_formats_add_their_gradients():
    """Bug case 20 (one rank): two Linears share a Parameter; both caches refresh after the step."""

    def factory(role):
        is_a = role is not None and role.name == "a"
        return factories.mxfp8_factory(role) if is_a else factories.current_scaling_factory(role)

    a, b = make(64, 64, bias=False, name="a"), make(64, 64, bias=False, name="b")
    b.weight = a.weight
    recipe, x = emulated(factory), torch.randn(16, 64)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.5)
    for first in (True, False):
        a.zero_grad()
        with dfg.autocast(recipe=recipe):
            (a(x, is_first_microbatch=first) + b(x, is_first_microbatch=first)).sum().backward()
        both = a.weight.grad.clone()
        singles = [run(m, x, recipe)[2].clone() for m in (a, b)]
        assert torch.allclose(both, singles[0] + singles[1], atol=1e-4)
        a.weight.grad = both
        optimizer.step()


# Copies and checkpoints.


@pytest.mark.parametrize("trained", [False, True])
def test_plain_linear_checkpoints_load_both_ways(trained):
    """Bug case 22: strict loading from and into nn.Linear; no bookkeeping keys."""
    ours, plain = make(), torch.nn.Linear(96, 80)
    if trained:
        run(ours, torch.randn(8, 96), emulated(PLAIN["mxfp8"]))
    assert set(ours.state_dict()) == {"weight", "bias"}
    plain.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(plain.weight, ours.weight)
    other = torch.nn.Linear(96, 80)
    ours.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(ours.weight, other.weight)


@pytest.mark.parametrize("name", ["delayed", "delayed_children", "guide", "nvfp4"])
def test_deepcopy_and_pickle_before_and_after_training(name):
    """Bug case 29: train only the copy; the original's weights and scales stay as they are."""
    recipe, x = emulated(ALL[name]), torch.randn(16, 96)
    module = make(bias=False)
    fresh = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        run(module, x, recipe)
        optimizer.step()
    before = {k: (s.scale.clone(), s.history.clone()) for k, s in module._delayed.items()}
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(2):
            run(twin, 3 * x, recipe)
            optimizer.step()
        assert not torch.equal(twin.weight, module.weight)
    for key, slot in module._delayed.items():
        assert torch.equal(slot.scale, before[key][0])
        assert torch.equal(slot.history, before[key][1])
    resumed = copy.deepcopy(module)
    assert_equal(run(resumed, x, recipe), run(module, x, recipe))


def test_double_backward_is_refused():
    module, x = make(), torch.randn(4, 96, requires_grad=True)
    with dfg.autocast(recipe=emulated(PLAIN["mxfp8"])):
        y = module(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_torch_autocast_casts_and_keeps_gradient_dtypes():
    """FP32 parameters under BF16 autocast: Y is BF16, dX FP32, dW FP32; no cast inside ours."""
    module, x = make(), torch.randn(16, 96)
    recipe = emulated(PLAIN["mxfp8"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, dx, dw, db = run(module, x, recipe)
    low = make().to(torch.bfloat16)
    wanted = run(low, x.bfloat16(), recipe)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (torch.bfloat16, *(torch.float32,) * 3)
    assert torch.equal(y, wanted[0]) and torch.equal(dw.bfloat16(), wanted[2])


def test_first_emulated_gemm_is_logged_once(monkeypatch, caplog):
    from dist_finegrain.modules import binding

    monkeypatch.setattr(binding, "_logged_emulation", False)
    for _ in range(2):
        run(make(), torch.randn(4, 96), emulated(PLAIN["mxfp8"]))
    lines = [r.getMessage() for r in caplog.records if "emulation" in r.getMessage()]
    assert lines == ["exact emulation: 1 GEMMs of module 'demo.fc1' and maybe more; see plan()"]


def test_return_bias_leaves_the_bias_out():
    module, x = make(return_bias=True), torch.randn(4, 96)
    y, bias = module(x)
    assert bias is module.bias
    assert torch.equal(y, x @ module.weight.t())
