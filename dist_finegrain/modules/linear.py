"""Linear: y = x Wᵀ + b, tensor-parallel, quantized per tensor and GEMM as the recipe says."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..distributed import collectives
from ..formats.dtypes import check_high_precision
from ..formats.tensors import QuantizedTensor
from ..resolution import Site
from ..roles import Slot, linear_slots
from .base import QuantizedModule
from .binding import Binding
from .compiled import traceable, traced_linear
from .direct_linear import DirectLinear
from .linear_function import LinearCall, LinearFunction
from .quantized_weights import forget_initial_value, quantize_parameters, stored_planes
from .torch_autocast import compute_dtype, without_autocast
from .weight_cache import WeightCache

PARALLEL_MODES = (None, "column", "row")
_WEIGHT_STD = 0.023  # Transformer Engine's default init: normal(0, 0.023)


class Linear(QuantizedModule):
    """Applies y = x Wᵀ + b.

    weight [out_features, in_features]: [out/tp, in] with parallel_mode="column", [out, in/tp] with
    "row". bias [out_features], [out/tp] in column mode.

    in_features, out_features: sizes of the whole layer, over all tp ranks.
    sequence_parallel: x (column) or y (row) is sharded along its first dimension.
    fuse_wgrad_accumulation: add dW to ``weight.main_grad`` (Megatron's protocol:
    ``overwrite_main_grad`` replaces, ``grad_added_to_main_grad`` is set when present).
    tp_group: tensor-parallel process group; parameters are plain shards. tp_size alone: the group
    comes later by ``set_tensor_parallel_group``. tp_mesh: 1-D DeviceMesh instead; parameters are
    DTensors, Shard(0) in column mode and Shard(1) in row mode.
    get_rng_state_tracker, rng_tracker_name: random state under which sharded weights are made.
    init_method: called with the weight shard; default normal(0, 0.023). bias: zeros.
    return_bias: do not add the bias; forward returns (y, bias).
    params_dtype: default torch.get_default_dtype(). device: None means torch's default.
    parameters_split: names (or name → out_features) of weights that together form the weight, e.g.
    ("query_", "key_", "value_"); the parameters are then ``query_weight`` and so on.
    delay_wgrad_compute: dW is computed by ``backward_dw()`` instead of in backward.
    save_original_input: save x itself instead of its columnwise plane, which backward then makes.
    ub_overlap_*, ub_name, symmetric_ar_type: refused unless default.
    name: this instance's name in ``role.name``, e.g. "decoder.3.fc2".

    forward: x [..., in_features] (row mode: in/tp) in float32, float16 or bfloat16; outside of
    torch.autocast its dtype must be the parameters'. Returns y [..., out_features], out/tp in
    column mode.

    Raises ValueError / TypeError naming the argument, what was got, what is accepted and a valid
    value, before any launch, collective or state change.
    """

    _label = "Linear"  # what errors about x call this module

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: tuple[str, ...] | dict[str, int] | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        symmetric_ar_type: str | None = None,
        ub_name: str | None = None,
        name: str | None = None,
        **ub_options: Any,
    ):
        _refuse_unsupported(ub_options, ub_name, symmetric_ar_type)
        if tp_mesh is not None:
            if tp_group is not None or tp_mesh.ndim != 1:
                raise ValueError(
                    f"tp_mesh has {tp_mesh.ndim} dimensions and tp_group is {tp_group}; accepted: "
                    "a 1-D mesh without tp_group, e.g. tp_mesh=mesh['tp']"
                )
            tp_group = tp_mesh.get_group()
        if tp_group is not None:
            tp_size = collectives.group_size(tp_group)
        check_sharding(parallel_mode, tp_size, in_features, out_features)
        params_dtype = params_dtype or torch.get_default_dtype()
        check_high_precision(params_dtype, "params_dtype")
        super().__init__(name)
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode = parallel_mode
        self.tp_size = tp_size if parallel_mode else 1
        self.tp_group = tp_group if parallel_mode else None
        self.tp_mesh = tp_mesh if parallel_mode else None
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self._init_method = init_method
        self._get_rng_state_tracker = get_rng_state_tracker
        self._rng_tracker_name = rng_tracker_name
        self._wgrad_store: list[Callable[[], torch.Tensor | None]] = []
        self._weight_cache: WeightCache | None = None
        self._weight_names = self._split_sizes(parameters_split)
        if parameters_split is not None and fuse_wgrad_accumulation | delay_wgrad_compute:
            raise ValueError(
                "parameters_split with fuse_wgrad_accumulation or delay_wgrad_compute: one GEMM "
                "gives the gradient of several parameters; accepted: parameters_split=None"
            )
        if tp_mesh is not None and fuse_wgrad_accumulation:
            raise ValueError(
                "fuse_wgrad_accumulation=True with tp_mesh: main_grad belongs to plain parameters; "
                "accepted: tp_group=mesh.get_group() instead of tp_mesh"
            )
        self._make_parameters(bias, params_dtype, device)

    # Sizes of this rank's shard.
    @property
    def local_in_features(self) -> int:
        """in_features of this rank: divided by tp in row mode."""
        return self.in_features // (self.tp_size if self.parallel_mode == "row" else 1)

    @property
    def local_out_features(self) -> int:
        """out_features of this rank: divided by tp in column mode."""
        return self.out_features // (self.tp_size if self.parallel_mode == "column" else 1)

    def _split_sizes(self, split) -> dict[str, int]:
        """Parameter prefix → out_features of this rank."""
        if split is None:
            return {"": self.local_out_features}
        if not isinstance(split, dict):
            share = self.out_features // max(len(split), 1)
            split = dict.fromkeys(split, share)
        ranks = self.tp_size if self.parallel_mode == "column" else 1
        if sum(split.values()) != self.out_features or any(n % ranks for n in split.values()):
            raise ValueError(
                f"parameters_split={split} must add up to out_features={self.out_features} in "
                f"multiples of the tensor-parallel size {ranks}"
            )
        return {prefix: size // ranks for prefix, size in split.items()}

    # Parameters.
    def _make_parameters(self, bias: bool, dtype: torch.dtype, device) -> None:
        for prefix, rows in self._weight_names.items():
            weight = torch.empty(rows, self.local_in_features, dtype=dtype, device=device)
            self._register(f"{prefix}weight", weight, 0 if self.parallel_mode == "column" else 1)
            if bias:
                self._register(f"{prefix}bias", torch.empty(rows, dtype=dtype, device=device), 0)
            else:
                self.register_parameter(f"{prefix}bias", None)
        self._mark_parameters()
        self.reset_parameters()
        self._quantize_parameters()

    def _quantize_parameters(self) -> None:
        """Store the weight quantized where quantized_model_init is open."""
        slot = next(s for s in self.get_quantizer_slots() if s.tensor_type == "weight")
        quantize_parameters(self, {"weight": slot})
        self._mark_parameters()

    def _register(self, name: str, local: torch.Tensor, shard_dim: int) -> None:
        """Register this rank's shard, as a DTensor if there is a tp_mesh."""
        is_replicated = self.parallel_mode is None or (
            self.parallel_mode == "row" and local.dim() == 1
        )
        if self.tp_mesh is not None:
            placement = Replicate() if is_replicated else Shard(shard_dim)
            local = DTensor.from_local(local, self.tp_mesh, [placement], run_check=False)
        self.register_parameter(name, torch.nn.Parameter(local))

    def _mark_parameters(self) -> None:
        """Set Megatron's attributes: how weights are sharded, which gradients are partial sums."""
        if self.parallel_mode is None:
            return
        column = self.parallel_mode == "column"
        for prefix in self._weight_names:
            weight, bias = (getattr(self, prefix + name) for name in ("weight", "bias"))
            for parameter in (weight, bias) if column else (weight,):
                if parameter is not None:
                    parameter.tensor_model_parallel = True
                    parameter.partition_dim = 0 if column else 1
                    parameter.partition_stride = 1
            if bias is not None and not column and self.sequence_parallel and not self.tp_mesh:
                bias.sequence_parallel = True  # each rank's gradient covers its rows only

    def reset_parameters(self) -> None:
        """Initialise weights (init_method, default normal(0, 0.023)) and set biases to zero."""
        init = self._init_method or (lambda w: torch.nn.init.normal_(w, mean=0.0, std=_WEIGHT_STD))
        fork = contextlib.nullcontext()
        if self._get_rng_state_tracker is not None and self.parallel_mode is not None:
            names = () if self._rng_tracker_name is None else (self._rng_tracker_name,)
            fork = self._get_rng_state_tracker().fork(*names)
        with torch.no_grad(), fork:
            for prefix in self._weight_names:
                weight = getattr(self, f"{prefix}weight")
                init(_to_local(weight))
                forget_initial_value(weight)
                bias = getattr(self, f"{prefix}bias")
                if bias is not None:
                    _to_local(bias).zero_()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the process group of a module that was built with tp_size only, or was unpickled."""
        size = collectives.group_size(tp_group)
        if size != self.tp_size:
            raise ValueError(
                f"tp_group has {size} ranks, the module was built for tp_size={self.tp_size}"
            )
        self.tp_group = tp_group
        self._outdate()

    # QuantizedModule.
    def get_quantizer_slots(self) -> tuple[Slot, ...]:
        return linear_slots(self.name, self._output_role, self._grad_input_role)

    def resolution_site(self, device: str) -> Site:
        return Site(
            self.name, self.module_type, device, self.local_in_features, self.local_out_features
        )

    def quantization_group(self) -> Any:
        return self.tp_group

    def _drop_weight_cache(self) -> None:
        self._weight_cache = None

    # Forward.
    @traceable
    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None):
        """y of x [..., in_features]; (y, bias) with return_bias.

        is_first_microbatch: True quantizes the weight and keeps it, False uses what is kept, None
        keeps nothing. A kept weight lasts until the step ends.
        """
        compute_dtype = self._check_input(x)
        binding = self.bind(x.device, compute_dtype)
        return self._multiply(x, binding, compute_dtype, is_first_microbatch)

    def _multiply(self, x, binding, compute_dtype: torch.dtype, is_first_microbatch: bool | None):
        """The layer of an x that was checked, under ``binding``: what forward returns."""
        weight, bias = self._weight(), self._bias()
        grad_enabled = torch.is_grad_enabled()
        added_bias = None if self.return_bias else bias
        # A view costs a node of the graph, and small layers wait for the host.
        matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if binding is None:
            y = traced_linear(self, matrix, weight, added_bias, compute_dtype)
            y = y.view(*self._output_shape(x))
            return (y, bias) if self.return_bias else y
        direct = None
        if self._is_simple(added_bias) and is_first_microbatch is None:
            direct = DirectLinear.for_use(binding, x.device)
        is_fused = self.fuse_wgrad_accumulation and weight.requires_grad and grad_enabled
        if direct and is_fused and not direct.has_fp8_wgrad:
            direct = None
        if direct and direct.takes(matrix, weight, added_bias, compute_dtype):
            training = grad_enabled and self.training
            y = direct(matrix, weight, added_bias, training, is_fused)
            y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])
            return (y, bias) if self.return_bias else y
        needs = (grad_enabled and x.requires_grad, grad_enabled and weight.requires_grad)
        cache = self._cache_for(is_first_microbatch, binding, compute_dtype)
        training = grad_enabled and self.training
        call = self.linear_call(binding, compute_dtype, *needs, training, cache)
        y = LinearFunction.apply(matrix, weight, added_bias, call)
        y = y.view(*self._output_shape(x))
        return (y, bias) if self.return_bias else y

    def linear_call(
        self,
        binding: Binding,
        compute_dtype: torch.dtype,
        needs_dgrad: bool,
        needs_wgrad: bool,
        training: bool,
        cache: WeightCache | None,
    ) -> LinearCall:
        """Everything about one forward that is not a tensor."""
        return LinearCall(
            name=self.name,
            binding=binding,
            compute_dtype=compute_dtype,
            parallel_mode=self.parallel_mode,
            sequence_parallel=self.sequence_parallel,
            group=self.tp_group,
            needs_dgrad=needs_dgrad,
            needs_wgrad=needs_wgrad,
            training=training,
            parameter=getattr(self, "weight", None),
            sums_bias_gradient=self.tp_mesh is not None,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            save_original_input=self.save_original_input,
            wgrad_store=self._wgrad_store if self.delay_wgrad_compute else None,
            cache=cache,
        )

    def linears(self) -> tuple[Linear, ...]:
        """The linear layers that this module runs."""
        return (self,)

    def why_eager(self) -> str:
        """Why this layer is no operator of its own in a compiled graph; "" when it is."""
        if self.tp_size > 1:
            return "the layer communicates with other ranks"
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute or self.save_original_input:
            return (
                "fuse_wgrad_accumulation, delay_wgrad_compute and save_original_input "
                "keep tensors that the graph does not see"
            )
        if any(type(p) is not torch.nn.Parameter for p in self.parameters()):
            return "a parameter is a QuantizedTensor or a DTensor"
        return ""

    def _is_simple(self, bias: torch.Tensor | None) -> bool:
        """Whether DirectLinear does all that this module was built for, with this bias."""
        is_alone = self.tp_size == 1 and not self.sequence_parallel
        adds_bias_later = self.parallel_mode == "row" and bias is not None
        keeps = self.delay_wgrad_compute or self.save_original_input
        return is_alone and not adds_bias_later and not keeps

    def _cache_for(self, is_first_microbatch: bool | None, binding, dtype) -> WeightCache | None:
        weight = getattr(self, "weight", None)
        if isinstance(weight, QuantizedTensor):
            planes = stored_planes(self, weight, binding, "weight", dtype)
            return WeightCache(binding, dtype, planes=planes)
        if is_first_microbatch is None:
            return None
        kept = self._weight_cache
        if is_first_microbatch or kept is None or not kept.is_valid(binding, dtype):
            self._weight_cache = WeightCache(binding, dtype)
        return self._weight_cache

    def _weight(self) -> torch.Tensor:
        parts = [_to_local(getattr(self, f"{prefix}weight")) for prefix in self._weight_names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _bias(self) -> torch.Tensor | None:
        parts = [_to_local(getattr(self, f"{prefix}bias")) for prefix in self._weight_names]
        if parts[0] is None:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _output_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        leading = list(x.shape[:-1])
        if self.sequence_parallel:
            if self.parallel_mode == "column":
                leading[0] *= self.tp_size
            else:
                leading[0] //= self.tp_size
        return (*leading, self.local_out_features)

    def _check_input(self, x: torch.Tensor) -> torch.dtype:
        """Everything a user can get wrong about x; returns the compute dtype."""
        label = f"{self._label} {self.name!r}" if self.name else f"an unnamed {self._label}"
        if x.dim() == 0 or x.shape[-1] != self.local_in_features:
            raise ValueError(
                f"x of {label} has shape {tuple(x.shape)}; its last dimension must be "
                f"{self.local_in_features} (in_features of this rank)"
            )
        check_high_precision(x.dtype, f"x of {label}")
        parameter = getattr(self, f"{next(iter(self._weight_names))}weight")
        if x.device != parameter.device:
            raise ValueError(
                f"x of {label} is on {x.device}, its weight on {parameter.device}; "
                f"e.g. x.to('{parameter.device}')"
            )
        if self.tp_size > 1 and self.tp_group is None:
            raise RuntimeError(
                f"{label} has tp_size={self.tp_size} but no process group; call "
                "set_tensor_parallel_group(group) first"
            )
        if self.sequence_parallel and x.dim() < 2:
            raise ValueError(
                f"x of {label} has shape {tuple(x.shape)}; sequence_parallel=True needs a leading "
                "sequence dimension, e.g. [tokens, features]"
            )
        if self.sequence_parallel and self.parallel_mode == "row" and x.shape[0] % self.tp_size:
            raise ValueError(
                f"x of {label} has {x.shape[0]} rows; sequence_parallel=True scatters dimension 0 "
                f"over {self.tp_size} ranks and needs a multiple of that"
            )
        self._check_main_grad(parameter, label)
        return _compute_dtype(x, parameter.dtype, label)

    def _check_main_grad(self, parameter: torch.Tensor, label: str) -> None:
        accumulates = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        main_grad = getattr(parameter, "main_grad", None)
        if (
            accumulates
            and parameter.requires_grad
            and getattr(main_grad, "shape", ()) != (parameter.shape)
        ):
            raise ValueError(
                f"fuse_wgrad_accumulation=True, but the weight of {label} has no main_grad of its "
                f"shape {tuple(parameter.shape)}; "
                "e.g. weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
            )

    # Delayed weight gradient.
    def backward_dw(self) -> None:
        """Compute the oldest weight gradient that ``delay_wgrad_compute`` put off; accumulate it.

        Does nothing when delay_wgrad_compute is off or the weight is frozen. Raises RuntimeError
        when none is waiting.
        """
        if not self.delay_wgrad_compute or not self.weight.requires_grad:
            return
        if not self._wgrad_store:
            raise RuntimeError("backward_dw() without a backward pass that delayed a gradient")
        with torch.no_grad(), without_autocast(self.weight.device):
            gradient = self._wgrad_store.pop(0)()
            if gradient is None or (self.fuse_wgrad_accumulation and self.weight.grad is not None):
                return
            if self.tp_mesh is not None:
                gradient = DTensor.from_local(
                    gradient, self.tp_mesh, self.weight.placements, run_check=False
                )
            if self.weight.grad is None:
                self.weight.grad = gradient
            else:
                self.weight.grad += gradient

    # Copies.
    def __getstate__(self) -> dict:
        state = super().__getstate__()
        state.update(_weight_cache=None, _wgrad_store=[])
        return state

    def __reduce_ex__(self, protocol):
        reduced = list(super().__reduce_ex__(protocol))
        reduced[2] = {**reduced[2], "tp_group": None, "tp_mesh": None}  # groups cannot be pickled
        return tuple(reduced)

    def _shared_by_copies(self) -> set[str]:
        return super()._shared_by_copies() | {"tp_group", "tp_mesh", "_get_rng_state_tracker"}

    def extra_repr(self) -> str:
        parts = [f"{self.in_features}, {self.out_features}", f"bias={self._bias() is not None}"]
        if self.parallel_mode:
            parts.append(f"parallel_mode={self.parallel_mode!r}, tp_size={self.tp_size}")
        if self.name:
            parts.append(f"name={self.name!r}")
        return ", ".join(parts)


def check_sharding(
    parallel_mode: str | None, tp_size: int, in_features: int, out_features: int
) -> None:
    """Raise ValueError for features that ``tp_size`` ranks cannot shard in this mode."""
    if parallel_mode not in PARALLEL_MODES:
        raise ValueError(
            f"parallel_mode={parallel_mode!r}; accepted: {PARALLEL_MODES}, "
            "e.g. parallel_mode='column'"
        )
    if tp_size < 1:  # the size of a group without this rank is -1
        raise ValueError(
            f"tp_size={tp_size}; accepted: a positive number of ranks, or a tp_group that has "
            "this rank, e.g. tp_size=1"
        )
    sharded = {"column": out_features, "row": in_features}.get(parallel_mode, tp_size)
    if sharded % tp_size:
        what = "out_features" if parallel_mode == "column" else "in_features"
        raise ValueError(
            f"{what}={sharded} is not a multiple of the tensor-parallel size {tp_size} "
            f"with parallel_mode={parallel_mode!r}; e.g. {what}="
            f"{math.ceil(sharded / tp_size) * tp_size}"
        )


def _compute_dtype(x: torch.Tensor, params_dtype: torch.dtype, label: str) -> torch.dtype:
    """torch.autocast's dtype where it is on, else x's, which must then be the parameters'."""
    if not torch.is_autocast_enabled(x.device.type) and x.dtype != params_dtype:
        raise TypeError(
            f"x of {label} has dtype {x.dtype}, its parameters {params_dtype}; they must be equal "
            f"outside of torch.autocast, e.g. x.to({params_dtype})"
        )
    return compute_dtype(x)


def _to_local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's shard: differentiable, or under no_grad the storage itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _refuse_unsupported(ub_options: dict, ub_name: str | None, symmetric_ar_type) -> None:
    """Userbuffers arguments may be passed with their defaults only."""
    for name, value in {**ub_options, "symmetric_ar_type": symmetric_ar_type}.items():
        if not name.startswith("ub_") and name != "symmetric_ar_type":
            raise TypeError(f"Linear got an unexpected keyword argument {name!r}")
        if value not in (None, False):
            raise ValueError(f"{name}={value!r} is not supported; accepted: {name}=None")
    if ub_name is not None:
        raise ValueError(f"ub_name={ub_name!r} is not supported; accepted: ub_name=None")
