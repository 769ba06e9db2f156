"""Problems, guarded buffers, the oracle and the bounds that every test of this folder shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import flash_kda
from flash_kda.reference import kda_reference

D = 128
DEVICE = torch.device("cuda")
BACKEND = "cuda"  # named, so that a refusal is an error and never a silent fall back to the reference backend

WHOLE, HALF, QUARTER = "kda_fwd_kernel", "kda_fwd_half_kernel", "kda_fwd_quarter_kernel"
STATE, SCAN = "kda_fwd_state_kernel", "kda_fwd_scan_kernel"  # run only where there are segments
ORDER = "kda_fwd_order_kernel"  # runs only where there are more packed pairs than multiprocessors

# Relative Frobenius error. The inputs' bf16 rounding is not in it (the oracle sees the same bf16 values):
# what is left is the kernel's own rounding, 4e-3 by emulation of its rounding points.
BOUND = 1e-2
# Per (token, head) row: a single wrong row of a thousand would hide in the Frobenius norm.
ROW_FACTOR = 8.0

GUARD = 4096
SENTINEL = 0x7FA5  # a NaN with a payload that no arithmetic produces

STATES = (None, torch.bfloat16, torch.float32)


def use_cpu() -> None:
    """Dry run: the same tests on the reference backend."""
    global DEVICE, BACKEND
    DEVICE, BACKEND = torch.device("cpu"), "auto"


@dataclass
class Problem:
    """The inputs of one call, and the dtype in which it hands over the final state (None: not at all)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    lower_bound: float
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    final_dtype: torch.dtype | None
    segment_tokens: int | None = None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.sequences, self.v.shape[2], D, D)

    def with_(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def tokens(self, start: int, stop: int) -> Problem:
        """The same sequences cut to tokens [start, stop); fixed length only."""
        span = slice(start, stop)
        names = ("q", "k", "v", "g", "beta")
        return replace(self, **{name: getattr(self, name)[:, span] for name in names})


class Guarded:
    """A tensor between two guard bands; bands and tensor start as the sentinel NaN."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        numel = 1
        for size in shape:
            numel *= size
        self.words = dtype.itemsize // 2
        self.raw = torch.full((numel * self.words + 2 * GUARD,), SENTINEL, dtype=torch.int16, device=DEVICE)
        body = self.raw[GUARD : GUARD + numel * self.words]
        self.tensor = body.view(dtype).view(*shape)

    def check(self, name: str) -> None:
        """Nothing outside was written, everything inside was."""
        for side, band in (("before", self.raw[:GUARD]), ("after", self.raw[-GUARD:])):
            assert bool((band == SENTINEL).all()), f"{name}: memory {side} the buffer was written"
        words = self.raw[GUARD:-GUARD].view(-1, self.words)
        untouched = int((words == SENTINEL).all(dim=1).sum()) if words.numel() else 0
        assert untouched == 0, f"{name}: {untouched} of {words.shape[0]} elements were not written"


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    """Normal values, the same for the same seed."""
    values = torch.randn(shape, generator=generator(seed), device=DEVICE, dtype=torch.float32)
    return (values * scale).to(dtype)


def offsets(lens: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """cu_seqlens of the lengths, on the device."""
    return torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).to(dtype).to(DEVICE)


def make(
    batch: int = 1,
    tokens: int = 64,
    heads: int = 2,
    value_heads: int | None = None,
    *,
    lens: Sequence[int] | None = None,
    cu_dtype: torch.dtype = torch.int64,
    initial: torch.dtype | None = torch.float32,
    final: torch.dtype | None = torch.float32,
    a_log: bool = True,
    dt_bias: bool = True,
    lower_bound: float = -5.0,
    scale: float = D**-0.5,
    seed: int = 0,
) -> Problem:
    """A random problem; `lens` packs sequences into one batch row."""
    if lens is not None:
        batch, tokens = 1, sum(lens)
    hv = heads if value_heads is None else value_heads
    sequences = batch if lens is None else len(lens)
    at = 1000 * seed
    rate = normal(hv, seed=at + 6, dtype=torch.float32, scale=0.5) if a_log else None
    bias = normal(hv, D, seed=at + 7, dtype=torch.float32, scale=0.25) if dt_bias else None
    state = None if initial is None else normal(sequences, hv, D, D, seed=at + 8, dtype=initial, scale=0.5)
    return Problem(
        q=normal(batch, tokens, heads, D, seed=at + 1),
        k=normal(batch, tokens, heads, D, seed=at + 2),
        v=normal(batch, tokens, hv, D, seed=at + 3),
        g=normal(batch, tokens, hv, D, seed=at + 4),
        beta=normal(batch, tokens, hv, seed=at + 5),
        scale=scale,
        A_log=rate,
        dt_bias=bias,
        lower_bound=lower_bound,
        initial_state=state,
        cu_seqlens=None if lens is None else offsets(lens, cu_dtype),
        final_dtype=final,
    )


def call(p: Problem, out: torch.Tensor, final: torch.Tensor | None, /, **changes: Any) -> None:
    """flash_kda.fwd on a problem; `changes` replace arguments by name."""
    arguments: dict[str, Any] = {
        "q": p.q,
        "k": p.k,
        "v": p.v,
        "g": p.g,
        "beta": p.beta,
        "scale": p.scale,
        "out": out,
        "A_log": p.A_log,
        "dt_bias": p.dt_bias,
        "lower_bound": p.lower_bound,
        "initial_state": p.initial_state,
        "final_state": final,
        "cu_seqlens": p.cu_seqlens,
        "backend": BACKEND,
        "segment_tokens": p.segment_tokens,
    }
    flash_kda.fwd(**{**arguments, **changes})


def run(p: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state from guarded, poisoned buffers, with the guards checked."""
    out = Guarded(p.v.shape, torch.bfloat16)
    final = None if p.final_dtype is None else Guarded(p.state_shape, p.final_dtype)
    call(p, out.tensor, None if final is None else final.tensor)
    out.check("out")
    if final is not None:
        final.check("final_state")
    return out.tensor, None if final is None else final.tensor


def oracle(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 output and final state. A batch is folded into the heads: one loop over tokens instead of B."""
    if p.cu_seqlens is not None or p.q.shape[0] < 2:
        return kda_reference(
            p.q,
            p.k,
            p.v,
            p.g,
            p.beta,
            p.scale,
            p.A_log,
            p.dt_bias,
            p.lower_bound,
            p.initial_state,
            p.cu_seqlens,
        )
    batch, tokens, hv, _ = p.v.shape

    def fold(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).reshape(1, tokens, batch * x.shape[2], *x.shape[3:])

    out, final = kda_reference(
        fold(p.q),
        fold(p.k),
        fold(p.v),
        fold(p.g),
        fold(p.beta),
        p.scale,
        None if p.A_log is None else p.A_log.repeat(batch),
        None if p.dt_bias is None else p.dt_bias.reshape(hv, D).repeat(batch, 1),
        p.lower_bound,
        None if p.initial_state is None else p.initial_state.reshape(1, batch * hv, D, D),
    )
    return out.reshape(tokens, batch, hv, D).transpose(0, 1), final.reshape(batch, hv, D, D)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; NaN in, NaN out. Zero where both are empty or zero."""
    want = want.double()
    size, miss = float(want.norm()), float((got.double() - want).norm())
    if size == 0.0:
        return 0.0 if miss == 0.0 else float("inf")
    return miss / size


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative error of one last-dimension row; tiny rows count against the mean size."""
    want = want.double()
    miss = (got.double() - want).norm(dim=-1)
    size = want.norm(dim=-1)
    scaled = miss / torch.maximum(size, 0.25 * size.mean()).clamp_min(1e-300)
    return float(scaled.max()) if scaled.numel() else 0.0


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, bound: float = BOUND) -> None:
    """Frobenius error within `bound`, each row's within ROW_FACTOR of it."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = relative(got, want)
    # Written so that NaN fails.
    assert error <= bound, f"{name}: relative error {error:.2e}, allowed {bound:.1e}"
    row = worst_row(got, want)
    assert row <= ROW_FACTOR * bound, f"{name}: worst row {row:.2e}, allowed {ROW_FACTOR * bound:.1e}"


def check(p: Problem, bound: float = BOUND) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a problem and compare everything it wrote with the oracle; returns what it wrote."""
    out, final = run(p)
    want_out, want_final = oracle(p)
    assert_close("out", out, want_out, bound)
    if final is not None:
        assert_close("final_state", final, want_final, bound)
    return out, final


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Bitwise equality, NaN equal to itself."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(
        (a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)).all()
    )


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def kernels(p: Problem) -> set[str]:
    """Names of the project's kernels that a call runs."""
    from torch.profiler import ProfilerActivity, profile

    run(p)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run(p)
        synchronize()
    return {event.key for event in recorded.key_averages() if event.key.startswith("kda_")}
