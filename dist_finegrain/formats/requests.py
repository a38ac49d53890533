"""Requests: what a factory returns for a slot whose quantizer needs state that the module keeps."""

from __future__ import annotations

import dataclasses
import enum

AMAX_COMPUTE_ALGOS = ("max", "most_recent")


class FP8Format(enum.Enum):
    """Element types of a per-tensor recipe; HYBRID is E4M3 forward and E5M2 for gradients."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclasses.dataclass(frozen=True)
class QuantizerRequest:
    """Asks the module for a quantizer bound to its state; also accepted as a hybrid's child."""


@dataclasses.dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Per-tensor FP8 whose scale follows from the amaxes of past steps.

    fp8_format: element types forward and for gradients.
    margin: the scale is divided by 2^margin.
    amax_history_len: how many steps the window holds.
    amax_compute_algo: "max" over the window, or the "most_recent" amax.
    scaling_factor_compute_algo: only None, kept for Transformer Engine's signature.
    reduce_amax: share amaxes over the reduction group; False is refused in a group of size > 1.

    Raises TypeError / ValueError naming the field, what was got and what is accepted.
    """

    fp8_format: FP8Format = FP8Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True

    def __post_init__(self):
        if not isinstance(self.fp8_format, FP8Format):
            raise TypeError(
                f"fp8_format={self.fp8_format!r}; accepted: FP8Format.HYBRID, FP8Format.E4M3, "
                "FP8Format.E5M2, e.g. fp8_format=FP8Format.HYBRID"
            )
        _check_int("margin", self.margin, 0, "margin=0")
        _check_int("amax_history_len", self.amax_history_len, 1, "amax_history_len=1024")
        if self.amax_compute_algo not in AMAX_COMPUTE_ALGOS:
            raise ValueError(
                f"amax_compute_algo={self.amax_compute_algo!r}; accepted: {AMAX_COMPUTE_ALGOS}, "
                "e.g. amax_compute_algo='max'"
            )
        if self.scaling_factor_compute_algo is not None:
            raise ValueError(
                f"scaling_factor_compute_algo={self.scaling_factor_compute_algo!r}; accepted: "
                "only scaling_factor_compute_algo=None, the scale is (fp8_max / amax) / 2^margin"
            )
        if not isinstance(self.reduce_amax, bool):
            raise TypeError(
                f"reduce_amax={self.reduce_amax!r}; accepted: True or False, e.g. reduce_amax=True"
            )

    def element(self, forward: bool) -> str:
        """Element type, "e4m3" or "e5m2", of a forward slot or of a gradient slot."""
        if self.fp8_format is FP8Format.HYBRID:
            return "e4m3" if forward else "e5m2"
        return self.fp8_format.value


def _check_int(name: str, got: object, least: int, valid: str) -> None:
    if not isinstance(got, int) or isinstance(got, bool):
        raise TypeError(f"{name}={got!r}; accepted: an int of at least {least}, e.g. {valid}")
    if got < least:
        raise ValueError(f"{name}={got}; accepted: an int of at least {least}, e.g. {valid}")
