"""Starts torchrun from a test: ``run_ranks`` runs a function or a script on several local ranks.

As a script it is what each rank runs for a function: set up gloo, call, store the result.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 40
_STOP_SECONDS = 15


def run_ranks(
    target: Callable[..., Any] | str | Path,
    nproc: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``target(*args)`` on ``nproc`` ranks under torchrun and wait for them.

    target: a module-level function, called on each rank with the default gloo group initialised
    (args and results are pickled), or the path of a script that takes args as its command line.
    timeout: seconds until all ranks are stopped. env: set on top of this process's variables.

    Returns by rank the results of a function, or the standard output of a script.
    Raises AssertionError with the stderr tail of the failing ranks, the first to fail first.
    """
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        if callable(target):
            call = Path(folder, "call.pickle")
            call.write_bytes(pickle.dumps((_import_path(target), args, timeout)))
            command, name = [__file__, str(call)], target.__qualname__
        else:
            command, name = [str(target), *map(str, args)], Path(target).name
        _run(command, name, nproc, timeout, env or {}, Path(folder))
        if not callable(target):
            return [_log(Path(folder), r, "stdout").read_text() for r in range(nproc)]
        return [pickle.loads(_result_path(folder, r).read_bytes()) for r in range(nproc)]


def _import_path(function: Callable) -> tuple[str, str]:
    if function.__module__ == "__main__" or "<locals>" in function.__qualname__:
        raise ValueError(
            f"target={function!r} cannot be imported by the ranks; accepted: a module-level "
            "function of a test module"
        )
    return function.__module__, function.__qualname__


def _run(command, name, nproc, timeout, env, folder: Path) -> None:
    """Run torchrun to its end; AssertionError unless every rank exits with 0 in time."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Each rank's output goes to files: interleaved on one pipe it cannot be told apart.
    launcher += [f"--nproc-per-node={nproc}", "--redirects=3", f"--log-dir={folder / 'logs'}"]
    variables = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **env,
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
        raise AssertionError(f"{name} on {nproc} ranks: {failure}\n{_report(output, folder)}")


def _stop(process: subprocess.Popen) -> str:
    """SIGTERM makes torchrun end its ranks, which have sessions of their own."""
    process.terminate()
    try:
        return process.communicate(timeout=_STOP_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _report(launcher_output: str, folder: Path) -> str:
    """The stderr tail of every rank; the rank that torchrun calls the root cause comes first."""
    root = re.search(r"Root Cause.*?rank\s*: (\d+)", launcher_output, re.DOTALL)
    ranks = sorted(int(path.parent.name) for path in folder.glob("logs/*/*/*/stderr.log"))
    if not ranks:
        return _tail(launcher_output)
    first = int(root.group(1)) if root else ranks[0]
    ranks.sort(key=lambda rank: rank != first)
    tails = [(rank, _tail(_log(folder, rank, "stderr").read_text())) for rank in ranks]
    return "\n".join(f"--- rank {rank}, stderr:\n{tail}" for rank, tail in tails)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


def _log(folder: Path, rank: int, stream: str) -> Path:
    return next(folder.glob(f"logs/*/*/{rank}/{stream}.log"))


def _result_path(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"result_{rank}.pickle")


def _run_rank(call: Path) -> None:
    """One rank of a function's run."""
    import torch.distributed as dist

    (module, function), args, timeout = pickle.loads(call.read_bytes())
    # A hang then shows where this rank waits, before the launcher ends it.
    faulthandler.dump_traceback_later(max(0.9 * timeout, 1), exit=True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    result = getattr(importlib.import_module(module), function)(*args)
    _result_path(call.parent, dist.get_rank()).write_bytes(pickle.dumps(result))
    dist.barrier()  # a rank that is done must not close connections that others still use
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
