"""The reference backend: torch on any device, any K and V, both gates. Made to be right, then bearable
on a CPU.

All sequences and heads advance together, one token a step. Sequences are ordered by length, so the ones
still running are always the first rows of the state: no mask, no padding, and a sequence never meets
another's numbers. Arithmetic is float64, which no global switch (TF32, bf16 matmul on CPU) can weaken.
Nothing is cut into segments, so ``segment_tokens`` changes nothing here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from ..checks import check_ends
from ..dispatch import REFERENCE
from ..reference import decay_log, normalise
from ._capture import refuse_capture

STEPS = 64  # tokens whose inputs are activated at once; bounds the float64 copies

SOFTPLUS_LOWER_BOUND = 0.0  # the operator's float that stands for lower_bound=None
CHOSEN_SEGMENTS = -1  # the operator's int that stands for segment_tokens=None

operators: frozenset[str] = frozenset()  # those registered by this package; ``_ops`` fills it in


def run(q: Tensor, *rest: Tensor | float | None) -> None:
    """The arguments are the operator's. CPU and meta tensors: ``fwd``; others, or where another library has
    taken that name: ``fwd_reference``; without either, the computation itself."""
    if "fwd" in operators and q.device.type in ("cpu", "meta"):
        torch.ops.flash_kda.fwd.default(q, *rest)
    elif "fwd_reference" in operators:
        torch.ops.flash_kda.fwd_reference.default(q, *rest)
    else:
        with torch.no_grad():
            compute(q, *cast(Any, rest))


class _Rows:
    """Where each sequence lies in [B, T], longest first: batch row, first token, length, original number."""

    def __init__(self, batch: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> None:
        if cu_seqlens is None:
            spans = [(b, 0, tokens) for b in range(batch)]
        else:
            ends = cu_seqlens.tolist()
            check_ends(ends, tokens)  # of a GPU, whose own check of an index would end every later call there
            spans = [(0, a, z - a) for a, z in pairwise(ends)]
        numbers = sorted(range(len(spans)), key=lambda n: -spans[n][2])
        self.order = torch.tensor(numbers, dtype=torch.long, device=device)
        self.lengths = [spans[n][2] for n in numbers]
        self.row = torch.tensor([spans[n][0] for n in numbers], dtype=torch.long, device=device)
        self.first = torch.tensor([spans[n][1] for n in numbers], dtype=torch.long, device=device)
        self.steps = max(self.lengths, default=0)

    def active(self, step: int) -> int:
        """How many sequences are longer than ``step`` tokens: the first so many rows."""
        return sum(length > step for length in self.lengths)


class _Block:
    """Activated inputs of the sequences running at ``start``, up to STEPS tokens: ``[n, steps, HV, ...]``."""

    def __init__(self, call: _Call, rows: _Rows, start: int, stop: int) -> None:
        n = rows.active(start)
        lengths = torch.tensor(rows.lengths[:n], device=call.q.device)
        steps = torch.arange(start, stop, device=call.q.device)
        # A sequence that ends inside the block repeats its last token; those steps are never used.
        token = rows.first[:n, None] + torch.minimum(steps[None], lengths[:, None] - 1)
        row = rows.row[:n, None].expand_as(token)
        group = call.v.shape[2] // call.q.shape[2]
        self.q = normalise(call.q[row, token]).mul_(call.scale).repeat_interleave(group, dim=2)
        self.k = normalise(call.k[row, token]).repeat_interleave(group, dim=2)
        self.v = call.v[row, token].double()
        bound = None if call.lower_bound == SOFTPLUS_LOWER_BOUND else call.lower_bound
        self.decay = decay_log(call.g[row, token], call.A_log, call.dt_bias, bound).exp_()
        self.beta = torch.sigmoid(call.beta[row, token].double())


class _Call:
    """The inputs of one call."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float,
    ) -> None:
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.scale, self.A_log, self.dt_bias, self.lower_bound = scale, A_log, dt_bias, lower_bound


def _step(state: Tensor, block: _Block, i: int, n: int) -> Tensor:
    """Advances the first ``n`` states ``[n, HV, V, K]`` in place by the block's token ``i``; its output."""
    k, q = block.k[:n, i, :, :, None], block.q[:n, i, :, :, None]
    state.mul_(block.decay[:n, i, :, None, :])
    error = block.v[:n, i, :, :, None] - torch.matmul(state, k)
    state.addcmul_(error * block.beta[:n, i, :, None, None], k.transpose(-1, -2))
    return torch.matmul(state, q).squeeze(-1)


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
    """The computation itself, the body of the operators. Reads ``cu_seqlens`` on the host, and makes tensors
    of numbers of the host: no CUDA graph holds that."""
    refuse_capture(REFERENCE, q.device, "where sequences begin and end")
    call = _Call(q, k, v, g, beta, scale, A_log, dt_bias, lower_bound)
    rows = _Rows(q.shape[0], q.shape[1], cu_seqlens, q.device)
    if initial_state is None:
        state = torch.zeros(
            len(rows.lengths), v.shape[2], v.shape[3], q.shape[3], dtype=torch.float64, device=q.device
        )
    else:
        state = initial_state[rows.order].double()
    for start in range(0, rows.steps, STEPS):
        stop = min(start + STEPS, rows.steps)
        block = _Block(call, rows, start, stop)
        for step in range(start, stop):
            n = rows.active(step)
            out[rows.row[:n], rows.first[:n] + step] = _step(state[:n], block, step - start, n).to(out.dtype)
    if final_state is not None:
        final_state[rows.order] = state.to(final_state.dtype)
