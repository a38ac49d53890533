"""From a recipe to one module's quantizers and kernels: ask the factory, check the pairs.

Nothing here runs a GEMM, allocates on a device or communicates, so plan() uses it as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from .formats.hybrid import HybridQuantizer
from .formats.identity import IdentityQuantizer
from .formats.plane import DIRECTIONS, Direction
from .formats.quantizer import Quantizer
from .formats.requests import DelayedScalingRequest, QuantizerRequest
from .ops.gemm import Kernel, PairRefused, select
from .recipe import CustomRecipe
from .roles import GemmOperands, Slot

# (slot, "both" or the child's direction, request) → a quantizer that reads the slot's scale
DelayedBinder = Callable[[Slot, str, DelayedScalingRequest], Quantizer]


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a recipe is resolved: one module as this rank sees it.

    k, n: in_features and out_features of this rank's GEMMs; device: "cpu", "sm_90", "sm_100".
    """

    name: str
    module_type: str
    device: str
    k: int
    n: int

    def __str__(self) -> str:
        return f"module {self.name!r}" if self.name else f"an unnamed {self.module_type} module"


def ask_factory(
    recipe: CustomRecipe, slots: Iterable[Slot], site: Site, bind_delayed: DelayedBinder
) -> dict[str, Quantizer]:
    """Call the factory once per slot, in order: tensor type → quantizer of our own.

    Raises ValueError when the factory returns None, TypeError for anything else that is neither a
    Quantizer nor a request; both name the slot.
    """
    answers = {}
    for slot in slots:
        answer = recipe.qfactory(slot.role)
        _check_answer(answer, slot, site)
        bound = _bind(answer, slot, bind_delayed, recipe)
        answers[slot.tensor_type] = _overridden(bound, slot, recipe, site)
    return answers


def _check_answer(answer, slot: Slot, site: Site) -> None:
    valid = "e.g. MXFP8Quantizer(), or IdentityQuantizer() to keep it in high precision"
    if answer is None:
        raise ValueError(
            f"qfactory returned None for {slot} of {site}; every role needs a quantizer, {valid}"
        )
    if not isinstance(answer, (Quantizer, QuantizerRequest)):
        raise TypeError(
            f"qfactory returned {answer!r} for {slot} of {site}; accepted: a Quantizer or "
            f"DelayedScalingRequest, {valid}"
        )


def _bind(answer, slot: Slot, bind_delayed: DelayedBinder, recipe: CustomRecipe) -> Quantizer:
    if isinstance(answer, QuantizerRequest):
        return bind_delayed(slot, "both", answer)
    if not isinstance(answer, HybridQuantizer):
        return answer.copy()
    children = []
    for direction in DIRECTIONS:
        child = getattr(answer, f"{direction}_quantizer")
        is_request = isinstance(child, QuantizerRequest)
        children.append(bind_delayed(slot, direction, child) if is_request else child.copy())
    return answer.with_children(*children)


def _overridden(quantizer: Quantizer, slot: Slot, recipe: CustomRecipe, site: Site) -> Quantizer:
    """backward_override: what backward GEMMs read is held in the compute dtype."""
    if recipe.backward_override is None:
        return quantizer
    if slot.tensor_type == "grad_output":
        return IdentityQuantizer()
    row = quantizer.child("rowwise")
    if row.plane_format("rowwise").statistic == "scale":
        raise ValueError(
            f"backward_override={recipe.backward_override!r} with delayed scaling in {slot} of "
            f"{site}; accepted: backward_override=None, or current_scaling_factory"
        )
    source = "original" if recipe.backward_override == "high_precision" else "rowwise_dequantized"
    return HybridQuantizer(
        rowwise_quantizer=row.copy(),
        columnwise_quantizer=IdentityQuantizer(),
        columnwise_source=source,
    )


def choose_kernel(
    operands: GemmOperands, quantizers: dict[str, Quantizer], site: Site, execution: str
) -> Kernel:
    """The kernel of one GEMM; ValueError naming module, GEMM, both formats, device and way out."""
    a = quantizers[operands.a].plane_format(operands.a_direction)
    b = quantizers[operands.b].plane_format(operands.b_direction)
    try:
        return select(operands.gemm, a, b, site.device, execution, k=site.k, n=site.n)
    except PairRefused as refusal:
        raise PairRefused(
            f"{operands.gemm} of {site} cannot run on {site.device} with execution={execution!r}: "
            f"{operands.a} {operands.a_direction} is {a.describe()}, "
            f"{operands.b} {operands.b_direction} is {b.describe()}: {refusal}"
        ) from None


def describe_slots(slots: Iterable[Slot], quantizers: dict[str, Quantizer]) -> str:
    """One line per slot: its role and the formats of both directions; equal on ranks that agree."""
    lines = []
    for slot in slots:
        quantizer = quantizers[slot.tensor_type]
        row, column = (quantizer.plane_format(d).describe() for d in DIRECTIONS)
        lines.append(f"{slot}: {row} | {column} ({quantizer.columnwise_source})")
    return "\n".join(lines)


def describe_recipe(recipe: CustomRecipe) -> str:
    """The options of a recipe that change numbers; they must be equal on ranks that agree."""
    return (
        f"execution={recipe.resolved_execution}, rounding_seed={recipe.rounding_seed}, "
        f"fast_accumulation={recipe.fast_accumulation}, "
        f"backward_override={recipe.backward_override}"
    )


def source_of(quantizer: Quantizer, direction: Direction) -> str:
    """Where a plane comes from: "original", or "rowwise_dequantized" for some columns."""
    return quantizer.columnwise_source if direction == "columnwise" else "original"
