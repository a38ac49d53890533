"""assign_names: what role.name says for modules inside a model."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def model():
    return torch.nn.ModuleDict({"a": dfg.Linear(8, 8), "b": dfg.Linear(8, 8, name="mine")})


def test_fills_empty_names_only_and_strips_wrappers():
    wrapped = Wrapper(torch.nn.ModuleDict({"module": model()}))
    dfg.assign_names(wrapped, "decoder")
    inner = wrapped._orig_mod["module"]
    assert (inner["a"].name, inner["b"].name) == ("decoder.a", "mine")
    dfg.assign_names(wrapped, overwrite=True)
    assert (inner["a"].name, inner["b"].name) == ("a", "b")


def test_two_modules_of_one_name_are_refused_and_nothing_changes():
    twins = model()
    twins["b"].name = "a"
    with pytest.raises(ValueError, match="two modules have the name 'a'"):
        dfg.assign_names(twins)
    assert twins["a"].name == ""


def test_unnamed_module_keeps_an_empty_role_name():
    roles = []

    def factory(role):
        roles.append(role)
        return dfg.IdentityQuantizer()

    with dfg.autocast(recipe=dfg.CustomRecipe(qfactory=factory)):
        dfg.Linear(8, 8)(torch.randn(2, 8))
    assert roles[0].name == ""
