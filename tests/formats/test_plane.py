"""Rounding of decoded values, and padding."""

from __future__ import annotations

import math

import pytest
import torch

from dist_finegrain.formats.plane import padded, saturating_to

INF = math.inf


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
