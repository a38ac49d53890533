"""plan(): buckets, reasons and byte counts, without running anything; the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.__main__ import main
from tests.recipes import ALL, emulated, guide_factory


def demo_model():
    return torch.nn.ModuleDict(
        {
            "fc1": dfg.Linear(64, 128, name="demo.fc1"),
            "fc2": dfg.Linear(128, 64, name="demo.fc2"),
            "head": dfg.Linear(64, 32),
        }
    )


def rows_of(result):
    return {(r.module, r.gemm): r for r in result.rows}


@pytest.mark.parametrize("device", ["cpu", "sm_90", "sm_100"])
def test_guide_recipe_on_every_device(device):
    result = dfg.plan(demo_model(), emulated(guide_factory), device=device)
    rows = rows_of(result)
    assert len(rows) == 9 and result.ok
    assert [rows["demo.fc1", g].formats[0] for g in ("fprop", "dgrad", "wgrad")] == [
        "mxfp8(e4m3)", rows["demo.fc1", "dgrad"].formats[0], "identity",
    ]  # fmt: skip
    assert rows["demo.fc1", "dgrad"].formats[1].startswith("nvfp4")
    assert rows["demo.fc1", "dgrad"].sources == ("original", "rowwise_dequantized")
    assert {rows["demo.fc2", g].bucket for g in ("fprop", "dgrad", "wgrad")} == {"fast"}
    wanted = "fast" if device == "sm_100" else "emulated"
    assert rows["head", "wgrad"].bucket == rows["demo.fc1", "dgrad"].bucket == wanted
    assert rows["demo.fc1", "wgrad"].kernel == "mm"
    assert "swizzled" not in rows["head", "wgrad"].reason
    text = str(result)
    assert "mxfp8(e4m3) × mxfp8(e4m3)" in text and "of dequantized rows" in text


def test_native_mode_rejects_with_the_reason():
    result = dfg.plan(
        demo_model(), dfg.CustomRecipe(guide_factory, execution="native"), device="sm_90"
    )
    row = rows_of(result)["head", "fprop"]
    assert not result.ok and row.bucket == "rejected" and "sm_90" in row.reason
    assert result.counts() == {"fast": 4, "unoptimized": 0, "emulated": 0, "rejected": 5}


@pytest.mark.parametrize("name", sorted(ALL))
def test_plan_asks_the_factory_but_runs_and_changes_nothing(name):
    model = demo_model()
    dfg.plan(model, emulated(ALL[name]), device="sm_90")
    assert all(not m._bindings and not m._delayed for m in model.values())
    forward = dfg.plan(model, emulated(ALL[name]), device="cpu", training=False)
    assert {r.gemm for r in forward.rows} == {"fprop"}


def test_native_float8_on_hopper_and_block_on_blackwell():
    model = demo_model()
    for factory, kernel in (
        (factories.current_scaling_factory, "tensorwise"),
        (factories.row_scaling_factory, "rowwise"),
        (factories.float8_block_scaling_factory, "128-block"),
    ):
        recipe = dfg.CustomRecipe(factory, execution="native")
        result = dfg.plan(model, recipe, device="sm_90")
        # Through cuBLASLt where that call is built, else through torch's scaled_mm.
        kinds = {r.kernel.removesuffix(", fast accumulation").split()[1] for r in result.rows}
        assert kinds == {kernel}
        is_fast = {r.gemm for r in result.rows if r.kernel.endswith("fast accumulation")}
        assert is_fast == (set() if "block" in kernel else {"fprop"}) and result.ok
    blackwell = dfg.plan(model, recipe, device="sm_100")
    assert not blackwell.ok and "MXFP8 is" in blackwell.rows[0].reason


def test_saved_bytes_are_those_of_the_planes():
    rows = rows_of(dfg.plan(demo_model(), emulated(guide_factory), device="cpu", tokens=100))
    assert rows["head", "wgrad"].saved_bytes == 64 * 128 + 64 * 4  # X.col [64, 100→128]
    assert rows["demo.fc2", "wgrad"].saved_bytes == 128 * 100 * 2  # BF16
    assert rows["head", "fprop"].saved_bytes == 0
    assert rows["demo.fc2", "dgrad"].saved_bytes == 0  # the parameter itself
    assert all(r.wire_bytes == 0 for r in rows.values())
    rows = rows_of(dfg.plan(demo_model(), emulated(guide_factory), device="sm_100", tokens=100))
    assert rows["head", "wgrad"].saved_bytes == 64 * 128 + 128 * 4  # scales in tiles of 128 rows


def test_names_are_assigned_and_the_default_device_is_the_models():
    model = demo_model()
    result = dfg.plan(model, emulated(factories.mxfp8_factory))
    assert result.device == "cpu" and model["head"].name == "head"
    with pytest.raises(ValueError, match="device='hopper'.*sm_90"):
        dfg.plan(model, emulated(factories.mxfp8_factory), device="hopper")


def test_command_line(capsys):
    arguments = ["plan", "--model", "tests.test_planning:demo_model"]
    recipe = ["--recipe", "tests.recipes:guide_factory", "--device", "sm_90"]
    assert main([*arguments, *recipe, "--execution", "emulate"]) == 0
    assert "demo.fc1" in capsys.readouterr().out
    assert main([*arguments, *recipe, "--execution", "native", "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 9 and lines[0]["module"] == "demo.fc1"
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--recipe", "tests.recipes:nothing"])
    assert stopped.value.code == 2 and "package.module:attribute" in capsys.readouterr().err


def test_module_entry_point_runs():
    done = subprocess.run(
        [sys.executable, "-m", "dist_finegrain", "plan", "--help"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "--recipe" in done.stdout
