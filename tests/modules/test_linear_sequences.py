"""A Linear in every order of calls: caches, eval and train, nesting, recompute, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.modules.linear_cases import assert_equal, make, run, sqnr_db
from tests.recipes import ALL, PLAIN, emulated


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


def test_first_microbatch_quantizes_the_weight_as_it_is_now():
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(8, 96)
    module = make(bias=False)
    run(module, x, recipe, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(3)
    got = run(module, x, recipe, is_first_microbatch=True)
    assert_equal(got, run(module, x, recipe))


def test_stochastic_rounding_repeats_within_a_step_and_changes_with_it():
    recipe, x = emulated(PLAIN["nvfp4_stochastic"]), torch.randn(32, 96)
    module = make(bias=False)
    first = run(module, x, recipe)
    first = [None if t is None else t.clone() for t in first]
    assert_equal(run(module, x, recipe), first)
    torch.optim.SGD(module.parameters(), lr=0.0).step()
    assert not torch.equal(run(module, x, recipe)[0], first[0])


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


@pytest.mark.parametrize("name", ["mxfp8", "current", "row", "block_f32"])
def test_torch_autocast_casts_and_keeps_gradient_dtypes(name):
    """FP32 parameters under BF16 autocast: Y is BF16, dX FP32, dW FP32; no cast inside ours."""
    module, x = make(), torch.randn(16, 96)
    recipe = emulated(PLAIN[name])
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
