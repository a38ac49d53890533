"""What the Linear benchmark runs: recipes with their bars, steps and their parts, GEMM pairs.

Legend: x [M, K] · weight [N, K]ᵀ; a shape is (M, K, N). Bars are for one H200.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch

import dist_finegrain as dfg
from dist_finegrain import factories, factory_zoo
from dist_finegrain.factories import E4M3
from dist_finegrain.formats.plane import Plane
from dist_finegrain.modules.linear_function import LinearCall
from dist_finegrain.ops import native
from dist_finegrain.ops.gemm import device_kind, gemm, select

FIRST, SECOND, HOST_BOUND = (16384, 8192, 8192), (8192, 4096, 14336), (4096, 2048, 2048)
TINY = (16, 64, 64)
_ERROR_ROWS = 256


def hybrid_block_block_bf16(role):
    """Blocks of FP8 for fprop and dgrad, BF16 for wgrad."""
    plain = factories.float8_block_scaling_factory(role)
    if role is None or role.tensor_type not in ("input", "grad_output"):
        return plain
    return dfg.HybridQuantizer(
        rowwise_quantizer=plain, columnwise_quantizer=dfg.IdentityQuantizer()
    )


def _custom(factory) -> Callable[..., dfg.CustomRecipe]:
    return lambda **options: dfg.CustomRecipe(qfactory=factory, **options)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One line of the Linear table.

    make: the recipe, given ``execution``; bars: shape → least and greatest speed-up over BF16 that
    anchors ours; emulated: has no native kernel on Hopper; ends_step: every step ends with
    ``end_step()``, which updates delayed scales; host_bar_ms: of the tiny Linear, None where it is
    not run.
    """

    name: str
    make: Callable[..., dfg.CustomRecipe]
    bars: dict[tuple[int, int, int], tuple[float, float]]
    emulated: bool = False
    ends_step: bool = False
    host_bar_ms: float | None = None

    def recipe(self, device: torch.device) -> dfg.CustomRecipe:
        """The recipe as ``device`` runs it: on a CPU every GEMM is emulated."""
        is_native = device.type == "cuda" and not self.emulated
        return self.make(execution="native" if is_native else "emulate")


RECIPES = (
    Recipe(
        "current scaling",
        dfg.recipe.Float8CurrentScaling,
        {FIRST: (1.62, 1.74), SECOND: (1.41, 1.56)},
        host_bar_ms=0.4,
    ),
    Recipe(
        "delayed scaling",
        dfg.recipe.DelayedScaling,
        {FIRST: (1.78, 1.78), SECOND: (1.58, 1.58)},
        ends_step=True,
        host_bar_ms=0.4,
    ),
    Recipe(
        "float8 block",
        dfg.recipe.Float8BlockScaling,
        {FIRST: (1.29, 1.38), SECOND: (1.13, 1.30)},
    ),
    Recipe(
        "block, row-scaled wgrad",
        _custom(factory_zoo.float8_block_row_scaled_wgrad),
        {FIRST: (1.38, 1.38)},
    ),
    Recipe(
        "hybrid block, BF16 wgrad",
        _custom(hybrid_block_block_bf16),
        {FIRST: (1.30, 1.30), SECOND: (1.09, 1.09)},
        host_bar_ms=0.45,
    ),
    Recipe(
        "MXFP8, emulated",
        dfg.recipe.MXFP8BlockScaling,
        dict.fromkeys((FIRST, SECOND), (0.87, 0.87)),
        emulated=True,
    ),
    Recipe(
        "NVFP4, emulated",
        dfg.recipe.NVFP4BlockScaling,
        dict.fromkeys((FIRST, SECOND), (0.85, 0.85)),
        emulated=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """BF16: x [M, K], a leaf that wants its gradient; weight [N, K]; dy [M, N]."""

    x: torch.Tensor
    weight: torch.Tensor
    dy: torch.Tensor

    @classmethod
    def random(cls, shape: tuple[int, int, int], device: torch.device) -> Problem:
        """Random normal x and dy; weights of deviation 0.023."""
        (m, k, n), generator = shape, torch.Generator(device).manual_seed(0)

        def normal(rows: int, columns: int, deviation: float = 1.0) -> torch.Tensor:
            empty = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return empty.normal_(std=deviation, generator=generator)

        return cls(normal(m, k).requires_grad_(), normal(n, k, 0.023), normal(m, n))


class Step:
    """Forward and backward of one Linear: y, and the gradients of x and of the weight."""

    def __init__(self, module: torch.nn.Module, problem: Problem, context, ends_step: bool = False):
        self.module, self.problem, self.context = module, problem, context
        self.ends_step = ends_step
        with torch.no_grad():
            module.weight.copy_(problem.weight)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """What is kept for backward anyway."""
        return (self.module.weight,)

    def forward(self) -> torch.Tensor:
        """y, in a context entered anew."""
        with self.context():
            return self.module(self.problem.x)

    def captured(self, _=None) -> tuple[torch.Tensor, ...]:
        """(y, dx, dw): what a graph holds; a step is ended outside of graphs."""
        y = self.forward()
        inputs = (self.problem.x, self.module.weight)
        return y, *torch.autograd.grad(y, inputs, self.problem.dy)

    def __call__(self, _=None) -> tuple[torch.Tensor, ...]:
        """(y, dx, dw), and the end of the step where the recipe has one."""
        result = self.captured()
        if self.ends_step:
            dfg.end_step()
        return result


def torch_step(problem: Problem) -> Step:
    """What every line is compared with: torch.nn.Linear in BF16."""
    n, k = problem.weight.shape
    options = {"bias": False, "device": problem.x.device, "dtype": torch.bfloat16}
    return Step(torch.nn.Linear(k, n, **options), problem, contextlib.nullcontext)


def finegrain_step(case: Recipe, problem: Problem) -> Step:
    """The same with this package's Linear; the weight is quantized in every step."""
    (n, k), recipe = problem.weight.shape, case.recipe(problem.x.device)
    module = dfg.Linear(
        k, n, bias=False, params_dtype=torch.bfloat16, device=problem.x.device, name="bench.fc"
    )
    return Step(module, problem, lambda: dfg.autocast(recipe=recipe), case.ends_step)


class Parts:
    """The casts and the GEMMs of a step, each alone, by the calls that the step makes itself."""

    def __init__(self, step: Step):
        self.problem = step.problem
        self.weight = step.module.weight.detach()
        with step.context():
            binding = step.module.bind(self.weight.device, torch.bfloat16)
        self.call = LinearCall(
            binding=binding,
            compute_dtype=torch.bfloat16,
            parallel_mode=None,
            sequence_parallel=False,
            group=None,
            needs_dgrad=True,
            needs_wgrad=True,
            training=True,
        )
        self.x, self.w, self.dy = self.casts()

    def kernels(self) -> str:
        """Names of the kernels of fprop, dgrad and wgrad."""
        return " | ".join(kernel.name for kernel in self.call.binding.kernels.values())

    def casts(self, _=None) -> list[dict[str, Plane]]:
        """Planes of x and of the weight together, then of dy."""
        x = self.call.job("input", self.problem.x.detach(), True, True)
        w = self.call.job("weight", self.weight, True, True)
        self.call.cast(x, w)
        dy = self.call.job("grad_output", self.problem.dy, True, True)
        self.call.cast(dy)
        return [job.planes for job in (x, w, dy)]

    def gemms(self, _=None) -> list[torch.Tensor]:
        """y, dx and dw of planes made beforehand."""
        row, column = "rowwise", "columnwise"
        operands = {
            "fprop": (self.x[row], self.w[row]),
            "dgrad": (self.dy[row], self.w[column]),
            "wgrad": (self.dy[column], self.x[column]),
        }
        return [self.call.run(name, *pair, torch.bfloat16) for name, pair in operands.items()]


def relative_error(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """The largest relative Frobenius error among y, dx and dw, of at most 256 rows of each.

    Raises RuntimeError when it is not finite: such results are not worth timing.
    """
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        a, b = a[:_ERROR_ROWS].double(), b[:_ERROR_ROWS].double()
        error = ((a - b).norm() / b.norm()).item()
        if not error < float("inf"):
            raise RuntimeError(f"the relative error of a result is {error}")
        worst = max(worst, error)
    return worst


def saved_bytes(step) -> int:
    """Bytes of the storages that one ``step.forward()`` keeps, apart from ``step.parameters``."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step.forward()
    for parameter in step.parameters:
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    del y
    return sum(storages.values())


def peak_bytes(step: Step) -> int | None:
    """Most bytes allocated in one step above what was allocated before; None on a CPU."""
    device = step.problem.x.device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


@dataclasses.dataclass(frozen=True)
class Pair:
    """One line of the GEMM table: A and B by the quantizers of their row planes.

    function: the product's name in dist_finegrain.ops.native.
    """

    name: str
    a: dfg.Quantizer
    b: dfg.Quantizer
    function: str
    fast: bool = False

    def operands(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Plane, Plane]:
        """Both matrices cast."""
        return self.a(a).plane("rowwise"), self.b(b).plane("rowwise")

    def calls(self, a: Plane, b: Plane, device: torch.device) -> dict[str, Callable]:
        """Backend → product of a pair of planes like these; torch's own on a GPU only."""
        is_gpu = device.type == "cuda"
        execution = "native" if is_gpu else "emulate"
        k, n = a.shape[1], b.shape[0]
        kernel = select("fprop", a.format, b.format, device_kind(device), execution, k=k, n=n)
        calls = {kernel.name: lambda p: gemm(kernel, "fprop", *p, torch.bfloat16, fast=self.fast)}
        # Where the cuBLASLt call is not built, the first one is torch's already.
        if is_gpu and not kernel.name.startswith("scaled_mm"):
            product = getattr(native, self.function)
            calls["scaled_mm"] = lambda p: product(*p, torch.bfloat16, None, self.fast)
        return calls


_TENSOR, _ROW = dfg.Float8CurrentScalingQuantizer(E4M3), dfg.Float8RowScalingQuantizer(E4M3)
_BLOCK_1D, _BLOCK_2D = (dfg.Float8BlockQuantizer(E4M3, block_scaling_dim=d) for d in (1, 2))
PAIRS = (
    Pair("tensorwise, exact", _TENSOR, _TENSOR, "tensorwise"),
    Pair("tensorwise, fast", _TENSOR, _TENSOR, "tensorwise", fast=True),
    Pair("rowwise, exact", _ROW, _ROW, "rowwise"),
    Pair("rowwise, fast", _ROW, _ROW, "rowwise", fast=True),
    Pair("block 1×128 · 128×128", _BLOCK_1D, _BLOCK_2D, "block"),
    Pair("block 1×128 · 1×128", _BLOCK_1D, _BLOCK_1D, "block"),
)


def product_error(got: torch.Tensor, a: Plane, b: Plane) -> float:
    """Relative Frobenius error of at most 256 rows against FP64 of what the planes decode to."""
    left, right = (p.format.decode(p) for p in (a, b))
    return relative_error((got,), (left[:_ERROR_ROWS].double() @ right.double().t(),))
