"""The benchmark of modules runs and reports every line; what it measures is not judged here."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from . import modules
from .linear_cases import saved_bytes
from .modules_cases import (
    GROUPED_CASES,
    MLP_CASES,
    Case,
    GroupedMMStep,
    Problem,
    grouped_step,
    kernels_of,
    mlp_step,
    plain_mlp_step,
    split_of,
)

TINY_RUN = ["--quick", "--grouped", "3x40x64x48", "--mlp", "24x32x48"]
ERRORS = {"NVFP4, emulated": 0.5, "current scaling": 0.15, "delayed scaling": 0.15}
CPU = torch.device("cpu")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_lines(lines: list[dict], cases: tuple[Case, ...]) -> None:
    """Every case has its row, close to BF16; torch's own and Identity are nearly equal to it."""
    first, *rest = lines
    assert [line["name"] for line in rest] == [case.name for case in cases]
    assert first["eager"]["ms"] > 0
    for line, case in zip(rest, cases, strict=True):
        assert "error_text" not in line and "error_text" not in line["eager"], line
        is_exact = case.make is None or "Identity" in case.name
        limit = 2**-7 if is_exact else ERRORS.get(case.name, 0.1)
        assert 0 <= line["error"] < limit and (line["error"] > 1e-3 or is_exact), line
        assert line["eager"]["ms"] > 0
        assert line["saved_ratio"] == pytest.approx(line["saved_bytes"] / first["saved_bytes"])
        assert ("kernels" in line) == (case.make is not None)


def test_every_line_runs_on_the_cpu(tmp_path, capsys, threads):
    path = tmp_path / "modules.json"
    assert modules.main(["--device", "cpu", *TINY_RUN, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    check_lines(report["grouped"], GROUPED_CASES)
    check_lines(report["mlp"], MLP_CASES)
    assert {tuple(line["shape"]) for line in report["grouped"]} == {(3, 40, 64, 48)}
    table = capsys.readouterr().out
    assert "3 experts, 40×64→48" in table and "24×32, FFN 48" in table
    assert all(f"| {case.name} |" in table for case in (*GROUPED_CASES, *MLP_CASES))


def test_only_and_parts_choose_lines(tmp_path, threads):
    path = tmp_path / "modules.json"
    chosen = ["--parts", "grouped", "--only", "row-scaled, fast"]
    assert modules.main(["--device", "cpu", *TINY_RUN, *chosen, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    wanted = [c.name for c in GROUPED_CASES if c.name.startswith("row-scaled, fast")]
    assert [line["name"] for line in report["grouped"][1:]] == wanted and len(wanted) == 3
    assert report["mlp"] == []


@pytest.mark.parametrize(
    "option",
    (["--parts", "grouped,linear"], ["--grouped", "8x16"], ["--mlp", "8x0x4"], ["--mlp", "axbxc"]),
)
def test_a_wrong_option_ends_the_run(option, capsys):
    with pytest.raises(SystemExit):
        modules.parse(["--device", "cpu", *option])
    assert "accepted:" in capsys.readouterr().err


def test_a_line_that_fails_is_told_and_the_others_go_on(tmp_path, capsys, threads, monkeypatch):
    def refuse_delayed(case, problem):
        if case.ends_step:
            raise RuntimeError("out of memory")
        return mlp_step(case, problem)

    broken = dataclasses.replace(modules.TABLES["mlp"], step=refuse_delayed)
    monkeypatch.setitem(modules.TABLES, "mlp", broken)
    path = tmp_path / "modules.json"
    chosen = ["--parts", "mlp", "--only", "scaling"]
    assert modules.main(["--device", "cpu", *TINY_RUN, *chosen, "--json", str(path)]) == 1
    failed = [line["name"] for line in json.loads(path.read_text())["mlp"] if "error_text" in line]
    assert failed == ["delayed scaling"]
    assert "| delayed scaling | RuntimeError: out of memory |" in capsys.readouterr().out


def test_steps_of_one_problem_compute_the_same():
    problem = Problem.grouped((3, 40, 64, 48), CPU)
    assert split_of(3, 40) == problem.split == [14, 13, 13]
    plain, *others = GroupedMMStep(problem)(), *(
        grouped_step(case, problem)() for case in GROUPED_CASES[:2]
    )  # fmt: skip
    for other in others:
        for got, wanted in zip(other, plain, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-7)
    problem = Problem.mlp((24, 32, 48), CPU)
    for got, wanted in zip(
        mlp_step(MLP_CASES[0], problem)(), plain_mlp_step(problem)(), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6)


def test_saved_bytes_are_the_planes_of_backward():
    e, m, k, n = 3, 48, 64, 96
    problem = Problem.grouped((e, m, k, n), CPU)
    assert saved_bytes(GroupedMMStep(problem)) == 2 * m * k + 4 * e  # and the ends
    case = next(case for case in GROUPED_CASES if case.name == "row-scaled, exact")
    step = grouped_step(case, problem)
    # Columns of X and W in FP8, with room for each expert's padding and a scale for each row; the
    # ends of X's experts.
    codes = k * (m + 16 * e) + k * (e * n + 16 * e)
    assert saved_bytes(step) == codes + 2 * 4 * e * k + 4 * e
    assert kernels_of(step).count("decode + mm") == 3


def test_a_missed_bar_is_visible():
    line = {"shape": [1, 2, 3, 4], "name": "a|b", "bar_ms": 2.15, "bar_speed_up": 1.17, "te": {}}
    line["eager"] = {"ms": 2.1, "speed_up": 1.16}
    report = {"device": "d", "torch": "t", "transformer_engine": "–", "mlp": []}
    text = modules.markdown(report | {"grouped": [line]})
    assert "| a\\|b | 2.100 | 2.15 | **1.16** | 1.17 | – |" in text
    line["eager"] = {"ms": 2.2, "speed_up": 1.2}
    line["te"] = {"named": {"speed_up": 1.1}, "custom": {"error_text": "RuntimeError: no"}}
    text = modules.markdown(report | {"grouped": [line]})
    assert "| **2.200** | 2.15 | 1.20 | 1.17 | 1.10 named |" in text
    assert "- TE a|b, custom: RuntimeError: no" in text


@pytest.mark.gpu
def test_every_line_runs_on_the_gpu(tmp_path):
    path = tmp_path / "modules.json"
    sizes = ["--quick", "--grouped", "4x512x256x384", "--mlp", "256x256x384"]
    assert modules.main(["--device", "cuda", *sizes, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    check_lines(report["grouped"], GROUPED_CASES)
    check_lines(report["mlp"], MLP_CASES)
    assert all(line["peak_bytes"] > 0 and line["launches"] > 0 for line in report["grouped"])
