"""Seeded inputs: the same bits in every process on the same device and torch, shown by a checksum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from _cases import HEAD_DIM, AccuracyLine, Case


@dataclass
class Inputs:
    """Everything one call takes; `out` and `final_state` are written by the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    scale: float
    lower_bound: float
    initial_state: torch.Tensor | None
    out: torch.Tensor
    final_state: torch.Tensor
    cu_seqlens: torch.Tensor | None

    def poison(self) -> None:
        """NaN in both outputs, so that an element nobody wrote cannot pass."""
        self.out.fill_(float("nan"))
        self.final_state.fill_(float("nan"))

    def checksum(self) -> int:
        """A 32-bit digest of the bits of q, k, v, g and beta."""
        digest = 0
        for tensor in (self.q, self.k, self.v, self.g, self.beta):
            total = int(tensor.view(torch.int16).sum(dtype=torch.int64).item())
            digest = (digest * 1_000_003 + total) % (1 << 32)
        return digest


class _Draw:
    """Random tensors from one generator."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor.normal_(0.0, scale, generator=self.generator)

    def uniform(
        self, *shape: int, low: float, high: float, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.float32, device=self.device)
        return tensor.uniform_(low, high, generator=self.generator).to(dtype)


def timing_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """Random inputs of a timing case: fp32 states in and out, bounded gate at -5."""
    draw = _Draw(seed, device)
    shape = (case.batch, case.seqlen, case.nheads, HEAD_DIM)
    state = (case.sequences, case.nheads, HEAD_DIM, HEAD_DIM)
    q, k, v, g = (draw.normal(*shape) for _ in range(4))
    cu_seqlens = None
    if case.lens is not None:
        offsets = torch.tensor((0, *case.lens), dtype=torch.int64).cumsum(0)
        cu_seqlens = offsets.to(device)
    return Inputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=draw.normal(*shape[:3]),
        A_log=draw.uniform(case.nheads, low=-1.0, high=1.0, dtype=torch.float32),
        dt_bias=draw.normal(case.nheads, HEAD_DIM, dtype=torch.float32, scale=0.25),
        scale=HEAD_DIM**-0.5,
        lower_bound=-5.0,
        initial_state=draw.normal(*state, dtype=torch.float32, scale=0.5),
        out=torch.empty_like(v),
        final_state=torch.empty(state, dtype=torch.float32, device=device),
        cu_seqlens=cu_seqlens,
    )


def _gate(line: AccuracyLine, draw: _Draw, shape: tuple[int, ...]) -> torch.Tensor:
    if line.g == "normal":
        return draw.normal(*shape)
    if line.g == "uniform":
        return draw.uniform(*shape, low=-8.0, high=8.0)
    return torch.full(shape, float(line.g), dtype=torch.bfloat16, device=draw.device)


def _keys(line: AccuracyLine, draw: _Draw, shape: tuple[int, ...]) -> torch.Tensor:
    if line.keys == "normal":
        return draw.normal(*shape, dtype=torch.float32)
    batch, _, heads, dim = shape
    shared = draw.normal(batch, 1, heads, dim, dtype=torch.float32)
    return shared + float(line.keys) * draw.normal(*shape, dtype=torch.float32)


def accuracy_inputs(line: AccuracyLine, seed: int, device: torch.device) -> Inputs:
    """Inputs of one accuracy line; each batch entry is a seed of its own."""
    draw = _Draw(seed, device)
    heads, shape = line.nheads, (line.batch, line.seqlen, line.nheads, HEAD_DIM)
    state = (line.batch, heads, HEAD_DIM, HEAD_DIM)
    q = draw.normal(*shape, dtype=torch.float32) * line.qk_scale
    k = _keys(line, draw, shape) * line.qk_scale
    v = draw.normal(*shape)
    g = _gate(line, draw, shape)
    normal_beta = draw.normal(*shape[:3])
    beta = normal_beta if line.beta == "normal" else torch.full_like(normal_beta, float(line.beta))
    a_log = draw.uniform(heads, low=-1.0, high=1.0, dtype=torch.float32)
    dt_bias = draw.normal(heads, HEAD_DIM, dtype=torch.float32, scale=0.25)
    initial = draw.normal(*state, dtype=torch.float32, scale=0.5)
    return Inputs(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=v,
        g=g,
        beta=beta,
        A_log=a_log if line.a_log == "uniform" else torch.full_like(a_log, float(line.a_log)),
        dt_bias=dt_bias if line.dt_bias == "normal" else torch.full_like(dt_bias, float(line.dt_bias)),
        scale=HEAD_DIM**-0.5,
        lower_bound=line.lower_bound,
        initial_state=initial if line.random_state else None,
        out=torch.empty_like(v),
        final_state=torch.empty(state, dtype=torch.float32, device=device),
        cu_seqlens=None,
    )
