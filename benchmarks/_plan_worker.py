"""The process that bench_plan.py starts: times and profiles calls of one flash_kda, a JSON line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _cases import HEAD_DIM, Case
from _impls import load
from _inputs import Inputs, timing_inputs
from _kernels import on_device
from _plan import SWEEP_HEADS, SWEEP_TOKENS, Point, Span, alternatives, point_times, points
from _sink import Sink, guarded, machine
from _timing import Call, input_sets, measure_cuda, sleep
from _words import kernel_name
from torch.profiler import ProfilerActivity, profile

WARM, REPEATS = 5, 25  # calls of a point, the first for the clocks
LEAD_S = 1e-3  # a call's launches under the profiler take the host less


class Caller:
    """Calls of the implementation under test, each with a segment_tokens of its own (None: its choice)."""

    def __init__(self, under: Path | None) -> None:
        self.under = under

    def calls(self, inputs: Sequence[Inputs], segment_tokens: int | None) -> list[Call]:
        extra = {} if segment_tokens is None else {"segment_tokens": segment_tokens}
        run = load("ours", "cuda", self.under, **extra)
        return [lambda x=x: run(x) for x in inputs]  # type: ignore[misc]


def make_inputs(heads: int, tokens: int, seed: int, device: torch.device) -> list[Inputs]:
    """Sets of buffers enough to find each call's inputs outside the L2 cache."""
    case = Case(f"t{tokens}_h{heads}", 1, tokens, heads)
    count = input_sets(case.bytes_moved, device)
    return [timing_inputs(case, seed + index, device) for index in range(count)]


def spans_of(calls: Sequence[Call], count: int) -> list[Span]:
    """Start and end of this project's kernels in so many calls, launched ahead of the GPU."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        sleep(count * LEAD_S)
        for index in range(count):
            calls[index % len(calls)]()
        torch.cuda.synchronize()
    spans = [
        Span(kernel_name(event.name), event.time_range.start, event.time_range.end)
        for event in on_device(profiler.events() or [])
    ]
    return [span for span in spans if span.name.startswith("kda_")]


def segments_of(call: Call, heads: int) -> int:
    """How many segments a call of one sequence makes, by the workspace it takes: two fp32 states for each."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return max(1, taken // (2 * 4 * HEAD_DIM**2 * heads))


def do_points(caller: Caller, device: torch.device, seed: int, sink: Sink) -> None:
    """Kernel times of every point."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for point in points(sms):
        sink.put("point", **measure_point(point, caller, device, seed))


def measure_point(point: Point, caller: Caller, device: torch.device, seed: int) -> dict[str, Any]:
    """Kernel times of one point."""
    inputs = make_inputs(point.heads, point.tokens, seed, device)
    spans = spans_of(caller.calls(inputs, point.segment_tokens), WARM + REPEATS)
    return point_times(point, spans, WARM)


def do_sweep(caller: Caller, device: torch.device, seed: int, sink: Sink) -> None:
    """Times of whole calls: the choice and its alternatives."""
    for tokens in SWEEP_TOKENS:
        for heads in SWEEP_HEADS:
            inputs = make_inputs(heads, tokens, seed, device)
            for segment_tokens in (None, *alternatives(tokens)):
                calls = caller.calls(inputs, segment_tokens)
                segments = segments_of(calls[0], heads)
                timing = measure_cuda(calls, budget_s=0.05)
                row = {"heads": heads, "tokens": tokens, "segment_tokens": segment_tokens}
                sink.put("sweep", **row, segments=segments, ms=timing.ms, spread=timing.spread)


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    sink = Sink(Path(job["results"]))
    device = torch.device(job["device"])
    caller = Caller(None if job["require_under"] is None else Path(job["require_under"]))
    sink.put("machine", **machine(device))
    with torch.inference_mode():
        if job["sweep"]:  # before the profiler, which slows later launches once it has been started
            guarded(sink, "sweep", lambda: do_sweep(caller, device, job["seed"], sink))
        guarded(sink, "costs", lambda: do_points(caller, device, job["seed"], sink))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
