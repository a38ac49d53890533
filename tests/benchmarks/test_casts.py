"""The cast benchmark runs and reports every line; what it measures is not judged here."""

from __future__ import annotations

import json

import pytest
import torch

from dist_finegrain.formats import fused

from . import casts
from .cast_cases import BAR_SHAPE, CASES, least_bytes


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_line_runs_on_the_cpu(tmp_path, capsys, threads):
    if reason := fused.why_not(torch.device("cpu")):
        pytest.skip(reason)
    path = tmp_path / "casts.json"
    size = ["--device", "cpu", "--rows", "48", "--columns", "160", "--repeats", "1"]
    assert casts.main([*size, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [line["name"] for line in report["results"]] == [case.name for case in CASES]
    assert all(line["ms"] > 0 and line["reference_ms"] > 0 for line in report["results"])
    table = capsys.readouterr().out
    assert all(case.name.replace("|", "\\|") in table for case in CASES)


def test_only_chooses_lines(tmp_path, threads):
    if reason := fused.why_not(torch.device("cpu")):
        pytest.skip(reason)
    path = tmp_path / "casts.json"
    size = ["--device", "cpu", "--rows", "16", "--columns", "16", "--repeats", "1"]
    assert casts.main([*size, "--only", "mxfp8|nvfp4", "--json", str(path)]) == 0
    assert len(json.loads(path.read_text())["results"]) == 3


def test_floors_count_each_byte_once():
    """At 16384×8192 the floors are those of the project's table, in bytes per element."""
    x = torch.empty(BAR_SHAPE, dtype=torch.bfloat16, device="meta")
    per_element = {case.name: least_bytes(case, x) / x.numel() for case in CASES}
    assert per_element["block 1-D both"] == 4 + 2 * 4 / 128
    assert per_element["MXFP8 both"] == 4 + 2 / 32
    assert round(per_element["block 2-D both"], 4) == 4.0005
    assert round(per_element["MXFP8|NVFP4, RHT, amax given"], 4) == 3.5938
    assert round(per_element["NVFP4 both, nearest, amax included"], 3) == 5.125
    assert round(per_element["per-tensor current both"], 3) == 6.0
    assert per_element["amax alone"] == 2.0
    assert round(per_element["decode per-tensor FP8"], 3) == 3.0


def test_a_missed_bar_and_a_failed_line_are_visible():
    line = {"name": "a|b", "bar_us": 100.0, "us": 120.0}
    report = {"device": "d", "torch": "t", "transformer_engine": "–", "rows": 1, "columns": 1}
    failed = {"name": "c", "bar_us": None, "error": "RuntimeError: no"}
    table = casts.markdown(report | {"results": [line, failed]}, casts.GPU_COLUMNS)
    assert "| a\\|b | **120.0** | 100 | – |" in table and "| c | RuntimeError: no |" in table


@pytest.mark.gpu
def test_every_line_runs_on_the_gpu(tmp_path):
    if reason := fused.why_not(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)
    path = tmp_path / "casts.json"
    size = ["--device", "cuda", "--rows", "512", "--columns", "384", "--repeats", "1"]
    assert casts.main([*size, "--json", str(path)]) == 0
    lines = json.loads(path.read_text())["results"]
    assert all(line["us"] > 0 for line in lines)
    # A cast whose amaxes are given is one launch, with the amax of delayed scaling too.
    one_launch = {c.name for c in CASES if c.work in ("given", "recorded") and not c.bias_grad}
    counts = {line["name"]: line["launches"] for line in lines if line["name"] in one_launch}
    assert set(counts.values()) <= {1, None}, counts
