"""The short way through a grouped linear layer: one compiled operator, forward and backward.

What it computes is what grouped_linear_function.py computes, bit for bit; that file serves every
case and is this one's oracle. This one serves what a mixture of experts trains with: one rank, FP8
forward and dgrad, FP8 or BF16 wgrad, sizes on the host, no biases, nothing kept or put off.
Weight gradients may go to main_grad: that node is Python's, between two compiled calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..extension import why_unavailable
from ..formats.plane import DIRECTIONS
from ..formats.quantizer import Quantizer
from ..ops import grouped_kernels, lt
from ..ops.gemm import gemm_counter, scale_kind
from ..ops.grouped import GroupedKernel
from ..roles import LINEAR_GEMMS
from .binding import Binding
from .direct_linear import DTYPES, SLOTS, pack_slot
from .grouped_weights import weight_ends
from .main_grad import dummy_gradient, main_grads

_ops = torch.ops.dist_finegrain


@dataclasses.dataclass(frozen=True)
class DirectGrouped:
    """A binding of E experts as the operator ``grouped_linear`` is told of it; made once.

    delayed: in the operator's order, for each slot the scales that every expert's row reads, the
    amaxes that they raise, and those of the columns; [] where there is none.
    """

    plan: list[int]
    epsilons: list[float]
    delayed: list[torch.Tensor | None]
    weight_ends: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        binding: Binding,
        quantizers: Mapping[str, Sequence[Quantizer]],
        kernels: Mapping[str, GroupedKernel | None],
        together: frozenset[str],
        device: torch.device,
    ) -> DirectGrouped | None:
        """None where the operator does not offer something that the binding needs.

        quantizers: of each tensor type, one per expert; kernels, together: as in ``Ways``.
        """
        if why_unavailable(device) or lt.available(device) or not set(quantizers) <= together:
            return None
        operands, fast = {}, []
        for gemm in LINEAR_GEMMS:
            kernel = kernels.get(gemm.gemm)
            if gemm.gemm not in kernels:
                break
            a, b = (quantizers[slot][0].plane_format(d) for slot, d in gemm.sides)
            runs = {grouped_kernels.cublaslt}
            if gemm.gemm == "wgrad" and not any(getattr(f, "dtype", None) for f in (a, b)):
                runs.add(grouped_kernels.identity)
            if kernel is None or kernel.run not in runs:
                return None
            if {scale_kind(a), scale_kind(b)} == {"tensor", "row"}:
                return None  # a tensor's scale would have to be repeated for each row
            operands[gemm.gemm] = a, b
            fast.append(int(binding.is_fast(gemm.gemm) and kernel.has_fast))
        weight = [scale_kind(quantizers["weight"][0].plane_format(d)) for d in DIRECTIONS]
        if "128x128" in weight and weight[0] != weight[1]:
            return None  # 128×128 blocks are cast as one matrix, other formats by expert
        plan, epsilons, delayed = [], [], []
        for slot in SLOTS:
            packed = [pack_slot(q) for q in quantizers.get(slot, (None,))]
            if packed[0] is None:
                return None
            plan, epsilons = plan + packed[0].words, epsilons + packed[0].epsilons
            # Bound quantizers keep their tensors: they are listed once.
            experts = packed if len(packed) > 1 else packed * len(quantizers["weight"])
            for side in zip(*(p.delayed for p in experts), strict=True):
                delayed += [None if child is None else child.scale for child in side]
                delayed += [None if child is None else child.amax for child in side]
        plan += fast + [0] * (len(LINEAR_GEMMS) - len(fast)) + [gemm_counter(operands)]
        return cls(plan, epsilons, delayed if any(t is not None for t in delayed) else [])

    @staticmethod
    def takes(x: torch.Tensor, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether x [M, K] is contiguous and all are plain 16-bit tensors."""
        if dtype not in DTYPES or x.dtype != dtype or type(x) is not torch.Tensor:
            return False
        are_plain = all(
            type(w) in (torch.Tensor, torch.nn.Parameter) and w.dtype == dtype for w in weights
        )
        return are_plain and x.numel() > 0 and x.is_contiguous()

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        sizes: Sequence[int],
        ends: torch.Tensor,
        training: bool,
        into_main_grad: bool = False,
    ) -> torch.Tensor:
        """Y [M, N] of what ``takes`` accepts; ``training``: delayed amaxes count.

        sizes: rows of each expert; ends: int32 [E] on the device, where they end. into_main_grad:
        gradients of weights are added there, as ``fuse_wgrad_accumulation`` says.
        """
        with_grad = torch.is_grad_enabled()
        needs_dgrad = with_grad and x.requires_grad
        needs_wgrad = with_grad and any(w.requires_grad for w in weights)
        arguments = self.plan, self.epsilons, self.delayed, sizes, ends
        if into_main_grad and needs_wgrad:
            call = _Call(arguments, self._weight_ends(weights), weights, training)
            return _IntoMainGrad.apply(x, call, *weights)
        return _ops.grouped_linear.default(
            x, weights, *arguments, self._weight_ends(weights), needs_dgrad, needs_wgrad, training
        )

    def _weight_ends(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        rows, device = weights[0].shape[0], weights[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A graph's own: it lives as long as its replays, and holds nothing before them.
            return weight_ends(len(weights), rows, device)
        if rows not in self.weight_ends:
            self.weight_ends[rows] = weight_ends(len(weights), rows, device)
        return self.weight_ends[rows]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the node below is told beside tensors.

    arguments: plan, epsilons, delayed state, sizes and ends, as both operators take them;
    parameters: the weights, which own their main_grads; record: delayed amaxes count.
    """

    arguments: tuple
    weight_ends: torch.Tensor
    parameters: Sequence[torch.nn.Parameter]
    record: bool


class _IntoMainGrad(torch.autograd.Function):
    """Y of x [M, K] and E weights [N, K], whose main_grads are looked up when backward runs."""

    @staticmethod
    def forward(ctx, x, call: _Call, *weights):
        ctx.call, ctx.needs_dgrad = call, x.requires_grad
        y, *saved = _ops.grouped_linear_forward.default(
            x, weights, *call.arguments, call.weight_ends, ctx.needs_dgrad, True, call.record
        )
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        call = ctx.call
        grad_x = _ops.grouped_linear_backward.default(
            grad, ctx.saved_tensors, *call.arguments, ctx.needs_dgrad, call.record,
            *main_grads(call.parameters),
        )  # fmt: skip
        return grad_x, None, *map(dummy_gradient, call.parameters)
