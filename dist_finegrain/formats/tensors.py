"""Quantized tensors: what a quantizer returns, one plane per direction behind one torch.Tensor.

Legend: a tensor [..., K] is the matrix [M, K]; its rowwise plane is [M, K], its columnwise [K, M].
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .dtypes import HIGH_PRECISION_DTYPES
from .plane import DIRECTIONS, Direction, Plane
from .tensor_ops import DispatchingTensor

# Everything else in __dict__ was put there by the user or by torch and travels with the tensor.
_OWN_ATTRIBUTES = ("_rowwise", "_columnwise", "_quantizer")


class QuantizedTensor(DispatchingTensor):
    """A tensor [..., K] held as its rowwise and / or columnwise plane.

    shape, dtype: of the tensor that it stands for; ``dequantize`` returns that dtype.
    rowwise: Plane [M, K] or None; columnwise: Plane [K, M] or None.
    quantizer: re-quantizes on ``copy_`` and ``quantize_``; the tensor keeps the object given.
    device: needed only where no plane tells it.

    Operators act on the dequantized value, see tensor_ops.py. ``detach`` and views that keep K
    share the buffers, but dropping a direction in one leaves the others as they are.
    Raises ValueError when a plane's shape is not that of the tensor.
    """

    _rowwise: Plane | None
    _columnwise: Plane | None
    _quantizer: Any

    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rowwise: Plane | None,
        columnwise: Plane | None,
        *,
        quantizer: Any,
        requires_grad: bool = False,
        device: torch.device | None = None,
    ):
        return cls._make(shape, dtype, rowwise, columnwise, quantizer, requires_grad, device)

    @classmethod
    def _make(cls, shape, dtype, rowwise, columnwise, quantizer, requires_grad=False, device=None):
        rows, contraction = flat_shape(shape)
        _check_plane_shape("rowwise", rowwise, (rows, contraction), shape)
        _check_plane_shape("columnwise", columnwise, (contraction, rows), shape)
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            tuple(shape),
            dtype=dtype,
            device=device or _device_of(rowwise, columnwise),
            requires_grad=requires_grad,
        )
        self._quantizer = quantizer
        self._set_planes(rowwise, columnwise)
        return self

    def _set_planes(self, rowwise: Plane | None, columnwise: Plane | None) -> None:
        self._rowwise, self._columnwise = rowwise, columnwise

    # Planes and usage.
    def plane(self, direction: Direction) -> Plane | None:
        """The plane of this direction, None where it is not held."""
        return self._rowwise if direction == "rowwise" else self._columnwise

    @property
    def rowwise_plane(self) -> Plane | None:
        return self._rowwise

    @property
    def columnwise_plane(self) -> Plane | None:
        return self._columnwise

    @property
    def plane_nbytes(self) -> int:
        """Bytes of the buffers held (``nbytes`` is that of the dequantized tensor)."""
        return sum(self.plane(direction).nbytes for direction in self._owned())

    def get_usages(self) -> dict[str, bool]:
        """Which directions are held."""
        return {direction: self.plane(direction) is not None for direction in DIRECTIONS}

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """False drops a direction, None leaves it, True requires it.

        Raises RuntimeError, and changes nothing, when a required direction is not held: a plane
        cannot be made from the other one.
        """
        wanted = dict(zip(DIRECTIONS, (rowwise, columnwise), strict=True))
        for direction, want in wanted.items():
            if want and self.plane(direction) is None:
                raise RuntimeError(
                    f"{direction}=True, but this tensor holds no {direction} plane; usages can "
                    f"only be dropped. Quantize again with set_usage({direction}=True)"
                )
        kept = (self.plane(d) if want is not False else None for d, want in wanted.items())
        self._set_planes(*kept)

    def clear(self) -> None:
        """Drop both planes."""
        self._set_planes(None, None)

    # Values.
    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values in ``dtype`` (default: the tensor's), from the rowwise plane if it is held.

        Differentiable: the gradient passes unchanged. Raises RuntimeError when neither plane is
        held, or only a columnwise plane in the transformed (RHT) domain.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype or self.dtype)
        return self._values(dtype or self.dtype)

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        if self._rowwise is not None:
            return self._rowwise.decode(dtype).reshape(self.shape)
        if self._columnwise is None:
            raise RuntimeError(
                "this tensor holds neither plane: both usages were dropped, it was cleared, or its "
                "buffers were taken by prepare_for_saving"
            )
        if self._columnwise.format.rht is not None:
            raise RuntimeError(
                f"only the columnwise plane {self._columnwise.format.describe()} is held, and its "
                "codes are those of the Hadamard transform (RHT): they are not the tensor's "
                "values. Keep the rowwise plane to dequantize"
            )
        return self._columnwise.decode(dtype).t().reshape(self.shape).contiguous()

    def quantize_(
        self, source: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``source``, of this tensor's shape, into every plane held; returns self.

        noop_flag: FP32 [1]; non-zero leaves the bytes as they are.
        """
        quantizer = self._quantizer.copy()
        # A plane held but not requested would keep the old values.
        quantizer.set_usage(rowwise=True, columnwise=True)
        return quantizer.update_quantized(source, self, noop_flag)

    def _copy_planes_from(self, source: torch.Tensor) -> bool:
        """Copy bytes if ``source`` holds the same planes made the same way; else do nothing."""
        if not isinstance(source, QuantizedTensor) or source.shape != self.shape:
            return False
        if self._quantizer.columnwise_source != source._quantizer.columnwise_source:
            return False
        pairs = [(self.plane(d), source.plane(d)) for d in self._owned()]
        if any(theirs is None or theirs.format != ours.format for ours, theirs in pairs):
            return False
        for ours, theirs in pairs:
            write_plane(ours, theirs)
        return True

    # Saving for backward.
    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensor]:
        """(buffers for ``ctx.save_for_backward``, a shell of this tensor without them).

        The shell's ``restore_from_saved`` takes the buffers back; this tensor is not changed.
        """
        buffers = [part for d in self._owned() for part in self.plane(d).parts]
        shell = self._mapped(lambda part: None)
        return buffers, shell

    def restore_from_saved(self, saved: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take this tensor's buffers from the front of ``saved``; returns the rest."""
        saved = list(saved)
        planes: dict[Direction, Plane | None] = dict.fromkeys(DIRECTIONS)
        for direction in self._owned():
            plane = self.plane(direction)
            parts, saved = saved[: len(plane.parts)], saved[len(plane.parts) :]
            planes[direction] = dataclasses.replace(plane, parts=tuple(parts))
        self._set_planes(**planes)
        return saved

    # Copies.
    def _owned(self) -> list[Direction]:
        """Directions whose buffers are held; each buffer occurs in one of them."""
        return [direction for direction in DIRECTIONS if self.plane(direction) is not None]

    def _like(self, *, planes=None, shape=None) -> QuantizedTensor:
        """A tensor of this class with these planes (default: the same buffers)."""
        planes = planes or {direction: self.plane(direction) for direction in DIRECTIONS}
        return self._make(
            self.shape if shape is None else shape,
            self.dtype,
            planes["rowwise"],
            planes["columnwise"],
            self._quantizer,
            device=_device_of(*planes.values(), default=self.device),
        )

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor | None]) -> QuantizedTensor:
        """A tensor of this class with ``function`` applied to each buffer once."""
        planes: dict[Direction, Plane | None] = dict.fromkeys(DIRECTIONS)
        planes.update({d: self.plane(d).map(function) for d in self._owned()})
        return self._like(planes=planes)

    @property
    def data(self) -> QuantizedTensor:
        """The same buffers without gradient.

        Assigning takes over the planes of a tensor of this class; another tensor is quantized
        first, its dtype and shape become this tensor's (so ``module.to(dtype)`` works).
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(value) is not type(self):
            quantizer = self._quantizer.copy()
            quantizer.set_usage(**self.get_usages())
            value = quantizer._quantize(value.detach())
        torch.Tensor.data.__set__(self, value)
        self._quantizer = value._quantizer
        self._set_planes(value._rowwise, value._columnwise)

    def _attributes(self) -> dict[str, Any]:
        """Attributes that are not ours, such as Parameter's mark and Megatron's."""
        return {k: v for k, v in self.__dict__.items() if k not in _OWN_ATTRIBUTES}

    def __deepcopy__(self, memo: dict) -> QuantizedTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf tensors can be deep-copied; use detach() on this quantized tensor first"
            )
        twin = memo[id(self)] = self._like(
            planes={d: copy.deepcopy(self.plane(d), memo) for d in DIRECTIONS}
        )
        twin._quantizer = copy.deepcopy(self._quantizer, memo)
        twin.requires_grad_(self.requires_grad)
        twin.__dict__.update(copy.deepcopy(self._attributes(), memo))
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: int):
        buffers = {direction: self.plane(direction) for direction in self._owned()}
        state = (tuple(self.shape), self.dtype, buffers, self._quantizer)
        return rebuild_tensor, (type(self), *state, self.requires_grad, self._attributes())

    def __repr__(self, *, tensor_contents=None) -> str:
        planes = ", ".join(
            f"{d}={p.format.describe() if (p := self.plane(d)) is not None else None}"
            for d in DIRECTIONS
        )
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {planes}{grad})"


class IdentityTensor(QuantizedTensor):
    """A tensor held in high precision: one buffer serves both directions.

    Dropping a direction changes nothing; ``dequantize`` in the held dtype returns the buffer
    without a copy.
    """

    def _set_planes(self, rowwise: Plane | None, columnwise: Plane | None) -> None:
        if rowwise is None and columnwise is not None:
            rowwise = _transposed(columnwise)
        self._rowwise = rowwise
        self._columnwise = None if rowwise is None else _transposed(rowwise)

    def _owned(self) -> list[Direction]:
        return [] if self._rowwise is None else ["rowwise"]

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Does nothing, unless a direction is required after ``clear``: RuntimeError."""
        super().update_usage(rowwise or None, columnwise or None)

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        if self._rowwise is None:
            return super()._values(dtype)
        return self._rowwise.codes.reshape(self.shape).to(dtype)


class HybridQuantizedTensor(QuantizedTensor):
    """A tensor whose two planes were made by the two children of a HybridQuantizer.

    rowwise_storage, columnwise_storage: tensors of the children's types that hold the direction,
    or None; their planes are taken over without a copy.
    Raises TypeError for anything else, ValueError for a storage without its direction.
    """

    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rowwise_storage: QuantizedTensor | None,
        columnwise_storage: QuantizedTensor | None,
        quantizer: Any,
        requires_grad: bool = False,
        device: torch.device | None = None,
    ):
        rowwise = _plane_of_storage("rowwise", rowwise_storage)
        columnwise = _plane_of_storage("columnwise", columnwise_storage)
        return cls._make(shape, dtype, rowwise, columnwise, quantizer, requires_grad, device)

    @property
    def columnwise_source(self) -> str:
        """What the columnwise plane was made from: "original" or "rowwise_dequantized"."""
        return self._quantizer.columnwise_source

    @property
    def rowwise_storage(self) -> QuantizedTensor | None:
        """The rowwise plane as a tensor of the row child's type, sharing its buffers."""
        return self._storage("rowwise")

    @property
    def columnwise_storage(self) -> QuantizedTensor | None:
        """The columnwise plane as a tensor of the column child's type, sharing its buffers."""
        return self._storage("columnwise")

    def _storage(self, direction: Direction) -> QuantizedTensor | None:
        if (plane := self.plane(direction)) is None:
            return None
        planes = dict.fromkeys(DIRECTIONS) | {direction: plane}
        return self._quantizer.child(direction)._wrap(self.shape, self.dtype, *planes.values())


class _Dequantize(torch.autograd.Function):
    """Straight through: dx = dy."""

    @staticmethod
    def forward(ctx, tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor._values(dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.to(ctx.dtype), None


def rebuild_tensor(cls, shape, dtype, planes, quantizer, requires_grad, attributes):
    """What a pickled quantized tensor is made from."""
    if not (isinstance(cls, type) and issubclass(cls, QuantizedTensor)):
        raise TypeError(f"a pickled quantized tensor names the class {cls!r}, which is none")
    rowwise, columnwise = planes.get("rowwise"), planes.get("columnwise")
    tensor = cls._make(shape, dtype, rowwise, columnwise, quantizer, requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


def flat_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(M, K) of a tensor [..., K]: leading dimensions multiplied; a vector is one row."""
    shape = tuple(shape)
    if not shape:
        return (1, 1)
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return (rows, shape[-1])


def write_plane(target: Plane, source: Plane, noop_flag: torch.Tensor | None = None) -> None:
    """Overwrite the bytes of ``target`` with those of ``source``, unless ``noop_flag`` is set.

    High-precision buffers are cast to the target's dtype. Raises ValueError, before any write,
    when the buffers do not fit.
    """
    pairs = list(zip(target.parts, source.parts, strict=True))
    for index, (old, new) in enumerate(pairs):
        if _layout(old) != _layout(new):
            raise ValueError(
                f"buffer {index} of the {target.format.describe()} plane is {_layout(old)}, the "
                f"new one is {_layout(new)}; shapes and dtypes must be equal"
            )
    for old, new in pairs:
        if old is None:
            continue
        if noop_flag is not None:
            new = torch.where(noop_flag.to(old.device) != 0, old, new.to(old.device))
        old.copy_(new)
        if not old.is_inference():
            # Below __torch_dispatch__ no write is counted; a saved plane must notice this one.
            torch.autograd.graph.increment_version(old)
    if noop_flag is None:
        target.format = source.format  # a user's format may carry what decode() needs


def _layout(part: torch.Tensor | None) -> tuple | None:
    if part is None:
        return None
    dtype = "high precision" if part.dtype in HIGH_PRECISION_DTYPES else part.dtype
    return (tuple(part.shape), dtype)


def _transposed(plane: Plane) -> Plane:
    rows, contraction = plane.shape
    parts = tuple(None if part is None else part.t() for part in plane.parts)
    return dataclasses.replace(plane, shape=(contraction, rows), parts=parts)


def _plane_of_storage(direction: Direction, storage: Any) -> Plane | None:
    if storage is None:
        return None
    if not isinstance(storage, QuantizedTensor) or isinstance(storage, HybridQuantizedTensor):
        raise TypeError(
            f"{direction}_storage is a {type(storage).__name__}; accepted: a QuantizedTensor or "
            f"IdentityTensor that the {direction} child made, or None, e.g. "
            f"{direction}_storage=quantizer.{direction}_quantizer(tensor)"
        )
    if storage.plane(direction) is None:
        raise ValueError(
            f"{direction}_storage holds no {direction} plane; quantize it with "
            f"set_usage({direction}=True)"
        )
    return storage.plane(direction)


def _check_plane_shape(direction: Direction, plane: Plane | None, expected, shape) -> None:
    if plane is not None and tuple(plane.shape) != expected:
        raise ValueError(
            f"{direction} plane has shape {tuple(plane.shape)}; a tensor of shape {tuple(shape)} "
            f"takes {expected}"
        )


def _device_of(*planes: Plane | None, default: torch.device | None = None) -> torch.device:
    for plane in planes:
        for part in plane.parts if plane is not None else ():
            if part is not None:
                return part.device
    return default or torch.get_default_device()
