"""The grouped benchmark runs and reports every line; what it measures is not judged here."""

from __future__ import annotations

import json

import pytest
import torch

from dist_finegrain.formats import fused
from dist_finegrain.ops.grouped import GEMMS

from . import grouped

SIZES = ["--experts", "4", "--tokens", "80", "--n", "48", "--k", "64", "--repeats", "1"]


def check_every_line(device: str, options: list[str], tmp_path) -> str:
    if reason := fused.why_not(torch.device(device)):
        pytest.skip(reason)
    path = tmp_path / "grouped.json"
    assert grouped.main(["--device", device, *SIZES, *options, "--json", str(path)]) == 0
    lines = json.loads(path.read_text())["results"]
    names = ["BF16", *(v.name for v in grouped.VARIANTS)]
    assert [(line["gemm"], line["name"]) for line in lines] == [
        (g, n) for g in GEMMS for n in names
    ]
    assert all(line["us"] > 0 and line["error"] <= 2.5e-3 for line in lines)
    assert all(line["bar"] is None for line in lines)


@pytest.mark.parametrize("options", [[], ["--skewed"]], ids=["equal", "skewed"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_line_runs(device, options, tmp_path, capsys):
    check_every_line(device, options, tmp_path)
    table = capsys.readouterr().out
    assert table.count("| wgrad | row-scaled, fast |") == 1


def test_splits_account_for_all_tokens():
    for experts in (1, 2, 5, 8):
        for is_skewed in (False, True):
            split = grouped.token_split(experts, 1000, is_skewed)
            assert len(split) == experts and sum(split) == 1000 and min(split) >= 0
    assert grouped.token_split(8, 32768, False) == [4096] * 8
    assert grouped.token_split(4, 100, True) == [0, 0, 50, 50]


def test_bars_are_for_their_sizes_alone():
    arguments = grouped.parse(["--device", "cuda"])
    assert grouped.is_bar(arguments, torch.device("cuda"))
    for changed in (["--tokens", "64"], ["--skewed"]):
        other = grouped.parse(["--device", "cuda", *changed])
        assert not grouped.is_bar(other, torch.device("cuda"))


def test_a_missed_bar_and_a_failed_gemm_are_visible():
    report = {"device": "d", "torch": "t", "split": [1], **grouped.BAR_SIZES}
    line = {"gemm": "fprop", "name": "x", "us": 1.0, "tflop_s": 1.0, "error": 1e-3}
    line |= {"speed_up": 1.4, "bar": 1.5, "launches": None}
    failed = {"gemm": "wgrad", "name": "–", "error_text": "RuntimeError: no"}
    table = grouped.markdown(report | {"results": [line, failed]})
    assert "| fprop | x | **1.40** | 1.50 |" in table and "RuntimeError: no" in table
