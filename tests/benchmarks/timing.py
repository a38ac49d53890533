"""Times of repeated calls: graph replays on a GPU, the host clock on a CPU; launches per call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[object], object]
_BATCH_SECONDS = 4e-3  # of work between two looks at a clock
_MAX_INPUTS = 64


def inputs_needed(bytes_per_call: int, device: torch.device) -> int:
    """How many inputs to rotate over so that L2 has nothing left of the one whose turn it is."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MAX_INPUTS, 2 + 3 * cache // max(bytes_per_call, 1))


class GraphTimer:
    """One call per input, captured together: replays have no host gaps between launches.

    Every call's results stay alive until the last one is captured, so each has buffers of its own.
    Raises RuntimeError where ``call`` cannot be captured.
    """

    def __init__(self, call: Call, inputs: Sequence[object]):
        self.calls = len(inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(inputs[0])
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            results = [call(item) for item in inputs]
        del results
        self.replays = 1
        self.replays = max(1, round(_BATCH_SECONDS / max(self.seconds() * self.calls, 1e-7)))

    def seconds(self) -> float:
        """Mean time of a call over one batch of replays."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        start.record()
        for _ in range(self.replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / (self.replays * self.calls)


class HostTimer:
    """Calls on the host clock, one after another over the inputs.

    batch_seconds: of work between two looks at the clock. With turns of a few calls each call finds
    the processor's caches, and the thread that runs backward, as another call has left them.
    """

    def __init__(self, call: Call, inputs: Sequence[object], batch_seconds: float = _BATCH_SECONDS):
        self.call, self.inputs, self.rounds = call, inputs, 1
        call(inputs[0])
        self.rounds = max(1, round(batch_seconds / (self.seconds() * len(inputs))))

    def seconds(self) -> float:
        """Mean time of a call over one batch of rounds."""
        start = time.perf_counter()
        for _ in range(self.rounds):
            for item in self.inputs:
                self.call(item)
        return (time.perf_counter() - start) / (self.rounds * len(self.inputs))


def make_timer(call: Call, inputs: Sequence[object], device: torch.device):
    """The timer of this kind of device."""
    return (GraphTimer if device.type == "cuda" else HostTimer)(call, inputs)


def medians(timers: Sequence[GraphTimer | HostTimer], repeats: int) -> list[float]:
    """Median seconds of each; the timers take turns, so that all see the same clocks."""
    times = [[timer.seconds() for timer in timers] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def count_launches(call: Call, item: object) -> int | None:
    """Kernels, copies and fills that one call puts on the GPU; None where that cannot be seen."""
    call(item)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call(item)
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_gpu for event in profile.events()) or None
