"""Quantizer roles: what a factory is told about a slot; the slots of each module type."""

from __future__ import annotations

import dataclasses
from typing import Literal

GemmName = Literal["fprop", "dgrad", "wgrad"]


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """Describes one quantizer slot.

    module_type: "linear", "grouped_linear" or "dpa"; tensor_type: "input", "weight",
    "grad_output" (attention: "qkv", "s", "do", "dp"); name: the module instance, e.g.
    "decoder.39.fc2"; expert_index: global index of the expert inside a GroupedLinear.
    Fields and vocabulary may grow: end a factory with a default for every other role.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    expert_index: int | None = None

    def __str__(self) -> str:
        text = f"{self.module_type}|{self.tensor_type}|{self.name}"
        return text if self.expert_index is None else f"{text}|{self.expert_index}"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One call of the factory: its place in the module's list and the role it is asked with.

    ``tensor_type`` repeats the role's, or names the boundary where the role is None.
    """

    direction: Literal["forward", "backward"]
    position: int
    tensor_type: str
    role: QuantizerRole | None

    def __str__(self) -> str:
        return f"{self.direction} slot {self.position} ({self.tensor_type}, role {self.role})"


@dataclasses.dataclass(frozen=True)
class GemmOperands:
    """Which plane of which slot a GEMM reads, as A · Bᵀ."""

    gemm: GemmName
    a: str
    a_direction: Literal["rowwise", "columnwise"]
    b: str
    b_direction: Literal["rowwise", "columnwise"]

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(slot, direction) of A and of B."""
        return (self.a, self.a_direction), (self.b, self.b_direction)


# fprop Y = X.row · W.rowᵀ,  dgrad dX = dY.row · W.colᵀ,  wgrad dW = dY.col · X.colᵀ
LINEAR_GEMMS: tuple[GemmOperands, ...] = (
    GemmOperands("fprop", "input", "rowwise", "weight", "rowwise"),
    GemmOperands("dgrad", "grad_output", "rowwise", "weight", "columnwise"),
    GemmOperands("wgrad", "grad_output", "columnwise", "input", "columnwise"),
)


def linear_slots(
    name: str,
    output_role: QuantizerRole | None = None,
    grad_input_role: QuantizerRole | None = None,
) -> tuple[Slot, ...]:
    """Slots of a Linear in order: input, weight, output boundary; grad_output, grad-input."""

    def role(tensor_type: str) -> QuantizerRole:
        return QuantizerRole("linear", tensor_type, name)

    return (
        Slot("forward", 0, "input", role("input")),
        Slot("forward", 1, "weight", role("weight")),
        Slot("forward", 2, "output", output_role),
        Slot("backward", 0, "grad_output", role("grad_output")),
        Slot("backward", 1, "grad_input", grad_input_role),
    )


def layernorm_mlp_slots(
    fc1: str,
    fc2: str,
    output_role: QuantizerRole | None = None,
    grad_input_role: QuantizerRole | None = None,
) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Slots of the two layers of a LayerNormMLP, called ``fc1`` and ``fc2``.

    Forward positions 0 … 2 and 3 … 5, backward 0, 1 and 2, 3: fc2 counts on where fc1 ends. fc1's
    output goes to fc2 and fc2's grad-input to fc1, so those slots have the reader's role.
    """
    inner_output = QuantizerRole("linear", "input", fc2)
    inner_gradient = QuantizerRole("linear", "grad_output", fc1)
    first = linear_slots(fc1, inner_output, grad_input_role)
    second = linear_slots(fc2, output_role, inner_gradient)
    start = {d: sum(slot.direction == d for slot in first) for d in ("forward", "backward")}
    moved = (
        dataclasses.replace(slot, position=slot.position + start[slot.direction]) for slot in second
    )
    return first, tuple(moved)


def grouped_linear_slots(
    name: str,
    experts: range,
    output_role: QuantizerRole | None = None,
    grad_input_role: QuantizerRole | None = None,
) -> tuple[Slot, ...]:
    """Slots of a GroupedLinear with these global expert indices: those of a Linear for each expert.

    Expert g has forward positions 3g … 3g + 2 and backward positions 2g, 2g + 1, wherever it lives.
    """

    def role(tensor_type: str, expert: int) -> QuantizerRole:
        return QuantizerRole("grouped_linear", tensor_type, name, expert)

    forward = [
        slot
        for g in experts
        for slot in (
            Slot("forward", 3 * g, "input", role("input", g)),
            Slot("forward", 3 * g + 1, "weight", role("weight", g)),
            Slot("forward", 3 * g + 2, "output", output_role),
        )
    ]
    backward = [
        slot
        for g in experts
        for slot in (
            Slot("backward", 2 * g, "grad_output", role("grad_output", g)),
            Slot("backward", 2 * g + 1, "grad_input", grad_input_role),
        )
    ]
    return (*forward, *backward)
