"""What a recipe means for E experts: keys per expert in a Binding, one cast or several, kernels.

A Binding of GroupedLinear holds quantizers and kernels under ``expert_key``: of "input" and expert
3 under "input.3". Which GEMMs run for all experts at once follows from their formats.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch

from ..formats import fused
from ..formats.plane import DIRECTIONS
from ..formats.quantizer import Quantizer
from ..ops.gemm import PairRefused, select
from ..ops.grouped import GroupedKernel, select_grouped
from ..resolution import Site
from ..roles import LINEAR_GEMMS, GemmOperands
from .binding import HIGH_PRECISION, Binding
from .direct_grouped import DirectGrouped

_KEPT_WAYS = 8
Quantizers = Mapping[str, Sequence[Quantizer]]  # tensor type → one per expert


def expert_key(what: str, expert: int) -> str:
    """Where a Binding keeps the quantizer of a tensor type, or the kernel of a GEMM, of an expert.

    expert: its place on this rank.
    """
    return f"{what}.{expert}"


@functools.lru_cache(maxsize=64)
def high_precision_binding(experts: int) -> Binding:
    """``HIGH_PRECISION`` for E experts: Identity everywhere, no factory involved."""
    quantizers, kernels = (
        {expert_key(what, e): found for what, found in table.items() for e in range(experts)}
        for table in (HIGH_PRECISION.quantizers, HIGH_PRECISION.kernels)
    )
    return Binding(None, quantizers, kernels, has_backward=True)


def quantizers_of(binding: Binding, experts: int) -> dict[str, list[Quantizer]]:
    """Tensor type → one quantizer per expert, of the slots that were asked so far."""
    return {
        kind: [binding.quantizers[expert_key(kind, e)] for e in range(experts)]
        for kind in ("input", "weight", "grad_output")
        if expert_key(kind, 0) in binding.quantizers
    }


def formats_of(quantizer: Quantizer) -> tuple:
    """What must be equal for two experts to be cast together."""
    row, column = map(quantizer.child, DIRECTIONS)
    formats = map(quantizer.plane_format, DIRECTIONS)
    return (*formats, quantizer.columnwise_source, row is column)


def why_not_together(kind: str, quantizers: Sequence[Quantizer], why_unfused: str) -> str:
    """Why the tensor ``kind`` of all experts is no operand of a grouped GEMM; "" when it is.

    why_unfused: why the device has no compiled casts.
    """
    row, column, *_ = first = formats_of(quantizers[0])
    for index, quantizer in enumerate(quantizers):
        if formats_of(quantizer) != first:
            return f"{kind} of experts 0 and {index} differ in format"
    if any(getattr(f, "stochastic", False) for f in (row, column)):
        return f"stochastic rounding of {kind} draws from a stream of each expert"
    for format in (row, column):
        if format.family == "user":
            return f"{kind} is {format.describe()}, encoded expert by expert"
        is_square = format.family == "float8_block" and format.two_dimensional
        if is_square and kind != "weight":
            return f"{kind} is {format.describe()}, whose blocks reach over experts"
    return why_unfused and f"grouped casts need compiled kernels: {why_unfused}"


def why_unfused(device: torch.device) -> str:
    """Why ``device`` has no compiled casts; "" when it has."""
    return fused.why_not(device)


def choose_grouped(
    operands: GemmOperands,
    quantizers: Quantizers,
    site: Site,
    execution: str,
    dtype: torch.dtype,
    sizes_known: bool,
    why_unfused: str,
) -> tuple[GroupedKernel | None, str]:
    """(kernel of one GEMM of all experts, ""), or (None, why it runs expert by expert).

    sizes_known: m_splits is on the host. dtype: the compute dtype; why_unfused: why the device has
    no compiled casts. Raises PairRefused, naming module, GEMM, formats and way out, where the GEMM
    does not run with sizes on the device.
    """
    kinds = operands.a, operands.b
    reasons = [why_not_together(kind, quantizers[kind], why_unfused) for kind in kinds]
    reason = next(filter(None, reasons), "")
    if reason:
        return _expert_by_expert(operands, site, sizes_known, reason)
    a, b = (quantizers[kind][0].plane_format(direction) for kind, direction in operands.sides)
    try:
        kernel = select_grouped(
            operands.gemm, a, b, site.device, execution,
            k=site.k, n=site.n, dtype=dtype, sizes_known=sizes_known,
        )  # fmt: skip
    except PairRefused as refusal:
        raise PairRefused(
            f"{operands.gemm} of {site} cannot run on {site.device} with execution={execution!r}: "
            f"{operands.a} {operands.a_direction} is {a.describe()}, "
            f"{operands.b} {operands.b_direction} is {b.describe()}: {refusal}"
        ) from None
    experts = len(quantizers[operands.a])
    if experts > (kernel.most_experts or experts):
        reason = f"{kernel.name} takes {kernel.most_experts} experts at most, not {experts}"
        return _expert_by_expert(operands, site, sizes_known, reason)
    return kernel, ""


def _expert_by_expert(
    operands: GemmOperands, site: Site, sizes_known: bool, reason: str
) -> tuple[None, str]:
    if sizes_known:
        return None, reason
    raise PairRefused(
        f"{operands.gemm} of {site} runs expert by expert ({reason}), for which m_splits must "
        "be known on the host; accepted: a list, e.g. m_splits=[128, 256]"
    )


def grouped_kernels(
    binding: Binding,
    site: Site,
    execution: str,
    experts: int,
    dtype: torch.dtype,
    sizes_known: bool,
    device: torch.device,
) -> dict[str, GroupedKernel | None]:
    """GEMM → its kernel for all experts, None for expert by expert; of the slots asked so far.

    Raises PairRefused as ``choose_grouped`` does, before anything runs.
    """
    quantizers = quantizers_of(binding, experts)
    return {
        g.gemm: choose_grouped(
            g, quantizers, site, execution, dtype, sizes_known, why_unfused(device)
        )[0]
        for g in LINEAR_GEMMS
        if g.a in quantizers and g.b in quantizers
    }


@dataclasses.dataclass(frozen=True)
class Ways:
    """How the GEMMs of a binding run: kernels by GEMM, as ``grouped_kernels`` gives them.

    together: tensor types that are cast for all experts at once. direct: the short way, where
    there is one.
    """

    binding: Binding
    kernels: dict[str, GroupedKernel | None]
    together: frozenset[str]
    direct: DirectGrouped | None = None


class KeptWays:
    """The ways of a module's bindings, each chosen at its first forward."""

    def __init__(self):
        self._ways: collections.OrderedDict[tuple, Ways] = collections.OrderedDict()

    def of(
        self,
        binding: Binding,
        site: Site,
        experts: int,
        dtype: torch.dtype,
        sizes_known: bool,
        device: torch.device,
    ) -> Ways:
        """Arguments and errors as for ``grouped_kernels``; ``site`` is this module's always."""
        # Held by what is kept, no other binding can get this one's id.
        key = (id(binding), binding.has_backward, dtype, sizes_known, device)
        found = self._ways.get(key)
        if found is None:
            execution = binding.recipe.resolved_execution if binding.recipe else "native"
            kernels = grouped_kernels(binding, site, execution, experts, dtype, sizes_known, device)
            reason = why_unfused(device)
            kinds = quantizers_of(binding, experts)
            together = frozenset(k for k, q in kinds.items() if not why_not_together(k, q, reason))
            direct = DirectGrouped.of(binding, kinds, kernels, together, device)
            found = self._ways[key] = Ways(binding, kernels, together, direct)
            if len(self._ways) > _KEPT_WAYS:
                self._ways.popitem(last=False)
        return found

    def clear(self) -> None:
        """Forget them: what the bindings depend on changed."""
        self._ways.clear()


def choose_single(operands: GemmOperands, quantizers: Quantizers, site: Site, execution: str):
    """The kernel of every expert's GEMM on its own; PairRefused names the expert too."""
    made = []
    known = {}
    for e in range(len(quantizers[operands.a])):
        a, b = (quantizers[kind][e].plane_format(d) for kind, d in operands.sides)
        if (a, b) not in known:
            try:
                known[a, b] = select(
                    operands.gemm, a, b, site.device, execution, k=site.k, n=site.n
                )
            except PairRefused as refusal:
                raise PairRefused(
                    f"{operands.gemm} of expert {e} of {site} cannot run on {site.device} with "
                    f"execution={execution!r}: {operands.a} {operands.a_direction} is "
                    f"{a.describe()}, {operands.b} {operands.b_direction} is {b.describe()}: "
                    f"{refusal}"
                ) from None
        made.append(known[a, b])
    return made
