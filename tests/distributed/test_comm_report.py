"""comm_report(): bytes and collectives of one step, by kind and module."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

import dist_finegrain as dfg
from dist_finegrain import factories, factory_zoo
from dist_finegrain.distributed import collectives
from dist_finegrain.distributed.traffic import KINDS
from examples.gpt_model import GPT, GPTConfig
from tests.distributed.launch import run_ranks
from tests.recipes import PLAIN, emulated

SEQUENCE, BATCH, HIDDEN = 128, 2, 128
LIMITS = {"current": 0.52, "delayed": 0.52, "block": 0.52, "mxfp8": 0.52, "nvfp4": 0.29}
# Of a dY that dgrad and wgrad read (anchors.md); block and MXFP8 then stay in BF16.
# Delayed scaling comes last: its slots, once made, are compared in every later step too.
BOTH_PLANES = {"current": 0.51, "block": 1.0, "mxfp8": 1.0, "nvfp4": 0.57, "mxfp8_nvfp4": 0.80,
               "delayed": 0.51}  # fmt: skip
# All-reduces of amaxes in a step: one per Linear and pass; delayed scaling has one for them all.
MAXIMA = {"current": 8, "delayed": 1, "block": 0, "mxfp8": 0, "nvfp4": 8, "mxfp8_nvfp4": 8}


def every_collective():
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    dfg.comm_report(reset=True)
    x = torch.zeros(4, 8)
    collectives.all_gather_rows(x, group, module="a", what="rows")
    collectives.reduce_scatter_rows(x, group, module="a")
    collectives.all_reduce_sum(x, group, module="b")
    collectives.all_reduce_sum(x, group, module="b")
    collectives.reduce_max_together([torch.ones(3), torch.ones(5)], group, module="b")
    collectives.all_equal(rank, group, x.device)
    collectives.all_gather_object(rank, group)
    collectives.all_reduce_sum(x, None)
    report = dfg.comm_report(reset=True)
    return report, dfg.comm_report()


def test_every_collective_is_counted_with_what_this_rank_receives():
    for report, empty in run_ranks(every_collective, 2):
        found = {(r.module, r.kind, r.what): (r.collectives, r.nbytes) for r in report.rows}
        size = found.pop(("", "agreement", "object"))
        assert size[0] == 1 and size[1] > 0
        assert found == {
            ("a", "gather rows", "rows"): (1, 128),
            ("a", "scatter sum", ""): (1, 64),
            ("b", "sum", ""): (2, 2 * 128),
            ("b", "max", "amaxes"): (1, 32),
            ("", "agreement", "hash"): (1, 16),
        }
        assert report.select(module="b").nbytes == 288
        assert report.select(kind="sum").collectives == 2
        assert "scatter sum" in str(report) and not empty.rows


def test_kinds_are_checked():
    with pytest.raises(ValueError, match="kind='none'.*e.g. kind='sum'"):
        dfg.comm_report().select(kind="none")


def mxfp8_dgrad_nvfp4_wgrad(role):
    """dY in MXFP8 for dgrad, in NVFP4 for wgrad."""
    return factory_zoo._per_gemm(
        role, factories.mxfp8_factory, factories.mxfp8_factory, factories.nvfp4_factory
    )


FACTORIES = {**PLAIN, "mxfp8_nvfp4": mxfp8_dgrad_nvfp4_wgrad}


def gpt_traffic(freeze_weights=False):
    """By recipe: the report of one training step of the GPT, after one that binds.

    freeze_weights: of the linears, whose dY then needs one plane.
    """
    torch.set_num_threads(1)
    group = dist.new_group([0, 1])
    config = GPTConfig(layers=1, hidden=HIDDEN, seq_len=SEQUENCE, tp=2, sequence_parallel=True)
    model = GPT(config, group)
    for name, parameter in model.named_parameters():
        is_linear = name.startswith("decoder") and "norm" not in name
        parameter.requires_grad_(not (freeze_weights and is_linear))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.randint(256, (SEQUENCE, BATCH), generator=torch.Generator().manual_seed(0))
    reports = {}
    for recipe in ("bf16", *BOTH_PLANES):
        quantized = recipe != "bf16"
        context = functools.partial(
            dfg.autocast, quantized, recipe=emulated(FACTORIES[recipe]) if quantized else None
        )
        for _ in range(2):
            dfg.comm_report(reset=True)
            with torch.autocast("cpu", torch.bfloat16), context():
                loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
        reports[recipe] = dfg.comm_report()
    return reports


def test_gathers_of_the_gpt_move_a_share_of_the_bytes_of_bf16():
    for reports in run_ranks(gpt_traffic, 2):
        plain = reports["bf16"]
        rows = SEQUENCE * BATCH // 2
        assert plain.steps == 1
        # qkv and fc1 gather x twice, proj and fc2 gather dY once.
        assert plain.select(what="input for fprop").nbytes == 2 * 2 * rows * HIDDEN
        assert plain.select(what="input for wgrad").nbytes == 2 * 2 * rows * HIDDEN
        assert plain.select(kind="gather rows").collectives == 6
        assert {r.kind for r in plain.rows} == {"gather rows", "scatter sum"}
        for recipe, report in reports.items():
            if recipe == "bf16":
                continue
            limit = LIMITS.get(recipe, 0.52)
            for what in ("input for fprop", "input for wgrad"):
                share = report.select(what=what).nbytes / plain.select(what=what).nbytes
                assert 0 < share <= limit, (recipe, what, share)
            share = (
                report.select(what="grad_output").nbytes / plain.select(what="grad_output").nbytes
            )
            assert 0 < share <= BOTH_PLANES[recipe], (recipe, share)
            scattered = [r.select(kind="scatter sum").nbytes for r in (report, plain)]
            assert scattered[0] == scattered[1]
            assert report.select(kind="gather planes").collectives + (
                report.select(kind="gather rows").collectives
            ) == 6  # fmt: skip


def test_collectives_of_a_step_of_the_gpt():
    """qkv, proj, fc1 and fc2 of one layer: all that a step communicates, by kind."""
    for reports in run_ranks(gpt_traffic, 2):
        for recipe, report in reports.items():
            found = {kind: report.select(kind=kind).collectives for kind in KINDS}
            assert found["gather planes"] + found["gather rows"] == 6
            assert found["scatter sum"] == 4 and found["sum"] == 0
            assert found["max"] == MAXIMA.get(recipe, 0), (recipe, found)
            assert found["agreement"] == (recipe == "delayed"), (recipe, found)


def test_gradients_of_frozen_weights_travel_as_one_plane():
    for reports in run_ranks(gpt_traffic, 2, True):
        plain = reports["bf16"].select(what="grad_output")
        assert plain.collectives == 2  # proj and fc2
        for recipe, limit in LIMITS.items():
            found = reports[recipe].select(what="grad_output")
            assert found.select(kind="gather planes").collectives == found.collectives == 2
            assert 0 < found.nbytes / plain.nbytes <= limit, recipe
            assert not reports[recipe].select(what="input for wgrad").rows


def plan_and_traffic():
    """Bytes on the wire that plan() foresees, those counted, and reasons of the plan."""
    group, tokens = dist.new_group([0, 1]), 256
    found = []
    for mode, recipe in itertools.product(("column", "row"), ("identity", "current", "mxfp8")):
        layer = dfg.Linear(
            64, 96, parallel_mode=mode, sequence_parallel=True, tp_group=group, name="decoder.fc",
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        recipe = emulated(PLAIN[recipe])
        plan = dfg.plan(layer, recipe, tokens=tokens, device="cpu")
        dfg.comm_report(reset=True)
        rows = tokens // 2 if mode == "column" else tokens
        x = torch.ones(rows, layer.local_in_features, dtype=torch.bfloat16, requires_grad=True)
        with dfg.autocast(recipe=recipe):
            layer(x).sum().backward()
        report = dfg.comm_report()
        assert {r.module for r in report.rows if r.kind != "agreement"} == {"decoder.fc"}
        overhead = report.select(kind="max").nbytes + report.select(kind="agreement").nbytes
        found.append((sum(r.wire_bytes for r in plan.rows), report.nbytes - overhead))
    odd = dfg.plan(layer, emulated(PLAIN["nvfp4"]), tokens=2 * 7, device="cpu")
    return found, [{row.gemm: row.reason for row in p.rows} for p in (plan, odd)]


def test_plan_foresees_what_is_counted():
    for found, (mxfp8, nvfp4) in run_ranks(plan_and_traffic, 2):
        for foreseen, counted in found:
            assert foreseen == counted > 0
        for gemm in ("dgrad", "wgrad"):
            assert "sequence-parallel gather in high precision" in mxfp8[gemm]
        assert "7 rows per rank are no multiple of 16" in nvfp4["wgrad"]
        assert "gather" not in mxfp8["fprop"]
