"""The torchrun helper itself: results by rank, the failing rank's stderr, the time limit."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import run_ranks


def sum_of_ranks(start: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + start))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("deliberate failure")
    dist.barrier()


def hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def test_results_come_back_by_rank():
    assert run_ranks(sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


def test_failure_shows_the_failing_rank_first():
    with pytest.raises(AssertionError, match=r"exit code 1\n--- rank 1, stderr:") as info:
        run_ranks(fail_on_rank_one, 2)
    first = str(info.value).split("--- rank 0")[0]
    assert "RuntimeError: deliberate failure" in first


def test_a_hang_ends_at_the_limit_and_shows_where():
    start = time.monotonic()
    with pytest.raises(AssertionError) as info:
        run_ranks(hang_on_rank_one, 2, timeout=10)
    assert time.monotonic() - start < 60
    assert "hang_on_rank_one" in str(info.value)


def test_script_returns_the_output_by_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['RANK'], *sys.argv[1:])")
    assert run_ranks(script, 2, "a", 1) == ["0 a 1\n", "1 a 1\n"]


def test_local_function_is_refused():
    with pytest.raises(ValueError, match="module-level"):
        run_ranks(lambda: None, 2)
