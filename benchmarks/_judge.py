"""Compares the saved outputs of every implementation with flash_kda's float64 oracle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from _cases import AccuracyLine
from _inputs import Inputs, accuracy_inputs

from flash_kda.reference import kda_reference


def oracle(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 outputs. The batch is folded into the heads: one loop over tokens instead of one per entry."""
    batch, seqlen, heads, dim = x.q.shape

    def fold(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1).reshape(1, seqlen, batch * heads, *tensor.shape[3:])

    state = None if x.initial_state is None else x.initial_state.reshape(1, batch * heads, dim, dim)
    out, final = kda_reference(
        fold(x.q),
        fold(x.k),
        fold(x.v),
        fold(x.g),
        fold(x.beta),
        x.scale,
        A_log=x.A_log.repeat(batch),
        dt_bias=x.dt_bias.repeat(batch, 1),
        lower_bound=x.lower_bound,
        initial_state=state,
    )
    out = out.reshape(seqlen, batch, heads, dim).transpose(0, 1)
    return out, final.reshape(batch, heads, dim, dim)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error per batch entry (one seed each), averaged. NaN stays NaN."""
    got = got.to(want.device, torch.float64).flatten(1)
    want = want.flatten(1)
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).mean().item())


def judge_line(index: int, line: AccuracyLine, names: list[str], job: dict[str, Any]) -> dict[str, Any]:
    """Errors of every implementation on one line; None where it left no output."""
    device = torch.device(job["device"])
    inputs = accuracy_inputs(line, job["seed"] + 1000 * index, device)
    out, final = oracle(inputs)
    row: dict[str, Any] = {"case": line.label}
    for name in names:
        path = Path(job["scratch"]) / f"{name}-{index}.pt"
        if not path.exists():
            row[name] = None
            continue
        saved = torch.load(path)
        if saved["checksum"] != inputs.checksum():
            raise RuntimeError(f"{name} had other inputs on {line.label!r}: another torch or device?")
        row[name] = {"o": relative(saved["o"], out), "s": relative(saved["s"], final)}
    return row


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    with torch.inference_mode(), Path(job["results"]).open("a") as file:
        for index, data in enumerate(job["accuracy"]):
            row = judge_line(index, AccuracyLine.from_json(data), job["names"], job)
            file.write(json.dumps({"kind": "accuracy", **row}) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
