"""Where the examples run: natively on Blackwell, elsewhere by exact emulation."""

from __future__ import annotations

import os

import torch

VARIABLE = "DIST_FINEGRAIN_EXECUTION"


def choose_execution(device_type: str) -> str:
    """Set ``DIST_FINEGRAIN_EXECUTION=emulate`` off Blackwell unless it is set; says what holds."""
    if VARIABLE in os.environ:
        return f"{VARIABLE}={os.environ[VARIABLE]} (from the environment)"
    if device_type == "cuda" and torch.cuda.get_device_capability()[0] == 10:
        return "execution: native (Blackwell)"
    os.environ[VARIABLE] = "emulate"
    return f"{VARIABLE}=emulate (set here: MXFP8 and NVFP4 are native on Blackwell only)"
