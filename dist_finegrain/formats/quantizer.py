"""Quantizer: what a factory returns for one slot; it names the format of each direction."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch

from .casting import CastJob, run_casts
from .dtypes import check_high_precision
from .plane import DIRECTIONS, Direction, Format, Plane, Rounding
from .tensors import QuantizedTensor, flat_shape, write_plane
from .user import UserFormat, is_process_group


class Quantizer:
    """Turns a high-precision tensor into its rowwise and columnwise planes.

    Subclass it for a format of your own: implement ``encode(x) -> tuple of tensors`` and
    ``decode(parts, shape, dtype) -> Tensor``; both are called per plane on the matrix [R, C] with
    the contraction dimension last. GEMMs of such planes run from ``decode`` in every mode.
    ``torch.load(weights_only=True)`` of its tensors needs
    ``torch.serialization.add_safe_globals([YourQuantizer])``, as for any class of yours.

    rowwise, columnwise: which planes ``quantize`` produces (``set_usage`` changes it).

    A process group held as an attribute is shared by ``copy`` and deepcopy, and dropped (None) by
    pickle and by the quantizer that a result keeps.
    """

    tensor_class: ClassVar[type[QuantizedTensor]] = QuantizedTensor
    columnwise_source: str = "original"
    # Defaults of the class, so that a subclass need not call __init__.
    rowwise_usage: bool = True
    columnwise_usage: bool = True
    internal: bool = False
    optimize_for_gemm: bool = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True):
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

    # What a user's own format implements.
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Buffers of one plane of ``x`` [R, C]; called only where no native format is named."""
        raise TypeError(f"{type(self).__name__} implements neither encode() nor plane_format()")

    def decode(
        self, parts: tuple[torch.Tensor, ...], shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The values [R, C] in ``dtype`` from what ``encode`` returned."""
        raise TypeError(f"{type(self).__name__} implements neither decode() nor plane_format()")

    # What native formats and the hybrid override.
    def plane_format(self, direction: Direction) -> Format:
        """The frozen format of the plane in this direction."""
        return UserFormat(self)

    def child(self, direction: Direction) -> Quantizer:
        """The quantizer that owns this direction: itself, or a hybrid's child."""
        return self

    def set_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose which planes later calls produce; None leaves a direction as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def copy(self) -> Quantizer:
        """A quantizer of the same configuration and its own usage; tensors of state are shared."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __copy__(self) -> Quantizer:
        return self.copy()

    def usage(self, direction: Direction) -> bool:
        """Whether ``quantize`` produces the plane of this direction."""
        return self.rowwise_usage if direction == "rowwise" else self.columnwise_usage

    # Quantizing.
    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Quantize ``tensor`` [..., K]; leading dimensions are flattened to the M rows.

        out: write into this tensor's buffers instead (its directions are kept).
        dtype: nominal dtype of the result; default the input's.
        The result shares no memory with ``tensor``; its gradient passes to it unchanged.
        Raises TypeError for a dtype other than float32, float16, bfloat16; ValueError if ``out``
        has another shape or format.
        """
        check_high_precision(tensor.dtype, "tensor")
        check_high_precision(dtype or tensor.dtype, "the result")
        if out is not None:
            return self.update_quantized(tensor, out)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Quantize.apply(tensor, self, dtype)
        return self._quantize(tensor, dtype)

    __call__ = quantize

    def _quantize(self, tensor, dtype=None) -> QuantizedTensor:
        planes = self._planes(tensor, *map(self.usage, DIRECTIONS))
        # Identity, or a user's encode(), may hand its input on.
        planes = [p and p.map(lambda part: _unshared(part, tensor)) for p in planes]
        return self._wrap(tensor.shape, dtype or tensor.dtype, *planes, device=tensor.device)

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize ``src`` into the planes that ``dst`` holds and this quantizer requests.

        noop_flag: FP32 [1]; a non-zero value leaves every byte of ``dst`` as it is.
        Raises TypeError when ``dst`` is no QuantizedTensor or ``src`` no high-precision one;
        ValueError when the shapes differ or ``dst`` holds another format.
        """
        if not isinstance(dst, QuantizedTensor):
            raise TypeError(
                f"dst is a {type(dst).__name__}; accepted: a QuantizedTensor, e.g. "
                "dst=quantizer.make_empty(src.shape)"
            )
        check_high_precision(src.dtype, "src")
        if tuple(src.shape) != tuple(dst.shape):
            raise ValueError(
                f"src has shape {tuple(src.shape)}, dst has {tuple(dst.shape)}; they must be equal"
            )
        held = dst._owned()
        wanted = [self.usage(d) and d in held for d in DIRECTIONS]
        for direction, want in zip(DIRECTIONS, wanted, strict=True):
            if want:
                _check_format(direction, dst.plane(direction), self.plane_format(direction))
        for new, direction in zip(self._planes(src, *wanted), DIRECTIONS, strict=True):
            if new is not None:
                write_plane(dst.plane(direction), new, noop_flag)
        return dst

    def make_empty(
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A quantized tensor of ``shape`` with uninitialised buffers for the requested planes.

        device: None means torch's default device.
        """
        check_high_precision(dtype, "dtype")
        device = torch.device(device) if device is not None else torch.get_default_device()
        rows, columns = flat_shape(shape)
        extents = {"rowwise": (rows, columns), "columnwise": (columns, rows)}
        planes = [
            self.plane_format(d).empty(extents[d], dtype, device) if self.usage(d) else None
            for d in DIRECTIONS
        ]
        return self._wrap(shape, dtype, *planes, requires_grad=requires_grad, device=device)

    def dequantize(self, tensor: QuantizedTensor, *, dtype: torch.dtype | None = None):
        """The high-precision values of a tensor that this quantizer made."""
        return tensor.dequantize(dtype=dtype)

    def _wrap(
        self, shape, dtype, rowwise, columnwise, requires_grad=False, device=None
    ) -> QuantizedTensor:
        quantizer = self._without_groups()
        return self.tensor_class._make(
            shape, dtype, rowwise, columnwise, quantizer, requires_grad, device
        )

    def _planes(
        self, tensor, rowwise: bool, columnwise: bool, record: bool = True
    ) -> tuple[Plane | None, Plane | None]:
        values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        job = CastJob(
            matrix(values.detach()),
            self,
            rowwise=rowwise,
            columnwise=columnwise,
            record=record,
            rounding={d: Rounding() for d in DIRECTIONS},
        )
        run_casts([job])
        return job.planes["rowwise"], job.planes["columnwise"]

    # Copies: process groups stay with the process, tensors of state follow the device.
    def _without_groups(self) -> Quantizer:
        twin = self.copy()
        twin.__dict__.update({k: None for k, v in vars(twin).items() if is_process_group(v)})
        return twin

    def _on(self, device: torch.device) -> Quantizer:
        twin = self.copy()
        tensors = {k: v.to(device) for k, v in vars(twin).items() if isinstance(v, torch.Tensor)}
        twin.__dict__.update(tensors)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {k: None if is_process_group(v) else v for k, v in vars(self).items()}

    def __deepcopy__(self, memo: dict) -> Quantizer:
        twin = memo[id(self)] = object.__new__(type(self))
        for name, value in vars(self).items():
            twin.__dict__[name] = value if is_process_group(value) else copy.deepcopy(value, memo)
        return twin


class _Quantize(torch.autograd.Function):
    """Straight through: dx = dy."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None):
        ctx.dtype = tensor.dtype
        return quantizer._quantize(tensor, dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.to(ctx.dtype), None, None


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` [..., K] seen as [M, K]."""
    return tensor.reshape(flat_shape(tensor.shape))


def _unshared(part: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if isinstance(source, QuantizedTensor):
        shared = [p for d in source._owned() for p in source.plane(d).parts if p is not None]
    else:
        shared = [source]
    address = part.untyped_storage().data_ptr()
    return part.clone() if any(s.untyped_storage().data_ptr() == address for s in shared) else part


def _check_format(direction: Direction, plane: Plane, format_: Format) -> None:
    if format_ == plane.format or _of_one_user_class(format_, plane.format):
        return
    raise ValueError(
        f"the {direction} plane of dst is {plane.format.describe()}, this quantizer writes "
        f"{format_.describe()}; they must be equal, e.g. dst=quantizer.make_empty(src.shape)"
    )


def _of_one_user_class(a: Format, b: Format) -> bool:
    """Attributes of a user's quantizer may be state that changes from call to call."""
    are_user = isinstance(a, UserFormat) and isinstance(b, UserFormat)
    return are_user and type(a.quantizer) is type(b.quantizer)
