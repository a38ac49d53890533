"""Amaxes of experts, of rows and of columns on a GPU, on matrices that are read 16 bytes at a time.

Legend: X [M, K] is E experts' rows one after another. Oracle: max |x| over finite elements, FP32.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from dist_finegrain.extension import why_unavailable
from dist_finegrain.formats import fused, fused_grouped
from dist_finegrain.formats.float8 import Float8RowFormat, Float8TensorFormat
from dist_finegrain.reference.elements import finite_amax
from tests.special_values import DTYPES, every_magnitude, with_nonfinite

pytestmark = pytest.mark.gpu

TENSOR, ROW = Float8TensorFormat("e4m3"), Float8RowFormat("e4m3")
# Below, at and above what a block reads: 128 rows of 512 bytes.
SPLITS = {
    "one": [37],
    "zeros_anywhere": [0, 5, 0, 0, 130, 16, 0],
    "nothing": [0, 0, 0],
    "whole_blocks": [128, 256, 128],
    "around_a_block": [127, 129, 31, 33, 15, 17],
    "more_than_a_warp": [3] * 40,
    "more_than_a_block_keeps": [1, 0, 2] * 400,
}
# (K, elements before the first, row stride − K)
LAYOUTS = [(8, 0, 0), (24, 0, 16), (264, 8, 0), (2104, 0, 8), (100, 1, 3)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@pytest.fixture(autouse=True)
def kernels():
    if reason := why_unavailable(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)


def matrix(rows: int, layout: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Every magnitude, NaN and Inf on the GPU; what lies outside X is larger than all of it."""
    k, offset, gap = layout
    outside = torch.full((offset + rows * (k + gap) + 1,), torch.finfo(dtype).max, dtype=dtype)
    x = torch.as_strided(outside, (rows, k), (k + gap, 1), offset)
    x.copy_(with_nonfinite(every_magnitude(rows, k, dtype, seed=k) / 4, seed=rows))
    return torch.as_strided(outside.cuda(), x.shape, x.stride(), offset)


def ends_of(split: list[int]) -> torch.Tensor:
    return torch.tensor(split, device="cuda").cumsum(0).to(torch.int32)


def stacked(x: torch.Tensor, split: list[int], dims: int | tuple[int, ...]) -> torch.Tensor:
    return torch.stack([finite_amax(part, dims) for part in x.cpu().split(split)])


@each_layout
@each_dtype
def test_amaxes_of_experts_and_of_their_lines(dtype, layout):
    """[E] and [M], [E, K], each alone and both in one read; 0 for an expert without rows."""
    for name, split in SPLITS.items():
        x, ends = matrix(sum(split), layout, dtype), ends_of(split)
        of_experts = stacked(x, split, (0, 1)) if len(x) else torch.zeros(len(split))
        of_rows, of_columns = finite_amax(x.cpu(), 1), stacked(x, split, 0)
        found = fused_grouped.measure_grouped(x, ends, TENSOR, None)[0].cpu()
        assert torch.equal(found, of_experts), name
        rows, columns = fused_grouped.measure_grouped(x, ends, ROW, ROW)
        assert torch.equal(rows.cpu(), of_rows) and torch.equal(columns.cpu(), of_columns), name
        rows, _ = fused_grouped.measure_grouped(x, ends, ROW, None)
        _, columns = fused_grouped.measure_grouped(x, ends, None, ROW)
        assert torch.equal(rows.cpu(), of_rows) and torch.equal(columns.cpu(), of_columns), name


@each_layout
@each_dtype
def test_amaxes_of_lines(dtype, layout):
    for m in (1, 7, 128, 300):
        x = matrix(m, layout, dtype)
        rows, columns = fused.measure(x, ROW, ROW)
        assert torch.equal(rows.cpu(), finite_amax(x.cpu(), 1))
        assert torch.equal(columns.cpu(), finite_amax(x.cpu(), 0))
        _, columns = fused.measure(x, None, ROW)
        assert torch.equal(columns.cpu(), finite_amax(x.cpu(), 0))


@each_dtype
def test_one_element_anywhere(dtype):
    """Only its expert, its row and its column are raised."""
    split = [100, 0, 160, 40]
    x, ends = torch.zeros(300, 520, dtype=dtype, device="cuda"), ends_of(split)
    for row, column in itertools.product((0, 7, 99, 100, 127, 128, 259, 260, 299), (0, 255, 519)):
        x[row, column] = -2.5
        expert = int((ends <= row).sum())
        experts = fused_grouped.measure_grouped(x, ends, TENSOR, None)[0]
        rows, columns = fused_grouped.measure_grouped(x, ends, ROW, ROW)
        for amax, at in ((experts, (expert,)), (rows, (row,)), (columns, (expert, column))):
            assert amax[at] == 2.5 and amax.sum() == 2.5, (row, column)
        x[row, column] = 0


@each_dtype
def test_rows_behind_the_experts_are_nobodys(dtype):
    """Ends on the device cannot be refused: what lies behind the last one is not measured."""
    x = torch.ones(300, 264, dtype=dtype, device="cuda")
    x[200:] = 9.0
    ends = torch.tensor([60, 60, 200], dtype=torch.int32, device="cuda")
    experts = fused_grouped.measure_grouped(x, ends, TENSOR, None)[0]
    rows, columns = fused_grouped.measure_grouped(x, ends, ROW, ROW)
    assert experts.tolist() == [1.0, 0.0, 1.0]
    assert bool((rows[:200] == 1).all()) and not rows[200:].any()
    assert bool((columns[0] == 1).all() and (columns[2] == 1).all()) and not columns[1].any()
