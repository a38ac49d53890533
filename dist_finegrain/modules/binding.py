"""A binding: what one recipe means for one module. And how ranks agree on it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

from .. import stepping
from ..delayed import DelayedSlot, text_hash
from ..distributed import collectives
from ..formats.identity import IdentityQuantizer
from ..formats.plane import DIRECTIONS, Direction, Rounding
from ..formats.quantizer import Quantizer
from ..formats.requests import DelayedScalingRequest
from ..ops.gemm import Kernel, select
from ..recipe import CustomRecipe
from ..resolution import Site
from ..roles import LINEAR_GEMMS

logger = logging.getLogger("dist_finegrain")


@dataclasses.dataclass(frozen=True)
class DelayedUse:
    """How a binding uses a delayed slot while it trains: under which request, reduced where."""

    slot: DelayedSlot
    request: DelayedScalingRequest
    group: Any


@dataclasses.dataclass
class Binding:
    """One recipe resolved for one module; ``has_backward`` once the backward slots were asked."""

    recipe: CustomRecipe | None
    quantizers: dict[str, Quantizer] = dataclasses.field(default_factory=dict)
    kernels: dict[str, Kernel] = dataclasses.field(default_factory=dict)
    has_backward: bool = False
    delayed: list[DelayedUse] = dataclasses.field(default_factory=list)
    streams: dict[tuple[str, Direction], int] = dataclasses.field(default_factory=dict)
    # What follows from the above, found once: by tensor type, and the number of kernels known then.
    _stochastic: dict[str, bool] = dataclasses.field(default_factory=dict)
    _swizzled: dict[tuple[str, int], frozenset[Direction]] = dataclasses.field(default_factory=dict)
    direct: dict[tuple[torch.device, int], Any] = dataclasses.field(default_factory=dict)

    def rounding(self, tensor_type: str, rows: int, columns: int) -> dict[Direction, Rounding]:
        """Where stochastic rounding of this slot's planes draws from in this step; {} without any.

        rows, columns: global index of the operand's first element.
        """
        is_stochastic = self._stochastic.get(tensor_type)
        if is_stochastic is None:
            formats = map(self.quantizers[tensor_type].plane_format, DIRECTIONS)
            is_stochastic = any(getattr(format, "stochastic", False) for format in formats)
            self._stochastic[tensor_type] = is_stochastic
        if not is_stochastic:
            return {}
        seed = self.recipe.rounding_seed if self.recipe else 0
        step = stepping.completed_steps()
        origins = {"rowwise": (rows, columns), "columnwise": (columns, rows)}
        return {
            direction: Rounding(seed, self.streams.get((tensor_type, direction), 0), step, *origin)
            for direction, origin in origins.items()
        }

    def swizzled(self, tensor_type: str) -> frozenset[Direction]:
        """Directions of this slot whose scales are stored as the kernel that reads them does."""
        key = (tensor_type, len(self.kernels))
        if key not in self._swizzled:
            self._swizzled[key] = self._find_swizzled(tensor_type)
        return self._swizzled[key]

    def _find_swizzled(self, tensor_type: str) -> frozenset[Direction]:
        return frozenset(
            direction
            for operands in LINEAR_GEMMS
            for slot, direction in operands.sides
            if slot == tensor_type
            and operands.gemm in self.kernels
            and self.kernels[operands.gemm].swizzled
        )

    def is_fast(self, gemm: str) -> bool:
        """Whether the recipe lets this GEMM use fast accumulation."""
        return self.recipe is not None and gemm in self.recipe.fast_accumulation


def _high_precision_binding() -> Binding:
    identity = IdentityQuantizer()
    types = ("input", "weight", "output", "grad_output", "grad_input")
    pair = identity.plane_format("rowwise")
    kernels = {g.gemm: select(g.gemm, pair, pair, "cpu", "native", k=1, n=1) for g in LINEAR_GEMMS}
    return Binding(None, dict.fromkeys(types, identity), kernels, has_backward=True)


# The binding of the disabled path: Identity everywhere, no factory involved.
HIGH_PRECISION = _high_precision_binding()


def agreed(resolve: Callable[[], tuple[Any, str]], site: Site, group: Any, device: torch.device):
    """What ``resolve`` returns beside a text, if that text is the same on every rank of the group.

    Also when ``resolve`` raises on some rank, every rank takes part in the comparison and raises.
    """
    if not collectives.communicates(group):
        return resolve()[0]
    result, error = None, None
    try:
        result, text = resolve()
    except Exception as caught:
        error, text = caught, f"{type(caught).__name__}: {caught}"
    if not collectives.all_equal(text_hash(text), group, device):
        texts = collectives.all_gather_object(text, group)
        lines = "\n".join(f"rank {r}:\n{t}" for r, t in enumerate(texts))
        error = error or ValueError(
            f"the ranks of {site} resolved different recipes; the factory must answer alike on "
            f"every rank of a tensor-parallel group:\n{lines}"
        )
    if error is not None:
        raise error
    return result


_logged_emulation = False


def log_first_emulation(site: Site, kernels: dict[str, Kernel]) -> None:
    """One line per run, when the first module gets a GEMM that was asked to be emulated."""
    global _logged_emulation
    count = sum(kernel.execution == "emulated" for kernel in kernels.values())
    if count and not _logged_emulation:
        _logged_emulation = True
        logger.warning("exact emulation: %d GEMMs of %s and maybe more; see plan()", count, site)
