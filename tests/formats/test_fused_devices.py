"""What is particular to a kind of device: threads and instruction sets, streams and graphs.

CPU: any number of threads, each instruction set, denormals flushed by the caller or not. CUDA: no
synchronisation, capture into a graph, one launch per cast.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest
import torch

from dist_finegrain.extension import build_info
from dist_finegrain.formats import fused
from dist_finegrain.formats.plane import Format

from .fused_cases import (
    EVERY,
    PLACES,
    Matrix,
    as_measured_row,
    as_row,
    dirty_buffers,  # noqa: F401, an autouse fixture
    each_source,
    expected_cast,
    expected_of,
    moved,
    planes_differ,
    require,
    run_cast,
    values,
)

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[1]
_SETS = ("avx512", "avx2", "generic")
# The fast part of what an instruction set is tried with.
_SOME = "every_kind_of_data or decode_of_any_bytes or both_amaxes_of_one_read or any_key_and_place"


# CPU.
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("name", EVERY)
def test_any_number_of_threads(name, threads):
    """The rest of the suite runs on one thread; several write the same bytes and amaxes."""
    format = EVERY[name]
    require("cpu", format)
    matrix = Matrix("nonfinite", 700, 530, torch.bfloat16)
    wanted = expected_of(matrix, format, format, "original")
    x, before = values(matrix), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            amaxes = torch.full((2, 1), -1.0)
            options = {"row_amax": amaxes[0], "column_amax": amaxes[1], "bias_grad": True}
            result = run_cast(x, format, format, wanted, **options)
            measured = fused.measure(x, format, format)
            decoded = fused.decode(result.row, torch.float32)
    finally:
        torch.set_num_threads(before)
    assert not planes_differ(result, [one.plane for one in wanted])
    for recorded, amax, one in zip(amaxes, measured, wanted, strict=True):
        assert torch.equal(recorded, one.amax)
        assert amax is None or torch.equal(amax, format.measure(one.source))
    want = format.decode(wanted[0].plane)
    assert torch.equal(decoded.isnan(), want.isnan())
    assert torch.equal(decoded.nan_to_num(), want.nan_to_num())
    alone = run_cast(x, format, None, (wanted[0], None), bias_grad=True)
    assert torch.equal(result.bias_grad.nan_to_num(), alone.bias_grad.nan_to_num())


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", ["current", "block_fp32", "mxfp8", "nvfp4", "nvfp4_rht_sr"])
def test_denormals_flushed_by_the_caller(name, threads):
    """torch.set_flush_denormal(True): the same bytes as without, and it still holds after."""
    format = EVERY[name]
    require("cpu", format)
    x = values(Matrix("row_magnitudes", 300, 200, torch.bfloat16)) * 2.0**-100
    assert (x.abs()[x != 0] < torch.finfo(torch.bfloat16).tiny).any()
    wanted = expected_cast(x, format, format)
    want = wanted[0].plane.decode(torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        result = run_cast(x, format, format, wanted)
        amaxes = fused.measure(x, format, format)
        decoded = fused.decode(result.row, torch.float32)
        is_flushing = (torch.full((1,), 1e-38) * 0.25).item() == 0
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    assert is_flushing
    assert not planes_differ(result, [one.plane for one in wanted])
    assert torch.equal(decoded, want)
    for amax, one in zip(amaxes, wanted, strict=True):
        assert amax is None or torch.equal(amax, one.statistic)


@pytest.mark.parametrize("chosen", _SETS)
def test_each_instruction_set(chosen):
    run_suite(chosen, "-k", f"({_SOME}) and not cuda")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("chosen", _SETS)
def test_the_whole_suite_with_each_instruction_set(chosen):
    run_suite(chosen, "-k", "not cuda and not instruction_set")


def run_suite(chosen: str, *arguments: str) -> None:
    """These files again, in a process whose CPU kernels use the instruction set ``chosen``."""
    require("cpu")
    if _SETS.index(chosen) < _SETS.index(build_info().cpu):
        pytest.skip(f"the best here is {build_info().cpu}, not {chosen}")
    files = [str(path) for path in sorted(_HERE.glob("test_fused_*.py"))]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files]
    command += [f"--cpu-variant={chosen}", *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "kernels are not built" not in done.stdout
    assert f"CPU kernels: {chosen}" in done.stdout


# CUDA.
def queued(x: torch.Tensor, format: Format, source: str = "original"):
    """(what ``fused.cast`` returns, decode of its row plane): nothing reads a value on the host."""
    first = as_measured_row(format, source)
    row, _ = fused.measure(x, first, None)
    _, column = fused.measure(x, first, format, source=source, row_statistic=row)
    statistics = {"row_statistic": row, "column_statistic": column}
    result = fused.cast(x, first, format, source=source, rounding=PLACES, **statistics)
    return result, fused.decode(result.row, x.dtype)


@pytest.mark.gpu
@each_source
@pytest.mark.parametrize("name", ["current", "row", "block", "mxfp8", "nvfp4_rht_sr"])
def test_nothing_waits_for_the_device(name, source):
    format = EVERY[name]
    require("cuda", format)
    x = values(Matrix("normal", 200, 300, torch.bfloat16)).cuda()
    queued(x, format, source)  # what the first call loads and allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result, decoded = queued(x, format, source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = [
        w.plane for w in expected_cast(x.cpu(), as_measured_row(format, source), format, source)
    ]
    assert not planes_differ(result, wanted)
    assert torch.equal(decoded.cpu(), wanted[0].decode())


@pytest.mark.gpu
@each_source
@pytest.mark.parametrize("name", ["current", "row", "block", "mxfp8", "nvfp4_sr", "nvfp4_rht_sr"])
def test_a_captured_graph_replays_on_new_data(name, source):
    format = EVERY[name]
    require("cuda", format)
    x = values(Matrix("normal", 200, 300, torch.bfloat16)).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        queued(x, format, source)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, decoded = queued(x, format, source)
    for data in ("log_normal", "row_magnitudes"):
        x.copy_(values(Matrix(data, 200, 300, torch.bfloat16)))
        graph.replay()
        wanted = [
            w.plane for w in expected_cast(x.cpu(), as_measured_row(format, source), format, source)
        ]
        assert not planes_differ(result, wanted)
        want = wanted[0].decode()
        assert torch.equal(decoded.cpu().nan_to_num(), want.nan_to_num())  # rotated rows overflow


@pytest.mark.gpu
def test_a_replay_draws_the_noise_of_the_current_step():
    """Seed and step are read from device memory: the step moves without another capture."""
    format = EVERY["nvfp4_rht_sr"]
    require("cuda", format)
    x = values(Matrix("normal", 200, 300, torch.bfloat16)).cuda()
    queued(x, format)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, _ = queued(x, format)
    for step in (34, 35):
        places = {d: dataclasses.replace(place, step=step) for d, place in PLACES.items()}
        wanted = expected_cast(x.cpu(), format, format, places=places)
        run_cast(x, format, None, (wanted[0], None), places=places)
        graph.replay()
        assert not planes_differ(result, [one.plane for one in wanted])


@pytest.mark.gpu
@each_source
@pytest.mark.parametrize("name", ["delayed", "current", "row", "block", "mxfp8", "nvfp4_rht_sr"])
def test_one_launch_per_cast(name, source, monkeypatch):
    """Both planes and both recorded amaxes: one kernel, no copy and no fill."""
    monkeypatch.undo()  # dirtying a buffer is a launch of its own
    format = EVERY[name]
    require("cuda", format)
    x = values(Matrix("normal", 200, 300, torch.bfloat16))
    row = as_row(format, source)
    wanted = expected_cast(x, row, format, source)
    for one in wanted:
        one.statistic = moved(one.statistic, "cuda")
    x, amaxes = x.cuda(), torch.zeros(2, 1, device="cuda")
    options = {"row_amax": amaxes[0], "column_amax": amaxes[1]}
    run_cast(x, row, format, wanted, source, **options)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run_cast(x, row, format, wanted, source, **options)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    launched = [event.name for event in profile.events() if event.device_type == device]
    assert len(launched) == 1, launched
