"""Transformer Engine's Linear for the lines of the Linear benchmark that it can run on Hopper."""

from __future__ import annotations

import torch

from .linear_cases import Problem, Step


class TransformerEngine:
    """Its Linear under its recipes; ``version`` says why not where there is none."""

    def __init__(self, device: torch.device):
        self.recipes: dict[str, dict[str, object]] = {}
        if device.type != "cuda":
            self.version = "no GPU"
            return
        try:
            import transformer_engine
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe
        except (ImportError, OSError, RuntimeError) as error:  # as broken installations raise
            self.version = f"not importable ({error})"
            return
        self.version = getattr(transformer_engine, "__version__", "unknown")
        self._te = te
        # Line of the benchmark → kind of recipe → how to make it.
        makers = {
            "current scaling": {
                "named": lambda: recipe.Float8CurrentScaling(),
                "custom": lambda: recipe.CustomRecipe(qfactory=_factories().current),
            },
            "delayed scaling": {"named": lambda: recipe.DelayedScaling()},
            "float8 block": {
                "named": lambda: recipe.Float8BlockScaling(),
                "custom": lambda: recipe.CustomRecipe(qfactory=_factories().block),
            },
            "hybrid block, BF16 wgrad": {
                "custom": lambda: recipe.CustomRecipe(qfactory=_factories().hybrid)
            },
        }
        for line, kinds in makers.items():
            self.recipes[line] = {}
            for kind, make in kinds.items():
                try:
                    self.recipes[line][kind] = make()
                except (ImportError, AttributeError, TypeError, ValueError):  # another version
                    continue

    def step(self, line: str, kind: str, problem: Problem) -> Step:
        """A step of this line under its recipe of this kind."""
        (n, k), recipe = problem.weight.shape, self.recipes[line][kind]
        module = self._te.Linear(
            k, n, bias=False, params_dtype=torch.bfloat16, device=problem.x.device
        )
        return Step(module, problem, lambda: self._autocast(recipe))

    def _autocast(self, recipe):
        if hasattr(self._te, "autocast"):
            return self._te.autocast(enabled=True, recipe=recipe)
        return self._te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # older versions


class _factories:
    """Its quantizers by role, as this package's factories choose them.

    Raises ImportError or AttributeError in versions without hybrids and roles.
    """

    def __init__(self):
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex

        self._te, self._dtype = te, tex.DType
        te.HybridQuantizer, te.IdentityQuantizer  # noqa: B018

    def current(self, role):
        """E5M2 for gradients, else E4M3."""
        is_gradient = _tensor_type(role) == "grad_output"
        element = self._dtype.kFloat8E5M2 if is_gradient else self._dtype.kFloat8E4M3
        return self._te.Float8CurrentScalingQuantizer(element, torch.device("cuda"))

    def block(self, role):
        """128×128 for weights, 1×128 for the rest."""
        dim = 2 if _tensor_type(role) == "weight" else 1
        return self._te.Float8BlockQuantizer(
            self._dtype.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
        )

    def hybrid(self, role):
        """Blocks for fprop and dgrad, BF16 for wgrad."""
        if _tensor_type(role) not in ("input", "grad_output"):
            return self.block(role)
        return self._te.HybridQuantizer(
            rowwise_quantizer=self.block(role), columnwise_quantizer=self._te.IdentityQuantizer()
        )


def _tensor_type(role) -> str:
    """Of a role, or of the text that older versions pass, such as "linear_weight"."""
    return getattr(role, "tensor_type", None) or str(role or "").removeprefix("linear_")
