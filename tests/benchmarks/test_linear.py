"""The Linear benchmark runs and reports every line; what it measures is not judged here."""

from __future__ import annotations

import json

import pytest
import torch

from . import linear
from .linear_cases import (
    FIRST,
    PAIRS,
    RECIPES,
    Parts,
    Problem,
    finegrain_step,
    relative_error,
    saved_bytes,
    torch_step,
)

TINY_RUN = ["--quick", "--shapes", "48x64x96", "--gemm-size", "64"]
# Of y, dx and dw against BF16, for random normal data.
ERRORS = {"NVFP4, emulated": 0.25, "current scaling": 0.08, "delayed scaling": 0.08}
HOST_LINES = ["torch BF16", *(case.name for case in RECIPES if case.host_bar_ms is not None)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_lines(lines: list[dict], modes: tuple[str, ...]) -> None:
    """Every recipe has its rows, and their ratios fit each other."""
    first, *rest = lines
    assert [line["name"] for line in lines] == ["torch BF16", *(case.name for case in RECIPES)]
    for line in rest:
        assert "error_text" not in line, line
        assert 0 < line["error"] < ERRORS.get(line["name"], 0.06), line
        assert line["saved_ratio"] == pytest.approx(line["saved_bytes"] / first["saved_bytes"])
        for mode in modes:
            found = line[mode]
            assert "error_text" not in found, line
            shares = found["casts_share"] + found["gemms_share"]
            assert found["ms"] > 0 and shares > 0
            assert found["floor_speed_up"] * shares == pytest.approx(1)
            assert found["of_floor"] == pytest.approx(shares * found["speed_up"])


def test_every_recipe_runs_on_the_cpu(tmp_path, capsys, threads):
    path = tmp_path / "linear.json"
    assert linear.main(["--device", "cpu", *TINY_RUN, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    check_lines(report["linear"], ("eager",))
    assert all(line["shape"] == [48, 64, 96] for line in report["linear"])
    assert all(line.get("peak_ratio") is None for line in report["linear"])
    kernels = {line["name"]: line.get("kernels") for line in report["linear"]}
    assert kernels["hybrid block, BF16 wgrad"] == "decode + mm | decode + mm | mm"
    assert kernels["float8 block"] == "decode + mm | decode + mm | decode + mm"
    assert [line["name"] for line in report["host"]] == HOST_LINES
    assert all(
        line["over_bf16"] == pytest.approx(line["ms"] / report["host"][0]["ms"])
        for line in report["host"]
    )
    assert [line["name"] for line in report["gemm"]] == ["BF16", *(pair.name for pair in PAIRS)]
    assert all(line["tflop_s"] > 0 and line["ratio"] > 0 for line in report["gemm"])
    assert all(line["error"] < 5e-3 for line in report["gemm"][1:])
    table = capsys.readouterr().out
    assert all(f"| {case.name} |" in table for case in RECIPES)
    assert all(f"| {pair.name} |" in table for pair in PAIRS)


def test_only_and_parts_choose_lines(tmp_path, threads):
    path = tmp_path / "linear.json"
    chosen = ["--parts", "linear,gemm", "--only", "row"]
    assert linear.main(["--device", "cpu", *TINY_RUN, *chosen, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    names = [line["name"] for line in report["linear"]]
    assert names == ["torch BF16", "block, row-scaled wgrad"]
    assert report["host"] == []
    assert [line["name"] for line in report["gemm"]] == ["BF16", "rowwise, exact", "rowwise, fast"]


@pytest.mark.parametrize("option", (["--parts", "linear,attention"], ["--shapes", "16x32"]))
def test_a_wrong_option_ends_the_run(option, capsys):
    with pytest.raises(SystemExit):
        linear.parse(["--device", "cpu", *option])
    assert "accepted:" in capsys.readouterr().err


def test_a_line_that_fails_is_told_and_the_others_go_on(tmp_path, capsys, threads, monkeypatch):
    def refuse_delayed(case, problem):
        if case.ends_step:
            raise RuntimeError("out of memory")
        return finegrain_step(case, problem)

    monkeypatch.setattr(linear, "finegrain_step", refuse_delayed)
    path = tmp_path / "linear.json"
    chosen = ["--parts", "linear,host", "--only", "scaling"]
    assert linear.main(["--device", "cpu", *TINY_RUN, *chosen, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    for part in ("linear", "host"):
        failed = [line["name"] for line in report[part] if "error_text" in line]
        assert failed == ["delayed scaling"] and len(report[part]) == 3
    assert "| delayed scaling | RuntimeError: out of memory |" in capsys.readouterr().out


def test_a_steady_drift_of_the_clock_cancels():
    class Drifting:
        now = 0

        def __init__(self, work):
            self.work = work

        def seconds(self):
            Drifting.now += 1
            return self.work * (1 + 0.1 * Drifting.now)

    base, timers = Drifting(2.0), [Drifting(1.0), Drifting(3.0)]
    seconds, found = linear.take_turns(base, timers, 5)
    assert [share for _, share in found] == pytest.approx([0.5, 1.5])
    # Base's batches are number 1, 3 and 5 of the five of every round; 13 is in the middle.
    assert seconds == pytest.approx(2.0 * (1 + 0.1 * 13))


def test_the_parts_are_those_of_the_step():
    problem = Problem.random((48, 64, 96), torch.device("cpu"))
    for case in RECIPES:
        step = finegrain_step(case, problem)
        step()
        parts = Parts(step)
        for got, wanted in zip(parts.gemms(), step.captured(), strict=True):
            assert torch.equal(got, wanted), case.name


def test_saved_bytes_are_the_planes_of_backward():
    m, k, n = 48, 64, 96
    problem = Problem.random((m, k, n), torch.device("cpu"))
    case = next(case for case in RECIPES if case.name == "current scaling")
    assert saved_bytes(torch_step(problem)) == 2 * m * k
    # X and W in FP8, transposed, with a scale each.
    assert saved_bytes(finegrain_step(case, problem)) == m * k + n * k + 2 * 4


def test_results_that_are_not_finite_are_not_timed():
    good = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="relative error of a result is nan"):
        relative_error((good, good * torch.nan), (good, good))


def test_a_missed_bar_is_visible():
    line = {"shape": [1, 2, 3], "name": "a|b", "bar": [1.62, 1.74], "te": {}}
    line["eager"] = {"ms": 2.0, "speed_up": 1.7}
    report = {"device": "d", "torch": "t", "transformer_engine": "–", "host": [], "gemm": []}
    report |= {"linear": [line]}
    assert "| a\\|b | 2.000 | **1.70** | 1.62–1.74 | – |" in linear.markdown(report)
    line["te"] = {"named": {"speed_up": 1.69}, "custom": {"error_text": "RuntimeError: no"}}
    table = linear.markdown(report)
    assert "| 1.70 | 1.62–1.74 | 1.69 named |" in table
    assert "- TE a|b, custom: RuntimeError: no" in table
    late = {"name": "delayed scaling", "ms": 0.5, "bar_ms": 0.4, "over_bf16": 4.0}
    table = linear.markdown(report | {"tiny": [16, 64, 64], "host": [late]})
    assert "| delayed scaling | **0.500** | 0.40 | 4.00 |" in table


def test_bars_are_of_the_anchors_shapes():
    assert RECIPES[0].bars[FIRST] == (1.62, 1.74)
    shapes = set(linear.DEFAULT_SHAPES["cuda"])
    assert all(set(case.bars) <= shapes for case in RECIPES)


@pytest.mark.gpu
def test_every_recipe_runs_on_the_gpu(tmp_path):
    path = tmp_path / "linear.json"
    sizes = ["--quick", "--shapes", "512x256x384", "--gemm-size", "256"]
    assert linear.main(["--device", "cuda", *sizes, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    check_lines(report["linear"], ("eager", "graph"))
    assert all(line["peak_bytes"] > 0 for line in report["linear"])
    ours = [line["name"] for line in report["host"] if not line["name"].startswith("TE ")]
    assert ours == HOST_LINES
    assert all(line["tflop_s"] > 0 and line["ratio"] > 0 for line in report["gemm"])
    assert all(line["error"] < 5e-3 for line in report["gemm"][1:])
