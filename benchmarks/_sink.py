"""What the worker processes share: lines for the parent, pieces of work that may fail, facts and checks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _cases import Case
from _inputs import Inputs


class Sink:
    """Appends results to the file that the parent reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, kind: str, **data: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **data}) + "\n")


def guarded(sink: Sink, what: str, work: Callable[[], None]) -> None:
    """Run one piece; a failure is recorded and the next piece still runs."""
    try:
        work()
    except Exception as error:
        sink.put("error", what=what, error=f"{type(error).__name__}: {error}"[:800])


def machine(device: torch.device) -> dict[str, Any]:
    """What the GPU is, how many multiprocessors it has, and torch."""
    facts = {"device": "cpu (dry run)", "sms": None, "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"device": properties.name, "sms": properties.multi_processor_count}
    return facts


def _rms(tensor: torch.Tensor) -> float:
    """Root mean square without a float64 copy of the whole tensor; NaN if any element is."""
    norm = float(torch.linalg.vector_norm(tensor.float()).item())
    return norm / math.sqrt(max(1, tensor.numel()))


def check_written(case: Case, inputs: Inputs) -> dict[str, float]:
    """Size of both outputs; RuntimeError when an element was left unwritten (NaN) or everything is zero."""
    sizes = {"o_rms": _rms(inputs.out), "s_rms": _rms(inputs.final_state)}
    for name, value in sizes.items():
        if not 0.0 < value < float("inf"):
            raise RuntimeError(f"{case.name}: {name} is {value}, expected a finite positive number")
    return sizes
