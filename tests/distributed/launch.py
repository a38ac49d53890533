"""Starts ranks from a test: ``run_ranks`` runs a function or a script on several local ranks.

A script is started by torchrun. A function is called by torchrun's process library in processes
forked from a server that has imported torch once: most tests would wait for little else.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 40
_STOP_SECONDS = 15
_PRELOADED = ["torch.distributed.elastic.multiprocessing.api", "dist_finegrain", "pytest"]


def run_ranks(
    target: Callable[..., Any] | str | Path,
    nproc: int,
    *args: Any,
    timeout: float = 120,
    fresh: bool = False,
) -> list[Any]:
    """Run ``target(*args)`` on ``nproc`` ranks and wait for them.

    target: a module-level function, called on each rank with the default gloo group initialised
    (args and results are pickled), or the path of a script, run by torchrun, that takes args as its
    command line.
    timeout: seconds until all ranks are stopped. fresh: the ranks of a function are not forked, so
    that they hash strings differently, as under torchrun: for what sets or hashes could order.

    Returns by rank the results of a function, or the standard output of a script.
    Raises AssertionError with the stderr tail of the failing ranks, the first to fail first.
    """
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        if callable(target):
            _call(target, args, nproc, timeout, "spawn" if fresh else "forkserver", Path(folder))
            return [pickle.loads(_result_path(folder, r).read_bytes()) for r in range(nproc)]
        _torchrun([str(target), *map(str, args)], nproc, timeout, Path(folder))
        return [_log(Path(folder), r, "stdout").read_text() for r in range(nproc)]


def _import_path(function: Callable) -> tuple[str, str]:
    if function.__module__ == "__main__" or "<locals>" in function.__qualname__:
        raise ValueError(
            f"target={function!r} cannot be imported by the ranks; accepted: a module-level "
            "function of a test module"
        )
    return function.__module__, function.__qualname__


def _call(function, args, nproc, timeout, start_method, folder: Path) -> None:
    """Call ``function`` on every rank; AssertionError unless all return in time."""
    # Not imported above: every test process imports this file.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    name = function.__qualname__
    call = (str(folder), nproc, *_import_path(function), pickle.dumps(args), timeout)
    call += (frozenset(os.environ),)
    multiprocessing.set_forkserver_preload(_PRELOADED)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # _report says it
    ranks = start_processes(
        name,
        _run_rank,
        {rank: (rank, *call) for rank in range(nproc)},
        {rank: {**os.environ, "RANK": str(rank)} for rank in range(nproc)},
        DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
        start_method=start_method,
    )
    try:
        result = ranks.wait(timeout, period=0.02)
    finally:
        ranks.close(timeout=_STOP_SECONDS)
    if result is None or result.is_failed():
        first, failure = None, f"not finished after {timeout:g} s"
        if result is not None:
            first, failed = next(iter(result.failures.items()))
            failure = f"exit code {failed.exitcode}"
            first = _first_to_raise(folder, first)
        raise AssertionError(f"{name} on {nproc} ranks: {failure}\n{_report('', folder, first)}")


def _first_to_raise(folder: Path, found: int) -> int:
    """The rank that raised first; ``found``, whose end was seen first, where none raised."""
    times = {int(p.suffix[1:]): int(p.read_text()) for p in folder.glob("raised.*")}
    return min(times, key=times.get, default=found)


def _torchrun(command, nproc, timeout, folder: Path) -> None:
    """Run torchrun to its end; AssertionError unless every rank exits with 0 in time."""
    name = Path(command[0]).name
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Each rank's output goes to files: interleaved on one pipe it cannot be told apart.
    launcher += [f"--nproc-per-node={nproc}", "--redirects=3", f"--log-dir={folder / 'logs'}"]
    variables = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        [*launcher, *command],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        failure = f"exit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"not finished after {timeout:g} s"
        output = _stop(process)
    except BaseException:
        _stop(process)
        raise
    if failure:
        root = re.search(r"Root Cause.*?rank\s*: (\d+)", output, re.DOTALL)
        first = int(root.group(1)) if root else None
        raise AssertionError(
            f"{name} on {nproc} ranks: {failure}\n{_report(output, folder, first)}"
        )


def _stop(process: subprocess.Popen) -> str:
    """SIGTERM makes torchrun end its ranks, which have sessions of their own."""
    process.terminate()
    try:
        return process.communicate(timeout=_STOP_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _report(launcher_output: str, folder: Path, first: int | None) -> str:
    """The stderr tail of every rank; that of ``first``, which failed before others, comes first."""
    ranks = sorted(int(path.parent.name) for path in folder.glob("logs/**/stderr.log"))
    if not ranks:
        return _tail(launcher_output)
    ranks.sort(key=lambda rank: rank != first)
    tails = [(rank, _tail(_log(folder, rank, "stderr").read_text())) for rank in ranks]
    return "\n".join(f"--- rank {rank}, stderr:\n{tail}" for rank, tail in tails)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


def _log(folder: Path, rank: int, stream: str) -> Path:
    return next(folder.glob(f"logs/**/{rank}/{stream}.log"))


def _result_path(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"result_{rank}.pickle")


def _run_rank(rank, folder, nproc, module, function, args, timeout, variables) -> None:
    """One rank of a function's run: set up gloo, call, store the result."""
    import torch
    import torch.distributed as dist

    for name in os.environ.keys() - variables - {"RANK"}:
        del os.environ[name]  # the server was started with it
    torch.set_num_threads(1)
    # A hang then shows where this rank waits, before it is ended.
    faulthandler.dump_traceback_later(max(0.9 * timeout, 1), exit=True)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=nproc,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = getattr(importlib.import_module(module), function)(*pickle.loads(args))
        _result_path(folder, rank).write_bytes(pickle.dumps(result))
        dist.barrier()  # a rank that is done must not close connections that others still use
        dist.destroy_process_group()
    except BaseException:
        # Before the connections of this rank close, and others fail of it.
        raised = Path(folder, f"raising.{rank}")
        raised.write_text(str(time.monotonic_ns()))
        raised.rename(raised.with_stem("raised"))  # whole, or not there
        traceback.print_exc()  # the library keeps it elsewhere
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
