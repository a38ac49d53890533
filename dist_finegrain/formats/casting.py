"""Casting matrices to planes: measure, agree over the scale group, encode.

Several casts that feed one GEMM pair run together, so that their amaxes share one reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .plane import Direction, Format, Plane, Rounding, saturating_to

if TYPE_CHECKING:
    from .quantizer import Quantizer


@dataclasses.dataclass
class CastJob:
    """One matrix ``x`` [M, K] to be written as the planes that its quantizer names.

    reduce: whether amaxes are shared with the other ranks of the scale group.
    record: whether a delayed-scaling amax counts towards the next scale.
    planes: the result, None for a direction that was not asked for.
    """

    x: torch.Tensor
    quantizer: Quantizer
    rowwise: bool = True
    columnwise: bool = True
    reduce: bool = False
    record: bool = True
    rounding: dict[Direction, Rounding] = dataclasses.field(default_factory=dict)
    planes: dict[Direction, Plane | None] = dataclasses.field(
        default_factory=lambda: {"rowwise": None, "columnwise": None}
    )

    def format(self, direction: Direction) -> Format:
        return self.quantizer.plane_format(direction)

    @property
    def columnwise_waits(self) -> bool:
        """The column plane is made from the row plane's values, not from ``x``."""
        return self.columnwise and self.quantizer.columnwise_source == "rowwise_dequantized"


def run_casts(
    jobs: Sequence[CastJob], reduce_max: Callable[[list[torch.Tensor]], None] | None = None
) -> None:
    """Fill ``planes`` of every job.

    reduce_max: takes the FP32 amax tensors of the jobs with ``reduce`` and makes each the maximum
    over the scale group, in place. It is called once, and once more when a column that follows
    from the rowwise codes needs an amax; whether it is called depends on formats, never on data.
    """
    first, second = [], []
    for job in jobs:
        row = None
        if job.rowwise or job.columnwise_waits:
            row = _Measured(job, "rowwise", job.x)
            first.append(row)
        if job.columnwise and not job.columnwise_waits:
            first.append(_Measured(job, "columnwise", job.x.t(), row))
    _encode_all(first, reduce_max)
    for job in jobs:
        if job.columnwise_waits:
            second.append(_Measured(job, "columnwise", _decoded_transpose(job)))
            if not job.rowwise:
                job.planes["rowwise"] = None
    _encode_all(second, reduce_max)


class _Measured:
    """One plane on its way: its matrix with the contraction last, and its amax."""

    def __init__(
        self,
        job: CastJob,
        direction: Direction,
        source: torch.Tensor,
        twin: _Measured | None = None,
    ):
        """twin: the other direction of the same matrix; its tensor amax is not read twice."""
        self.job, self.direction, self.source = job, direction, source
        self.format = job.format(direction)
        self.child = job.quantizer.child(direction)
        self.statistic = None
        self.is_copy = twin is not None and self._has_statistic_of(twin)
        if self.is_copy:
            self.statistic = twin.statistic
        elif self.format.statistic == "scale":
            if job.record and source.numel():
                self.child.record_amax(self.format.measure(source))
            self.statistic = self.child.scale
        elif self.format.statistic != "none":
            self.statistic = self.format.measure(source)

    @property
    def is_shared(self) -> bool:
        # Row amaxes stay local: either the rank contracts its own shard, or it holds whole rows.
        return self.job.reduce and self.format.statistic == "tensor" and not self.is_copy

    def _has_statistic_of(self, twin: _Measured) -> bool:
        if self.format.statistic == "scale":
            return self.child is twin.child
        both_tensor = self.format.statistic == twin.format.statistic == "tensor"
        return both_tensor and self.format.rht is None and twin.format.rht is None

    def encode(self) -> None:
        rounding = self.job.rounding.get(self.direction)
        self.job.planes[self.direction] = self.format.encode(self.source, self.statistic, rounding)


def _encode_all(measured: list[_Measured], reduce_max) -> None:
    shared = [m.statistic for m in measured if m.is_shared]
    if shared and reduce_max is not None:
        reduce_max(shared)
    for item in measured:
        item.encode()


def _decoded_transpose(job: CastJob) -> torch.Tensor:
    row = job.planes["rowwise"]
    return saturating_to(row.format.decode(row), job.x.dtype, keep_inf=False).t()
