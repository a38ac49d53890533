"""The README says what the code does: its plan() tables, its example, its API table."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import dist_finegrain as dfg
from tests.recipes import emulated, guide_factory
from tests.test_planning import demo_model

README = Path(__file__).resolve().parents[1] / "README.md"


def plan_block() -> str:
    """What stands between the README's plan markers."""
    tables = [
        str(dfg.plan(demo_model(), emulated(guide_factory), device=device))
        for device in ("cpu", "sm_90", "sm_100")
    ]
    return "```\n" + "\n\n".join(tables) + "\n```"


def between(text: str, name: str) -> str:
    return re.search(f"<!-- {name}:begin -->\n(.*?)\n?<!-- {name}:end -->", text, re.DOTALL).group(
        1
    )


def test_plan_tables_are_those_of_plan():
    """To renew them: python -m tests.test_readme"""
    assert between(README.read_text(), "plan") == plan_block()


def test_example_runs_as_printed(monkeypatch):
    text = README.read_text()
    example = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "demo" in b)
    model = torch.nn.Sequential(
        dfg.Linear(32, 64, name="demo.fc1"), dfg.Linear(64, 32, name="demo.fc2")
    )
    inputs = torch.randn(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    monkeypatch.setenv("DIST_FINEGRAIN_EXECUTION", "emulate")
    exec(example, {"model": model, "inputs": inputs, "optimizer": optimizer})
    assert not torch.equal(before, model[0].weight)


def test_quantizer_of_the_readme_trains():
    text = README.read_text()
    example = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Ternary" in b)
    names = {"dfg": dfg, "torch": torch}
    exec(example, names)
    module, x = dfg.Linear(32, 48, name="fc"), torch.randn(16, 32)
    with dfg.autocast(recipe=dfg.CustomRecipe(lambda role: names["Ternary"]())):
        y = module(x)
    y.sum().backward()
    scale, weight_scale = x.abs().max(), module.weight.detach().abs().max()
    wanted = (x / scale).round() @ (module.weight / weight_scale).round().t()
    torch.testing.assert_close(y, wanted * scale * weight_scale)
    assert module.weight.grad.isfinite().all()


def test_api_table_names_everything_public():
    rows = "\n".join(line for line in README.read_text().splitlines() if line.startswith("| `"))
    missing = [name for name in dfg.__all__ if f"`{name}" not in rows]
    assert not missing


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(text.replace(between(text, "plan"), plan_block()))
