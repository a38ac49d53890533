"""The probe for NVIDIA's apex, with fake modules in its place."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from dist_finegrain import apex
from dist_finegrain.modules.norms import Norm


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    """No apex at all, whatever this machine has; each test then adds what it needs."""
    for name in (*apex.EXTENSIONS, "apex", "apex.normalization", apex._NORM_MODULE):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    forget()
    yield
    forget()


def forget():
    apex.probe.cache_clear()
    apex.norm_functions.cache_clear()


def install(monkeypatch, tmp_path, *, extensions=(), is_nvidia=True, functions=None):
    """Put a package called apex and some extension modules into sys.modules."""
    if is_nvidia:
        (tmp_path / "normalization").mkdir()
    package = types.ModuleType("apex")
    package.__path__, package.__file__ = [str(tmp_path)], str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "apex", package)
    for name in extensions:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    if functions is not None:
        monkeypatch.setitem(
            sys.modules, "apex.normalization", types.ModuleType("apex.normalization")
        )
        module = types.ModuleType(apex._NORM_MODULE)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, apex._NORM_MODULE, module)


def test_nothing_installed():
    found = apex.probe()
    assert found.package == "no package called apex is installed"
    assert all(found.why_no(name).startswith(name) for name in apex.EXTENSIONS)
    assert "amp_C: amp_C cannot be imported (ModuleNotFoundError" in str(found)
    assert apex.norm_functions()[0] == {}
    with pytest.raises(KeyError):
        found.why_no("apex_C")


def test_unrelated_package_is_named_and_not_imported(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").write_text("raise SystemExit('an unrelated package was run')")
    spec = types.SimpleNamespace(
        origin=str(tmp_path / "__init__.py"), submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.delitem(sys.modules, "apex")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    reason = apex.probe().package
    assert f"the package apex at {spec.origin} is not NVIDIA's" in reason
    assert "github.com/NVIDIA/apex" in reason
    monkeypatch.setitem(sys.modules, apex.FUSED_NORM, types.ModuleType(apex.FUSED_NORM))
    forget()
    assert apex.norm_functions() == ({}, reason)


def test_unrelated_package_that_was_imported_already(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, is_nvidia=False)
    assert "is not NVIDIA's" in apex.probe().package


def test_package_without_its_extensions(monkeypatch, tmp_path):
    """NVIDIA's apex, Python only: it imports fine and would fail in the first forward."""
    install(monkeypatch, tmp_path, extensions=("amp_C",), functions={})
    found = apex.probe()
    assert (found.package, found.why_no("amp_C")) == ("", "")
    assert apex.norm_functions() == ({}, found.why_no(apex.FUSED_NORM))


def test_extension_of_another_build(monkeypatch):
    def broken(name):
        raise OSError(f"{name}.so: undefined symbol: _ZN3c10")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "OSError: amp_C.so: undefined symbol" in apex.probe().why_no("amp_C")


def test_version_without_a_function(monkeypatch, tmp_path):
    functions = {"fused_layer_norm_affine": len}
    install(monkeypatch, tmp_path, extensions=apex.EXTENSIONS, functions=functions)
    usable, reason = apex.norm_functions()
    assert usable == {} and "has no fused_rms_norm_affine" in reason


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA: enough to see which function is called."""

    is_cuda = True


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norms_use_it_on_cuda_only(monkeypatch, tmp_path, normalization):
    calls = []

    def layer_norm(x, weight, bias, shape, eps):
        calls.append(("LayerNorm", shape, eps))
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    def rms_norm(x, weight, shape, eps):
        calls.append(("RMSNorm", shape, eps))
        return torch.nn.functional.rms_norm(x, shape, weight, eps)

    functions = {"fused_layer_norm_affine": layer_norm, "fused_rms_norm_affine": rms_norm}
    install(monkeypatch, tmp_path, extensions=apex.EXTENSIONS, functions=functions)
    norm, x, weight = Norm(normalization, 1e-3), torch.randn(4, 8), torch.randn(8)
    bias = torch.randn(8) if norm.has_bias else None
    wanted = norm(x, weight, bias)
    assert calls == []
    got = norm(x.as_subclass(OnCuda), weight, bias)
    assert calls == [(normalization, (8,), 1e-3)]
    assert torch.equal(got.as_subclass(torch.Tensor), wanted)
