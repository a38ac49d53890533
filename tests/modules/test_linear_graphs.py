"""A whole training step in a CUDA graph: every replay does what the next eager step would do."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factory_zoo, stepping
from dist_finegrain.formats import fused_options
from tests.recipes import ALL

pytestmark = pytest.mark.gpu

STEPS = 5
ROWS, WIDTH, WIDE = 144, 256, 384
OPTIONS = {"params_dtype": torch.bfloat16, "device": "cuda"}
RECIPES = {name: ALL[name] for name in sorted(ALL)}
RECIPES["block, row-scaled wgrad"] = factory_zoo.float8_block_row_scaled_wgrad


class Trainer:
    """Two layers, SGD with momentum, inputs in buffers that are refilled for each step."""

    def __init__(self, models: torch.nn.Module, recipe: dfg.CustomRecipe):
        self.model, self.recipe = models, recipe
        self.optimizer = torch.optim.SGD(models.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        self.target = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.loss = torch.zeros((), device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad()
        with dfg.autocast(recipe=self.recipe):
            y = self.model(self.x)
        loss = (y - self.target).square().float().mean()
        loss.backward()
        self.optimizer.step()  # ends the step: its hook is in the graph
        self.loss.copy_(loss.detach())

    def fill(self, index: int) -> None:
        generator = torch.Generator("cuda").manual_seed(index)
        for tensor in (self.x.data, self.target):
            tensor.normal_(generator=generator)

    def state(self) -> list[torch.Tensor]:
        scales = [s.scale for m in self.model for _, s in sorted(m._delayed.items(), key=str)]
        tensors = [self.loss, self.x.grad, *self.model.parameters(), *scales]
        return [tensor.detach().clone() for tensor in tensors]


def _restart_counting() -> None:
    stepping._steps.completed = 0
    for tensor, held in fused_options._seed_steps.values():
        tensor[1].zero_()
        held[1] = 0


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_replays_equal_eager_steps(name):
    """Stochastic rounding draws anew and delayed scales are updated in each of them."""
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    model = torch.nn.Sequential(
        dfg.Linear(WIDTH, WIDE, name="fc1", **options),
        dfg.Linear(WIDE, WIDTH, name="fc2", **options),
    )
    recipe = dfg.CustomRecipe(RECIPES[name], execution="emulate")
    twin = copy.deepcopy(model)

    def first_step(its_model):
        _restart_counting()
        trainer = Trainer(its_model, recipe)
        trainer.fill(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            trainer.step()
        torch.cuda.current_stream().wait_stream(stream)
        return trainer

    eager, wanted = first_step(model), []
    for index in range(1, STEPS + 1):
        eager.fill(index)
        eager.step()
        wanted.append(eager.state())
    del eager, model
    gc.collect()  # its delayed slots are no longer updated

    captured = first_step(twin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for index in range(1, STEPS + 1):
        captured.fill(index)
        graph.replay()
        for got, want in zip(captured.state(), wanted[index - 1], strict=True):
            assert torch.equal(got, want), index
    losses = [float(state[0]) for state in wanted]
    assert len(set(losses)) == STEPS


def test_weights_changed_between_replays_are_quantized_anew():
    module = dfg.Linear(
        WIDTH, WIDE, bias=False, params_dtype=torch.bfloat16, device="cuda", name="fc"
    )
    recipe = dfg.CustomRecipe(ALL["block"], execution="emulate")
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)

    def forward():
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            return module(x)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward()
    for _ in range(3):
        with torch.no_grad():
            module.weight.normal_()
        graph.replay()
        assert torch.equal(y, forward())


def test_a_first_delayed_update_inside_a_capture_is_refused():
    module = dfg.Linear(WIDTH, WIDE, name="fc", **OPTIONS)
    recipe = dfg.CustomRecipe(ALL["delayed"], execution="emulate")
    trainer = Trainer(torch.nn.Sequential(module), recipe)
    trainer.target = torch.zeros(ROWS, WIDE, dtype=torch.bfloat16, device="cuda")
    with dfg.autocast(recipe=recipe):
        module(trainer.x).float().mean().backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="never updated.*run one step with end_step"):
        with torch.cuda.graph(graph):
            trainer.step()
