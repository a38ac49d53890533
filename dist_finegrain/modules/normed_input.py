"""The norm in front of LayerNormLinear and LayerNormMLP: its parameters, marks and shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .linear import Linear, _to_local
from .mappings import gather_rows, sum_gradient
from .norms import Norm


class NormedInput:
    """Mixin of a module that owns ``layer_norm_weight`` and ``layer_norm_bias`` [h].

    Both are whole on every rank. Under sequence parallelism each rank normalizes its own rows, so
    gradients are partial sums: plain parameters are marked ``sequence_parallel`` and the trainer
    adds them up, as in Megatron; those of a DTensor are summed here. RMSNorm has no bias.
    """

    _norm: Norm
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool

    def _set_norm(self, norm: Norm, returns_output: bool, returns_gathered: bool) -> None:
        if returns_gathered and not returns_output:
            raise ValueError(
                "return_layernorm_output_gathered=True with return_layernorm_output=False; "
                "accepted: both True, or return_layernorm_output_gathered=False"
            )
        self._norm = norm
        self.return_layernorm_output = returns_output
        self.return_layernorm_output_gathered = returns_gathered

    def _make_norm_parameters(self, features: int, dtype: torch.dtype, device, mesh) -> None:
        """Register uninitialised parameters, replicated DTensors if there is a ``mesh``."""
        for name, is_there in (("weight", True), ("bias", self._norm.has_bias)):
            parameter = None
            if is_there:
                local = torch.empty(features, dtype=dtype, device=device)
                if mesh is not None:
                    local = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
                parameter = torch.nn.Parameter(local)
            self.register_parameter(f"layer_norm_{name}", parameter)

    def _reset_norm_parameters(self) -> None:
        with torch.no_grad():
            self._norm.reset(_to_local(self.layer_norm_weight), _to_local(self.layer_norm_bias))

    def _mark_norm_parameters(self, linear: Linear) -> None:
        """Tell the trainer which gradients are partial sums; ``linear`` reads norm(x)."""
        if linear.sequence_parallel and linear.tp_mesh is None:
            for parameter in (self.layer_norm_weight, self.layer_norm_bias):
                if parameter is not None:
                    parameter.sequence_parallel = True

    def _normalize(self, x: torch.Tensor, dtype: torch.dtype, linear: Linear) -> torch.Tensor:
        """The norm of this rank's rows of x [..., h] in ``dtype``."""
        weight, bias = _to_local(self.layer_norm_weight), _to_local(self.layer_norm_bias)
        if linear.sequence_parallel and linear.tp_mesh is not None:
            weight = sum_gradient(weight, linear.tp_group)
            bias = None if bias is None else sum_gradient(bias, linear.tp_group)
        return self._norm(x, weight, bias, dtype)

    def _with_norm_output(self, result: Any, normed: torch.Tensor, linear: Linear) -> Any:
        """(y[, bias], normed) as Transformer Engine orders them, or the result alone."""
        if not self.return_layernorm_output:
            return result
        if self.return_layernorm_output_gathered and linear.sequence_parallel:
            normed = gather_rows(normed, linear.tp_group)
        return (*result, normed) if isinstance(result, tuple) else (result, normed)
