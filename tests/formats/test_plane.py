"""Rounding of decoded values, and padding."""

from __future__ import annotations

import math

import pytest
import torch

from dist_finegrain.formats.plane import padded, saturating_to

INF = math.inf
CANONICAL_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_stay_or_saturate_whatever_the_widths(source, target):
    values = torch.tensor([INF, -INF, math.nan, 1.5, -0.0], dtype=source)
    kept = saturating_to(values, target)
    assert kept.dtype == target and kept.tolist()[:2] == [INF, -INF] and kept[2].isnan()
    assert kept.tolist()[3:] == [1.5, 0.0] and kept[4].signbit()
    limit = torch.finfo(target).max
    saturated = saturating_to(values, target, keep_inf=False)
    assert saturated.tolist()[:2] == [limit, -limit] and saturated[2].isnan()


@pytest.mark.parametrize("keep_inf", [True, False])
@pytest.mark.parametrize("source", CANONICAL_NAN)
@pytest.mark.parametrize("target", CANONICAL_NAN)
def test_every_nan_becomes_the_canonical_one(source, target, keep_inf):
    """At every place of a vector, of either sign and any payload, contiguous or not."""
    if keep_inf and source == target:
        return  # the very tensor
    word, nan = CANONICAL_NAN[source]
    values = torch.full((100,), nan, dtype=word)
    values[::3] |= torch.iinfo(word).min
    values[::5] |= 1
    values, before = values.view(source), values.clone()
    word, nan = CANONICAL_NAN[target]
    for view in (values, values[::7]):
        assert (saturating_to(view, target, keep_inf=keep_inf).view(word) == nan).all()
    assert torch.equal(values.view(before.dtype), before)


def test_finite_values_that_do_not_fit_saturate():
    largest = torch.tensor([3.4e38, -3.4e38])
    limit = torch.finfo(torch.bfloat16).max
    assert saturating_to(largest, torch.bfloat16).tolist() == [limit, -limit]
    assert saturating_to(torch.tensor([1e5]), torch.float16).item() == 65504


def test_padding_is_zero_and_absent_where_nothing_is_missing():
    x = torch.ones(5, 20)
    wide = padded(x, 16, 32)
    assert wide.shape == (16, 32) and wide.sum() == x.sum() and torch.equal(wide[:5, :20], x)
    assert padded(wide, 16, 32) is wide
    assert padded(torch.ones(0, 20), 16, 32).shape == (0, 32)
