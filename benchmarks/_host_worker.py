"""Times, in one process, what a call of ours costs the host beyond the raw operator; see bench_host.py."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _cases import Case
from _impls import load
from _inputs import Inputs, timing_inputs
from _sink import Sink, check_written, guarded, machine

ROUNDS, CALLS = 41, 50  # CALLS launches fit into the queue of a stream, so the host never waits in a round

Call = Callable[[], object]


def calls_of(x: Inputs, backend: str) -> dict[str, Call]:
    """The same work by the operator, by fwd with a backend named and chosen, by the allocating function."""
    flash_kda: Any = importlib.import_module("flash_kda")
    raw = torch.ops.flash_kda.fwd.default
    given = (x.q, x.k, x.v, x.g, x.beta, x.scale, x.out, x.A_log, x.dt_bias, x.lower_bound)
    last = (x.initial_state, x.final_state, x.cu_seqlens)
    options = {
        "scale": x.scale,
        "lower_bound": x.lower_bound,
        "initial_state": x.initial_state,
        "cu_seqlens": x.cu_seqlens,
        "output_final_state": True,
    }

    def allocating() -> None:
        out = torch.empty_like(x.v)
        state = None if x.final_state is None else torch.empty_like(x.final_state)
        raw(*given[:6], out, *given[7:], x.initial_state, state, x.cu_seqlens, -1)

    return {
        "raw": lambda: raw(*given, *last, -1),
        "alloc": allocating,
        "named": lambda: flash_kda.fwd(*given, *last, backend=backend),
        "auto": lambda: flash_kda.fwd(*given, *last),
        "func": lambda: flash_kda.flash_kda_func(x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, **options),
    }


def _round_us(call: Call, count: int, synchronize: Call) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    return elapsed / count * 1e6


def host_us(calls: dict[str, Call], device: torch.device, rounds: int, count: int) -> dict[str, float]:
    """Host time of each call, the median over rounds; the calls take turns, so a busy host hits all alike."""
    synchronize: Call = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for call in calls.values():
        _round_us(call, count, synchronize)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_round_us(call, count, synchronize))
    synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def time_case(case: Case, job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Check that the call writes both outputs, then time the host."""
    inputs = timing_inputs(case, job["seed"], device)
    inputs.poison()
    load("ours", device.type)(inputs)
    check_written(case, inputs)
    backend = "cuda" if device.type == "cuda" else "reference"
    rounds, count = (ROUNDS, CALLS) if device.type == "cuda" else (3, 1)
    return {"case": case.name, **host_us(calls_of(inputs, backend), device, rounds, count)}


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    device, sink = torch.device(job["device"]), Sink(Path(job["results"]))
    under = None if job["require_under"] is None else Path(job["require_under"])
    with torch.inference_mode():
        load("ours", device.type, under)  # RuntimeError where another package answers to the name
        sink.put("machine", **machine(device))
        for data in job["cases"]:
            case = Case.from_json(data)
            guarded(sink, case.name, lambda case=case: sink.put("host", **time_case(case, job, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
