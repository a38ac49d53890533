"""The autograd function of a linear layer: three GEMMs of planes, C = A · Bᵀ.

Legend: M tokens, K in_features, N out_features; K or N is divided by tp where it is sharded.

    fprop  Y  = X.row  · W.rowᵀ      [M, K] · [N, K]ᵀ
    dgrad  dX = dY.row · W.colᵀ      [M, N] · [K, N]ᵀ
    wgrad  dW = dY.col · X.colᵀ      [N, M] · [K, M]ᵀ

    parallel_mode  X before fprop      Y after fprop        dY before dgrad     dX after dgrad
    column         gather if SP        –                    –                   sum (SP: scatter)
    row            –                   sum (SP: scatter)    gather if SP        –

What is gathered travels as planes where they have fewer bytes (gathered.py). X is gathered again
before wgrad: its rows of other ranks are not kept.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ..distributed import collectives
from ..formats.casting import CastJob, run_casts
from ..formats.plane import Direction, Plane, in_memory_order
from ..ops.gemm import gemm
from .binding import Binding
from .gathered import gathered_grad_output, gathered_input, gathered_input_again, kept_direction
from .main_grad import add_to_main_grad, dummy_gradient
from .torch_autocast import without_autocast
from .weight_cache import WeightCache


@dataclasses.dataclass
class LinearCall:
    """Everything about one forward that is not a tensor.

    group: the tensor-parallel group; None outside tensor parallelism. training: amaxes count.
    parameter: the weight parameter that owns main_grad, or None; sums_bias_gradient: under SP, add
    up the ranks' bias gradients here, not in the trainer; wgrad_store: where a delayed weight
    gradient is put, or None; cache: quantized weights kept across microbatches, or None.
    name: the module's, for comm_report(). segments: ranks whose rows X and dY are made of, where no
    block of a column plane crosses from one to the next; None: those of ``group`` under SP.
    """

    binding: Binding
    compute_dtype: torch.dtype
    parallel_mode: str | None
    sequence_parallel: bool
    group: Any
    needs_dgrad: bool
    needs_wgrad: bool
    training: bool
    parameter: torch.nn.Parameter | None = None
    sums_bias_gradient: bool = False
    fuse_wgrad_accumulation: bool = False
    save_original_input: bool = False
    wgrad_store: list | None = None
    cache: WeightCache | None = None
    name: str = ""
    segments: int | None = None

    def __post_init__(self):
        if self.segments is None:
            is_cut = self.sequence_parallel and self.parallel_mode is not None
            self.segments = collectives.group_size(self.group) if is_cut else 1

    @property
    def gathers_input(self) -> bool:
        return self._gathers("column")

    @property
    def gathers_grad_output(self) -> bool:
        return self._gathers("row")

    def _gathers(self, mode: str) -> bool:
        is_sharded = self.parallel_mode == mode and self.sequence_parallel
        return is_sharded and collectives.communicates(self.group)

    def job(self, tensor_type: str, x: torch.Tensor, rowwise: bool, columnwise: bool) -> CastJob:
        """The cast of one operand, with its scale group and the place of this rank's shard.

        Other ranks hold pieces of: W in both modes, dY in column, X in row (contracts.md, "Scale
        groups"; what was gathered in high precision is whole).
        """
        rows, columns = self._origin(tensor_type, x)
        sharded = {"column": ("weight", "grad_output"), "row": ("weight", "input")}
        return CastJob(
            x,
            self.binding.quantizers[tensor_type],
            rowwise=rowwise,
            columnwise=columnwise,
            reduce=tensor_type in sharded.get(self.parallel_mode, ()),
            record=self.training,
            swizzled=self.binding.swizzled(tensor_type),
            segments=1 if tensor_type == "weight" else self.segments,
            rounding=self.binding.rounding(tensor_type, rows, columns),
        )

    def _origin(self, tensor_type: str, x: torch.Tensor) -> tuple[int, int]:
        """Global (row, column) index of the first element of this rank's shard of the operand."""
        rank = collectives.group_rank(self.group)
        if self.parallel_mode == "column":
            if tensor_type == "weight":
                return rank * x.shape[0], 0
            if tensor_type == "grad_output":
                return 0, rank * x.shape[1]
        if self.parallel_mode == "row" and tensor_type in ("weight", "input"):
            return 0, rank * x.shape[1]
        return 0, 0

    def cast(self, *jobs: CastJob) -> None:
        """Run casts that feed one GEMM pair, with one reduction over the scale group."""
        reduce_max = collectives.reduce_max_together
        run_casts(jobs, functools.partial(reduce_max, group=self.group, module=self.name))

    def run(
        self, name: str, a: Plane, b: Plane, dtype: torch.dtype, bias=None, **into
    ) -> torch.Tensor:
        """One GEMM with the kernel and accumulation that the recipe resolved to.

        into: ``out`` and ``accumulate`` of ``gemm``.
        """
        kernel, fast = self.binding.kernels[name], self.binding.is_fast(name)
        return gemm(kernel, name, a, b, dtype, bias=bias, fast=fast, **into)

    def sum_over_ranks(self, partial: torch.Tensor, what: str) -> torch.Tensor:
        """Sum of the ranks' partial products; under sequence parallelism this rank's rows of it."""
        add = collectives.all_reduce_sum
        if self.sequence_parallel:
            add = collectives.reduce_scatter_rows
        return add(partial, self.group, module=self.name, what=what)


class LinearFunction(torch.autograd.Function):
    """Y = X Wᵀ + b of x [M, K] (M/tp under SP in column mode), weight [N, K], bias [N] or None."""

    @staticmethod
    def forward(ctx, x, weight, bias, call: LinearCall):
        with without_autocast(x.device):
            ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
            c = call.compute_dtype
            x = x.to(c).contiguous()
            bias = None if bias is None else bias.to(c)
            ctx.x_shape = tuple(x.shape)

            late_column = call.save_original_input and call.needs_wgrad
            if call.gathers_input:
                keeps = kept_direction(call, x) if call.needs_wgrad and not late_column else None
                late_column = call.needs_wgrad and keeps is None
                gathering = gathered_input(call, x, keeps)
                w_planes = _weight_planes(call, weight, gathering.jobs())
                gathering.start()
                x_row, x_kept = gathering.wait()["rowwise"], keeps and gathering.own(keeps)
            else:
                x_job = call.job("input", x, True, call.needs_wgrad and not late_column)
                w_planes = _weight_planes(call, weight, [x_job])
                x_row, x_kept = x_job.planes["rowwise"], x_job.planes["columnwise"]

            row_parallel = call.parallel_mode == "row"
            y = call.run("fprop", x_row, w_planes["rowwise"], c, None if row_parallel else bias)
            if row_parallel:
                y = call.sum_over_ranks(y, "output")
                y = y if bias is None else y + bias

        ctx.call = call
        w_col = w_planes["columnwise"] if call.needs_dgrad else None
        _save_planes(ctx, x_kept, w_col, x if late_column else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        call = ctx.call
        with without_autocast(grad_output.device):
            x_col, w_col, x = _saved_planes(ctx)
            dy = grad_output.to(call.compute_dtype).contiguous()
            needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
            x_gathering = dy_gathering = dy_job = x_job = None
            if call.needs_wgrad and call.gathers_input:
                x_gathering = gathered_input_again(call, x, x_col, ctx.x_shape)
            elif call.needs_wgrad and x_col is None:
                x_job = call.job("input", x, False, True)
            if call.gathers_grad_output:
                dy_gathering = gathered_grad_output(call, dy)
                dy_job = dy_gathering.own_job
            else:
                dy_job = call.job("grad_output", dy, call.needs_dgrad, call.needs_wgrad)
            if dy_job is not None:
                dy_job.bias_grad = needs_bias

            jobs = [dy_job] if dy_gathering is None else dy_gathering.jobs()
            jobs += [x_job] if x_job is not None else []
            jobs += x_gathering.jobs() if x_gathering is not None else []
            call.cast(*jobs)
            for gathering in (dy_gathering, x_gathering):
                if gathering is not None:
                    gathering.start()
            grad_bias = None
            if needs_bias:
                # A gathered plane holds every rank's rows, the gradient covers this rank's:
                # DTensors are summed here, plain parameters by the trainer.
                grad_bias = dy.sum(0, dtype=torch.float32) if dy_job is None else dy_job.row_sum
                if call.gathers_grad_output and call.sums_bias_gradient:
                    options = {"module": call.name, "what": "bias gradient"}
                    collectives.all_reduce_sum(grad_bias, call.group, **options)
                grad_bias = grad_bias.to(ctx.bias_dtype)
            dy_planes = dy_job.planes if dy_gathering is None else dy_gathering.wait()

            grad_x = None
            if call.needs_dgrad:
                grad_x = call.run("dgrad", dy_planes["rowwise"], w_col, ctx.x_dtype)
                if call.parallel_mode == "column":
                    grad_x = call.sum_over_ranks(grad_x, "grad_input")

            grad_weight = None
            if call.needs_wgrad:
                if x_gathering is not None:
                    x_col = x_gathering.wait()["columnwise"]
                elif x_job is not None:
                    x_col = x_job.planes["columnwise"]
                grad_weight = _weight_gradient(
                    call, dy_planes["columnwise"], x_col, ctx.weight_dtype
                )
        return grad_x, grad_weight, grad_bias, None


def _weight_planes(
    call: LinearCall, weight, x_jobs: list[CastJob]
) -> dict[Direction, Plane | None]:
    """Planes of the weight, from the cache where it holds them; X is cast in the same breath."""
    cached = call.cache.planes if call.cache else {"rowwise": None, "columnwise": None}
    need_col = call.needs_dgrad and cached["columnwise"] is None
    jobs, w_job = list(x_jobs), None
    if cached["rowwise"] is None or need_col:
        weight = weight.to(call.compute_dtype)
        w_job = call.job("weight", weight, cached["rowwise"] is None, need_col)
        jobs.append(w_job)
    call.cast(*jobs)
    made = {} if w_job is None else w_job.planes
    planes = {d: cached[d] or made.get(d) for d in cached}
    if call.cache:
        call.cache.planes = planes
    return planes


def _weight_gradient(call: LinearCall, dy_col: Plane, x_col: Plane, dtype: torch.dtype):
    """dW for autograd; None when it is delayed or was accumulated into main_grad."""

    def into_main_grad() -> torch.Tensor | None:
        multiply = functools.partial(call.run, "wgrad", dy_col, x_col)
        add_to_main_grad(call.parameter, multiply)
        return dummy_gradient(call.parameter)

    def into_grad() -> torch.Tensor:
        return call.run("wgrad", dy_col, x_col, dtype)

    if call.wgrad_store is None:
        return into_main_grad() if call.fuse_wgrad_accumulation else into_grad()
    call.wgrad_store.append(into_main_grad if call.fuse_wgrad_accumulation else into_grad)
    return None


def _save_planes(ctx, x_col: Plane | None, w_col: Plane | None, x: torch.Tensor | None) -> None:
    """Hand the planes' buffers to autograd, so that saved-tensor hooks see them."""
    tensors, layout = [x], []
    for plane in (x_col, w_col):
        saved = [] if plane is None else [in_memory_order(part) for part in plane.parts]
        tensors += [part for part, _ in saved]
        # Only the description is kept here: the buffers live in autograd's saved tensors.
        bare = None if plane is None else dataclasses.replace(plane, parts=())
        layout.append((bare, [is_turned for _, is_turned in saved]))
    ctx.layout = layout
    ctx.save_for_backward(*tensors)


def _saved_planes(ctx) -> tuple[Plane | None, Plane | None, torch.Tensor | None]:
    x, *tensors = ctx.saved_tensors
    planes, rest = [], iter(tensors)
    for plane, turned in ctx.layout:
        parts = [next(rest) for _ in turned]
        parts = tuple(p.t() if t else p for p, t in zip(parts, turned, strict=True))
        planes.append(None if plane is None else dataclasses.replace(plane, parts=parts))
    return planes[0], planes[1], x
