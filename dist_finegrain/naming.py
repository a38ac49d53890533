"""Names of module instances: what role.name says, and how a model's modules get theirs."""

from __future__ import annotations

import torch

from .modules.base import QuantizedModule
from .modules.composite import Part

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def named_quantized_modules(model: torch.nn.Module) -> list[tuple[str, QuantizedModule]]:
    """(path without wrapper parts, module) of every module of this package, in model order.

    Without the parts of a composite: their names follow from its.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule) and not isinstance(module, Part):
            parts = [part for part in path.split(".") if part not in _WRAPPERS]
            found.append((".".join(parts), module))
    return found


def assign_names(model: torch.nn.Module, prefix: str = "", *, overwrite: bool = False) -> None:
    """Give every module of this package in ``model`` its path as its name.

    prefix: put before each path, e.g. "decoder". overwrite: also replace names that are set.
    Communicates nothing. Raises ValueError when two modules would have one name; then no name is
    changed.
    """
    _assign(named_quantized_modules(model), prefix, overwrite)


def name_unbound(model: torch.nn.Module) -> None:
    """assign_names for the modules that no recipe was resolved for: a bound one keeps its name."""
    modules = named_quantized_modules(model)
    _assign([(path, module) for path, module in modules if not module.is_bound], "", False)


def _assign(modules: list[tuple[str, QuantizedModule]], prefix: str, overwrite: bool) -> None:
    names: dict[str, QuantizedModule] = {}
    for path, module in modules:
        name = ".".join(part for part in (prefix, path) if part)
        if module.name and not overwrite:
            name = module.name
        if name in names and name:
            raise ValueError(
                f"two modules have the name {name!r}; names must be unique, "
                "e.g. pass another name= or assign_names(model, overwrite=True)"
            )
        names[name] = module
    for name, module in names.items():
        module.name = name
