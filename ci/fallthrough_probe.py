"""One process of ``ci/fallthrough.py``: what ``auto`` takes here, and whether it computes the right numbers.

``python fallthrough_probe.py JOB``, a JSON object; the answer is the last line printed. Imports nothing of
``ci``: it runs in the environment of the wheel.
"""

from __future__ import annotations

import importlib
import json
import logging
import site
import sys
import time
from typing import Any

DIM = 128
HEADS, VALUE_HEADS = 2, 4
# Tokens of each sequence of a batch, or packed: the recurrent kernels of fla and its chunked ones.
CASES: tuple[tuple[str, int, tuple[int, ...] | None], ...] = (
    ("1 x 1", 1, None),
    ("2 x 5", 5, None),
    ("2 x 200", 200, None),
    ("packed 3, 0, 20", 23, (3, 0, 20)),
    ("packed 130, 0, 17, 65", 212, (130, 0, 17, 65)),
)


class Winners(logging.Handler):
    """The messages of the logger that say which backend runs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self.messages.append(record.getMessage())


def few_configurations() -> None:
    """One candidate per kernel instead of up to 36: fla is here to be right, not to be fast."""
    try:
        tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    except ImportError:
        return
    prune = tuner.prune_configs
    tuner.prune_configs = lambda self, kwargs: prune(self, kwargs)[:1]


def make_call(
    torch: Any, device: str, tokens: int, lens: tuple[int, ...] | None, seed: int
) -> dict[str, Any]:
    """Arguments of ``fwd``, outputs full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if lens or tokens == 1 else 2
    sequences = len(lens) if lens else batch

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device)

    key, value = (batch, tokens, HEADS, DIM), (batch, tokens, VALUE_HEADS, DIM)
    state = (sequences, VALUE_HEADS, DIM, DIM)
    ends = None if lens is None else torch.tensor([0, *lens]).cumsum(0).to(device)
    return {
        "q": normal(*key).bfloat16(),
        "k": normal(*key).bfloat16(),
        "v": normal(*value).bfloat16(),
        "g": normal(*value).bfloat16(),
        "beta": normal(*value[:3]).bfloat16(),
        "scale": DIM**-0.5,
        "out": torch.full(value, float("nan"), dtype=torch.bfloat16, device=device),
        "A_log": normal(VALUE_HEADS) * 0.5,
        "dt_bias": normal(VALUE_HEADS, DIM) * 0.25,
        "lower_bound": -5.0,
        "initial_state": normal(*state) * 0.5,
        "final_state": torch.full(state, float("nan"), device=device),
        "cu_seqlens": ends,
    }


def relative(got: Any, want: Any) -> float:
    """Relative Frobenius error; NaN in, NaN out."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


def run_case(torch: Any, device: str, index: int) -> dict[str, Any]:
    """One call of ``auto`` against the oracle."""
    import flash_kda
    from flash_kda.reference import kda_reference

    name, tokens, lens = CASES[index]
    call = make_call(torch, device, tokens, lens, seed=index)
    began = time.perf_counter()
    with torch.inference_mode():
        flash_kda.fwd(**call)
        inputs = {n: value for n, value in call.items() if n not in ("out", "final_state")}
        out, final = kda_reference(**inputs)
    errors = {"out": relative(call["out"], out), "final_state": relative(call["final_state"], final)}
    return {"case": name, **errors, "seconds": time.perf_counter() - began}


def refusal_of_cuda(torch: Any, device: str) -> dict[str, Any]:
    """What a call that names the kernels of the wheel raises."""
    import flash_kda

    call = make_call(torch, device, 5, None, seed=0)
    try:
        flash_kda.fwd(**call, backend="cuda")
    except flash_kda.Unavailable as error:
        return {"code": error.code, "text": str(error)}
    except Exception as error:
        return {"code": type(error).__name__, "text": str(error)}
    return {"code": "ran", "text": "the call went through"}


def decision(capability: str | None) -> dict[str, Any]:
    """What would run on the current GPU, or on one of that capability that need not be here."""
    import flash_kda

    made = flash_kda.explain() if capability is None else flash_kda.explain(capability=capability)
    verdicts = {v.backend: {"code": v.code, "text": v.text} for v in made.verdicts}
    return {"device": made.device, "backend": made.backend, "verdicts": verdicts}


def main() -> int:
    job = json.loads(sys.argv[1])
    for folder in job["paths"]:
        site.addsitedir(folder)  # and not PYTHONPATH: the DSL is found by way of a .pth file
    import torch

    import flash_kda

    capability = job["capability"]
    found = {"file": flash_kda.__file__, "torch": str(torch.__version__), **decision(capability)}
    if capability is None:
        few_configurations()
        winners, logger = Winners(), logging.getLogger("flash_kda")
        logger.addHandler(winners)
        logger.setLevel(logging.INFO)
        found["gpu"] = torch.cuda.get_device_name()
        found["cases"] = [run_case(torch, "cuda", index) for index in range(len(CASES))]
        found["winners"] = winners.messages
        found["cuda"] = refusal_of_cuda(torch, "cuda")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
