"""compute-sanitizer over every CUDA kernel on small shapes."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from .fused_cases import require


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_small_shapes_are_clean(tool):
    require("cuda")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    only_ours = ["--kernel-name", "kernel_substring=dfg"]
    done = subprocess.run(
        [*command, *only_ours, sys.executable, "-m", "tests.formats.small_shapes"],
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("this machine does not permit compute-sanitizer")
    assert done.returncode == 0, output[-3000:]
    assert "pairs done" in output, output[-3000:]
    assert "ERROR SUMMARY: 0 errors" in output or "0 hazards displayed" in output, output[-3000:]
