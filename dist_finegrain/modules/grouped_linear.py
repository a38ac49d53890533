"""GroupedLinear: a Linear for each of E experts, whose tokens follow each other in one input."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..context import Frame
from ..distributed import collectives
from ..formats.dtypes import check_high_precision
from ..formats.plane import DIRECTIONS
from ..formats.quantizer import Quantizer
from ..formats.tensors import QuantizedTensor
from ..ops.gemm import device_kind
from ..resolution import Site, ask_factory, describe_recipe, describe_slots
from ..roles import LINEAR_GEMMS, Slot, grouped_linear_slots
from .base import QuantizedModule
from .binding import HIGH_PRECISION, Binding, DelayedUse, agreed, log_first_emulation
from .compiled import untraceable
from .grouped_binding import (
    KeptWays,
    choose_single,
    expert_key,
    high_precision_binding,
    quantizers_of,
)
from .grouped_casting import Operand
from .grouped_linear_function import GroupedCall, GroupedLinearFunction
from .grouped_weights import (
    are_copies_of_one_storage,
    join_weights,
    new_weights,
    view_in_one,
)
from .linear import _WEIGHT_STD, _compute_dtype, check_sharding
from .quantized_weights import forget_initial_value, quantize_parameters, stored_planes
from .torch_autocast import without_autocast
from .weight_cache import WeightCache


class GroupedLinear(QuantizedModule):
    """Applies y_e = x_e W_eᵀ + b_e for E = num_gemms experts (of a mixture of experts).

    weight0 … weight{E-1} [out_features, in_features]: [out/tp, in] with parallel_mode="column",
    [out, in/tp] with "row". bias0 … bias{E-1} [out_features]. The weights lie behind each other in
    one storage, also after a move or a deepcopy, so that they are cast in place; weights that the
    caller puts elsewhere are copied together in each forward. ``torch.save`` writes the storage
    once; clone a weight before pickling it alone.

    num_gemms: experts of this rank; first_expert: global index of the first one, so that
    ``role.expert_index`` and saved state do not depend on expert parallelism.
    parallel_mode, tp_group, tp_size: how the weights are sharded. Nothing is gathered or reduced
    here but amaxes of sharded matrices: x and dy come as the GEMMs need them, y (row) and dx
    (column) are partial sums. bias with tp_size > 1 is refused.
    return_bias: do not add the biases; forward returns (y, list of biases).
    single_grouped_weight, single_grouped_bias, use_grouped_tensor, ub_*: refused unless default.
    Other arguments as for Linear.

    forward: inp [..., in_features] (row mode: in/tp), its rows sorted by expert, and m_splits, the
    rows of each expert (zeros anywhere): a list, or int32 / int64 [E] on the CPU or on inp's
    device. A list must add up to the rows of inp. Sizes on a GPU are not read back: there the sum
    cannot be checked. Rows beyond it get no product: their y, dx and share of the bias are
    undefined, and amaxes may count them; splits beyond the rows are cut off there.

    Where all experts have one format, tensors are cast and multiplied for all experts at once.
    Tensors whose experts differ (role.expert_index), that round stochastically (a stream for each
    expert) or have a user's format, and their GEMMs, run expert by expert, which needs m_splits on
    the host: sizes on a GPU are then refused. plan() shows which.

    Raises ValueError / TypeError naming the argument, what was got, what is accepted and a valid
    value, before any launch, collective or state change.
    """

    module_type = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        first_expert: int = 0,
        name: str | None = None,
        **refused: Any,
    ):
        _refuse_unsupported(refused)
        _check_count("num_gemms", num_gemms, 1)
        _check_count("first_expert", first_expert, 0)
        tp_size = tp_size if tp_group is None else collectives.group_size(tp_group)
        check_sharding(parallel_mode, tp_size, in_features, out_features)
        if bias and tp_size > 1:
            raise ValueError(
                f"bias=True with tp_size={tp_size}; accepted: bias=False, or tp_size=1: "
                "GroupedLinear does no tensor-parallel communication, so biases of partial sums "
                "would be added once per rank"
            )
        params_dtype = params_dtype or torch.get_default_dtype()
        check_high_precision(params_dtype, "params_dtype")
        super().__init__(name)
        self.num_gemms, self.first_expert = num_gemms, first_expert
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode = parallel_mode
        self.tp_size = tp_size if parallel_mode else 1
        self.tp_group = tp_group if parallel_mode else None
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self._init_method = init_method
        self._get_rng_state_tracker = get_rng_state_tracker
        self._rng_tracker_name = rng_tracker_name
        self._wgrad_store: list[Callable[[], Sequence[torch.Tensor | None]]] = []
        self._weight_cache: WeightCache | None = None
        self._ways = KeptWays()
        shape = (self.local_out_features, self.local_in_features)
        weights = new_weights(num_gemms, shape, dtype=params_dtype, device=device)
        for e, weight in enumerate(weights):
            self.register_parameter(f"weight{e}", weight)
        for e in range(num_gemms):
            one = torch.empty(shape[0], dtype=params_dtype, device=device) if bias else None
            self.register_parameter(f"bias{e}", None if one is None else torch.nn.Parameter(one))
        self._mark_parameters()
        self.reset_parameters()
        self._quantize_parameters()

    # Sizes of this rank's shard.
    @property
    def local_in_features(self) -> int:
        """in_features of this rank: divided by tp in row mode."""
        return self.in_features // (self.tp_size if self.parallel_mode == "row" else 1)

    @property
    def local_out_features(self) -> int:
        """out_features of this rank: divided by tp in column mode."""
        return self.out_features // (self.tp_size if self.parallel_mode == "column" else 1)

    # Parameters.
    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """weight0 … weight{E-1}."""
        return [getattr(self, f"weight{e}") for e in range(self.num_gemms)]

    @property
    def biases(self) -> list[torch.nn.Parameter]:
        """bias0 … bias{E-1}; empty without biases."""
        found = [getattr(self, f"bias{e}") for e in range(self.num_gemms)]
        return [] if found[0] is None else found

    def _mark_parameters(self) -> None:
        """Set Megatron's attributes: how weights are sharded."""
        if self.parallel_mode is None:
            return
        for weight in self.weights:
            weight.tensor_model_parallel = True
            weight.partition_dim = 0 if self.parallel_mode == "column" else 1
            weight.partition_stride = 1

    def _quantize_parameters(self) -> None:
        """Store the weights quantized where quantized_model_init is open."""
        slots = [s for s in self.get_quantizer_slots() if s.tensor_type == "weight"]
        quantize_parameters(self, {f"weight{e}": slot for e, slot in enumerate(slots)})
        self._mark_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights (init_method, default normal(0, 0.023)) and set biases to zero."""
        init = self._init_method or (lambda w: torch.nn.init.normal_(w, mean=0.0, std=_WEIGHT_STD))
        fork = contextlib.nullcontext()
        if self._get_rng_state_tracker is not None:
            names = () if self._rng_tracker_name is None else (self._rng_tracker_name,)
            fork = self._get_rng_state_tracker().fork(*names)
        with torch.no_grad(), fork:
            for weight in self.weights:
                init(weight)
                forget_initial_value(weight)
            for bias in self.biases:
                bias.zero_()

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
        experts = range(self.first_expert, self.first_expert + self.num_gemms)
        return grouped_linear_slots(self.name, experts, self._output_role, self._grad_input_role)

    def slots_of_experts(self, direction: str) -> list[tuple[Slot, ...]]:
        """The slots of one direction, in order, for each expert."""
        slots = [s for s in self.get_quantizer_slots() if s.direction == direction]
        size = len(slots) // self.num_gemms
        return [tuple(slots[e * size : (e + 1) * size]) for e in range(self.num_gemms)]

    def resolution_site(self, device: str) -> Site:
        return Site(
            self.name, self.module_type, device, self.local_in_features, self.local_out_features
        )

    def quantization_group(self) -> Any:
        return self.tp_group

    def _resolve(self, binding: Binding, direction: str, frame: Frame, device) -> None:
        """Ask the factory for one direction's slots of every expert, check every pair."""
        recipe, site = frame.recipe, self.resolution_site(device_kind(device))
        by_expert = self.slots_of_experts(direction)
        uses: list[DelayedUse] = []

        def bind_delayed(slot: Slot, child: str, request) -> Quantizer:
            uses.append(self._delayed_use(slot, child, request, frame, device))
            return uses[-1].slot.quantizer()

        def resolve():
            quantizers, kernels = {}, {}
            lines = [describe_recipe(recipe)]
            for e, slots in enumerate(by_expert):
                made = ask_factory(recipe, slots, site, bind_delayed)
                quantizers.update({expert_key(kind, e): q for kind, q in made.items()})
                lines.append(describe_slots(slots, made))
            lines += [f"{use.slot.key}: {use.request}" for use in uses]
            known = Binding(recipe, {**binding.quantizers, **quantizers})
            known = quantizers_of(known, self.num_gemms)
            for g in LINEAR_GEMMS:
                if (g.gemm == "fprop") == (direction == "forward"):
                    found = choose_single(g, known, site, recipe.resolved_execution)
                    kernels.update({expert_key(g.gemm, e): k for e, k in enumerate(found)})
            return (quantizers, kernels), "\n".join(lines)

        quantizers, kernels = agreed(resolve, site, self.quantization_group(), device)
        log_first_emulation(site, kernels)
        self._take_up(binding, quantizers, kernels, uses)
        for e, slots in enumerate(by_expert):
            for slot in slots:
                for plane, suffix in (("rowwise", "row"), ("columnwise", "col")):
                    index = self.first_expert + e
                    text = f"{self.name}|{slot.tensor_type}|{index}|{suffix}"
                    key = expert_key(slot.tensor_type, e), plane
                    binding.streams[key] = zlib.crc32(text.encode())

    def _outdate(self) -> None:
        super()._outdate()
        self._ways.clear()

    def _drop_weight_cache(self) -> None:
        self._weight_cache = None

    # Forward.
    @untraceable("the sizes of its GEMMs are known when it runs")
    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
    ):
        """y of inp [..., in_features], ``m_splits`` rows per expert; (y, biases) with return_bias.

        is_first_microbatch: True quantizes the weights and keeps them, False uses what is kept,
        None keeps nothing. Kept weights last until the step ends.
        """
        compute_dtype = self._check_input(inp)
        # A view costs a node of the graph, and small layers wait for the host.
        x = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
        sizes = self._checked_sizes(m_splits, x)
        binding = self.bind(x.device, compute_dtype)
        if binding is HIGH_PRECISION:
            binding = high_precision_binding(self.num_gemms)
        site = self.resolution_site(device_kind(x.device))
        ways = self._ways.of(
            binding, site, self.num_gemms, compute_dtype, sizes is not None, x.device
        )
        grad_enabled = torch.is_grad_enabled()
        weights, biases = self.weights, self.biases
        added = [] if self.return_bias else biases
        ends = _ends(m_splits if sizes is None else sizes, x.device, x.shape[0])
        is_direct = ways.direct and is_first_microbatch is None and self._is_simple(added)
        if is_direct and ways.direct.takes(x, weights, compute_dtype):
            y = ways.direct(
                x, weights, sizes, ends, grad_enabled and self.training,
                self.fuse_wgrad_accumulation,
            )  # fmt: skip
            y = y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.local_out_features)
            return (y, biases) if self.return_bias else y
        call = GroupedCall(
            binding=binding,
            kernels=ways.kernels,
            together=ways.together,
            experts=self.num_gemms,
            sizes=sizes,
            ends=ends,
            compute_dtype=compute_dtype,
            parallel_mode=self.parallel_mode,
            group=self.tp_group,
            needs_dgrad=grad_enabled and x.requires_grad,
            needs_wgrad=grad_enabled and any(w.requires_grad for w in weights),
            training=grad_enabled and self.training,
            parameters=weights,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            save_original_input=self.save_original_input,
            wgrad_store=self._wgrad_store if self.delay_wgrad_compute else None,
            cache=self._cache_for(is_first_microbatch, binding, compute_dtype),
        )
        y = GroupedLinearFunction.apply(x, call, *weights, *added)
        y = y.view(*inp.shape[:-1], self.local_out_features)
        return (y, biases) if self.return_bias else y

    def _is_simple(self, biases: Sequence[torch.Tensor]) -> bool:
        """Whether DirectGrouped does all that this module was built for, with these biases."""
        keeps = self.delay_wgrad_compute or self.save_original_input
        return self.tp_size == 1 and not biases and not keeps

    def _stored_weights(self, binding: Binding, dtype: torch.dtype) -> WeightCache:
        """The planes of weights that are stored quantized."""
        by_expert = [
            stored_planes(self, weight, binding, expert_key("weight", e), dtype)
            for e, weight in enumerate(self.weights)
        ]
        planes = {d: tuple(made[d] for made in by_expert) for d in DIRECTIONS}
        operands = {d: None if None in held else Operand(held) for d, held in planes.items()}
        return WeightCache(binding, dtype, planes=operands)

    def _cache_for(self, is_first_microbatch: bool | None, binding, dtype) -> WeightCache | None:
        if isinstance(self.weight0, QuantizedTensor):
            return self._stored_weights(binding, dtype)
        if is_first_microbatch is None:
            return None
        kept = self._weight_cache
        if is_first_microbatch or kept is None or not kept.is_valid(binding, dtype):
            self._weight_cache = WeightCache(binding, dtype)
        return self._weight_cache

    # Checks.
    def _label(self) -> str:
        return f"GroupedLinear {self.name!r}" if self.name else "an unnamed GroupedLinear"

    def _check_input(self, x: torch.Tensor) -> torch.dtype:
        """Everything a user can get wrong about inp; returns the compute dtype."""
        label, weight = self._label(), self.weight0
        if x.dim() == 0 or x.shape[-1] != self.local_in_features:
            raise ValueError(
                f"inp of {label} has shape {tuple(x.shape)}; its last dimension must be "
                f"{self.local_in_features} (in_features of this rank)"
            )
        check_high_precision(x.dtype, f"inp of {label}")
        if x.device != weight.device:
            raise ValueError(
                f"inp of {label} is on {x.device}, its weights on {weight.device}; "
                f"e.g. inp.to('{weight.device}')"
            )
        if self.tp_size > 1 and self.tp_group is None:
            raise RuntimeError(
                f"{label} has tp_size={self.tp_size} but no process group; call "
                "set_tensor_parallel_group(group) first"
            )
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            for e, parameter in enumerate(self.weights):
                shape = getattr(getattr(parameter, "main_grad", None), "shape", ())
                if parameter.requires_grad and shape != parameter.shape:
                    raise ValueError(
                        f"fuse_wgrad_accumulation=True, but weight{e} of {label} has no main_grad "
                        f"of its shape {tuple(parameter.shape)}; e.g. weight{e}.main_grad = "
                        f"torch.zeros_like(weight{e}, dtype=torch.float32)"
                    )
        return _compute_dtype(x, weight.dtype, label)

    def _checked_sizes(self, m_splits, x: torch.Tensor) -> list[int] | None:
        """m_splits as a list where the host knows it; None for sizes on a GPU."""
        valid = f"a list of {self.num_gemms} counts that add up to {x.shape[0]}"
        if isinstance(m_splits, torch.Tensor):
            is_list = m_splits.dtype in (torch.int32, torch.int64)
            is_list = is_list and tuple(m_splits.shape) == (self.num_gemms,)
            if not is_list or m_splits.device not in (x.device, torch.device("cpu")):
                raise ValueError(
                    f"m_splits of {self._label()} is {m_splits.dtype} {tuple(m_splits.shape)} on "
                    f"{m_splits.device}; accepted: {valid}, or torch.int32 or torch.int64 "
                    f"({self.num_gemms},) on cpu or {x.device}"
                )
            if m_splits.device.type != "cpu":
                return None
            m_splits = m_splits.tolist()
        if not isinstance(m_splits, (list, tuple)):
            raise TypeError(
                f"m_splits of {self._label()} is {m_splits!r}; accepted: {valid}, or a tensor"
            )
        if any(isinstance(m, bool) or not isinstance(m, int) for m in m_splits):
            raise TypeError(f"m_splits of {self._label()} is {m_splits}; accepted: {valid}")
        if len(m_splits) != self.num_gemms or min(m_splits) < 0 or sum(m_splits) != x.shape[0]:
            raise ValueError(
                f"m_splits of {self._label()} is {list(m_splits)}, {len(m_splits)} counts that add "
                f"up to {sum(m_splits)}, inp has {x.shape[0]} rows; accepted: {valid}"
            )
        return list(m_splits)

    # Delayed weight gradients.
    def backward_dw(self) -> None:
        """Compute the oldest weight gradients that ``delay_wgrad_compute`` put off; add them up.

        Does nothing when delay_wgrad_compute is off or all weights are frozen. Raises RuntimeError
        when none are waiting.
        """
        weights = self.weights
        if not self.delay_wgrad_compute or not any(w.requires_grad for w in weights):
            return
        if not self._wgrad_store:
            raise RuntimeError("backward_dw() without a backward pass that delayed a gradient")
        with torch.no_grad(), without_autocast(weights[0].device):
            gradients = self._wgrad_store.pop(0)()
            for weight, gradient in zip(weights, gradients, strict=True):
                is_dummy = self.fuse_wgrad_accumulation and weight.grad is not None
                if gradient is None or is_dummy or not weight.requires_grad:
                    continue
                if weight.grad is None:
                    weight.grad = gradient
                else:
                    weight.grad += gradient

    # Copies and moves.
    def _apply(self, fn, recurse=True):
        # Only what was joined here: a trainer's flat buffers must stay where they are.
        was_joined = view_in_one(self.weights) is not None
        super()._apply(fn, recurse)
        if was_joined:
            join_weights(self.weights)
        return self

    def __deepcopy__(self, memo):
        twin = super().__deepcopy__(memo)
        if view_in_one(self.weights) is not None:
            join_weights(twin.weights)
        return twin

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        state.update(_weight_cache=None, _wgrad_store=[], _ways=KeptWays())
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        # torch.load keeps them together, plain pickle does not.
        if are_copies_of_one_storage(self.weights):
            join_weights(self.weights)

    def __reduce_ex__(self, protocol):
        reduced = list(super().__reduce_ex__(protocol))
        reduced[2] = {**reduced[2], "tp_group": None}  # groups cannot be pickled
        return tuple(reduced)

    def _shared_by_copies(self) -> set[str]:
        return super()._shared_by_copies() | {"tp_group", "_get_rng_state_tracker"}

    def extra_repr(self) -> str:
        parts = [f"{self.num_gemms}, {self.in_features}, {self.out_features}"]
        parts.append(f"bias={bool(self.biases)}")
        if self.parallel_mode:
            parts.append(f"parallel_mode={self.parallel_mode!r}, tp_size={self.tp_size}")
        if self.first_expert:
            parts.append(f"first_expert={self.first_expert}")
        if self.name:
            parts.append(f"name={self.name!r}")
        return ", ".join(parts)


def _ends(sizes: list[int] | torch.Tensor, device: torch.device, rows: int) -> torch.Tensor:
    """int32 [E] on ``device``: cumulative sizes, without waiting for the device.

    Sizes that only the device knows cannot be refused; no end lies before another or past ``rows``.
    """
    if isinstance(sizes, torch.Tensor):
        return sizes.cumsum(0).clamp(0, rows).cummax(0).values.to(torch.int32)
    ends = list(itertools.accumulate(sizes))
    if device.type != "cuda":
        return torch.tensor(ends, dtype=torch.int32, device=device)
    return torch.tensor(ends, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def _check_count(what: str, got: Any, least: int) -> None:
    if isinstance(got, bool) or not isinstance(got, int) or got < least:
        raise ValueError(
            f"{what}={got!r}; accepted: an int of at least {least}, e.g. {what}={least}"
        )


def _refuse_unsupported(options: dict[str, Any]) -> None:
    """Arguments of Transformer Engine that may be passed with their defaults only."""
    known = ("single_grouped_weight", "single_grouped_bias", "use_grouped_tensor")
    for name, value in options.items():
        if not name.startswith("ub_") and name not in known:
            raise TypeError(f"GroupedLinear got an unexpected keyword argument {name!r}")
        if value not in (None, False):
            raise ValueError(f"{name}={value!r} is not supported; accepted: {name}=None")
