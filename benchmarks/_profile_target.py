"""What Nsight Compute runs for profile_rows.py: one call of our package, after one that is not profiled.

The job (JSON) names the case; what the GPU is goes to the job's `results`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _cases import Case
from _impls import load
from _inputs import timing_inputs
from _worker import check_written


def profiled(call: Callable[[], None]) -> None:
    """One call between the profiler's start and stop (ncu --profile-from-start off)."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def machine(device: torch.device) -> dict[str, Any]:
    """The GPU and torch, as the worker reports them, and the number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "torch": torch.__version__,
        "sms": properties.multi_processor_count,
    }


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    device = torch.device(job["device"])
    case = Case.from_json(job["case"])
    under = None if job["require_under"] is None else Path(job["require_under"])
    with torch.inference_mode():
        run = load("ours", device.type, under)
        inputs = timing_inputs(case, job["seed"], device)
        inputs.poison()
        run(inputs)
        check_written(case, inputs)
        profiled(lambda: run(inputs))
    Path(job["results"]).write_text(json.dumps(machine(device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
