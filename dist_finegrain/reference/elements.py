"""Rules that the FP8 formats share: FP32 constants, amax, scale from amax, element casts, E8M0.

Codes are torch.uint8 tensors holding E4M3 or E5M2 bytes; ``element`` is "e4m3" or "e5m2". Every
arithmetic step is one IEEE binary32 operation, rounded to nearest even, in the order written.
Two details look simplifiable and are not: a quotient is always tensor / tensor (torch turns
scalar / tensor into a reciprocal and a product, often one ulp off), and casts clamp explicitly
(torch's E4M3 cast saturates only from 2.12, its E5M2 cast overflows to Inf in every version).
"""

from __future__ import annotations

import math

import torch

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
# 1/448 and 1/57344 rounded to FP32: bits 3B124925 and 37924925.
FP8_MAX_RECIPROCAL = {
    "e4m3": float.fromhex("0x1.24924ap-9"),
    "e5m2": float.fromhex("0x1.24924ap-16"),
}
FLT_MAX = torch.finfo(torch.float32).max
NAN_CODE = 0x7F
_TORCH_DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_EXPONENT_BITS = 0x7F800000


def finite_part(x: torch.Tensor) -> torch.Tensor:
    """``x`` with NaN and ±Inf replaced by zero: what amaxes and codes of the other elements see.

    Returns ``x`` itself where it is known to be all finite. Only CPU tensors are looked at for
    that; elsewhere it would be a host synchronisation.
    """
    if x.device.type == "cpu":
        low, high = _range(x)
        if low > -math.inf and high < math.inf:  # both are False for NaN
            return x
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(smallest, largest) element, 0-d, both NaN if there is one; zeros for no element."""
    if x.numel() == 0:
        return x.new_zeros(()), x.new_zeros(())
    # aminmax reads memory in logical order, so hand it the order in which a transpose lies.
    return torch.aminmax(x.t() if x.dim() == 2 and not x.is_contiguous() else x)


def finite_amax(x: torch.Tensor, dims: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """max |x| over the finite elements, FP32; the amax of nothing is 0.

    dims: the dimensions to reduce, which disappear; None reduces all of them to shape [1].
    """
    x = finite_part(x)
    if dims is None:
        low, high = _range(x)
        return torch.maximum(low.abs(), high.abs()).float().reshape(1)
    if x.numel() == 0:
        return x.float().sum(dims)
    return x.abs().amax(dims).float()


def scale_from_amax(
    amax: torch.Tensor, fp8_max: float, epsilon: float = 0.0, power_of_two: bool = False
) -> torch.Tensor:
    """Encode scale s = fp8_max / max(amax, epsilon), FP32 of ``amax``'s shape.

    An amax of 0 gives 1; a quotient that overflows gives FLT_MAX; ``power_of_two`` then clears the
    mantissa.
    """
    amax = amax.clamp(min=epsilon)
    scale = (torch.full_like(amax, fp8_max) / amax).clamp(max=FLT_MAX)
    scale = torch.where(amax == 0, torch.ones_like(amax), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return scale


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale by FP32 division: the decode scale of an encode scale."""
    return torch.ones_like(scale) / scale


def cast_e4m3(values: torch.Tensor, nonfinite_of: torch.Tensor | None = None) -> torch.Tensor:
    """FP32 ``values`` to E4M3 bytes, nearest-even, saturating at ±448; zeros keep their sign.

    nonfinite_of: the input that ``values`` was scaled from, same shape; where it is NaN or ±Inf
    the code is 7F. None: that input is all finite, so an infinite value is an overflow of the
    scaling, which saturates.
    """
    return _narrow(values.clamp(-448.0, 448.0), "e4m3", nonfinite_of)


def cast_e5m2(values: torch.Tensor, nonfinite_of: torch.Tensor | None = None) -> torch.Tensor:
    """As ``cast_e4m3``, to E5M2 saturating at ±57344; NaN gives 7F and ±Inf gives 7C or FC."""
    return _narrow(values.clamp(-57344.0, 57344.0), "e5m2", nonfinite_of)


def encode_with_scale(x: torch.Tensor, scale: torch.Tensor, element: str) -> torch.Tensor:
    """Codes of ``x`` · ``scale``: the element step of every FP8 format.

    x: FP32, FP16 or BF16; scale: FP32 encode scale that broadcasts to ``x``. It has dimensions, as
    a product with a 0-d tensor would stay in the dtype of ``x``.
    """
    finite = finite_part(x)
    values = (finite * scale).clamp_(-FP8_MAX[element], FP8_MAX[element])
    return _narrow(values, element, None if finite is x else x)


def _narrow(clamped: torch.Tensor, element: str, nonfinite_of: torch.Tensor | None) -> torch.Tensor:
    codes = clamped.to(_TORCH_DTYPE[element]).view(torch.uint8)
    if nonfinite_of is None:
        return codes
    if element == "e4m3":
        return codes.masked_fill_(~nonfinite_of.isfinite(), NAN_CODE)
    codes.masked_fill_(nonfinite_of.isnan(), NAN_CODE)
    codes.masked_fill_(nonfinite_of == math.inf, 0x7C)
    return codes.masked_fill_(nonfinite_of == -math.inf, 0xFC)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes to FP32 values; 7F and FF are NaN."""
    # An E4M3 byte shifted into FP16 is its value times 2^-8, subnormals included: several times
    # faster than torch's own cast. Bit 14 is the copy of the sign that the widening left there.
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = half.view(torch.float16).float().mul_(256.0)
    magnitude = codes & 0x7F
    if codes.device.type == "cpu" and (codes.numel() == 0 or magnitude.amax() < NAN_CODE):
        return values
    return values.masked_fill_(magnitude == NAN_CODE, math.nan)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """E5M2 bytes to FP32 values, NaN and ±Inf included."""
    return codes.view(torch.float8_e5m2).float()


def decode_elements(codes: torch.Tensor, element: str) -> torch.Tensor:
    """FP32 values of the codes alone, without any scale."""
    return decode_e4m3(codes) if element == "e4m3" else decode_e5m2(codes)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes to FP32: c is 2^(c-127), 0 is 2^-127 (not zero), 255 is NaN."""
    bits = codes.to(torch.int32) << 23
    bits = bits.masked_fill(codes == 0, 0x00400000).masked_fill(codes == 255, 0x7FC00000)
    return bits.view(torch.float32)


def blocks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``x`` [R, C] as [⌈R/rows⌉, rows, ⌈C/columns⌉, columns], filled up with zeros."""
    row_pad, column_pad = -x.shape[0] % rows, -x.shape[1] % columns
    if row_pad or column_pad:
        x = torch.nn.functional.pad(x, (0, column_pad, 0, row_pad))
    return x.unflatten(0, (x.shape[0] // rows, rows)).unflatten(2, (x.shape[1] // columns, columns))


def unblocked(blocks: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The [R, C] matrix that ``blocks`` was made from: a view of it where nothing was filled."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]
