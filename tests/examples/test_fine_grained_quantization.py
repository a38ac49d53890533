"""The guide's demo, and the execution that examples choose."""

import os

import pytest
import torch

import dist_finegrain as dfg
from examples import fine_grained_quantization as demo
from examples.execution import VARIABLE, choose_execution


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "restored at teardown")
    monkeypatch.delenv(VARIABLE)


def test_demo_prints_its_plan_and_learns(unset, capsys):
    demo.main()
    output = capsys.readouterr().out
    assert "demo.fc1   dgrad" in output
    if not torch.cuda.is_available():
        assert f"{VARIABLE}=emulate" in output
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) == demo.STEPS and losses[-1] < 0.7 * losses[0]


def test_demo_assigns_what_the_guide_assigns():
    recipe = dfg.CustomRecipe(qfactory=demo.quantizer_factory, execution="emulate")
    rows = dfg.plan(demo.build_model("cpu"), recipe).rows
    formats = {}
    for row in rows:
        formats.setdefault(row.module, []).append({f.split("(")[0] for f in row.formats})
    assert formats == {
        "demo.stem": [{"mxfp8"}] * 3,
        "demo.fc1": [{"mxfp8"}, {"nvfp4"}, {"identity"}],
        "demo.fc2": [{"identity"}] * 3,
    }
    derived = [(r.module, r.gemm) for r in rows if "rowwise_dequantized" in r.sources]
    assert derived == [("demo.fc1", "dgrad")]


@pytest.mark.parametrize("capability, expected", [((10, 0), None), ((9, 0), "emulate")])
def test_execution_is_native_on_blackwell_only(unset, monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    message = choose_execution("cuda")
    assert os.environ.get(VARIABLE) == expected
    assert ("native" if expected is None else f"{VARIABLE}=emulate") in message


def test_execution_from_the_environment_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "reference")
    assert choose_execution("cpu") == f"{VARIABLE}=reference (from the environment)"
    assert os.environ[VARIABLE] == "reference"
