"""LayerNormMLP: y = act(norm(x) W₁ᵀ + b₁) W₂ᵀ + b₂, the feed-forward half of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..distributed import collectives
from ..roles import Slot, layernorm_mlp_slots
from .activations import activate, check_activation, is_gated
from .compiled import traceable
from .composite import Composite, Part
from .normed_input import NormedInput
from .norms import Norm


class LayerNormMLP(NormedInput, Composite):
    """Applies y = act(norm(x) W₁ᵀ + b₁) W₂ᵀ + b₂.

    With f = ffn_hidden_size, F = 2f for a gated activation and f otherwise, h = hidden_size:
    layer_norm_weight, layer_norm_bias [h] (RMSNorm: no bias); fc1_weight [F, h], fc1_bias [F];
    fc2_weight [h, f], fc2_bias [h]. set_parallel_mode shards fc1 by columns, fc1_weight [F/tp, h]
    and fc1_bias [F/tp], and fc2 by rows, fc2_weight [h, f/tp]. A gated activation applies its
    function to the first half of this rank's rows of fc1 and multiplies by the second.

    eps, normalization, zero_centered_gamma, return_layernorm_output and
    return_layernorm_output_gathered: as in LayerNormLinear.
    activation: a name in modules/activations.py, "gelu" (tanh form), "swiglu", "srelu" (ReLU²), ….
    sequence_parallel: x and y are sharded along their first dimension; rows are gathered for fc1
    and scattered after fc2.
    init_method, output_layer_init_method: for fc1_weight and fc2_weight; default normal(0, 0.023).
    return_bias: do not add fc2_bias; forward returns it too.
    bias: of both layers. delay_wgrad_compute: ``backward_dw()`` computes fc2's and then fc1's dW.
    tp_group, tp_size, tp_mesh, fuse_wgrad_accumulation, get_rng_state_tracker, rng_tracker_name,
    params_dtype, device, symmetric_ar_type, ub_*: as in Linear.
    name: this instance's name; the layers are ``<name>.fc1`` and ``<name>.fc2`` in ``role.name``.

    forward: x [..., h] ([s/tp, ..., h] under sequence_parallel), dtype as for Linear. Returns y of
    x's shape, or a tuple: y, then bias with return_bias, then norm(x) with return_layernorm_output.

    Raises ValueError / TypeError naming the argument, what was got, what is accepted and a valid
    value, before any launch, collective or state change.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        ub_name: str | None = None,
        name: str | None = None,
        **ub_options: Any,
    ):
        check_activation(activation)
        norm = Norm(normalization, eps, zero_centered_gamma)
        if set_parallel_mode:
            _check_shards(ffn_hidden_size, activation, tp_group, tp_size, tp_mesh)
        super().__init__(name)
        self._set_norm(norm, return_layernorm_output, return_layernorm_output_gathered)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation = activation
        self.set_parallel_mode = set_parallel_mode
        # These keep their place at the front of the state dict; the parts check all arguments.
        self.register_parameter("layer_norm_weight", None)
        self.register_parameter("layer_norm_bias", None)
        shared = {
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "tp_mesh": tp_mesh,
            "get_rng_state_tracker": get_rng_state_tracker,
            "rng_tracker_name": rng_tracker_name,
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "delay_wgrad_compute": delay_wgrad_compute,
            "symmetric_ar_type": symmetric_ar_type,
            "ub_name": ub_name,
            **ub_options,
        }
        self.fc1 = Part(
            self,
            "fc1",
            hidden_size,
            ffn_hidden_size * (2 if is_gated(activation) else 1),
            init_method=init_method,
            parallel_mode="column" if set_parallel_mode else None,
            **shared,
        )
        self.fc1.reads_norm = True  # as in LayerNormLinear
        self.fc2 = Part(
            self,
            "fc2",
            ffn_hidden_size,
            hidden_size,
            init_method=output_layer_init_method,
            parallel_mode="row" if set_parallel_mode else None,
            return_bias=return_bias,
            **shared,
        )
        dtype = params_dtype or torch.get_default_dtype()
        self._make_norm_parameters(hidden_size, dtype, device, self.fc1.tp_mesh)
        self._reset_norm_parameters()
        for part in self.parts():
            part.quantize_parameters()
        self._mark_parameters()

    # Parts.
    def parts(self) -> tuple[Part, Part]:
        return self.fc1, self.fc2

    def slots_of_parts(self) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
        names = (self.fc1.name, self.fc2.name)
        return layernorm_mlp_slots(*names, self._output_role, self._grad_input_role)

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        self._mark_norm_parameters(self.fc1)
        if self.set_parallel_mode and is_gated(self.activation):
            for parameter in (self.fc1_weight, self.fc1_bias):
                if parameter is not None:
                    parameter.partition_stride = 2  # this rank's rows are two pieces of the whole

    def reset_parameters(self) -> None:
        """Initialise both weights, zero biases, and a norm that scales by 1 and shifts by 0."""
        self._reset_norm_parameters()
        for part in self.parts():
            part.reset_parameters()

    # Forward.
    @traceable
    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None):
        """y of x [..., hidden_size]; see the class for what else is returned.

        is_first_microbatch: as for Linear, for both weights.
        """
        fc1, fc2 = self.parts()
        compute_dtype = fc1._check_input(x)
        fc2._check_main_grad(self.fc2_weight, f"LayerNormMLP {fc2.name!r}")
        first, second = self.bind_parts(x.device, compute_dtype)
        normed = self._normalize(x, compute_dtype, fc1)
        hidden = fc1._multiply(normed, first, compute_dtype, is_first_microbatch)
        hidden = activate(self.activation, hidden)
        result = fc2._multiply(hidden, second, compute_dtype, is_first_microbatch)
        return self._with_norm_output(result, normed, fc1)

    def extra_repr(self) -> str:
        parts = [f"{self.hidden_size}, {self.ffn_hidden_size}", f"activation={self.activation!r}"]
        parts.append(f"normalization={self._norm.normalization!r}")
        if self.name:
            parts.append(f"name={self.name!r}")
        return ", ".join(parts)


def _check_shards(width: int, activation: str, tp_group, tp_size: int, tp_mesh) -> None:
    """What tensor parallelism asks of the width; Linear checks the groups themselves."""
    group = tp_group if tp_mesh is None or tp_mesh.ndim != 1 else tp_mesh.get_group()
    ranks = tp_size if group is None else collectives.group_size(group)
    if ranks > 1 and width % ranks:
        raise ValueError(
            f"ffn_hidden_size={width} is not a multiple of the tensor-parallel size {ranks}; "
            f"e.g. ffn_hidden_size={math.ceil(width / ranks) * ranks}"
        )
    if ranks > 1 and tp_mesh is not None and is_gated(activation):
        raise ValueError(
            f"activation={activation!r} with a tp_mesh of {ranks} ranks: each rank's rows of fc1 "
            "are two pieces of the whole, which a DTensor's Shard(0) does not say, so that a "
            "checkpoint would load wrong at another size; accepted: an activation without a gate, "
            "or tp_group=mesh.get_group() instead of tp_mesh"
        )
