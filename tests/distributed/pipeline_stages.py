"""Two pipeline stages with delayed scaling: on two ranks under Schedule1F1B, or one after another.

A stage has a branch that only some steps, and of these only some microbatches, go through.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

import dist_finegrain as dfg
from tests.modules.training_cases import states
from tests.recipes import ALL, emulated

STAGES, MICROBATCHES, STEPS = 2, 4, 3
ROWS, H = 16, 64  # rows of a microbatch
BRANCH_STEP = 1  # the only one that goes through the branches
CHECKPOINTS = ("none", "reentrant", "non-reentrant", "recompute()")


class Stage(torch.nn.Module):
    """x + mlp(x), and through ``branch`` where the step lets it and the microbatch asks for it."""

    def __init__(self, index: int, recipe: str, checkpointing: str):
        super().__init__()
        torch.manual_seed(index)
        self.mlp = dfg.LayerNormMLP(H, 2 * H, name=f"stages.{index}.mlp")
        self.branch = dfg.Linear(H, H, name=f"stages.{index}.branch")
        self.recipe, self.checkpointing = emulated(ALL[recipe]), checkpointing
        self.is_branch_open = False
        self.branched = 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.mlp(x)
        if self.is_branch_open and x[0, 0] > 0:
            self.branched += 1
            y = y + self.branch(y)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Closed before backward, which then recomputes outside of any autocast.
        with dfg.autocast(recipe=self.recipe):
            if self.checkpointing == "none":
                return self.body(x)
            if self.checkpointing == "recompute()":
                return dfg.recompute(self.body, x)
            is_reentrant = self.checkpointing == "reentrant"
            if is_reentrant and not x.requires_grad:  # else it cuts the first stage's graph
                x = x.detach().requires_grad_()
            return checkpoint(self.body, x, use_reentrant=is_reentrant)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum of squares, small: microbatches add up and training stays finite."""
    return ((y - target) ** 2).sum() / 1000


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and target of all microbatches of a step; louder in later steps."""
    generator = torch.Generator().manual_seed(step)
    x, target = (torch.randn(MICROBATCHES * ROWS, H, generator=generator) for _ in range(2))
    return (1 + step) * x, target


def found_in(stage: Stage) -> dict:
    """Gradients of the step that was, scales and histories."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in
             stage.named_parameters()}  # fmt: skip
    for key, (scale, history) in states(stage).items():
        found[key, "scale"], found[key, "history"] = scale, history
    return found


def train(stages: list[Stage], run_step) -> list[list[dict]]:
    """By step and stage what was found; ``run_step(step)`` accumulates all gradients."""
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    results = []
    for step in range(STEPS):
        for stage in stages:
            stage.is_branch_open, stage.branched = step == BRANCH_STEP, 0
        optimizer.zero_grad()
        run_step(step)
        optimizer.step()
        results.append([{**found_in(stage), "branched": stage.branched} for stage in stages])
    return results


def one_process(recipe: str) -> list[list[dict]]:
    """Plain accumulation: one microbatch after another through both stages, nothing recomputed."""
    stages = [Stage(index, recipe, "none") for index in range(STAGES)]
    model = torch.nn.Sequential(*stages)

    def run_step(step):
        for x, target in zip(*(t.chunk(MICROBATCHES) for t in data(step)), strict=True):
            loss_of(model(x), target).backward()

    return train(stages, run_step)


def pipelined(recipe: str, checkpointing: str) -> list[dict]:
    """What this rank's stage found, by step."""
    index = dist.get_rank()
    module = Stage(index, recipe, checkpointing)
    # Given shapes; torch 2.13 finds them by a trial on uninitialised memory, which trains as well.
    shapes = {
        "input_args": torch.empty(ROWS, H, requires_grad=index > 0),
        "output_args": torch.empty(ROWS, H, requires_grad=True),
    }
    stage = PipelineStage(module, index, STAGES, torch.device("cpu"), **shapes)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)

    def run_step(step):
        x, target = data(step)
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)

    return [stages[0] for stages in train([module], run_step)]


def pipelined_every_way(recipes: list[str]) -> dict:
    """(recipe, checkpointing) → what this rank's stage found, by step."""
    torch.set_num_threads(1)
    run = functools.partial
    calls = {(r, c): run(pipelined, r, c) for r in recipes for c in CHECKPOINTS}
    return {key: call() for key, call in calls.items()}
