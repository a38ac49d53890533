"""autocast: which recipe is in force, for the modules that run inside it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from . import stepping
from .recipe import CustomRecipe, recipe_token


@dataclasses.dataclass(frozen=True)
class Frame:
    """One open autocast: ``enabled=False`` is the high-precision path.

    is_default: no autocast is open.
    """

    enabled: bool
    recipe: CustomRecipe | None
    token: int | None
    amax_reduction_group: Any = None
    is_default: bool = False


_DEFAULT = Frame(enabled=False, recipe=None, token=None, is_default=True)


class _Stack(threading.local):
    def __init__(self):
        self.frames: list[Frame] = []


_stack = _Stack()


def current_frame() -> Frame:
    """The innermost open autocast of this thread; a disabled default frame when none is open."""
    return _stack.frames[-1] if _stack.frames else _DEFAULT


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Run with a frame that was in force before."""
    _stack.frames.append(frame)
    try:
        yield
    finally:
        _stack.frames.pop()


class autocast:
    """Context in which the modules of this package quantize as ``recipe`` says.

    enabled: False is the high-precision path; no factory is called.
    recipe: a CustomRecipe; None inherits the enclosing autocast's.
    amax_reduction_group: process group over which delayed-scaling amaxes are reduced; it must
    contain the tensor-parallel group of every module inside. Default: that group.
    calibrating: accepted for Transformer Engine's signature; only False.

    Innermost wins; leaving it, also by an exception, restores the one outside. torch.autocast and
    this one do not switch each other.
    Raises ValueError when enabled without any recipe, TypeError when recipe is not a CustomRecipe.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: CustomRecipe | None = None,
        amax_reduction_group: Any = None,
    ):
        if calibrating:
            raise ValueError("calibrating=True is not supported; accepted: calibrating=False")
        if recipe is not None and not isinstance(recipe, CustomRecipe):
            raise TypeError(
                f"recipe is {recipe!r}; accepted: a CustomRecipe, "
                "e.g. recipe=CustomRecipe(qfactory=dist_finegrain.factories.mxfp8_factory)"
            )
        self.enabled = enabled
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group

    def __enter__(self):
        frame = self._frame()
        if not _stack.frames:
            stepping.finish_postponed_step()
        _stack.frames.append(frame)
        return self

    def __exit__(self, *exc_info):
        _stack.frames.pop()

    def _frame(self) -> Frame:
        outer = current_frame()
        if not self.enabled:
            return dataclasses.replace(outer, enabled=False, is_default=False)
        recipe = self.recipe or outer.recipe
        if recipe is None:
            raise ValueError(
                "autocast(enabled=True) got recipe=None outside of any other autocast; "
                "e.g. autocast(recipe=CustomRecipe(dist_finegrain.factories.mxfp8_factory))"
            )
        token = outer.token if recipe is outer.recipe else recipe_token(recipe)
        group = self.amax_reduction_group or outer.amax_reduction_group
        return Frame(True, recipe, token, group)
