"""Requests: validation, equality and element types."""

from __future__ import annotations

import dataclasses

import pytest

from dist_finegrain.formats.requests import DelayedScalingRequest, FP8Format, QuantizerRequest


def test_defaults_are_transformer_engines():
    request = DelayedScalingRequest()
    assert isinstance(request, QuantizerRequest)
    assert dataclasses.astuple(request) == (FP8Format.HYBRID, 0, 1024, "max", None, True)


@pytest.mark.parametrize(
    ("fp8_format", "forward", "backward"),
    [
        (FP8Format.HYBRID, "e4m3", "e5m2"),
        (FP8Format.E4M3, "e4m3", "e4m3"),
        (FP8Format.E5M2, "e5m2", "e5m2"),
    ],
)
def test_element(fp8_format, forward, backward):
    request = DelayedScalingRequest(fp8_format=fp8_format)
    assert (request.element(True), request.element(False)) == (forward, backward)


def test_is_a_frozen_value():
    request = DelayedScalingRequest(margin=1)
    assert request == DelayedScalingRequest(margin=1) and request != DelayedScalingRequest()
    assert len({request, DelayedScalingRequest(margin=1)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.margin = 2


@pytest.mark.parametrize(
    ("error", "field", "got"),
    [
        (TypeError, "fp8_format", "HYBRID"),
        (TypeError, "margin", 0.5),
        (TypeError, "margin", True),
        (ValueError, "margin", -1),
        (TypeError, "amax_history_len", "16"),
        (ValueError, "amax_history_len", 0),
        (ValueError, "amax_compute_algo", "min"),
        (ValueError, "amax_compute_algo", max),
        (ValueError, "scaling_factor_compute_algo", lambda *_: 1.0),
        (TypeError, "reduce_amax", 1),
    ],
)
def test_bad_field_is_named_with_what_is_accepted(error, field, got):
    with pytest.raises(error) as caught:
        DelayedScalingRequest(**{field: got})
    message = str(caught.value)
    assert message.startswith(f"{field}=") and "accepted: " in message
    assert repr(got) in message and message.count(f"{field}=") >= 2  # a valid value is shown
