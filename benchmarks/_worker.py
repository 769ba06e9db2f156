"""One implementation in one process: reads a job (JSON), appends one JSON line per finished piece of work.

Lines already written survive a crash or a timeout of the process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _cases import AccuracyLine, Case
from _impls import Run, compile_only, load
from _inputs import accuracy_inputs, timing_inputs
from _kernels import kernels_of
from _sink import Sink, check_written, guarded, machine
from _timing import copy_gbps, input_sets, matmul_tflops, measure


def time_case(case: Case, run: Run, device: torch.device, seed: int) -> dict[str, Any]:
    """Check that the call writes both outputs, then time it on rotated inputs."""
    sets = input_sets(case.bytes_moved, device)
    inputs = [timing_inputs(case, seed + index, device) for index in range(sets)]
    inputs[0].poison()
    run(inputs[0])
    sizes = check_written(case, inputs[0])
    timing = measure([lambda x=x: run(x) for x in inputs], device)  # type: ignore[misc]
    return {
        "case": case.name,
        "ms": timing.ms,
        "spread": timing.spread,
        "host_us": timing.host_us,
        "calls": timing.calls,
        "input_sets": sets,
        "checksum": inputs[0].checksum(),
        **sizes,
    }


def name_kernels(case: Case, run: Run, device: torch.device, seed: int) -> dict[str, Any]:
    """The kernels of one call; none on the CPU."""
    if device.type != "cuda":
        return {"case": case.name, "kernels": []}
    inputs = timing_inputs(case, seed, device)
    return {"case": case.name, "kernels": kernels_of(lambda: run(inputs))}


def save_accuracy(
    index: int, line: AccuracyLine, run: Run, device: torch.device, seed: int, path: Path
) -> None:
    """Run one accuracy line and leave outputs and the inputs' checksum in `path` for the judge."""
    inputs = accuracy_inputs(line, seed + 1000 * index, device)
    inputs.poison()
    run(inputs)
    torch.save(
        {"o": inputs.out.cpu(), "s": inputs.final_state.cpu(), "checksum": inputs.checksum()},
        path,
    )


def _clean(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def do_timing(job: dict[str, Any], run: Run, device: torch.device, sink: Sink) -> None:
    """Time every case of the job."""
    for data in job["cases"]:
        case = Case.from_json(data)
        start = time.perf_counter()
        guarded(
            sink,
            case.name,
            lambda case=case: sink.put("time", **time_case(case, run, device, job["seed"])),
        )
        _clean(device)
        took = time.perf_counter() - start
        print(f"{job['impl']:9s} {case.name:20s} {took:6.1f} s", file=sys.stderr, flush=True)


def do_accuracy(job: dict[str, Any], name: str, run: Run, device: torch.device, sink: Sink) -> None:
    """Save the outputs of every accuracy line of the job."""
    for index, data in enumerate(job["accuracy"]):
        line = AccuracyLine.from_json(data)
        path = Path(job["scratch"]) / f"{name}-{index}.pt"
        guarded(
            sink,
            line.label,
            lambda i=index, line=line, path=path: save_accuracy(i, line, run, device, job["seed"], path),
        )


def do_kernels(job: dict[str, Any], run: Run, device: torch.device, sink: Sink) -> None:
    """Name the kernels of every case. After all timing: once started, the profiler slows later launches."""
    for data in job["cases"]:
        case = Case.from_json(data)
        guarded(
            sink,
            f"{case.name}, kernels",
            lambda case=case: sink.put("kernels", **name_kernels(case, run, device, job["seed"])),
        )
        _clean(device)


def do_ceilings(device: torch.device, sink: Sink) -> None:
    """The machine's copy rate and matrix rate, and what the machine is."""
    rates = {"copy_gbps": copy_gbps(device), "matmul_tflops": matmul_tflops(device)}
    sink.put("machine", **rates, **machine(device))
    _clean(device)


def do_all(job: dict[str, Any], device: torch.device, under: Path | None, sink: Sink) -> None:
    """Times, accuracy and kernels of one implementation."""
    if share := job.get("compile_only"):
        compile_only(*share)
    if job["ceilings"]:
        do_ceilings(device, sink)
    for name in job["impls"]:
        run = load(name, device.type, under)
        if name == job["impl"]:
            do_timing(job, run, device, sink)
        do_accuracy(job, name, run, device, sink)
    if not job.get("compile_only"):
        do_kernels(job, load(job["impl"], device.type, under), device, sink)


def do_times(job: dict[str, Any], device: torch.device, under: Path | None, sink: Sink) -> None:
    """What the machine is and the times of ours; no rates of the machine, no kernels."""
    sink.put("machine", **machine(device))
    do_timing(job, load("ours", device.type, under), device, sink)


def do_profile(job: dict[str, Any], device: torch.device, under: Path | None, sink: Sink) -> None:
    """For Nsight Compute (--profile-from-start off): one call of ours between the profiler's start and stop,
    after one that is not profiled."""
    case = Case.from_json(job["profile"])
    run = load("ours", device.type, under)
    inputs = timing_inputs(case, job["seed"], device)
    inputs.poison()
    run(inputs)
    check_written(case, inputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    run(inputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    sink.put("machine", **machine(device))


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    under = None if job["require_under"] is None else Path(job["require_under"])
    work = do_profile if "profile" in job else do_times if job.get("times_only") else do_all
    with torch.inference_mode():
        work(job, torch.device(job["device"]), under, Sink(Path(job["results"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
