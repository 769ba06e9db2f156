"""Small calls for compute-sanitizer; docs/hacking.md has the command.

Inputs are made and results judged on the CPU: the device runs almost nothing but the kernels under test.
Exits 0 when every result is right; the sanitizer's own exit code comes from `--error-exitcode`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

import flash_kda
from flash_kda.reference import kda_reference

D = 128
BOUND = 1e-2


@dataclass(frozen=True)
class Small:
    """One call: shape, dtypes of the states (None: absent), packed lengths, layout of q, k and v."""

    name: str
    batch: int = 1
    tokens: int = 33
    heads: int = 1
    value_heads: int = 1
    initial: torch.dtype | None = torch.float32
    final: torch.dtype | None = torch.float32
    lens: tuple[int, ...] | None = None
    cu_dtype: torch.dtype = torch.int64
    fused: bool = False
    parameters: bool = True
    segment_tokens: int | None = None


SET = (
    Small("three chunks, one of them partial"),
    Small("whole chunks, two heads, batch", batch=2, tokens=32, heads=2, value_heads=2),
    Small("one token, no states", tokens=1, initial=None, final=None, parameters=False),
    Small("no token", tokens=0),
    Small("bf16 states", tokens=17, initial=torch.bfloat16, final=torch.bfloat16),
    Small("grouped value heads", tokens=20, heads=1, value_heads=2),
    Small("packed, empty ones and single tokens", lens=(0, 5, 0, 1, 16, 18, 0)),
    Small("packed, all empty, int32", lens=(0, 0), cu_dtype=torch.int32),
    Small("packed, int32, no initial state", lens=(3, 40), initial=None, cu_dtype=torch.int32),
    Small("views of a fused projection", tokens=21, heads=2, value_heads=2, fused=True),
    Small("longer than the ring of stages", tokens=150),
    Small("one block a head: more heads than a GPU has pairs of multiprocessors", heads=200, value_heads=200),
    Small("a cluster of two a head: more than a quarter of the multiprocessors", heads=50, value_heads=50),
    Small("packed, blocks draw the longest first", lens=(17, 0, 40, 1), heads=100, value_heads=100),
    Small("long enough for segments", tokens=2100),
    Small("packed, cut after 256 tokens", lens=(0, 600, 1, 256), segment_tokens=256),
    Small("packed, one of them long enough for segments", lens=(4400, 0, 17)),
)


def cpu_inputs(c: Small) -> dict[str, Any]:
    """The call's inputs, on the CPU."""
    torch.manual_seed(1)
    tokens = c.tokens if c.lens is None else sum(c.lens)
    sequences = c.batch if c.lens is None else len(c.lens)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    inputs: dict[str, Any] = {
        "qkv": normal(c.batch, tokens, 3, c.heads, D),
        "v": normal(c.batch, tokens, c.value_heads, D),
        "g": normal(c.batch, tokens, c.value_heads, D),
        "beta": normal(c.batch, tokens, c.value_heads),
        "A_log": 0.5 * normal(c.value_heads, dtype=torch.float32) if c.parameters else None,
        "dt_bias": 0.25 * normal(c.value_heads, D, dtype=torch.float32) if c.parameters else None,
        "initial_state": None
        if c.initial is None
        else normal(sequences, c.value_heads, D, D, dtype=c.initial),
        "cu_seqlens": None,
    }
    if c.lens is not None:
        inputs["cu_seqlens"] = torch.tensor((0, *c.lens)).cumsum(0).to(c.cu_dtype)
    return inputs


def split(c: Small, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v: views of the fused buffer, or tensors of their own."""
    q, k, v = x["qkv"].unbind(2)
    return q, k, v if c.fused else x["v"]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    size = float(want.norm())
    miss = float((got.double() - want).norm())
    return miss / size if size else miss


def run(c: Small) -> float:
    """Largest relative error of the call's results."""
    x = cpu_inputs(c)
    device: dict[str, Any] = {name: None if t is None else t.to("cuda") for name, t in x.items()}
    q, k, v = split(c, device)
    out = torch.empty(v.shape, dtype=torch.bfloat16, device="cuda")
    sequences = c.batch if c.lens is None else len(c.lens)
    shape = (sequences, c.value_heads, D, D)
    final = None if c.final is None else torch.empty(shape, dtype=c.final, device="cuda")
    flash_kda.fwd(
        q,
        k,
        v,
        device["g"],
        device["beta"],
        D**-0.5,
        out,
        device["A_log"],
        device["dt_bias"],
        -5.0,
        device["initial_state"],
        final,
        device["cu_seqlens"],
        backend="cuda",
        segment_tokens=c.segment_tokens,
    )
    torch.cuda.synchronize()
    cq, ck, cv = split(c, x)
    want_out, want_final = kda_reference(
        cq,
        ck,
        cv,
        x["g"],
        x["beta"],
        D**-0.5,
        x["A_log"],
        x["dt_bias"],
        -5.0,
        x["initial_state"],
        x["cu_seqlens"],
    )
    errors = [relative(out.cpu(), want_out)]
    if final is not None:
        errors.append(relative(final.cpu(), want_final))
    return max(errors)


def run_decreasing_offsets() -> None:
    """More segments than the workspace has places for, which only the device can see."""
    tokens, offsets = 36864, torch.tensor([0, 36864] * 5, device="cuda")
    q, k, v, g = (torch.ones(1, tokens, 1, D, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    beta = torch.ones(1, tokens, 1, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(v)
    flash_kda.fwd(q, k, v, g, beta, 1.0, out, None, None, -5.0, None, None, offsets, backend="cuda")
    torch.cuda.synchronize()


def main() -> int:
    if not torch.cuda.is_available():
        print("sanitizer_set.py needs a GPU; torch sees none.", file=sys.stderr)
        return 13
    wrong = 0
    for case in SET:
        start = time.perf_counter()
        error = run(case)
        good = error <= BOUND
        wrong += not good
        print(
            f"{'ok' if good else 'WRONG':5s} {error:.1e} {time.perf_counter() - start:5.1f} s  {case.name}",
            flush=True,
        )
    run_decreasing_offsets()
    print("ran   decreasing offsets; for the memory checker to judge", flush=True)
    return 13 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
