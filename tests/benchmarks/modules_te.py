"""Transformer Engine's GroupedLinear and LayerNormMLP for the lines that it can run on Hopper."""

from __future__ import annotations

import contextlib
import functools

import torch

from .modules_cases import BF16, EPS, Problem, Step
from .te_linear import TransformerEngine


class TransformerEngineModules(TransformerEngine):
    """Its modules under the recipes of ``TransformerEngine``, and in BF16."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        if self.recipes:
            self.recipes[BF16] = {"BF16": None}

    def grouped_step(self, line: str, kind: str, problem: Problem) -> Step:
        """A step of this line under its recipe of this kind."""
        n, k = problem.parameters[0].shape
        module = self._te.GroupedLinear(
            len(problem.split), k, n, bias=False, params_dtype=torch.bfloat16,
            device=problem.x.device,
        )  # fmt: skip
        weights = [getattr(module, f"weight{e}") for e in range(len(problem.split))]
        context = self._context(line, kind)
        return Step(module, weights, problem, context, (problem.split,))

    def mlp_step(self, line: str, kind: str, problem: Problem) -> Step:
        """The same of LayerNormMLP."""
        module = self._te.LayerNormMLP(
            *problem.parameters[2].shape, activation="swiglu", normalization="RMSNorm", eps=EPS,
            bias=False, params_dtype=torch.bfloat16, device=problem.x.device,
        )  # fmt: skip
        parameters = module.layer_norm_weight, module.fc1_weight, module.fc2_weight
        return Step(module, parameters, problem, self._context(line, kind))

    def _context(self, line: str, kind: str):
        recipe = self.recipes[line][kind]
        if recipe is None:
            return contextlib.nullcontext
        return functools.partial(self._autocast, recipe)
