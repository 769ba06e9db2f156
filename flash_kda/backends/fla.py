"""Flash-linear-attention's Triton kernels: any GPU Triton runs on, K from 16 to 256, both gates.

Its ``chunk_kda`` hands a call to this package where it finds it installed, and would so call itself through
us for ever. The function under its dispatcher is called instead: no variable is set, no registry changed, so
other threads and the user's own calls of flash-linear-attention are dispatched as before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import FLA
from ._capture import refuse_capture
from .reference import CHOSEN_SEGMENTS, SOFTPLUS_LOWER_BOUND

# Up to so many tokens its token-by-token kernel is the faster one; its own layer switches here too.
RECURRENT_TOKENS = 64

_running = threading.local()


class Entries(NamedTuple):
    """The two functions of ``fla.ops.kda``; each returns the output and the final state."""

    chunk: Callable[..., tuple[Tensor, Tensor | None]]
    recurrent: Callable[..., tuple[Tensor, Tensor | None]]


@functools.cache
def load() -> Entries:
    """Imports flash-linear-attention and Triton."""
    kda = importlib.import_module("fla.ops.kda")
    # Unwrapping the other one would take off the guard that makes its inputs contiguous.
    return Entries(inspect.unwrap(kda.chunk_kda), kda.fused_recurrent_kda)


@contextmanager
def _no_loop() -> Iterator[None]:
    """Ends a loop at its first turn, should a version of flash-linear-attention come back here after all."""
    if getattr(_running, "inside", False):
        raise RuntimeError(
            "flash-linear-attention, called by flash_kda's backend 'fla', called flash_kda again; set "
            "FLA_FLASH_KDA=0 before Python starts, and report its version"
        )
    _running.inside = True
    try:
        yield
    finally:
        _running.inside = False


def _no_tokens(initial_state: Tensor | None, final_state: Tensor | None) -> None:
    """Nothing to launch a kernel for: the states stay what they were."""
    if final_state is None:
        return
    if initial_state is None:
        final_state.zero_()
    else:
        final_state.copy_(initial_state)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    segment_tokens: int = CHOSEN_SEGMENTS,
) -> None:
    """The body of the operator. ``segment_tokens`` changes nothing: nothing is cut into segments there.

    Its functions allocate what they return, so the results are copied; a bf16 state is read as fp32 and
    rounded once at the end. With ``cu_seqlens`` and more than RECURRENT_TOKENS tokens it reads them on the
    host, and so waits for the GPU: a call that a CUDA graph cannot hold, which is refused.
    """
    if out.numel() == 0:
        _no_tokens(initial_state, final_state)
        return
    few = q.shape[1] <= RECURRENT_TOKENS
    if cu_seqlens is not None and not few:
        refuse_capture(FLA, q.device, f"the cu_seqlens of more than {RECURRENT_TOKENS} tokens")
    bounded = lower_bound != SOFTPLUS_LOWER_BOUND
    # None means rate 1 to us and another thing to each of its kernels.
    rate = torch.zeros(v.shape[2], device=v.device) if A_log is None else A_log
    entry = load().recurrent if few else load().chunk
    options: dict[str, Any] = {} if few else {"safe_gate": bounded}
    with torch.no_grad(), _no_loop():
        o, state = entry(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            A_log=rate,
            dt_bias=None if dt_bias is None else dt_bias.reshape(-1),
            scale=scale,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=final_state is not None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=lower_bound if bounded else None,
            state_v_first=True,  # rows are value channels, as ours
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
            **options,
        )
        out.copy_(o)
        if final_state is not None and state is not None:
            final_state.copy_(state)


def run(q: Tensor, *rest: Any) -> None:
    """Directly, and through the operator ``fwd_fla`` where the call is traced."""
    if type(q) is Tensor and not torch.compiler.is_compiling():
        compute(q, *rest)
    else:
        torch.ops.flash_kda.fwd_fla.default(q, *rest)
