"""Delayed scaling and the end of a step: update rule, hook, manual mode, postponement."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import delayed, factories, stepping
from dist_finegrain.delayed import DelayedSlot, update_slots
from dist_finegrain.formats.requests import DelayedScalingRequest
from tests.recipes import emulated

FLT_MAX = torch.finfo(torch.float32).max


@pytest.fixture(autouse=True)
def fresh_steps(monkeypatch):
    monkeypatch.setattr(stepping, "_steps", stepping._Steps())


def slot_with(amaxes, **request):
    request = DelayedScalingRequest(**{"amax_history_len": 3, **request})
    slot = DelayedSlot(("k",), "fc", request, "e4m3", torch.device("cpu"), 0)
    for amax in amaxes:
        slot.pending.fill_(amax)
        update_slots([slot])
    return slot


def f32(value):
    return torch.tensor(value, dtype=torch.float32)


def test_window_maximum_includes_the_newest_and_old_rows_leave():
    slot = slot_with([8.0, 2.0])
    assert slot.history.tolist() == [0, 8, 2] and slot.scale == f32(448) / 8
    slot = slot_with([8.0, 2.0, 4.0, 1.0])
    assert slot.history.tolist() == [2, 4, 1] and slot.scale == f32(448) / 4
    assert slot.pending == -1


def test_most_recent_margin_and_element():
    slot = slot_with([8.0, 2.0], amax_compute_algo="most_recent", margin=3)
    assert slot.scale == f32(448) / 2 / 8


def test_slot_that_did_not_run_keeps_everything():
    slot = slot_with([8.0])
    update_slots([slot])
    assert slot.history.tolist() == [0, 0, 8] and slot.scale == f32(448) / 8


def test_zero_amax_keeps_the_scale_and_tiny_amax_is_capped():
    """Bug case 6: amax so small that fp8_max / amax overflows FP32."""
    slot = slot_with([8.0, 0.0], amax_compute_algo="most_recent")
    assert slot.scale == f32(448) / 8 and slot.history[-1] == 0
    for tiny in (1e-38, 1e-40, 1.4e-45):
        assert slot_with([tiny]).scale.item() in (FLT_MAX, (f32(448) / f32(tiny)).item())
        assert slot_with([tiny]).scale.isfinite()


def layer(**options):
    torch.manual_seed(0)
    factory = functools.partial(factories.delayed_scaling_factory, amax_history_len=4, **options)
    module = dfg.Linear(32, 32, bias=False, name="fc")
    return module, emulated(factory), torch.optim.SGD(module.parameters(), lr=0.0)


def forward(module, recipe, scale=1.0):
    with dfg.autocast(recipe=recipe):
        module(torch.randn(8, 32) * scale).sum().backward()


def histories(module):
    return {k[2]: s.history.count_nonzero().item() for k, s in module._delayed.items()}


RAN_ONCE = {"input": 1, "weight": 1, "output": 0, "grad_output": 1, "grad_input": 0}


def test_optimizer_step_ends_the_step_once():
    module, recipe, optimizer = layer()
    for _ in range(3):  # microbatches
        forward(module, recipe)
    optimizer.step()
    assert histories(module) == RAN_ONCE
    optimizer.step()  # no forward between: ignored
    assert histories(module) == RAN_ONCE and stepping.completed_steps() == 1


def test_skipped_optimizer_step_does_not_end_the_step():
    module, recipe, optimizer = layer()
    forward(module, recipe, 100.0)
    forward(module, recipe, 1.0)
    optimizer.step()
    state = next(s for k, s in module._delayed.items() if k[2] == "input")
    assert state.history.count_nonzero() == 1 and state.history[-1] > 100


def test_user_calls_are_the_only_trigger_once_made():
    module, recipe, optimizer = layer()
    forward(module, recipe)
    dfg.end_step()
    assert histories(module) == RAN_ONCE
    forward(module, recipe)
    optimizer.step()
    assert histories(module) == RAN_ONCE
    dfg.end_step()
    assert histories(module)["input"] == 2


def test_inside_backward_it_waits_for_the_next_autocast():
    module, recipe, _ = layer()
    x = torch.randn(8, 32, requires_grad=True)
    x.register_hook(lambda grad: dfg.end_step())
    with dfg.autocast(recipe=recipe):
        y = module(x)
    y.sum().backward()
    assert stepping.completed_steps() == 0
    with dfg.autocast(recipe=recipe):
        assert stepping.completed_steps() == 1
        with dfg.autocast(recipe=recipe):
            assert stepping.completed_steps() == 1
    assert histories(module)["input"] == 1


def test_postponed_step_waits_for_the_end_of_backward_and_counts_once():
    module, recipe, optimizer = layer()
    x = torch.randn(8, 32, requires_grad=True)
    seen = []

    def in_backward(grad):
        dfg.end_step()
        with dfg.autocast(recipe=recipe):  # as a recomputation opens it
            seen.append(stepping.completed_steps())

    x.register_hook(in_backward)
    with dfg.autocast(recipe=recipe):
        y = module(x)
    y.sum().backward()
    dfg.end_step()
    with dfg.autocast(recipe=recipe):
        pass
    assert seen == [0] and stepping.completed_steps() == 1


def test_warns_once_when_steps_never_end(monkeypatch):
    from dist_finegrain.modules import base

    monkeypatch.setattr(base, "_warned_never_ending_step", False)
    module, recipe, _ = layer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(70):
            forward(module, recipe)
    assert [str(w.message)[:2] for w in caught] == ["64"]


def test_scales_converge_to_the_data_and_error_is_that_of_the_format():
    module, recipe, optimizer = layer()
    for _ in range(2):
        forward(module, recipe)
        optimizer.step()
    x = torch.randn(8, 32)
    with dfg.autocast(recipe=recipe):
        y = module(x)
    wanted = x @ module.weight.t()
    assert (y - wanted).norm() / wanted.norm() < 0.06


def test_what_the_kernel_is_told_follows_the_slot():
    """Kept between steps; new after a move, another request or a longer history."""
    slot = DelayedSlot(
        ("forward", 0, "input", "", "e4m3"), "fc", DelayedScalingRequest(amax_history_len=4),
        "e4m3", torch.device("cpu"), 0,
    )  # fmt: skip
    first = delayed._state(slot)
    assert delayed._state(slot) is first
    slot.adopt(DelayedScalingRequest(amax_history_len=4, margin=1), None, "fc")
    second = delayed._state(slot)
    assert second.margin == 1 and second.packed != first.packed
    slot.adopt(DelayedScalingRequest(amax_history_len=8, margin=1), None, "fc")
    assert delayed._state(slot).history is slot.history and len(slot.history) == 8
    twin = copy.deepcopy(slot)
    assert delayed._state(twin).scale is twin.scale
    assert delayed._state(pickle.loads(pickle.dumps(slot))).margin == 1
