"""Options, skips and limits that hold for every test."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal

import pytest
import torch

_LIMIT_SECONDS = {"fast": 120, "slow": 1500}
_GRACE_SECONDS = 60


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--run-nightly", action="store_true", help="also run those marked nightly")
    parser.addoption(
        "--cpu-variant",
        default="",
        help="instruction set of the compiled CPU kernels: generic, avx2 or avx512; default: best",
    )


def pytest_configure(config):
    # Tests choose their execution themselves; the caller's would change what they mean.
    os.environ.pop("DIST_FINEGRAIN_EXECUTION", None)
    torch.set_num_threads(1)  # small tensors, and ranks in subprocesses need the cores
    if chosen := config.getoption("--cpu-variant"):
        _choose_cpu_variant(chosen)


def pytest_report_header(config):
    if not config.getoption("--cpu-variant"):
        return None
    from dist_finegrain import build_info

    return str(build_info())


def _choose_cpu_variant(name: str) -> None:
    """Run the CPU kernels of this process with the instruction set ``name``; build_info() says so.

    Raises pytest.UsageError where there are no compiled kernels or the processor lacks it.
    """
    from dist_finegrain import extension

    if not extension.build_info().cpu:
        raise pytest.UsageError(f"--cpu-variant {name}: {extension.build_info().cpu_reason}")
    from dist_finegrain import _C

    try:
        _C.choose_cpu_variant(name)
    except RuntimeError as error:
        raise pytest.UsageError(f"--cpu-variant: {error}") from error
    extension._info = dataclasses.replace(extension._info, cpu=_C.cpu_variant())


def pytest_collection_modifyitems(config, items):
    slow = pytest.mark.skip(reason="slow; run with --run-slow")
    nightly = pytest.mark.skip(reason="takes minutes; run with --run-slow --run-nightly")
    gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "nightly" in item.keywords and not config.getoption("--run-nightly"):
            item.add_marker(nightly)
        elif "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(gpu)


@pytest.fixture(autouse=True)
def optimizer_steps_end_steps():
    """A test that calls end_step() itself must not decide for the tests after it."""
    from dist_finegrain import stepping

    before = stepping._steps.user_driven
    yield
    stepping._steps.user_driven = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that runs too long; one stuck in C code ends the whole run with a traceback."""
    limit = _LIMIT_SECONDS["slow" if "slow" in item.keywords else "fast"]

    def expire(signum, frame):
        pytest.fail(f"not finished after {limit} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(limit)
    faulthandler.dump_traceback_later(limit + _GRACE_SECONDS, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
