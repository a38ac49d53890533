"""The short way through a linear layer: one compiled operator, forward and backward.

What it computes is what linear_function.py computes, bit for bit; that file serves every case and
is this one's oracle. This one serves the case in which a small layer would wait for the host:
one rank, native formats of two buffers, 16-bit tensors of whole tiles, nothing kept or put off.
"""

from __future__ import annotations

import dataclasses

import torch

from ..extension import why_unavailable
from ..formats.fused_options import is_measured, options_of
from ..formats.identity import IdentityFormat
from ..formats.plane import DIRECTIONS, Format
from ..formats.quantizer import Quantizer
from ..ops import lt
from ..ops.gemm import gemm_counter, scale_kind
from ..roles import LINEAR_GEMMS
from .binding import Binding
from .main_grad import dummy_gradient, main_grads

_ops = torch.ops.dist_finegrain
TILE = 16  # rows and columns that are stored without padding are multiples of it
DTYPES = (torch.bfloat16, torch.float16)
SLOTS = ("input", "weight", "grad_output")
_TWO_BUFFERS = ("float8", "float8_block")  # codes and one buffer of FP32 scales


@dataclasses.dataclass(frozen=True)
class DirectLinear:
    """A binding as the operator ``linear`` is told of it; made once.

    delayed: in the operator's order, row and column of input, weight and grad_output, the scale
    that each reads and the amax that it raises; [] where there is none.
    """

    plan: list[int]
    epsilons: list[float]
    delayed: list[torch.Tensor | None]
    has_fp8_wgrad: bool

    @classmethod
    def for_use(cls, binding: Binding, device: torch.device) -> DirectLinear | None:
        """``of`` these, remembered for as long as the binding knows no other kernels."""
        key = (device, len(binding.kernels))
        if key not in binding.direct:
            binding.direct[key] = cls.of(binding, device)
        return binding.direct[key]

    @classmethod
    def of(cls, binding: Binding, device: torch.device) -> DirectLinear | None:
        """None where the operator does not offer something that the binding needs."""
        if why_unavailable(device):
            return None
        operands, fast = {}, []
        for gemm in LINEAR_GEMMS:
            if gemm.gemm not in binding.kernels:
                break
            kernel = binding.kernels[gemm.gemm]
            a, b = (binding.quantizers[s].plane_format(d) for s, d in gemm.sides)
            if kernel.execution != "native" or not _is_offered(a, b, device):
                return None
            operands[gemm.gemm] = a, b
            fast.append(int(binding.is_fast(gemm.gemm) and kernel.has_fast))
        plan, epsilons, delayed = [], [], []
        for slot in SLOTS:
            packed = pack_slot(binding.quantizers.get(slot))
            if packed is None:
                return None
            plan, epsilons = plan + packed.words, epsilons + packed.epsilons
            for child in packed.delayed:  # bound quantizers keep their tensors
                delayed += [None, None] if child is None else [child.scale, child.amax]
        plan += fast + [0] * (len(LINEAR_GEMMS) - len(fast)) + [gemm_counter(operands)]
        has_fp8_wgrad = "wgrad" in operands and operands["wgrad"][0].family != "identity"
        delayed = delayed if any(t is not None for t in delayed) else []
        return cls(plan, epsilons, delayed, has_fp8_wgrad)

    @staticmethod
    def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype) -> bool:
        """Whether these are plain contiguous 16-bit matrices [M, K], [N, K] of whole tiles."""
        if x.dtype != dtype or weight.dtype != dtype or dtype not in DTYPES:
            return False
        if bias is not None and not (
            bias.dtype == dtype and bias.is_contiguous() and lt.is_aligned(bias)
        ):
            return False
        rows, columns = x.shape
        is_whole = rows % TILE == 0 and columns % TILE == 0 and weight.shape[0] % TILE == 0
        is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and type(x) is torch.Tensor
        return is_whole and rows > 0 and is_plain and x.is_contiguous() and weight.is_contiguous()

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        training: bool,
        into_main_grad: bool = False,
    ) -> torch.Tensor:
        """Y = X Wᵀ + b, [M, N], of what ``takes`` accepts; ``training``: delayed amaxes count.

        into_main_grad: the weight's gradient goes there, as ``fuse_wgrad_accumulation`` says; only
        with ``has_fp8_wgrad``.
        """
        with_grad = torch.is_grad_enabled()
        needs_wgrad = with_grad and weight.requires_grad
        if into_main_grad and needs_wgrad:
            return _IntoMainGrad.apply(x, weight, bias, self, training)
        return _ops.linear.default(
            x, weight, bias, self.plan, self.epsilons, self.delayed, with_grad and x.requires_grad,
            needs_wgrad, training,
        )  # fmt: skip


class _IntoMainGrad(torch.autograd.Function):
    """Y of x [M, K] and the weight [N, K], whose main_grad is looked up when backward runs."""

    @staticmethod
    def forward(ctx, x, weight, bias, direct: DirectLinear, training: bool):
        ctx.arguments = direct.plan, direct.epsilons, direct.delayed
        ctx.parameter, ctx.training = weight, training
        y, *saved = _ops.linear_forward.default(
            x, weight, bias, *ctx.arguments, x.requires_grad, True, training
        )
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (main_grad,), (is_sum,) = main_grads([ctx.parameter])
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        grad_x, grad_bias = _ops.linear_backward.default(
            grad, ctx.saved_tensors, *ctx.arguments, needs_x, needs_bias, ctx.training, main_grad,
            is_sum,
        )  # fmt: skip
        return grad_x, dummy_gradient(ctx.parameter), grad_bias, None, None


@dataclasses.dataclass(frozen=True)
class PackedSlot:
    """One slot as operators of whole layers are told of it.

    words: options of row and column, whether the column is made of the row's values; delayed: the
    quantizers of row and column whose scale is given, None without.
    """

    words: list[int]
    epsilons: list[float]
    delayed: list[Quantizer | None]


def pack_slot(quantizer: Quantizer | None) -> PackedSlot | None:
    """None for what no operator offers; zeros for a slot that was not asked for yet."""
    if quantizer is None:
        return PackedSlot([0] * 3, [0.0] * 2, [None] * 2)
    formats = [quantizer.plane_format(direction) for direction in DIRECTIONS]
    if any(f.family != "identity" and f.codec is None for f in formats):
        return None  # the user's own, even if no GEMM reads that plane
    is_dequantized = quantizer.columnwise_source != "original"
    if is_dequantized and not _is_made_of_rows(*formats):
        return None
    row, column = (options_of(format) for format in formats)
    return PackedSlot(
        [row.packed, column.packed, int(is_dequantized)],
        [row.epsilon, column.epsilon],
        [
            quantizer.child(direction) if format.statistic == "scale" else None
            for direction, format in zip(DIRECTIONS, formats, strict=True)
        ],
    )


def _is_offered(a: Format, b: Format, device: torch.device) -> bool:
    """Whether the operator multiplies planes of these formats as the binding's kernel does."""
    if type(a) is type(b) is IdentityFormat:
        return a.dtype is None and b.dtype is None
    if lt.available(device) or not {a.codec, b.codec} <= set(_TWO_BUFFERS):
        return False
    # A per-tensor scale beside row scales would have to be repeated for each row.
    kinds = {scale_kind(a), scale_kind(b)}
    return "row" not in kinds or len(kinds) == 1


def _is_made_of_rows(row: Format, column: Format) -> bool:
    """Whether a cast makes this column of the row's values, with nothing to measure in between."""
    return "identity" not in (row.family, column.family) and not is_measured(column)
