"""Stochastic noise follows the global place: codes of shards are slices of one rank's codes.

Legend: m rows per rank, tp ranks; X [tp · m, K], W [N, K], dY [tp · m, N], cut as the mode says.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dist_finegrain as dfg
from dist_finegrain.distributed import collectives
from dist_finegrain.distributed.plane_gather import HIGH_PRECISION, PLANE, ROW_PLANE, Wire
from dist_finegrain.formats.casting import run_casts
from dist_finegrain.modules.binding import Binding
from dist_finegrain.modules.gathered import Gathered
from dist_finegrain.modules.linear_function import LinearCall
from dist_finegrain.roles import LINEAR_GEMMS
from tests.distributed.launch import run_ranks
from tests.distributed.linear_parity import shard
from tests.distributed.test_plane_gather import is_possible, same
from tests.planes import planes_differ, region_of

ROWS = (128, 48, 7, 0)
WIDTH = 48  # features per rank: groups of 16 end at the shard, those of 32 do not
CUT = {  # (mode, tensor) → the dimension in which ranks hold pieces
    ("column", "weight"): 0,
    ("column", "grad_output"): 1,
    ("row", "weight"): 1,
    ("row", "input"): 1,
}
GATHERED = {("column", "input"), ("row", "grad_output")}  # under SP
WAYS = tuple(itertools.product((PLANE, HIGH_PRECISION), (PLANE, ROW_PLANE, HIGH_PRECISION)))


def quantizer_of(name: str):
    noisy = {"stochastic_rounding": True}
    if name == "of rows":
        return dfg.HybridQuantizer(
            rowwise_quantizer=dfg.NVFP4Quantizer(**noisy),
            columnwise_quantizer=dfg.NVFP4Quantizer(**noisy, with_rht=True),
            columnwise_source="rowwise_dequantized",
        )
    options = {"1-D": {}, "RHT": {"with_rht": True}, "2-D": {"with_2d_quantization": True}}
    return dfg.NVFP4Quantizer(**noisy, **options[name])


def binding_of(name: str, tensor: str) -> Binding:
    streams = {(tensor, "rowwise"): 11, (tensor, "columnwise"): 12}
    return Binding(None, {tensor: quantizer_of(name)}, streams=streams)


class Places:
    """One operand whole and in pieces; ``of_…`` name the pieces whose planes are no slices."""

    def __init__(self, name, mode, tensor, sequence_parallel, rows, group):
        self.name = f"{name}/{mode}/{tensor}/sp={sequence_parallel}/{rows} rows"
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.mode, self.tensor, self.rows = mode, tensor, rows
        self.binding = binding_of(name, tensor)
        told = {"segments": self.ranks if sequence_parallel else 1}
        options = (torch.bfloat16, mode, sequence_parallel, group, True, True, False)
        self.call = LinearCall(self.binding, *options)
        alone = LinearCall(
            self.binding, torch.bfloat16, None, False, None, True, True, False, **told
        )
        generator = torch.Generator().manual_seed(rows)
        extent = WIDTH * self.ranks
        height = extent if tensor == "weight" else rows * self.ranks
        self.x = torch.randn(height, extent, generator=generator).bfloat16()
        job = alone.job(tensor, self.x, True, True)
        run_casts([job])
        self.wanted = job.planes

    def of_shard(self) -> list[str]:
        """The piece that this rank casts without a gather."""
        own = shard(self.x, CUT[self.mode, self.tensor], self.rank, self.ranks)
        job = self.call.job(self.tensor, own, True, True)
        self.call.cast(job)
        errors = []
        for operands in LINEAR_GEMMS:
            for side, (tensor, direction) in enumerate(operands.sides):
                if tensor != self.tensor or 0 in job.planes[direction].shape:
                    continue
                region = region_of(operands.gemm, side, self.mode, self.rank, self.ranks)
                found = planes_differ(job.planes[direction], self.wanted[direction], region)
                errors += [f"{self.name} {direction}: {found}"] if found else []
        return errors

    def of_gather(self) -> tuple[list[str], int]:
        """The whole from every rank's rows, by every wire that can carry it; how many can."""
        own = shard(self.x, 0, self.rank, self.ranks)
        errors, tried = [], 0
        for ways in WAYS:
            if not is_possible(self.binding.quantizers[self.tensor], ways, self.rows):
                continue
            tried += 1
            operand = Gathered(self.call, self.tensor, own, Wire(*ways, 0), "")
            self.call.cast(*operand.jobs())
            operand.start()
            for direction, plane in operand.wait().items():
                if not same(plane, self.wanted[direction]):
                    errors.append(f"{self.name} {direction} by {ways}")
        return errors, tried


def run_places(blind: bool) -> dict:
    """What differs in every case. blind: each rank believes that it is the first."""
    torch.set_num_threads(1)
    group = dist.new_group(list(range(dist.get_world_size())))
    rank_of = (lambda group: 0) if blind else collectives.group_rank
    report = {"cases": 0, "errors": [], "right": []}
    with mock.patch.object(collectives, "group_rank", rank_of):
        for name, mode, tensor, sp, rows in itertools.product(
            ("1-D", "RHT", "2-D", "of rows"), ("column", "row"),
            ("input", "weight", "grad_output"), (False, True), ROWS,
        ):  # fmt: skip
            is_gathered = (mode, tensor) in GATHERED
            # Square blocks of gathered rows end at the shard: no slice of one rank's.
            is_cut = name == "2-D" and rows % 16 != 0
            if is_gathered and (not sp or is_cut):
                continue
            places = Places(name, mode, tensor, sp, rows, group)
            errors, tried = places.of_gather() if is_gathered else (places.of_shard(), 1)
            report["cases"] += tried
            report["errors"] += errors
            if not errors and (rows or tensor == "weight"):
                report["right"].append(places.name)
    return report


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_of_shards_are_slices_of_one_ranks(ranks):
    for rank, report in enumerate(run_ranks(run_places, ranks, False)):
        assert report["cases"] > 150
        assert not report["errors"], f"rank {rank}:\n" + "\n".join(report["errors"])


def test_a_rank_that_does_not_know_its_place_is_noticed():
    """Also shows that no case is blind: noise of another place gives other codes."""
    first, second = run_ranks(run_places, 2, True)
    assert first["errors"] and not second["right"], second["right"]
