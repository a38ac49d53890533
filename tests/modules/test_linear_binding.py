"""When a Linear asks its factory, and what survives when it asks again (contracts.md)."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.recipes import emulated

SHAPE = (32, 64, 48)  # M, K, N
_CALLS = []  # not captured: a factory that changes what it captured is another factory


class Recording:
    """A factory that remembers the roles it was asked with."""

    def __init__(self, factory=factories.mxfp8_factory):
        self.factory, self.roles = factory, []

    def __call__(self, role):
        self.roles.append(role)
        return self.factory(role)

    def take(self):
        roles, self.roles = self.roles, []
        return [None if r is None else r.tensor_type for r in roles]


def make(name="fc", seed=0, **options):
    torch.manual_seed(seed)
    m, k, n = SHAPE
    return dfg.Linear(k, n, name=name, **options), torch.randn(m, k)


def train_step(module, x, recipe, optimizer=None):
    module.zero_grad()
    with dfg.autocast(recipe=recipe):
        y = module(x)
    y.square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    return y.detach(), module.weight.grad.clone()


def test_factory_is_asked_five_times_in_order_and_never_again():
    module, x = make()
    factory = Recording()
    recipe = emulated(factory)
    for _ in range(3):
        train_step(module, x, recipe)
    roles = factory.roles
    assert factory.take() == ["input", "weight", None, "grad_output", None]
    assert {(r.module_type, r.name) for r in roles if r is not None} == {("linear", "fc")}


def test_three_calls_in_a_life_without_gradients():
    module, x = make()
    factory = Recording()
    recipe = emulated(factory)
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        module(x), module(x)
    assert factory.take() == ["input", "weight", None]
    train_step(module, x, recipe)
    assert factory.take() == ["grad_output", None]


def test_new_recipe_object_of_the_same_factory_asks_nothing():
    module, x = make()
    factory = Recording()
    train_step(module, x, emulated(factory))
    factory.take()
    for _ in range(3):
        train_step(module, x, emulated(factory))
    assert factory.take() == []


def test_recreated_partials_and_functions_with_equal_captures_ask_nothing():
    module, x = make()
    calls = _CALLS
    calls.clear()

    def build(element_name):
        def factory(role):
            _CALLS.append(element_name)
            return factories.mxfp8_factory(role)

        return factory

    train_step(module, x, emulated(build("a")))
    assert len(calls) == 5
    train_step(module, x, emulated(build("a")))
    assert len(calls) == 5
    train_step(module, x, emulated(build("b")))
    assert len(calls) == 10
    recording = Recording()
    for _ in range(2):
        train_step(module, x, emulated(functools.partial(Recording.__call__, recording)))
    assert len(recording.take()) == 5


def test_changed_recipe_key_and_changed_field_and_invalidate_ask_again():
    class Keyed(Recording):
        key = 0

        def recipe_key(self):
            return self.key

    module, x = make()
    factory = Keyed()
    recipe = emulated(factory)
    train_step(module, x, recipe)
    factory.take()
    factory.key = 1
    train_step(module, x, recipe)
    assert len(factory.take()) == 5
    train_step(module, x, dataclasses.replace(recipe, rounding_seed=3))
    assert len(factory.take()) == 5
    recipe.invalidate()
    train_step(module, x, recipe)
    assert len(factory.take()) == 5


def test_invalidate_reaches_every_recipe_of_the_factory():
    module, x = make()
    factory = Recording()
    train_step(module, x, emulated(factory))
    emulated(factory).invalidate()
    factory.take()
    train_step(module, x, emulated(factory))
    assert len(factory.take()) == 5
    train_step(module, x, emulated(factory))
    assert factory.take() == []


def test_list_that_a_partial_captured_is_compared_by_what_it_held():
    module, x = make()
    asked = _CALLS
    asked.clear()

    def pick(role, high_precision):
        _CALLS.append(role)
        is_plain = role is not None and role.name in high_precision
        return dfg.IdentityQuantizer() if is_plain else factories.mxfp8_factory(role)

    names = []
    quantized = train_step(module, x, emulated(functools.partial(pick, high_precision=names)))[0]
    names.append("fc")
    plain = train_step(module, x, emulated(functools.partial(pick, high_precision=names)))[0]
    assert len(asked) == 10 and not torch.equal(quantized, plain)
    train_step(module, x, emulated(functools.partial(pick, high_precision=["fc"])))
    assert len(asked) == 10


def test_moving_nowhere_and_loading_ask_nothing():
    module, x = make()
    factory = Recording()
    recipe = emulated(factory)
    train_step(module, x, recipe)
    factory.take()
    module.to("cpu").float()
    module.load_state_dict(module.state_dict())
    dfg.plan(module, emulated(factories.mxfp8_factory))
    train_step(module, x, recipe)
    assert factory.take() == []


def test_plan_does_not_rename_what_already_runs():
    model = torch.nn.Sequential(dfg.Linear(64, 48))
    factory = Recording()
    x = torch.randn(4, 64)
    with dfg.autocast(recipe=emulated(factory)):
        model(x)
    factory.take()
    dfg.plan(model, emulated(factories.mxfp8_factory))
    with dfg.autocast(recipe=emulated(factory)):
        model(x)
    assert model[0].name == "" and factory.take() == []


def test_rename_and_boundary_role_ask_again_but_equal_values_do_not():
    module, x = make()
    factory = Recording()
    recipe = emulated(factory)
    train_step(module, x, recipe)
    factory.take()
    module.name = "fc"
    module.output_quantizer_role = None
    train_step(module, x, recipe)
    assert factory.take() == []
    module.name = "other"
    train_step(module, x, recipe)
    assert len(factory.take()) == 5
    module.output_quantizer_role = dfg.QuantizerRole("linear", "input", "next")
    train_step(module, x, recipe)
    assert factory.roles[2].name == "next"


def test_alternating_recipes_call_nothing_after_the_first_round():
    module, x = make()
    first, second = Recording(), Recording(factories.current_scaling_factory)
    for _ in range(3):
        train_step(module, x, emulated(first))
        with torch.no_grad(), dfg.autocast(recipe=emulated(second)):
            module(x)
    assert len(first.take()) == 5 and len(second.take()) == 3


def test_changed_factory_equals_a_fresh_module():
    """Bug case 9: steps with f, then with g; the first step with g is that of a fresh module."""
    f, g = emulated(factories.mxfp8_factory), emulated(factories.nvfp4_factory)
    module, x = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        train_step(module, x, f, optimizer)
    fresh, _ = make(seed=1)
    fresh.load_state_dict(module.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(train_step(module, x, g), train_step(fresh, x, g), strict=True)
    )
    assert not torch.equal(train_step(module, x, f)[0], train_step(module, x, g)[0])


def test_mutating_a_recipe_is_refused():
    """Bug case 9: the same recipe object with its factory replaced."""
    recipe = emulated(factories.mxfp8_factory)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.qfactory = factories.nvfp4_factory


def test_cached_weight_does_not_outlive_its_recipe():
    """Bug case 9: weight caches are rebuilt with the quantizers."""
    module, x = make()
    mxfp8, nvfp4 = emulated(factories.mxfp8_factory), emulated(factories.nvfp4_factory)
    with dfg.autocast(recipe=mxfp8):
        module(x, is_first_microbatch=True)
    with dfg.autocast(recipe=nvfp4):
        cached, fresh = module(x, is_first_microbatch=False), module(x)
    assert torch.equal(cached, fresh)


def delayed(length=4, **options):
    return emulated(
        functools.partial(factories.delayed_scaling_factory, amax_history_len=length), **options
    )


def scales(module):
    return {key: (s.scale.clone(), s.history.clone()) for key, s in module._delayed.items()}


def test_delayed_state_survives_a_rename_and_an_equal_role():
    """Bug case 10: scales and histories carry over for every slot whose format did not change."""
    module, x = make()
    twin, _ = make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, twin)]
    for _ in range(5):
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            train_step(m, x, delayed(), optimizer)
    before = scales(module)
    module.name = "renamed"
    module.grad_input_quantizer_role = dfg.QuantizerRole("linear", "grad_output", "previous")
    results = [
        train_step(m, x, delayed(), o) for m, o in zip((module, twin), optimizers, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert before.keys() == scales(module).keys()
    assert all(h.count_nonzero() == 4 for _, h in scales(module).values() if h.any())


def test_evaluation_under_another_request_leaves_the_training_state_alone():
    """A short-history recipe used in eval neither truncates nor replaces what training uses."""
    module, x = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(3):
        train_step(module, x, delayed(4), optimizer)
    before = scales(module)
    with torch.no_grad(), dfg.autocast(recipe=delayed(1)):
        module(x)
    after = scales(module)
    assert all(torch.equal(before[k][1], after[k][1]) for k in before)
    train_step(module, x, delayed(4), optimizer)
    assert {len(s.history) for s in module._delayed.values()} == {4}


def test_moved_state_is_what_later_casts_record_into(monkeypatch):
    """As a move to another device and back does: the slots get other tensors."""
    from dist_finegrain.delayed import DelayedSlot

    def move(slot, device):
        slot.scale, slot.history, slot.pending = (
            t.clone() for t in (slot.scale, slot.history, slot.pending)
        )
        return True

    module, x = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    train_step(module, x, delayed(), optimizer)
    monkeypatch.setattr(DelayedSlot, "to", move)
    module.to("cpu")
    train_step(module, x, delayed())
    ran = {k[2]: s.pending.item() for k, s in module._delayed.items()}
    assert ran["input"] == x.abs().max() and ran["grad_output"] > 0


def test_first_forward_in_inference_mode_does_not_spoil_training():
    module, x = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with torch.inference_mode(), dfg.autocast(recipe=delayed()):
        module(x)
    train_step(module, x, delayed(), optimizer)
    assert all(s.pending == -1 for s in module._delayed.values())


def test_loading_other_weights_starts_delayed_scaling_anew():
    """Bug case 24 (one rank): weights x100 loaded into a trained module are not clipped."""
    module, x = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(3):
        train_step(module, x, delayed(), optimizer)
    module.load_state_dict({k: 100 * v for k, v in module.state_dict().items()})
    assert all(s.scale == 1 and not s.history.any() for s in module._delayed.values())
    y = train_step(module, x, delayed())[0]
    wanted = torch.nn.functional.linear(x, module.weight, module.bias).detach()
    assert (y - wanted).norm() / wanted.norm() < 0.1


def test_shorter_history_keeps_the_newest_rows_and_follows_growing_weights():
    """Bug case 9: history 1024 -> 1 while the weights are multiplied by 100."""
    module, x = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(3):
        train_step(module, x, delayed(1024), optimizer)
    key = next(k for k in module._delayed if k[2] == "weight")
    assert len(module._delayed[key].history) == 1024
    with torch.no_grad():
        module.weight.mul_(100)
    train_step(module, x, delayed(1), optimizer)
    state = module._delayed[key]
    assert state.history.tolist() == [module.weight.abs().max().item()]
    assert state.scale.item() == pytest.approx(448 / module.weight.abs().max().item())


def test_hybrid_children_have_their_own_requests():
    """Requests may differ per slot and per hybrid child (Transformer Engine refuses both)."""
    from tests.recipes import delayed_children

    module, x = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        train_step(module, x, emulated(delayed_children), optimizer)
    lengths = {key[3]: len(s.history) for key, s in module._delayed.items() if key[2] == "input"}
    assert lengths == {"rowwise": 4, "columnwise": 2}
    row, col = (module._delayed["forward", 0, "input", d, "e4m3"] for d in lengths)
    assert row.history.count_nonzero() == 3 and col.history.count_nonzero() == 2
    assert row.scale.item() == pytest.approx(448 / x.abs().max().item())
