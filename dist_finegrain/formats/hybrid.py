"""HybridQuantizer: one quantizer per direction, so that each GEMM can have its own format."""

from __future__ import annotations

import torch

from .plane import Direction, Format
from .quantizer import Quantizer
from .requests import QuantizerRequest
from .tensors import HybridQuantizedTensor

COLUMNWISE_SOURCES = ("original", "rowwise_dequantized")


class HybridQuantizer(Quantizer):
    """Composes a rowwise and a columnwise quantizer; returns a HybridQuantizedTensor.

    rowwise_quantizer, columnwise_quantizer: a Quantizer (native, Identity or your own), which the
    hybrid then owns and pins to its direction, or a QuantizerRequest, which a module binds to its
    state; until then the hybrid cannot quantize.
    columnwise_source: "original": both children encode the input. "rowwise_dequantized": the column
    child encodes decode(row codes), rounded to the input's dtype and saturated; a row plane is made
    for it, and dropped, when only the columnwise one is requested.

    Raises TypeError when a child is neither, or is itself a hybrid; ValueError for one instance in
    both directions or an unknown source.
    """

    tensor_class = HybridQuantizedTensor

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer | QuantizerRequest,
        columnwise_quantizer: Quantizer | QuantizerRequest,
        columnwise_source: str = "original",
    ):
        super().__init__()
        _check_child("rowwise", rowwise_quantizer)
        _check_child("columnwise", columnwise_quantizer)
        if rowwise_quantizer is columnwise_quantizer and isinstance(rowwise_quantizer, Quantizer):
            raise ValueError(
                "rowwise_quantizer and columnwise_quantizer are one instance; each direction needs "
                "its own, e.g. columnwise_quantizer=rowwise_quantizer.copy()"
            )
        if columnwise_source not in COLUMNWISE_SOURCES:
            raise ValueError(
                f"columnwise_source={columnwise_source!r}; accepted: {COLUMNWISE_SOURCES}, "
                "e.g. columnwise_source='original'"
            )
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source
        if isinstance(rowwise_quantizer, Quantizer):
            rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        if isinstance(columnwise_quantizer, Quantizer):
            columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    @property
    def requests(self) -> dict[Direction, QuantizerRequest]:
        """The children that a module still has to bind, by direction."""
        children = {"rowwise": self.rowwise_quantizer, "columnwise": self.columnwise_quantizer}
        return {d: c for d, c in children.items() if isinstance(c, QuantizerRequest)}

    def with_children(self, rowwise: Quantizer, columnwise: Quantizer) -> HybridQuantizer:
        """A hybrid of the same source and usage with these children, which it then owns."""
        twin = super().copy()
        HybridQuantizer.__init__(
            twin,
            rowwise_quantizer=rowwise,
            columnwise_quantizer=columnwise,
            columnwise_source=self.columnwise_source,
        )
        twin.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        return twin

    def copy(self) -> HybridQuantizer:
        """The same with copies of the children; tensors of state are shared."""
        children = (self.rowwise_quantizer, self.columnwise_quantizer)
        return self.with_children(*(c.copy() if isinstance(c, Quantizer) else c for c in children))

    def child(self, direction: Direction) -> Quantizer:
        """The quantizer of this direction; RuntimeError while either child is a request."""
        for pending, request in self.requests.items():
            raise RuntimeError(
                f"{pending}_quantizer is a {type(request).__name__}: a module must bind it to its "
                "scaling state before this HybridQuantizer can quantize. Return the hybrid from a "
                "recipe's factory, or bind it with with_children(rowwise, columnwise)"
            )
        return self.rowwise_quantizer if direction == "rowwise" else self.columnwise_quantizer

    def plane_format(self, direction: Direction) -> Format:
        return self.child(direction).plane_format(direction)

    def _without_groups(self) -> HybridQuantizer:
        children = (self.child("rowwise"), self.child("columnwise"))
        return self.with_children(*(child._without_groups() for child in children))

    def _on(self, device: torch.device) -> HybridQuantizer:
        children = (self.child("rowwise"), self.child("columnwise"))
        return self.with_children(*(child._on(device) for child in children))


def _check_child(direction: Direction, child: object) -> None:
    if isinstance(child, HybridQuantizer):
        raise TypeError(
            f"{direction}_quantizer is a HybridQuantizer; hybrids do not nest, pass the quantizer "
            f"of that direction, e.g. {direction}_quantizer=hybrid.{direction}_quantizer.copy()"
        )
    if not isinstance(child, (Quantizer, QuantizerRequest)):
        raise TypeError(
            f"{direction}_quantizer is {child!r}; accepted: a Quantizer or a QuantizerRequest, "
            f"e.g. {direction}_quantizer=IdentityQuantizer()"
        )
