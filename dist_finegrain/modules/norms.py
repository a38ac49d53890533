"""LayerNorm and RMSNorm over the last dimension: statistics and arithmetic in FP32.

    LayerNorm  y = (x − mean) · rsqrt(var + eps) · γ + β      x [..., h]; γ, β [h]
    RMSNorm    y = x · rsqrt(mean(x²) + eps) · γ

zero_centered_gamma: γ = 1 + weight, added in FP32: BF16 has no number between 1 and 1.0078.
One fused kernel where there is one: apex's on CUDA, else torch's.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from .. import apex
from .torch_autocast import without_autocast

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm without its parameters. Raises ValueError for an unknown normalization or eps ≤ 0."""

    normalization: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self):
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(
                f"normalization={self.normalization!r}; accepted: {NORMALIZATIONS}, "
                "e.g. normalization='RMSNorm'"
            )
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps}; accepted: a positive number, e.g. eps=1e-5")

    @property
    def has_bias(self) -> bool:
        """RMSNorm has a weight only."""
        return self.normalization == "LayerNorm"

    def reset(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Fill the parameters so that γ = 1 and β = 0."""
        weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
        if bias is not None:
            bias.zero_()

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The norm of x [..., h] in ``dtype`` (default x's); weight, bias [h], all floating."""
        with without_autocast(x.device):
            if self.zero_centered_gamma:
                weight = weight.float() + 1
            if x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype):
                return self._fused(x, weight, bias).to(dtype or x.dtype)
            return _MixedNorm.apply(x, weight, bias, self, dtype or x.dtype)

    def _fused(self, x, weight, bias) -> torch.Tensor:
        shape = (x.shape[-1],)
        functions = apex.norm_functions()[0] if x.is_cuda else {}
        if self.has_bias:
            if functions:
                return functions["fused_layer_norm_affine"](x, weight, bias, shape, self.eps)
            return F.layer_norm(x, shape, weight, bias, self.eps)
        if functions:
            return functions["fused_rms_norm_affine"](x, weight, shape, self.eps)
        return F.rms_norm(x, shape, weight, self.eps)


class _MixedNorm(torch.autograd.Function):
    """Norm of x whose dtype is not the weight's: FP32 inside, x itself saved, rounded once."""

    @staticmethod
    def forward(ctx, x, weight, bias, norm: Norm, dtype: torch.dtype):
        x32, gamma = x.float(), weight.float()
        ctx.norm, ctx.bias_dtype = norm, None if bias is None else bias.dtype
        mean = None
        if norm.has_bias:
            shape = (x.shape[-1],)
            y, mean, rstd = torch.native_layer_norm(x32, shape, gamma, bias.float(), norm.eps)
        else:
            rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + norm.eps)
            y = x32 * rstd * gamma
        ctx.save_for_backward(x, weight, mean, rstd)
        return y.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, mean, rstd = ctx.saved_tensors
        x32, gamma, grad = x.float(), weight.float(), grad.float()
        normed = (x32 if mean is None else x32 - mean) * rstd
        leading = tuple(range(x.dim() - 1))
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            scaled = grad * gamma
            grad_x = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
            if mean is not None:
                grad_x = grad_x - scaled.mean(-1, keepdim=True)
            grad_x = (grad_x * rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _sum(grad * normed, leading).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = _sum(grad, leading).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _sum(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.sum(dims) if dims else x  # sum(()) would sum everything
