"""Importing the package and using it without any GPU or driver (bug case 38)."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch
import dist_finegrain as dfg
from dist_finegrain import factories

assert not torch.cuda.is_initialized()
plain = torch.nn.Linear(16, 8)
module = dfg.Linear(16, 8, name="fc")
module.load_state_dict(plain.state_dict(), strict=True)
recipe = dfg.CustomRecipe(qfactory=factories.mxfp8_factory, execution="emulate")
with dfg.autocast(recipe=recipe):
    y = module(torch.randn(4, 16))
assert y.isfinite().all() and not torch.cuda.is_initialized()
print("fine")
"""


def test_import_and_forward_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_public_names_exist_and_no_submodule_hides_a_function():
    import types

    import dist_finegrain as dfg

    for name in dfg.__all__:
        value = getattr(dfg, name)
        is_module = isinstance(value, types.ModuleType)
        assert is_module == (name in ("factories", "factory_zoo", "recipe")), name
