"""The job: what it refuses, its parallel arithmetic, its plan, and short runs under torchrun.

Cheapest first: the command line, one process, then two and four ranks, then the whole job (slow).
"""

import collections
import functools
import json

import pytest
import torch
import torch.distributed as dist

import dist_finegrain as dfg
from dist_finegrain.factories import high_precision_factory, mxfp8_factory, nvfp4_factory
from examples import recipes
from examples.gpt_model import GPT, GPTConfig, is_tensor_parallel
from examples.job import Job, build_parser
from examples.parallel import (
    GradientComparison,
    Ranks,
    backward,
    clip_gradients,
    compare_gradients,
    held_out_loss,
    mean_loss,
    precision,
    reduce_gradients,
)
from examples.train_gpt import learning_rate, main
from tests.distributed.launch import ROOT, run_ranks
from tests.examples.gradient_limits import check_agreement

SCRIPT = ROOT / "examples" / "train_gpt.py"
TINY = ["--hidden", 32, "--heads", 2, "--seq-len", 32, "--batch", 2, "--log-interval", 1]


# The command line.


def make_job(arguments: str, world: int) -> Job:
    return Job.create(build_parser().parse_args(arguments.split()), world)


@pytest.mark.parametrize(
    "arguments, world, message",
    [
        ("--tp 2", 3, r"tp=2 with 3 ranks; accepted: a divisor.*e.g. tp=3"),
        ("--tp 0", 2, r"tp=0 with 2 ranks"),
        ("--heads 3 --hidden 96", 2, r"heads=3; accepted: a multiple of tp = 2, e.g. heads=4"),
        ("--hidden 130", 2, r"hidden=130; accepted: a multiple of 2 × heads = 8, e.g. hidden=136"),
        ("--seq-len 33", 2, r"seq_len=33; accepted: a multiple of tp = 2, e.g. seq_len=34"),
        ("--top-k 2", 1, r"top_k=2 without moe; accepted: both, e.g. moe=4 with top_k=2"),
        ("--moe --top-k 5", 1, r"experts=4 with top_k=5; accepted: no expert, or top_k from 1"),
        ("--moe 3 --top-k 0", 1, r"experts=3 with top_k=0"),
        ("--moe -1", 1, r"experts=-1 with top_k=2"),
        ("--layers 0", 1, r"layers=0; accepted: a positive integer"),
        ("--steps 0", 1, r"steps=0; accepted: a positive integer"),
        ("--recipe nowhere:factory", 1, r"recipe='nowhere:factory' cannot be imported"),
        ("--recipe examples.recipes:nothing", 1, r"recipe='examples.recipes:nothing' cannot"),
        ("--recipe mxfp8", 1, r"recipe='mxfp8' cannot be imported"),
        ("--plot", 1, r"plot without out"),
        ("--data /nowhere/text", 1, r"data='/nowhere/text' cannot be read"),
        ("--seq-len 8000000", 1, r"seq_len=8000000 with \d+ bytes of text held out"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(arguments, world, message):
    with pytest.raises(ValueError, match=message):
        make_job(arguments, world)
    assert not dist.is_initialized()


def test_defaults_fit_any_even_world():
    job = make_job("", 4)
    assert job.model.tp == 4 and job.model.sequence_parallel
    assert job.recipe.qfactory is recipes.guide_factory
    job = make_job("--recipe bf16 --seq-len 33 --no-sequence-parallel", 2)
    assert job.recipe is None and not job.model.sequence_parallel
    assert not make_job("", 1).model.sequence_parallel
    assert job.model.experts == 0
    mixture = make_job("--moe", 2).model
    assert (mixture.experts, mixture.top_k, mixture.sequence_parallel) == (4, 2, True)
    assert make_job("--moe 8 --top-k 1", 1).model.experts == 8


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dist_finegrain\[plot\]'"):
        make_job("--plot --out runs", 1)


def test_learning_rate_warms_up_and_decays():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[4] == rates[5] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.05 <= rates[-1] < 0.06


def test_a_mistake_exits_with_two_and_one_line(capsys):
    assert main(["--recipe", "nowhere:factory"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train_gpt.py: error: recipe='nowhere:factory'")
    assert error.count("\n") == 1


# One process.


def tiny_config(**changes) -> GPTConfig:
    return GPTConfig(**{"layers": 3, "hidden": 64, "heads": 4, "seq_len": 32, **changes})


def tiny_batch(batch: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(97, 123, (33, batch), generator=generator)
    return text[:-1], text[1:]


def forward_context(factory=None, dtype=torch.bfloat16):
    recipe = factory and dfg.CustomRecipe(qfactory=factory, execution="emulate")
    return functools.partial(precision, recipe, "cpu", dtype)


def test_model_is_causal():
    model = GPT(tiny_config())
    inputs, targets = tiny_batch()
    changed = inputs.clone()
    changed[20:] = 65

    def loss_of_first_twenty(tokens):
        ignored = targets.clone()
        ignored[20:] = -100  # cross_entropy's ignore_index
        return model(tokens, ignored).item()

    assert loss_of_first_twenty(inputs) == loss_of_first_twenty(changed)
    changed[10] = 65
    assert loss_of_first_twenty(inputs) != loss_of_first_twenty(changed)


def test_plan_of_the_job_has_all_formats_and_both_sources():
    model = GPT(GPTConfig())
    rows = dfg.plan(model, dfg.CustomRecipe(recipes.guide_factory, execution="emulate")).rows
    assert len(rows) == 4 * 4 * 3
    formats = {(row.module, row.gemm): {f.split("(")[0] for f in row.formats} for row in rows}
    assert formats["decoder.1.fc1", "fprop"] == {"mxfp8"}
    assert formats["decoder.1.fc1", "dgrad"] == {"nvfp4"}
    assert formats["decoder.1.fc1", "wgrad"] == {"identity"}
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert formats["decoder.2.fc2", gemm] == {"identity"}
        assert formats["decoder.3.qkv", gemm] == {"mxfp8"}
    assert {source for row in rows for source in row.sources} == {"original", "rowwise_dequantized"}
    hybrid = next(row for row in rows if (row.module, row.gemm) == ("decoder.1.fc1", "dgrad"))
    assert hybrid.sources == ("original", "rowwise_dequantized")


def test_same_precision_gives_the_same_gradient():
    model = GPT(tiny_config())
    rows = compare_gradients(
        model, Ranks(), tiny_batch(), forward_context(), forward_context(high_precision_factory)
    )
    for row in rows:
        assert row.cosine == pytest.approx(1, abs=1e-9), row
        assert row.norm_ratio == pytest.approx(1, abs=1e-9), row
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("factory", [mxfp8_factory, nvfp4_factory])
def test_quantized_gradient_agrees_with_high_precision(factory):
    model = GPT(tiny_config(hidden=128))
    rows = compare_gradients(
        model, Ranks(), tiny_batch(16), forward_context(), forward_context(factory)
    )
    check_agreement(rows, has_nvfp4=factory is nvfp4_factory)
    assert min(row.cosine for row in rows) < 0.9999  # something was quantized


# Several ranks.


def train_three_steps(tp: int, sequence_parallel: bool, experts: int) -> tuple[list, dict, float]:
    """SGD in FP32 with clipping: (loss, gradient norm) by step, this rank's weights, final loss."""
    ranks = Ranks.create(tp, "cpu") if dist.is_initialized() else Ranks()
    config = tiny_config(tp=tp, sequence_parallel=sequence_parallel, experts=experts)
    model = GPT(config, ranks.tp_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    context = forward_context(dtype=torch.float32)
    steps = []
    for step in range(3):
        batch = [x.chunk(ranks.dp, dim=1)[ranks.dp_rank] for x in tiny_batch(4, seed=step)]
        loss = backward(model, batch, context)
        reduce_gradients(model, ranks)
        norm = clip_gradients(model, ranks, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((mean_loss(loss, batch[1].numel(), model, ranks), norm.item()))
    weights = {
        name: (p.detach(), p.partition_dim if is_tensor_parallel(p) else None)
        for name, p in model.named_parameters()
    }
    return steps, weights, held_out_loss(model, ranks, [tiny_batch(4, seed=9)], context)


def train_variants(variants: list[tuple[int, bool]], experts: int) -> list:
    return [train_three_steps(*variant, experts) for variant in variants]


def whole(shards: list[tuple[torch.Tensor, int | None]]) -> torch.Tensor:
    """The parameter that one tp group's (shard, partition dim) add up to."""
    tensors, dim = [t for t, _ in shards], shards[0][1]
    if dim is not None:
        return torch.cat(tensors, dim)
    for other in tensors[1:]:
        torch.testing.assert_close(other, tensors[0], rtol=0, atol=0)
    return tensors[0]


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(
    "world, variants",
    [(2, [(2, True), (2, False), (1, False)]), (4, [(2, True), (4, True), (4, False)])],
)
def test_every_parallelism_trains_the_same_model(world, variants, experts):
    steps, weights, held_out = train_three_steps(1, False, experts)
    assert all(norm > 1 for _, norm in steps)  # clipping acts
    by_rank = run_ranks(train_variants, world, variants, experts)
    for index, (tp, _) in enumerate(variants):
        results = [rank[index] for rank in by_rank]
        for got_steps, _, got_held_out in results:
            torch.testing.assert_close(got_steps, steps, rtol=1e-5, atol=0)
            assert got_held_out == pytest.approx(held_out, rel=1e-5)
        for start in range(0, world, tp):
            for name, (expected, _) in weights.items():
                got = whole([results[start + r][1][name] for r in range(tp)])
                torch.testing.assert_close(got, expected, rtol=0, atol=2e-6, msg=name)


def compare_on_ranks(sequence_parallel: bool, experts: int) -> list:
    ranks = Ranks.create(2, "cpu")
    config = tiny_config(tp=2, sequence_parallel=sequence_parallel, experts=experts)
    model = GPT(config, ranks.tp_group)
    batch = tiny_batch(16)
    return compare_gradients(model, ranks, batch, forward_context(), forward_context(mxfp8_factory))


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradient_comparison_covers_the_whole_parameter(sequence_parallel, experts):
    expected = compare_gradients(
        GPT(tiny_config(experts=experts)),
        Ranks(),
        tiny_batch(16),
        forward_context(),
        forward_context(mxfp8_factory),
    )
    first, second = run_ranks(compare_on_ranks, 2, sequence_parallel, experts)
    assert first == second
    for got, want in zip(first, expected, strict=True):
        # Partial sums are rounded to BF16 on the ranks, so the comparisons differ a little.
        assert got.parameter == want.parameter
        assert got.cosine == pytest.approx(want.cosine, abs=2e-3), want
        assert got.norm_ratio == pytest.approx(want.norm_ratio, abs=0.02), want


def read_metrics(folder) -> dict[str, list[dict]]:
    events = collections.defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        events[record.pop("event")].append(record)
    return events


def test_short_run_reports_and_counts_what_the_plan_says(tmp_path):
    pytest.importorskip("matplotlib")
    arguments = [*TINY, "--steps", 3, "--layers", 3, "--check-gradients", "--plot"]
    outputs = run_ranks(SCRIPT, 2, *arguments, "--out", tmp_path)
    assert outputs[1] == ""  # only rank 0 prints
    for text in ("DIST_FINEGRAIN_EXECUTION=emulate", "bigram 2.", "step 3/3", "held-out loss"):
        assert text in outputs[0]
    events = read_metrics(tmp_path)
    rows = events["plan"][0]["rows"]
    expected = collections.Counter(" | ".join([row["gemm"], *row["formats"]]) for row in rows)
    (gemms,) = events["gemms"]
    assert gemms["steps"] == 3
    assert gemms["counts"] == {key: 3 * count for key, count in expected.items()}
    assert [record["step"] for record in events["gradients"]] == [1, 3]
    assert [record["step"] for record in events["step"]] == [1, 2, 3]
    assert 2 < events["held_out"][0]["loss"] < 7
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_short_run_with_experts_counts_one_gemm_per_expert(tmp_path):
    recipe = "dist_finegrain.factory_zoo:moe_nvfp4_row_scaled_fwd_mxfp8_bwd"
    arguments = [*TINY, "--steps", 2, "--layers", 2, "--moe", 3, "--recipe", recipe]
    run_ranks(SCRIPT, 2, *arguments, "--out", tmp_path)
    events = read_metrics(tmp_path)
    expected = collections.Counter()
    for row in events["plan"][0]["rows"]:
        is_grouped = row["module"].endswith(("fc1", "fc2"))
        expected[" | ".join([row["gemm"], *row["formats"]])] += 2 * (3 if is_grouped else 1)
    assert events["gemms"][0]["counts"] == expected
    assert "fprop | nvfp4(e2m1, row-scaled) | nvfp4(e2m1, row-scaled)" in expected
    assert 2 < events["held_out"][0]["loss"] < 7


def factory_that_fails_on_rank_one(role):
    if dist.get_rank() == 1:
        raise RuntimeError("deliberate failure")
    return mxfp8_factory(role)


def test_failure_on_one_rank_ends_the_run():
    recipe = f"{__name__}:factory_that_fails_on_rank_one"
    with pytest.raises(AssertionError, match="deliberate failure"):
        run_ranks(SCRIPT, 2, *TINY, "--steps", 3, "--recipe", recipe)


# The whole job.


@pytest.mark.slow
def test_quick_start_reaches_its_loss_and_bf16_agrees(tmp_path):
    for recipe in ("examples.recipes:guide_factory", "bf16"):
        folder = tmp_path / recipe.split(":")[-1]
        options = ["--recipe", recipe, "--out", folder, "--check-gradients"]
        run_ranks(SCRIPT, 2, *options, timeout=1200)
    guide, bf16 = (read_metrics(tmp_path / name) for name in ("guide_factory", "bf16"))
    losses = [events["held_out"][0]["loss"] for events in (guide, bf16)]
    assert max(losses) < 2.0 < guide["corpus"][0]["bigram"]
    assert losses[0] == pytest.approx(losses[1], rel=0.015)
    for record in guide["gradients"]:
        rows = [GradientComparison(**row) for row in record["rows"]]
        check_agreement(rows, has_nvfp4=False)


@pytest.mark.nightly
@pytest.mark.slow
def test_nvfp4_gradients_agree_at_the_first_and_the_last_step(tmp_path):
    recipe = "dist_finegrain.factories:nvfp4_factory"
    options = ["--recipe", recipe, "--check-gradients", "--out", tmp_path]
    run_ranks(SCRIPT, 2, *options, timeout=1200)
    events = read_metrics(tmp_path)
    assert [record["step"] for record in events["gradients"]] == [1, events["config"][0]["steps"]]
    for record in events["gradients"]:
        rows = [GradientComparison(**row) for row in record["rows"]]
        check_agreement(rows, has_nvfp4=True)
    assert events["held_out"][0]["loss"] < 2.2
