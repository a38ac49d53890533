"""The table of recipes: what it reads from runs, how it is written, and a small one made whole."""

import dataclasses
import json

import pytest

from examples import recipe_table
from examples.recipe_table import Agreement, Row, main, table
from examples.recipes import zoo_recipes
from tests.test_factories import KINDS

MOE_RECIPE = "dist_finegrain.factory_zoo:moe_nvfp4_row_scaled_fwd_mxfp8_bwd"
TINY = "--steps 2 --layers 1 --hidden 32 --heads 2 --seq-len 32 --batch 2".split()


def test_zoo_has_every_recipe_of_its_file():
    names = [path.removeprefix("dist_finegrain.factory_zoo:") for path in zoo_recipes()]
    assert names == [name for name in dict.fromkeys(names) if name in KINDS]
    assert sorted(names) == sorted(name for name in KINDS if not name.endswith("_factory"))


def gradient(parameter, cosine, norm_ratio=1.0):
    return {"parameter": parameter, "cosine": cosine, "norm_ratio": norm_ratio}


RECORDS = [
    {
        "event": "gradients",
        "step": 1,
        "rows": [
            gradient("decoder.0.mlp.fc1.weight0", 0.5),
            gradient("decoder.0.attention.proj.weight", 0.7),
            gradient("norm.weight", 0.4),
        ],
    },
    {
        "event": "gradients",
        "step": 9,
        "rows": [
            gradient("decoder.0.attention.qkv.weight", 0.99),
            gradient("decoder.0.attention.qkv.bias", 0.97, 1.1),
            gradient("decoder.0.mlp.fc1.weight", 0.98, 0.8),
            gradient("decoder.0.mlp.fc2.weight11", 0.95),
            gradient("decoder.0.mlp.router.weight", 0.96),
            gradient("head.weight", 0.999),
        ],
    },
    {"event": "held_out", "loss": 2.2, "seconds": 61.4},
]


def test_row_has_every_comparison_and_tells_linear_weights_from_others():
    row = Row.read("a.b:name", "GPT", "command", RECORDS)
    assert (row.held_out, row.seconds) == (2.2, 61.4)
    first, last = row.gradients
    assert first == Agreement(1, 0.5, 0.6, 0.4, 0.0)
    assert dataclasses.replace(last, norm_error=0.2) == Agreement(9, 0.95, 0.98, 0.96, 0.2)
    assert last.norm_error == pytest.approx(0.2)


def test_table_compares_with_bf16_of_the_same_model():
    rows = [
        Row("bf16", "GPT", "", 2.0, 10),
        Row("bf16", "MoE", "", 4.0, 10),
        Row.read("a.b:name", "GPT", "", RECORDS),
        Row.read("a.b:name", "MoE", "", RECORDS),
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| BF16 | GPT | 2.0000 | – | – | – | – | – |"
    columns = "0.500, 0.950 | 0.600, 0.980 | 0.400, 0.960 | 0.0%, 20.0%"
    start = f"| `name` | {{}} | 2.2000 | {{}} | {columns} |"
    assert lines[4:] == [start.format("GPT", "+10.00%"), start.format("MoE", "-45.00%")]
    assert "| – | 0.5" in table(rows[2:])


def test_small_table_is_written_and_taken_up_again(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--out", str(tmp_path), "--recipes", "bf16", MOE_RECIPE, "--models", "MoE"]
    assert main([*arguments, "--jobs", "2", *TINY]) == 0
    record = json.loads((tmp_path / "table.json").read_text())
    assert record["facts"]["options"] == " ".join(TINY)
    bf16, moe = (
        Row(**{**row, "gradients": tuple(Agreement(**a) for a in row["gradients"])})
        for row in record["rows"]
    )
    assert (bf16.recipe, bf16.model, bf16.gradients) == ("bf16", "MoE", ())
    assert moe.command == f"examples/train_gpt.py --recipe {MOE_RECIPE} --moe " + " ".join(
        [*TINY, "--check-gradients"]
    )
    assert 3 < moe.held_out < 7 and moe.held_out != bf16.held_out
    assert [agreement.step for agreement in moe.gradients] == [1, 2]
    assert all(0.5 < a.weight_cosine <= a.weight_cosine_median < 1 for a in moe.gradients)
    text = (tmp_path / "table.md").read_text()
    assert text.startswith(table([bf16, moe])) and "torch" in text
    assert text.strip() in capfd.readouterr().out

    ended = []
    monkeypatch.setattr(recipe_table.subprocess, "run", lambda *a, **b: ended.append(a) or 1 / 0)
    assert main([*arguments, *TINY]) == 0 and not ended
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == record["rows"]
    with pytest.raises(ZeroDivisionError):  # other options are another run
        main([*arguments, *TINY, "--lr", "0.1"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--recipes", "bf16", "nowhere:f"], "recipe='nowhere:f' cannot be imported"),
        (["--jobs", "0"], "jobs=0; accepted: a positive integer"),
        (["--layers", "0"], "layers=0"),
        (["--recipe", "bf16", "--recipes", MOE_RECIPE], f"recipe=bf16 and moe=0 for {MOE_RECIPE}"),
        (["--moe", "8"], "recipe=bf16 and moe=8 for bf16 of the GPT"),
        (["--models", "MoE", "--top-k", "9"], "experts=4 with top_k=9"),
    ],
)
def test_mistakes_end_it_before_the_first_run(arguments, message, tmp_path, capsys):
    out = tmp_path / "table"
    assert main(["--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_a_run_that_fails_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = f"{__name__}:factory_without_an_answer"
    monkeypatch.setenv("PYTHONPATH", str(recipe_table.SCRIPT.parents[1]))
    assert main(["--out", str(tmp_path), "--recipes", recipe, "--models", "GPT", *TINY]) == 1
    error = capsys.readouterr().err
    assert f"--recipe {recipe} --steps 2" in error and "ended with" in error
    assert "None" in error  # the run's own words


def factory_without_an_answer(role):
    return None


@pytest.mark.nightly
@pytest.mark.slow
def test_moe_recipe_trains_experts_as_bf16_does(tmp_path):
    """One row of the README's table."""
    arguments = ["--recipes", "bf16", MOE_RECIPE, "--models", "MoE", "--steps", "200"]
    assert main([*arguments, "--out", str(tmp_path), "--jobs", "2"]) == 0
    bf16, moe = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert max(moe["held_out"], bf16["held_out"]) < 2.42  # the text's bigram entropy
    assert moe["held_out"] == pytest.approx(bf16["held_out"], rel=0.015)
    last = moe["gradients"][-1]
    assert last["step"] == 200
    assert last["weight_cosine"] > 0.97 and last["other_cosine"] > 0.95
