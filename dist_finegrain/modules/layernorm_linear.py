"""LayerNormLinear: y = norm(x) Wᵀ + b, the Linear that follows a norm in a transformer layer."""

from __future__ import annotations

from typing import Any

import torch

from .compiled import traceable
from .linear import Linear
from .normed_input import NormedInput
from .norms import Norm


class LayerNormLinear(NormedInput, Linear):
    """Applies y = norm(x) Wᵀ + b; its slots, weight and bias are Linear's.

    weight [out_features, in_features], bias [out_features]: both out/tp with
    parallel_mode="column". layer_norm_weight, layer_norm_bias [in_features] (RMSNorm: no bias).

    eps: added to the variance (RMSNorm: to the mean square).
    normalization: "LayerNorm" or "RMSNorm".
    zero_centered_gamma: the norm multiplies by 1 + layer_norm_weight.
    return_layernorm_output: also return norm(x) in the compute dtype.
    return_layernorm_output_gathered: return it after the gather of sequence parallelism.
    parallel_mode: None or "column"; under sequence_parallel the norm runs on this rank's rows,
    which are gathered after it, and layer_norm gradients are partial sums: plain parameters are
    marked ``sequence_parallel`` for the trainer, DTensors (tp_mesh) are summed in backward.
    Every other argument is Linear's.

    forward: x [..., in_features] as Linear's. Returns y [..., out_features] (out/tp in column
    mode), or a tuple: y, then bias with return_bias, then norm(x) with return_layernorm_output.

    Raises ValueError / TypeError naming the argument, what was got, what is accepted and a valid
    value, before any launch, collective or state change.
    """

    _label = "LayerNormLinear"
    reads_norm = True  # plan() says that the cast of x is not fused with it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parallel_mode: str | None = None,
        **linear_options: Any,
    ):
        if parallel_mode == "row":
            raise ValueError(
                "parallel_mode='row' in LayerNormLinear: a norm needs whole rows of x, "
                "which row mode shards; accepted: None or 'column', e.g. parallel_mode='column'"
            )
        # Before Linear's constructor, which makes the parameters.
        self._set_norm(
            Norm(normalization, eps, zero_centered_gamma),
            return_layernorm_output,
            return_layernorm_output_gathered,
        )
        super().__init__(in_features, out_features, parallel_mode=parallel_mode, **linear_options)

    def _make_parameters(self, bias: bool, dtype: torch.dtype, device) -> None:
        self._make_norm_parameters(self.in_features, dtype, device, self.tp_mesh)
        super()._make_parameters(bias, dtype, device)

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        self._mark_norm_parameters(self)

    def reset_parameters(self) -> None:
        """Linear's initialisation, and a norm that scales by 1 and shifts by 0."""
        self._reset_norm_parameters()
        super().reset_parameters()

    @traceable
    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None):
        """y of x [..., in_features]; see the class for what else is returned.

        is_first_microbatch: as for Linear.
        """
        compute_dtype = self._check_input(x)
        binding = self.bind(x.device, compute_dtype)
        normed = self._normalize(x, compute_dtype, self)
        result = self._multiply(normed, binding, compute_dtype, is_first_microbatch)
        return self._with_norm_output(result, normed, self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, normalization={self._norm.normalization!r}"
