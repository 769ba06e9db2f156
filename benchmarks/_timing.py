"""Device times: CUDA events around single calls, the host kept ahead of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], None]
REPEATS = 3
# torch.cuda._sleep counts cycles of the SM clock, at most 1.98 GHz on an H200.
CYCLES_PER_SECOND = 2.0e9


@dataclass(frozen=True)
class Timing:
    """Median device time of one call, how far the repeats' medians lie apart, and the host's time."""

    ms: float
    spread: float
    host_us: float | None
    calls: int


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(enable_timing=True)


def sleep(seconds: float) -> None:
    """Keep the device busy for about so long, so that the host gets ahead of it."""
    spin: Any = torch.cuda._sleep
    spin(int(seconds * CYCLES_PER_SECOND))


def _timed_batch(calls: Sequence[Call], count: int) -> list[float]:
    """Times in ms of `count` calls.

    A sleep kernel goes first: without it the events around a short kernel measure how fast the host launches.
    """
    lead_s = min(0.02, count * 150e-6)
    sleep(lead_s)
    pairs = [(_event(), _event()) for _ in range(count)]
    for index, (start, end) in enumerate(pairs):
        start.record()
        calls[index % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _host_us(calls: Sequence[Call], count: int = 20) -> float:
    """Host time of one call while the device is busy with something else."""
    sleep(0.02)
    start = time.perf_counter()
    for index in range(count):
        calls[index % len(calls)]()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / count * 1e6


def measure_cuda(calls: Sequence[Call], budget_s: float = 0.2) -> Timing:
    """Median of event times over REPEATS batches; `calls` are the same work on different buffers."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    estimate = statistics.median(_timed_batch(calls, 3))
    count = max(5, min(100, int(budget_s * 1e3 / max(estimate, 1e-3))))
    _timed_batch(calls, max(3, count // 4))
    medians = [statistics.median(_timed_batch(calls, count)) for _ in range(REPEATS)]
    middle = statistics.median(medians)
    host = _host_us(calls) if estimate < 5.0 else None
    return Timing(middle, (max(medians) - min(medians)) / middle, host, count * REPEATS)


def measure_host(calls: Sequence[Call]) -> Timing:
    """Wall-clock times, for a dry run of the scripts on the CPU. Says nothing about a GPU."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    middle = statistics.median(times)
    return Timing(middle, (max(times) - min(times)) / middle, None, len(times))


def measure(calls: Sequence[Call], device: torch.device) -> Timing:
    """Time the calls with the method that fits the device."""
    return measure_cuda(calls) if device.type == "cuda" else measure_host(calls)


def copy_gbps(device: torch.device) -> float:
    """Bytes read plus bytes written per second (in 1e9) of a large device-to-device copy."""
    count = 1 << 32 if device.type == "cuda" else 1 << 24
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    timing = measure([copy], device)
    return 2 * count / timing.ms / 1e6


def matmul_tflops(device: torch.device) -> float:
    """Rate of one bf16 matrix product of side 8192 on random data, in 1e12 operations per second."""
    side = 8192 if device.type == "cuda" else 128
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    timing = measure([multiply], device)
    return 2 * side**3 / timing.ms / 1e9


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """How many sets of buffers to rotate so that each call finds its inputs evicted from the L2 cache."""
    if device.type != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    if bytes_per_set >= 2 * l2:
        return 1
    return min(32, -(-4 * l2 // bytes_per_set))
