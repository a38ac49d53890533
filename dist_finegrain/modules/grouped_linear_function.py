"""The autograd function of a grouped linear layer: three GEMMs of planes for each of E experts.

Legend: expert e has m tokens, M together; K in_features, N out_features of this rank.

    fprop  Y_e  = X_e.row  · W_e.rowᵀ      [m, K] · [N, K]ᵀ
    dgrad  dX_e = dY_e.row · W_e.colᵀ      [m, N] · [K, N]ᵀ
    wgrad  dW_e = dY_e.col · X_e.colᵀ      [N, m] · [K, m]ᵀ

No communication of tensors: only amaxes of weights that are sharded over a group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from ..distributed import collectives
from ..formats.casting import CastJob, run_casts
from ..formats.plane import Direction
from ..ops.experts import Experts
from ..ops.gemm import gemm
from ..ops.grouped import GroupedKernel, grouped_gemm
from .binding import Binding
from .grouped_binding import expert_key
from .grouped_casting import (
    GroupedJob,
    Operand,
    cast_each,
    run_grouped_casts,
)
from .grouped_weights import share_storage, weight_ends, weights_in_one
from .main_grad import add_to_main_grad, dummy_gradient, main_grads
from .torch_autocast import without_autocast
from .weight_cache import WeightCache

_WEIGHT_READERS = {"rowwise": "fprop", "columnwise": "dgrad"}
_SHARDED = {"column": ("weight", "grad_output"), "row": ("weight", "input")}


@dataclasses.dataclass
class GroupedCall:
    """Everything about one forward that is not a tensor of the autograd function.

    kernels: per GEMM the one for all experts, or None: expert by expert. together: tensor types
    that are cast for all experts at once. sizes: tokens of each expert, None where only the device
    knows them; ends: int32 [E], cumulative. parameters: weights that own a main_grad. Others as in
    LinearCall.
    """

    binding: Binding
    kernels: dict[str, GroupedKernel | None]
    together: frozenset[str]
    experts: int
    sizes: list[int] | None
    ends: torch.Tensor
    compute_dtype: torch.dtype
    parallel_mode: str | None
    group: object
    needs_dgrad: bool
    needs_wgrad: bool
    training: bool
    parameters: Sequence[torch.nn.Parameter] = ()
    fuse_wgrad_accumulation: bool = False
    save_original_input: bool = False
    wgrad_store: list | None = None
    cache: WeightCache | None = None

    # Casts.
    def cast_tokens(
        self, kind: str, x: torch.Tensor, rowwise: bool, columnwise: bool
    ) -> dict[Direction, Operand | None]:
        """Planes of X [M, K] or dY [M, N] of all experts."""
        if not (rowwise or columnwise):
            return {"rowwise": None, "columnwise": None}
        if kind not in self.together:
            return self._cast_each(kind, x.split(self.sizes), rowwise, columnwise)
        job = self._grouped_job(kind, x, self.ends, rowwise, columnwise)
        run_grouped_casts([job], self._reduce_max)
        return {d: job.operand(d) for d in ("rowwise", "columnwise")}

    def cast_weights(
        self, weights: Sequence[torch.Tensor], rowwise: bool, columnwise: bool
    ) -> dict[Direction, Operand | None]:
        """Planes of the weights E times [N, K]."""
        if not (rowwise or columnwise):
            return {"rowwise": None, "columnwise": None}
        first = self.binding.quantizers[expert_key("weight", 0)]
        formats = [first.plane_format(d) for d in ("rowwise", "columnwise")]
        are_square = [f.family == "float8_block" and f.two_dimensional for f in formats]
        rows = weights[0].shape[0]
        reads = {"rowwise": rowwise, "columnwise": columnwise}
        loops = [self._is_loop(gemm) for d, gemm in _WEIGHT_READERS.items() if reads[d]]
        is_one = all(are_square) and self.has_whole_blocks(weights[0]) and not any(loops)
        if "weight" not in self.together or (any(are_square) and not is_one):
            # 128×128 blocks would reach over experts in one cast: cast alone, then stacked.
            weights = [w.to(self.compute_dtype) for w in weights]
            made = self._cast_each("weight", weights, rowwise, columnwise)
            return {
                d: o
                if o is None or self._is_loop(_WEIGHT_READERS[d])
                else Operand(experts=o.stacked())
                for d, o in made.items()
            }
        flat = weights_in_one(weights, self.compute_dtype)
        if any(are_square):  # of one matrix; no block reaches over experts
            job = CastJob(flat, first, rowwise=rowwise, columnwise=columnwise)
            run_casts([job], self._reduce_max)
            row, column = (job.planes.get(d) for d in ("rowwise", "columnwise"))
        else:
            ends = weight_ends(self.experts, rows, flat.device)
            job = self._grouped_job("weight", flat, ends, rowwise, columnwise)
            run_grouped_casts([job], self._reduce_max)
            row, column = job.row, job.column
        row = row and Experts.of_rows(row, self.experts)
        column = column and Experts.of_columns(column, self.experts, rows)
        return {
            "rowwise": row and Operand(experts=row),
            "columnwise": column and Operand(experts=column),
        }

    @staticmethod
    def has_whole_blocks(weight: torch.Tensor) -> bool:
        """Whether no 128×128 block of [E·N, K] reaches over experts."""
        return all(size % 128 == 0 for size in weight.shape)

    def _grouped_job(self, kind, x, ends, rowwise, columnwise) -> GroupedJob:
        quantizers = [self.binding.quantizers[expert_key(kind, e)] for e in range(self.experts)]
        reduce = kind in _SHARDED.get(self.parallel_mode, ())
        return GroupedJob(x, ends, quantizers, rowwise, columnwise, reduce, self.training)

    def _cast_each(self, kind, matrices, rowwise, columnwise) -> dict[Direction, Operand | None]:
        jobs = []
        for e, x in enumerate(matrices):
            key = expert_key(kind, e)
            jobs.append(
                CastJob(
                    x,
                    self.binding.quantizers[key],
                    rowwise=rowwise,
                    columnwise=columnwise,
                    reduce=kind in _SHARDED.get(self.parallel_mode, ()),
                    record=self.training,
                    rounding=self.binding.rounding(key, *self._origin(kind, x)),
                )
            )
        return cast_each(jobs, self._reduce_max)

    @property
    def _reduce_max(self):
        return functools.partial(collectives.reduce_max_together, group=self.group)

    def _origin(self, kind: str, x: torch.Tensor) -> tuple[int, int]:
        """Global (row, column) of the first element of this rank's shard; tokens start at 0."""
        rank = collectives.group_rank(self.group)
        if kind not in _SHARDED.get(self.parallel_mode, ()):
            return 0, 0
        if self.parallel_mode == "column" and kind == "weight":
            return rank * x.shape[0], 0
        return 0, rank * x.shape[1]

    # GEMMs.
    def _is_loop(self, name: str) -> bool:
        """Whether this GEMM runs expert by expert."""
        kernel = self.kernels[name]
        return kernel is None or (self.sizes is not None and kernel.is_loop)

    def run(
        self,
        name: str,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        biases: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """One GEMM of all experts, with its biases: [M, N], [M, K] or [E, N, K] in ``dtype``."""
        if self._is_loop(name):
            made = [
                self._one(name, e, *pair, dtype, bias=biases[e] if biases else None)
                for e, pair in enumerate(zip(a.each(self.sizes), b.each(self.sizes), strict=True))
            ]
            return torch.stack(made) if name == "wgrad" else torch.cat(made)
        kernel = self.kernels[name]
        # The bias is added before the only rounding of ours: in FP32 unless the kernel has rounded.
        is_final = not biases or (kernel.rounds_to_bf16 and dtype == torch.bfloat16)
        product = grouped_gemm(
            kernel, name, a.tokens, b.tokens if name == "wgrad" else b.stacked(), self.ends,
            dtype if is_final else torch.float32, column_ends=a.column_ends, sizes=self.sizes,
            fast=self.binding.is_fast(name),
        )  # fmt: skip
        if biases:
            self._add_biases(product, biases)
        return product.to(dtype)

    def _add_biases(self, product: torch.Tensor, biases: Sequence[torch.Tensor]) -> None:
        """To each expert's rows of [M, N], in place, rounded once to its dtype."""
        if self.sizes is not None:
            for rows, bias in zip(product.split(self.sizes), biases, strict=True):
                rows.add_(bias)
        else:
            added = torch.stack(tuple(biases)).to(product.dtype)
            product.add_(added.index_select(0, self._expert_of_rows(len(product))))

    def _one(self, name: str, expert: int, a, b, dtype: torch.dtype, **options) -> torch.Tensor:
        kernel = self.binding.kernels[expert_key(name, expert)]
        return gemm(kernel, name, a, b, dtype, fast=self.binding.is_fast(name), **options)

    def _expert_of_rows(self, rows: int) -> torch.Tensor:
        """int32 [M]: whose token each row is."""
        index = torch.arange(rows, dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends[:-1], index, right=True, out_int32=True)

    def bias_gradients(self, dy: torch.Tensor) -> Sequence[torch.Tensor]:
        """Sums over each expert's rows of the unquantized dY [M, N]: E times FP32 [N]."""
        if self.sizes is not None:
            return [part.sum(0, dtype=torch.float32) for part in dy.split(self.sizes)]
        offsets = torch.cat((self.ends.new_zeros(1), self.ends)).long()
        sums = torch.segment_reduce(dy.float(), "sum", offsets=offsets, axis=0, unsafe=True)
        return sums.unbind()

    # Weight gradients.
    def weight_gradients(self, dy_col: Operand, x_col: Operand, dtype: torch.dtype):
        """dW of each expert for autograd; Nones when delayed or accumulated into main_grad."""
        make = functools.partial(self._into_grad, dy_col, x_col, dtype)
        if self.fuse_wgrad_accumulation:
            make = functools.partial(self._into_main_grad, dy_col, x_col)
        if self.wgrad_store is None:
            return make()
        self.wgrad_store.append(make)
        return [None] * self.experts

    def _into_grad(self, dy_col: Operand, x_col: Operand, dtype: torch.dtype):
        return self.run("wgrad", dy_col, x_col, dtype).unbind()

    def _into_main_grad(self, dy_col: Operand, x_col: Operand):
        """Add dW to main_grad, with one rounding to its dtype after those of the kernel."""
        if self._is_loop("wgrad"):
            self._each_into_main_grad(dy_col, x_col)
        else:
            self._all_into_main_grad(dy_col, x_col)
        return [dummy_gradient(parameter) for parameter in self.parameters]

    def _all_into_main_grad(self, dy_col: Operand, x_col: Operand) -> None:
        out, accumulate = main_grads(self.parameters)
        grouped_gemm(
            self.kernels["wgrad"], "wgrad", dy_col.tokens, x_col.tokens, self.ends, torch.float32,
            column_ends=dy_col.column_ends, sizes=self.sizes, out=out, accumulate=accumulate,
            fast=self.binding.is_fast("wgrad"),
        )  # fmt: skip

    def _each_into_main_grad(self, dy_col: Operand, x_col: Operand) -> None:
        pairs = zip(dy_col.each(self.sizes), x_col.each(self.sizes), strict=True)
        for e, (parameter, pair) in enumerate(zip(self.parameters, pairs, strict=True)):
            if parameter.requires_grad:
                add_to_main_grad(parameter, functools.partial(self._one, "wgrad", e, *pair))


class GroupedLinearFunction(torch.autograd.Function):
    """Y_e = X_e W_eᵀ + b_e of x [M, K], E weights [N, K] and then E biases [N] or none."""

    @staticmethod
    def forward(ctx, x, call: GroupedCall, *parameters):
        with without_autocast(x.device):
            weights, biases = parameters[: call.experts], parameters[call.experts :]
            ctx.x_dtype, ctx.weight_dtype = x.dtype, weights[0].dtype
            ctx.bias_dtype = biases[0].dtype if biases else None
            c = call.compute_dtype
            x = x.to(c).contiguous()
            is_late = call.save_original_input and call.needs_wgrad
            x_planes = call.cast_tokens("input", x, True, call.needs_wgrad and not is_late)
            w_planes = _weight_planes(call, weights)
            y = call.run(
                "fprop", x_planes["rowwise"], w_planes["rowwise"], c, [b.to(c) for b in biases]
            )
        ctx.call = call
        saved = (
            x_planes["columnwise"] if call.needs_wgrad else None,
            w_planes["columnwise"] if call.needs_dgrad else None,
        )
        packed = [(None, []) if operand is None else operand.unpack() for operand in saved]
        ctx.operands = [bare for bare, _ in packed]
        ctx.counts = [len(tensors) for _, tensors in packed]
        # Autograd sees changes of weights, of which planes in high precision are views.
        held = [t for t in packed[1][1] if t is not None]
        seen = weights if any(share_storage(t, weights[0]) for t in held) else ()
        ctx.save_for_backward(x if is_late else None, *packed[0][1], *packed[1][1], *seen)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        call, experts = ctx.call, ctx.call.experts
        with without_autocast(grad_output.device):
            x, *tensors = ctx.saved_tensors
            split = ctx.counts[0]
            x_col, w_col = (
                None if bare is None else bare.pack(held)
                for bare, held in zip(ctx.operands, (tensors[:split], tensors[split:]), strict=True)
            )
            dy = grad_output.to(call.compute_dtype).contiguous()
            planes = call.cast_tokens("grad_output", dy, call.needs_dgrad, call.needs_wgrad)

            grad_biases = [None] * (experts if ctx.bias_dtype is not None else 0)
            if any(ctx.needs_input_grad[2 + experts :]):
                grad_biases = [g.to(ctx.bias_dtype) for g in call.bias_gradients(dy)]

            grad_x = None
            if call.needs_dgrad:
                grad_x = call.run("dgrad", planes["rowwise"], w_col, ctx.x_dtype)

            grad_weights = [None] * experts
            if call.needs_wgrad:
                if x_col is None:
                    x_col = call.cast_tokens("input", x, False, True)["columnwise"]
                grad_weights = call.weight_gradients(planes["columnwise"], x_col, ctx.weight_dtype)
        return grad_x, None, *grad_weights, *grad_biases


def _weight_planes(call: GroupedCall, weights) -> dict[Direction, Operand | None]:
    """Planes of the weights, from the cache where it holds them."""
    cached = call.cache.planes if call.cache else {"rowwise": None, "columnwise": None}
    need_col = call.needs_dgrad and cached["columnwise"] is None
    made = call.cast_weights(weights, cached["rowwise"] is None, need_col)
    planes = {d: cached[d] or made[d] for d in cached}
    if call.cache:
        call.cache.planes = planes
    return planes
