"""Public bug reports about ranks, each as it was reported: rows 30 to 32 of the bug cases."""

from __future__ import annotations

import torch
import torch.distributed as dist

import dist_finegrain as dfg
from tests.distributed.launch import run_ranks
from tests.distributed.linear_parity import Case
from tests.recipes import PLAIN, emulated

K, N = 256, 384
RECIPES = ("identity", "current", "delayed", "block", "mxfp8")


def loud_activations():
    """Sequence parallelism; the rows of rank 1 are 64 times as large; three steps."""
    torch.set_num_threads(1)
    group, errors = dist.new_group([0, 1]), []
    for recipe in ("delayed", "current"):
        for mode in ("column", "row"):
            case = Case(recipe, mode, True, torch.bfloat16, group, (256, K, 2 * K))
            case.x[128:] *= 64
            errors += case.run()[0]
    return errors


def test_loud_activations_of_one_rank():
    """Bug case 30: planes, y, dX and dW are those of one rank, in current and delayed scaling."""
    for errors in run_ranks(loud_activations, 2):
        assert not errors, "\n".join(errors)


def eight_tokens():
    """Row-parallel, 8 tokens per rank, non-square weights; then x of three dimensions."""
    torch.set_num_threads(1)
    group, rank, errors = dist.new_group([0, 1]), dist.get_rank(), []
    for recipe in RECIPES:
        errors += Case(recipe, "row", True, torch.bfloat16, group, (16, K, N)).run()[0]
    torch.manual_seed(rank)
    for recipe in RECIPES:
        torch.manual_seed(rank)
        x, dy = torch.randn(16, 3, K // 2), torch.randn(8, 3, N)
        found = []
        for flat in (False, True):
            torch.manual_seed(7)
            layer = dfg.Linear(
                K, N, parallel_mode="row", sequence_parallel=True, tp_group=group, name="fc"
            )
            leaf = (x.flatten(0, 1) if flat else x).clone().requires_grad_()
            with dfg.autocast(recipe=emulated(PLAIN[recipe])):
                y = layer(leaf)
            y.backward(dy.view(y.shape))
            gradients = leaf.grad, layer.weight.grad, layer.bias.grad
            found.append([t.detach().reshape(-1) for t in (y, *gradients)])
            del y, layer
        if not all(map(torch.equal, *found)):
            errors.append(f"{recipe}: x of three dimensions")
    return errors


def test_gathered_gradients_keep_their_order():
    """Bug case 31: pieces are joined along the rows: dX and dW match one rank, also in 3-D."""
    for errors in run_ranks(eight_tokens, 2):
        assert not errors, "\n".join(errors)


def ninety_six_rows():
    torch.set_num_threads(1)
    group, errors = dist.new_group([0, 1]), []
    for recipe in ("block", "block_1d", "block_f32"):
        for mode in ("column", "row"):
            errors += Case(recipe, mode, True, torch.bfloat16, group, (192, K, 2 * K)).run()[0]
    return errors


def test_rows_per_rank_that_are_no_multiple_of_the_block():
    """Bug case 32: 96 rows per rank in FP8 blocks equal one rank with the same segments."""
    for errors in run_ranks(ninety_six_rows, 2):
        assert not errors, "\n".join(errors)
