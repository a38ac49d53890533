"""The MoE layer against plain torch, its balancing loss, and the GPT made of such layers."""

import functools

import pytest
import torch
from torch.nn import functional

import dist_finegrain as dfg
from dist_finegrain import factories
from examples import gpt_model
from examples.gpt_model import GPT, GPTConfig
from examples.job import Job, build_parser, load_recipe
from examples.moe_layer import (
    MoELayer,
    balance_loss,
    experts_need_host_splits,
    same_choices,
)
from examples.parallel import Ranks, backward, compare_gradients, mean_loss, precision
from examples.recipes import zoo_recipes
from examples.train_gpt import Trainer
from tests.distributed.launch import run_ranks
from tests.examples.gradient_limits import check_agreement
from tests.recipes import emulated

H, E = 16, 4
WHOLE = {"tp_group": None, "tp_size": 1, "sequence_parallel": False}


def make_layer(top_k: int = 2) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(H, E, top_k, "decoder.0", WHOLE)


def plain_moe(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    rows = []
    for token in x.flatten(0, 1):
        probabilities = functional.linear(token, layer.router.weight).softmax(-1)
        chosen = sorted(range(E), key=lambda e: -probabilities[e].item())[: layer.top_k]
        row = torch.zeros(H)
        for e in chosen:
            inner = functional.linear(token, getattr(layer.fc1, f"weight{e}"))
            inner = functional.gelu(inner, approximate="tanh")
            y = functional.linear(inner, getattr(layer.fc2, f"weight{e}"))
            row = row + probabilities[e] * y
        rows.append(row)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("top_k, unused", [(1, None), (2, None), (2, 0), (4, None)])
def test_layer_equals_plain_torch_with_gradients(top_k, unused):
    layer = make_layer(top_k)
    x = torch.randn(6, 3, H)
    if unused is not None:  # an expert that gets no token
        with torch.no_grad():
            x[..., 0], layer.router.weight[unused] = 9.0, 0.0
            layer.router.weight[unused, 0] = -1.0
    grad = torch.randn(x.shape)
    found = []
    for forward in (lambda x: layer(x)[0], functools.partial(plain_moe, layer)):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y = forward(leaf)
        y.backward(grad)
        gradients = [p.grad if p.grad is not None else torch.zeros(1) for p in layer.parameters()]
        found.append([y.detach(), leaf.grad, *gradients])
    if unused is not None:
        assert not (layer.router.last_chosen == unused).any()
        assert not getattr(layer.fc1, f"weight{unused}").grad
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted.expand_as(got), rtol=1e-4, atol=1e-5)
    assert layer.router.weight.grad.any()


@pytest.mark.parametrize("read_splits", [False, True])
def test_token_counts_stay_on_the_device_unless_asked(read_splits):
    layer, seen = make_layer(), []
    for module in (layer.fc1, layer.fc2):
        module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    layer.read_splits = read_splits
    layer(torch.randn(6, 3, H))
    counts = torch.bincount(layer.router.last_chosen.flatten(), minlength=E)
    for splits in seen:
        assert isinstance(splits, list if read_splits else torch.Tensor)
        assert list(splits) == counts.tolist()
    assert len(seen) == 2


def test_router_stays_in_high_precision_under_autocast():
    layer, x = make_layer(), torch.randn(6, 3, H)
    wanted = layer.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.router(x)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


# Balance.


def test_balancing_loss_is_one_when_balanced_and_experts_when_not():
    tokens = torch.arange(8).view(8, 1)
    even = torch.full((8, 1, E), 1 / E)
    spread = torch.stack([tokens % E, (tokens + 1) % E], dim=-1)
    assert balance_loss(even, spread, E).item() == pytest.approx(8)
    one = functional.one_hot(torch.zeros(8, 1, dtype=torch.int64), E).float()
    assert balance_loss(one, torch.zeros(8, 1, 1, dtype=torch.int64), E).item() == 8 * E


def test_balancing_loss_is_a_sum_over_positions_and_sequences():
    probabilities, chosen = torch.rand(8, 4, E), torch.randint(E, (8, 4, 2))
    total = balance_loss(probabilities, chosen, E)
    by_position = sum(balance_loss(p, chosen, E) for p in probabilities.chunk(2))
    halves = zip(probabilities.chunk(2, 1), chosen.chunk(2, 1), strict=True)
    by_sequence = sum(balance_loss(p, c, E) for p, c in halves)
    torch.testing.assert_close(by_position, total)
    torch.testing.assert_close(by_sequence, total)


def moe_config(**changes) -> GPTConfig:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "experts": 4}
    return GPTConfig(**{**sizes, **changes})


def text_batch(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(97, 123, (33, batch), generator=torch.Generator().manual_seed(0))
    return text[:-1], text[1:]


def context(recipe=None, dtype=torch.bfloat16):
    return functools.partial(precision, recipe, "cpu", dtype)


def test_balancing_loss_is_in_the_gradient_and_not_in_the_value(monkeypatch):
    model, batch = GPT(moe_config()), text_batch()
    values, gradients = [], []
    for weight in (0.0, 0.01, 0.02):
        monkeypatch.setattr(gpt_model, "BALANCE_WEIGHT", weight)
        model.zero_grad()
        values.append(backward(model, batch, context(dtype=torch.float32)))
        gradients.append(model.decoder[1].mlp.router.weight.grad.clone())
    assert values[0] == values[1] == values[2]
    change = gradients[1] - gradients[0]
    assert change.abs().max() > 1e-6
    torch.testing.assert_close(gradients[2] - gradients[0], 2 * change, rtol=1e-3, atol=1e-8)


def test_balancing_loss_spreads_the_tokens():
    layer = make_layer()
    with torch.no_grad():
        layer.router.weight[0] += 0.3  # of inputs with a positive sum, most go to expert 0
    x = torch.randn(64, 2, H).abs()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    shares = []
    for _ in range(100):
        _, balance = layer(x)
        (balance / 128).backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append(torch.bincount(layer.router.last_chosen.flatten(), minlength=E).max() / 256)
    assert shares[0] > 0.45 and shares[-1] < 0.35


# The GPT of such layers.


def test_same_choices_are_those_of_the_forward_before():
    model, batch = GPT(moe_config()), text_batch()
    router = model.decoder[0].mlp.router
    model(*batch)
    chosen = router.last_chosen
    with torch.no_grad():
        router.weight.neg_()
    with same_choices(model):
        model(*batch)
        assert torch.equal(router.last_chosen, chosen)
    model(*batch)
    assert not torch.equal(router.last_chosen, chosen)


def test_comparison_keeps_the_choices_and_takes_experts_without_tokens():
    model, batch = GPT(moe_config(top_k=1)), text_batch(1)
    model.decoder[0].mlp.router.weight.data.zero_()  # equal probabilities: one expert gets all
    router = model.decoder[1].mlp.router
    recipe = emulated(factories.nvfp4_factory)
    rows = compare_gradients(model, Ranks(), batch, context(), context(recipe))
    kept = router.last_chosen
    by_name = {row.parameter: (row.cosine, row.norm_ratio) for row in rows}
    unused = [
        by_name[f"decoder.0.mlp.fc1.weight{e}"]
        for e in range(4)
        if not (model.decoder[0].mlp.router.last_chosen == e).any()
    ]
    assert unused == [(1, 1)] * 3
    with context()():
        model(*batch)
    assert torch.equal(router.last_chosen, kept)
    assert router.kept_choice is None


@pytest.mark.parametrize("path", zoo_recipes())
def test_gradients_of_every_zoo_recipe_agree_with_high_precision(path):
    model = GPT(moe_config(hidden=128))
    recipe = emulated(load_recipe(path).qfactory)
    plan = dfg.plan(model, recipe)
    assert plan.ok and len(plan.rows) == 3 * 4 * model.config.layers
    rows = compare_gradients(model, Ranks(), text_batch(16), context(), context(recipe))
    assert len(rows) == len(list(model.parameters()))
    check_agreement(rows, has_nvfp4="nvfp4" in path)


def losses_of_the_zoo(tp: int, sequence_parallel: bool) -> list[float]:
    """Loss of one step's forward and backward, summed over the ranks, by recipe."""
    ranks = Ranks.create(tp, "cpu") if tp > 1 else Ranks()
    model = GPT(moe_config(tp=tp, sequence_parallel=sequence_parallel), ranks.tp_group)
    losses = []
    for path in zoo_recipes():
        recipe = emulated(load_recipe(path).qfactory)
        loss = backward(model, text_batch(), context(recipe))
        assert all(p.grad.isfinite().all() for p in model.parameters())
        losses.append(mean_loss(loss, 128, model, ranks))
    return losses


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_zoo_recipe_runs_on_two_ranks(sequence_parallel):
    wanted = losses_of_the_zoo(1, False)
    for got in run_ranks(losses_of_the_zoo, 2, 2, sequence_parallel):
        assert got == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    "recipe, read",
    [
        ("dist_finegrain.factories:nvfp4_factory", True),  # stochastic: a stream of each expert
        ("dist_finegrain.factory_zoo:moe_nvfp4_row_scaled_fwd_mxfp8_bwd", False),
        ("dist_finegrain.factories:row_scaling_factory", False),
    ],
)
def test_trainer_reads_token_counts_where_the_plan_says_so(recipe, read, monkeypatch):
    monkeypatch.setenv("DIST_FINEGRAIN_EXECUTION", "emulate")
    options = ["--recipe", recipe, "--moe", "3", "--layers", "2"]
    job = Job.create(build_parser().parse_args(options), 1)
    trainer = Trainer(job, Ranks(), torch.device("cpu"))
    plan = dfg.plan(trainer.model, job.recipe, device="sm_90")
    assert bool(experts_need_host_splits(plan)) == read
    trainer.read_splits_where_needed(plan)
    layers = [m for m in trainer.model.modules() if isinstance(m, MoELayer)]
    assert [layer.read_splits for layer in layers] == [read] * 2
    assert [layer.experts for layer in layers] == [3] * 2
