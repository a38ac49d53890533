"""An exception on one rank ends every process, soon, with the first message in the output.

As a script it is one rank of a training that breaks off.
"""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import dist_finegrain as dfg
from tests.distributed import launch
from tests.distributed.launch import run_ranks
from tests.recipes import PLAIN, emulated

H, RANKS = 64, 2
LIMIT = 60  # seconds
MESSAGE = "deliberate failure of one rank"


def raises_on_rank_one(role):
    if dist.get_rank() == 1:
        raise RuntimeError(MESSAGE)
    return PLAIN["current"](role)


def break_off(where: str) -> None:
    """Rank 1 raises at one place of a training step; rank 0 goes on to the next collective."""
    group = dist.new_group(list(range(RANKS)))
    layer = dfg.Linear(
        H, H, parallel_mode="column", sequence_parallel=True, tp_group=group, name="fc"
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    factory = raises_on_rank_one if where == "factory" else PLAIN["delayed"]
    is_broken = dist.get_rank() == 1
    for step in range(3):
        is_last = is_broken and step == 2
        x = torch.ones(16, H, requires_grad=True)
        if is_last and where == "input":
            x = torch.ones(16, H + 1)
        with dfg.autocast(recipe=emulated(factory)):
            y = layer(x)
        if is_last and where == "between":
            raise RuntimeError(MESSAGE)
        y.sum().backward()
        if is_last and where == "end of step":
            raise RuntimeError(MESSAGE)
        optimizer.step()


@pytest.mark.parametrize("where", ["factory", "input", "between", "end of step"])
def test_message_of_the_failing_rank_is_shown(where):
    start = time.monotonic()
    with pytest.raises(AssertionError) as info:
        run_ranks(break_off, RANKS, where, timeout=LIMIT)
    assert time.monotonic() - start < LIMIT
    wanted = f"fc' has shape (16, {H + 1})" if where == "input" else MESSAGE
    assert wanted in str(info.value) and "exit code 1" in str(info.value)


def test_torchrun_ends_and_shows_it():
    start = time.monotonic()
    with pytest.raises(AssertionError, match=f"exit code 1\n--- rank 1, stderr:[^-]*{MESSAGE}"):
        run_ranks(__file__, RANKS, "between", timeout=LIMIT)
    assert time.monotonic() - start < LIMIT


@pytest.mark.parametrize("where", ["factory", "between"])
def test_every_process_exits_with_an_error_without_a_launcher(where):
    """Nobody ends the others here: each must notice, or be told, by itself."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(launch.ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, where],
            env={**variables, "RANK": str(rank)},
            cwd=launch.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    end = time.monotonic() + LIMIT
    try:
        errors = [p.communicate(timeout=max(end - time.monotonic(), 1))[1] for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode not in (0, None) for process in processes), errors
    assert MESSAGE in errors[1]
    assert where == "between" or MESSAGE in errors[0]  # ranks compare what a factory did


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT))
    break_off(sys.argv[1])
