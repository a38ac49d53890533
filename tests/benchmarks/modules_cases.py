"""What the benchmark of modules runs: recipes with their bars, problems, steps of each module.

Legend: E experts, M tokens, K in_features, N out_features; hidden H, ffn F. Bars are for one H200.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.ops.gemm import device_kind
from dist_finegrain.recipe import GEMM_NAMES

from .linear_cases import RECIPES

GROUPED_BAR = (8, 16384, 4096, 4096)  # E, M, K, N
MLP_BAR = (8192, 4096, 14336)  # M, H, F
BF16, LOOP = "BF16, Identity", "torch, a Linear for each"
_BF16_OPTIONS = {"dtype": torch.bfloat16}
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of a table.

    make: the recipe, given ``execution``; None for torch's own modules. bar_ms, bar: most
    milliseconds and least speed-up over BF16 that anchors.md asks for; emulated and ends_step as in
    Recipe; on_device: m_splits is a tensor on the GPU.
    """

    name: str
    make: Callable[..., dfg.CustomRecipe] | None
    bar_ms: float | None = None
    bar: float | None = None
    emulated: bool = False
    ends_step: bool = False
    on_device: bool = False

    def recipe(self, device: torch.device) -> dfg.CustomRecipe:
        """The recipe as ``device`` runs it: on a CPU every GEMM is emulated."""
        is_native = device.type == "cuda" and not self.emulated
        return self.make(execution="native" if is_native else "emulate")


def _custom(factory, **fixed) -> Callable[..., dfg.CustomRecipe]:
    return lambda **options: dfg.CustomRecipe(qfactory=factory, **fixed, **options)


def _e4m3_delayed(role):
    return dfg.DelayedScalingRequest(fp8_format=dfg.FP8Format.E4M3)


_tensor = functools.partial(
    factories.current_scaling_factory, fp8_format=dfg.FP8Format.E4M3, amax_epsilon=0.0
)
_EXACT, _FAST = {"fast_accumulation": ()}, {"fast_accumulation": tuple(GEMM_NAMES)}
_row = factories.row_scaling_factory
_EXACT_BAR, _FAST_BAR = {"bar_ms": 2.15, "bar": 1.17}, {"bar_ms": 2.0}
_IDENTITY = Case(BF16, _custom(factories.high_precision_factory))
_SHARED = tuple(Case(r.name, r.make, emulated=r.emulated, ends_step=r.ends_step) for r in RECIPES)
GROUPED_CASES = (
    Case(LOOP, None),
    _IDENTITY,
    Case("row-scaled, exact", _custom(_row, **_EXACT), **_EXACT_BAR),
    Case("row-scaled, fast fprop", _custom(_row), **_EXACT_BAR),
    Case("row-scaled, fast", _custom(_row, **_FAST), **_FAST_BAR),
    Case("row-scaled, fast, m_splits on the device", _custom(_row, **_FAST), on_device=True),
    Case("per-tensor E4M3, exact", _custom(_tensor, **_EXACT), **_EXACT_BAR),
    Case("per-tensor E4M3, fast", _custom(_tensor, **_FAST), **_FAST_BAR),
    Case("delayed E4M3, fast", _custom(_e4m3_delayed, **_FAST), ends_step=True, **_FAST_BAR),
    *_SHARED,
)
MLP_CASES = (_IDENTITY, *_SHARED)


def split_of(experts: int, tokens: int) -> list[int]:
    """Tokens of each expert: as equal as can be."""
    return [tokens // experts + (e < tokens % experts) for e in range(experts)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """BF16: x, a leaf that wants its gradient; dy; ``parameters`` in the order of the gradients.

    weights of experts E times [N, K]; of an MLP: norm [H], fc1 [2F, H], fc2 [H, F].
    """

    x: torch.Tensor
    dy: torch.Tensor
    parameters: tuple[torch.Tensor, ...]
    split: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def grouped(cls, shape: Sequence[int], device: torch.device) -> Problem:
        """Random normal x [M, K] and dy [M, N]; weights of deviation 0.023."""
        (experts, m, k, n), normal = shape, _normal(device)
        weights = tuple(normal(n, k, deviation=0.023) for _ in range(experts))
        return cls(normal(m, k).requires_grad_(), normal(m, n), weights, split_of(experts, m))

    @classmethod
    def mlp(cls, shape: Sequence[int], device: torch.device) -> Problem:
        """Random normal x and dy [M, H]; weights of deviation 0.023, a norm near 1."""
        (m, h, f), normal = shape, _normal(device)
        weights = normal(2 * f, h, deviation=0.023), normal(h, f, deviation=0.023)
        norm = 1 + normal(h, deviation=0.1)
        return cls(normal(m, h).requires_grad_(), normal(m, h), (norm, *weights))


def _normal(device: torch.device) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        empty = torch.empty(*shape, device=device, **_BF16_OPTIONS)
        return empty.normal_(std=deviation, generator=generator)

    return normal


class Step:
    """Forward and backward of one module: y, and the gradients of x and of its parameters.

    parameters: of the module, in the problem's order; arguments: of its forward beside x.
    """

    def __init__(
        self, module, parameters, problem: Problem, context, arguments=(), ends_step=False
    ):
        self.module, self.parameters, self.problem = module, tuple(parameters), problem
        self.context, self.arguments, self.ends_step = context, arguments, ends_step
        with torch.no_grad():
            for parameter, value in zip(self.parameters, problem.parameters, strict=True):
                parameter.copy_(value)

    def forward(self) -> torch.Tensor:
        """y, in a context entered anew."""
        with self.context():
            return self.module(self.problem.x, *self.arguments)

    def captured(self, _=None) -> tuple[torch.Tensor, ...]:
        """(y, dx, gradients): what a graph holds; a step is ended outside of graphs."""
        y = self.forward()
        return y, *torch.autograd.grad(y, (self.problem.x, *self.parameters), self.problem.dy)

    def __call__(self, _=None) -> tuple[torch.Tensor, ...]:
        """(y, dx, gradients), and the end of the step where the recipe has one."""
        result = self.captured()
        if self.ends_step:
            dfg.end_step()
        return result


# torch's own modules.
class GroupedMM(torch.nn.Module):
    """torch's grouped_mm of one weight [E, N, K]; sizes are on the device."""

    def __init__(self, problem: Problem):
        super().__init__()
        weight = torch.stack(problem.parameters)
        self.weight = torch.nn.Parameter(torch.empty_like(weight))
        ends = list(itertools.accumulate(problem.split))
        self.ends = torch.tensor(ends, dtype=torch.int32, device=weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=self.ends)


class GroupedMMStep(Step):
    """Its step: the gradient of the one weight, expert by expert."""

    def __init__(self, problem: Problem):
        module = GroupedMM(problem)
        super().__init__(module, module.weight.data.unbind(), problem, contextlib.nullcontext)
        self.parameters = (module.weight,)

    def captured(self, _=None) -> tuple[torch.Tensor, ...]:
        y, dx, dw = super().captured()
        return y, dx, *dw.unbind()


class Linears(torch.nn.ModuleList):
    """A torch.nn.Linear for each expert."""

    def __init__(self, problem: Problem):
        n, k = problem.parameters[0].shape
        options = {"bias": False, "device": problem.x.device, **_BF16_OPTIONS}
        super().__init__(torch.nn.Linear(k, n, **options) for _ in problem.split)
        self.split = problem.split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [layer(part) for layer, part in zip(self, x.split(self.split), strict=True)]
        )


class PlainMLP(torch.nn.Module):
    """RMSNorm, fc1, SwiGLU, fc2 of torch."""

    def __init__(self, problem: Problem):
        super().__init__()
        _, fc1, fc2 = problem.parameters
        options = {"device": problem.x.device, **_BF16_OPTIONS}
        self.norm = torch.nn.RMSNorm(fc1.shape[1], eps=EPS, **options)
        self.fc1 = torch.nn.Linear(*reversed(fc1.shape), bias=False, **options)
        self.fc2 = torch.nn.Linear(*reversed(fc2.shape), bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


def plain_mlp_step(problem: Problem) -> Step:
    """What every line of the MLP is compared with."""
    module = PlainMLP(problem)
    return Step(module, module.parameters(), problem, contextlib.nullcontext)


# This package's.
def grouped_step(case: Case, problem: Problem) -> Step:
    """A step of GroupedLinear, or of torch's Linears; weights are quantized in every step."""
    n, k = problem.parameters[0].shape
    if case.make is None:
        module = Linears(problem)
        return Step(module, module.parameters(), problem, contextlib.nullcontext)
    recipe, device = case.recipe(problem.x.device), problem.x.device
    module = dfg.GroupedLinear(
        len(problem.split), k, n, bias=False, params_dtype=torch.bfloat16, device=device,
        name="bench.experts",
    )  # fmt: skip
    split = torch.tensor(problem.split, device=device) if case.on_device else problem.split
    context = functools.partial(dfg.autocast, recipe=recipe)
    return Step(module, module.weights, problem, context, (split,), case.ends_step)


def mlp_step(case: Case, problem: Problem) -> Step:
    """A step of LayerNormMLP with RMSNorm and SwiGLU."""
    fc2 = problem.parameters[2]
    recipe = case.recipe(problem.x.device)
    module = dfg.LayerNormMLP(
        *fc2.shape, activation="swiglu", normalization="RMSNorm", eps=EPS,
        bias=False, params_dtype=torch.bfloat16, device=problem.x.device, name="bench.mlp",
    )  # fmt: skip
    parameters = module.layer_norm_weight, module.fc1_weight, module.fc2_weight
    context = functools.partial(dfg.autocast, recipe=recipe)
    return Step(module, parameters, problem, context, (), case.ends_step)


def kernels_of(step: Step) -> str:
    """Kernels of fprop, dgrad and wgrad of one of this package's modules; "" of torch's."""
    module, device = step.module, step.problem.x.device
    if isinstance(module, dfg.GroupedLinear):
        with step.context():
            binding = module.bind(device, torch.bfloat16)
        sizes_known = isinstance(step.arguments[0], list) or device.type == "cpu"
        site, experts = module.resolution_site(device_kind(device)), module.num_gemms
        ways = module._ways.of(binding, site, experts, torch.bfloat16, sizes_known, device)
        return _names([kernel or "expert by expert" for kernel in ways.kernels.values()])
    if isinstance(module, dfg.LayerNormMLP):
        with step.context():
            bindings = module.bind_parts(device, torch.bfloat16)
        return "; ".join(_names(binding.kernels.values()) for binding in bindings)
    return ""


def _names(kernels) -> str:
    return " | ".join(getattr(kernel, "name", kernel) for kernel in kernels)
