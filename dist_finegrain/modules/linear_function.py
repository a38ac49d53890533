"""The autograd function of a linear layer: three GEMMs of planes, C = A · Bᵀ.

Legend: M tokens, K in_features, N out_features; K or N is divided by tp where it is sharded.

    fprop  Y  = X.row  · W.rowᵀ      [M, K] · [N, K]ᵀ
    dgrad  dX = dY.row · W.colᵀ      [M, N] · [K, N]ᵀ
    wgrad  dW = dY.col · X.colᵀ      [N, M] · [K, M]ᵀ

    parallel_mode  X before fprop      Y after fprop        dY before dgrad     dX after dgrad
    column         gather rows if SP   –                    –                   sum (SP: scatter)
    row            –                   sum (SP: scatter)    gather rows if SP   –
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch

from ..distributed import collectives
from ..formats.casting import CastJob, run_casts
from ..formats.plane import Direction, Plane, in_memory_order
from ..ops.gemm import gemm
from .binding import Binding
from .weight_cache import WeightCache


@dataclasses.dataclass
class LinearCall:
    """Everything about one forward that is not a tensor.

    group: the tensor-parallel group; None outside tensor parallelism. training: amaxes count.
    parameter: the weight parameter that owns main_grad, or None; sums_bias_gradient: under SP, add
    up the ranks' bias gradients here, not in the trainer; wgrad_store: where a delayed weight
    gradient is put, or None; cache: quantized weights kept across microbatches, or None.
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

    @property
    def gathers_input(self) -> bool:
        return self.parallel_mode == "column" and self.sequence_parallel

    @property
    def gathers_grad_output(self) -> bool:
        return self.parallel_mode == "row" and self.sequence_parallel

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
        run_casts(jobs, functools.partial(collectives.reduce_max_together, group=self.group))

    def run(
        self, name: str, a: Plane, b: Plane, dtype: torch.dtype, bias=None, **into
    ) -> torch.Tensor:
        """One GEMM with the kernel and accumulation that the recipe resolved to.

        into: ``out`` and ``accumulate`` of ``gemm``.
        """
        kernel, fast = self.binding.kernels[name], self.binding.is_fast(name)
        return gemm(kernel, name, a, b, dtype, bias=bias, fast=fast, **into)

    def sum_over_ranks(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of the ranks' partial products; under sequence parallelism this rank's rows of it."""
        if self.sequence_parallel:
            return collectives.reduce_scatter_rows(partial, self.group)
        return collectives.all_reduce_sum(partial, self.group)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Operators below keep the dtypes they are given; free where torch.autocast is off anyway."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class LinearFunction(torch.autograd.Function):
    """Y = X Wᵀ + b of x [M, K] (M/tp under SP in column mode), weight [N, K], bias [N] or None."""

    @staticmethod
    def forward(ctx, x, weight, bias, call: LinearCall):
        with without_autocast(x.device):
            ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
            c = call.compute_dtype
            local_x = x = x.to(c).contiguous()
            bias = None if bias is None else bias.to(c)
            if call.gathers_input:
                x = collectives.all_gather_rows(x, call.group)

            late_column = call.save_original_input and call.needs_wgrad
            x_job = call.job("input", x, True, call.needs_wgrad and not late_column)
            w_planes = _weight_planes(call, weight, x_job)
            x_row, x_col = x_job.planes["rowwise"], x_job.planes["columnwise"]

            row_parallel = call.parallel_mode == "row"
            y = call.run("fprop", x_row, w_planes["rowwise"], c, None if row_parallel else bias)
            if row_parallel:
                y = call.sum_over_ranks(y)
                y = y if bias is None else y + bias

        ctx.call = call
        w_col = w_planes["columnwise"] if call.needs_dgrad else None
        _save_planes(ctx, x_col, w_col, local_x if late_column else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        call = ctx.call
        with without_autocast(grad_output.device):
            x_col, w_col, x = _saved_planes(ctx)
            dy = grad_output.to(call.compute_dtype).contiguous()
            needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
            own_rows_sum = None
            if call.gathers_grad_output:
                if needs_bias:
                    # The cast reads every rank's rows, the gradient covers this rank's: DTensors
                    # are summed here, plain parameters by the trainer.
                    own_rows_sum = dy.sum(0, dtype=torch.float32)
                    if call.sums_bias_gradient:
                        collectives.all_reduce_sum(own_rows_sum, call.group)
                dy = collectives.all_gather_rows(dy, call.group)
            job = call.job("grad_output", dy, call.needs_dgrad, call.needs_wgrad)
            job.bias_grad = needs_bias and own_rows_sum is None
            call.cast(job)
            grad_bias = job.row_sum if own_rows_sum is None else own_rows_sum
            grad_bias = None if grad_bias is None else grad_bias.to(ctx.bias_dtype)

            grad_x = None
            if call.needs_dgrad:
                grad_x = call.run("dgrad", job.planes["rowwise"], w_col, ctx.x_dtype)
                if call.parallel_mode == "column":
                    grad_x = call.sum_over_ranks(grad_x)

            grad_weight = None
            if call.needs_wgrad:
                if x_col is None:
                    if call.gathers_input:
                        x = collectives.all_gather_rows(x, call.group)
                    x_job = call.job("input", x, False, True)
                    call.cast(x_job)
                    x_col = x_job.planes["columnwise"]
                grad_weight = _weight_gradient(
                    call, job.planes["columnwise"], x_col, ctx.weight_dtype
                )
        return grad_x, grad_weight, grad_bias, None


def _weight_planes(call: LinearCall, weight, x_job: CastJob) -> dict[Direction, Plane | None]:
    """Planes of the weight, from the cache where it holds them; X is cast in the same breath."""
    cached = call.cache.planes if call.cache else {"rowwise": None, "columnwise": None}
    need_col = call.needs_dgrad and cached["columnwise"] is None
    jobs = [x_job]
    if cached["rowwise"] is None or need_col:
        weight = weight.to(call.compute_dtype)
        jobs.append(call.job("weight", weight, cached["rowwise"] is None, need_col))
    call.cast(*jobs)
    made = jobs[1].planes if len(jobs) > 1 else {}
    planes = {d: cached[d] or made.get(d) for d in cached}
    if call.cache:
        call.cache.planes = planes
    return planes


def _weight_gradient(call: LinearCall, dy_col: Plane, x_col: Plane, dtype: torch.dtype):
    """dW for autograd; None when it is delayed or was accumulated into main_grad."""

    def into_main_grad() -> torch.Tensor | None:
        parameter = call.parameter
        main_grad, overwrites = (
            parameter.main_grad,
            getattr(parameter, "overwrite_main_grad", False),
        )
        if main_grad.is_contiguous() and main_grad.dtype in (torch.float32, torch.bfloat16):
            into = {"out": main_grad, "accumulate": not overwrites}
            call.run("wgrad", dy_col, x_col, main_grad.dtype, **into)
        else:
            gradient = call.run("wgrad", dy_col, x_col, main_grad.dtype)
            main_grad.copy_(gradient) if overwrites else main_grad.add_(gradient)
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        # Megatron's hook expects some gradient and then ignores it, or adds zeros.
        parameter.grad_added_to_main_grad = True
        return torch.zeros_like(parameter)

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
