"""The oracle: Kimi Delta Attention in float64, one token after the other.

One head, state ``S`` of shape ``[V, K]`` (row = value channel), natural logarithms throughout::

    q^ = q / sqrt(sum q^2 + 1e-6) * scale          k^ = k / sqrt(sum k^2 + 1e-6)
    g  = lower_bound * sigmoid(exp(A_log) * (g_raw + dt_bias))      bounded gate
    g  = -exp(A_log) * softplus(g_raw + dt_bias)                    softplus gate (lower_bound is None)
    b  = sigmoid(beta_logit)                                        (x 2 with allow_neg_eigval)
    S <- S diag(exp g)
    S <- S + b (v - S k^) k^T
    o  = S q^

Every test measures against this file, so it holds no shortcut: heads are a tensor dimension, sequences and
tokens are Python loops, and the three updates above are three statements.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

NORM_EPS = 1e-6


def decay_log(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The activated gate in float64: natural logarithm of the decay of each key channel, <= 0.

    Args:
        g: ``[..., HV, K]``, before activation.
        A_log: ``[HV]`` or None (zeros).
        dt_bias: ``[HV, K]`` (or ``HV*K`` values) or None (zeros).
        lower_bound: bound of the gate, or None for the softplus gate.
    """
    heads, channels = g.shape[-2:]
    z = g.double()
    if dt_bias is not None:
        z = z + dt_bias.double().reshape(heads, channels)
    rate = torch.ones(heads, 1, dtype=torch.float64, device=g.device)
    if A_log is not None:
        rate = A_log.double().exp().reshape(heads, 1)
    if lower_bound is None:
        return -rate * torch.logaddexp(z, torch.zeros_like(z))
    return lower_bound * torch.sigmoid(rate * z)


def normalise(x: Tensor) -> Tensor:
    """``x / sqrt(sum x^2 + 1e-6)`` over the last dimension, in float64."""
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _sequences(batch: int, tokens: int, cu_seqlens: Tensor | None) -> list[tuple[int, slice]]:
    if cu_seqlens is None:
        return [(b, slice(0, tokens)) for b in range(batch)]
    ends = cu_seqlens.tolist()
    return [(0, slice(a, z)) for a, z in pairwise(ends)]


def _recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence in float64. q, k, g ``[T, HV, K]``, v ``[T, HV, V]``, b ``[T, HV]``, S ``[HV, V, K]``."""
    out = torch.zeros_like(v)
    for t in range(v.shape[0]):
        state = state * torch.exp(g[t])[:, None, :]
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("h,hv,hk->hvk", b[t], error, k[t])
        out[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return out, state


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = -5.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention in float64.

    Args:
        q, k: ``[B, T, H, K]``, any floating dtype, before normalisation.
        v: ``[B, T, HV, V]``; HV is a multiple of H, value head h reads query/key head ``h // (HV // H)``.
        g: ``[B, T, HV, K]``, before activation.
        beta: ``[B, T, HV]``, logits.
        scale: factor on the normalised q; None means ``K ** -0.5``.
        A_log: ``[HV]`` or None (zeros).
        dt_bias: ``[HV, K]`` or ``[HV * K]`` or None (zeros).
        lower_bound: bound of the gate, or None for the softplus gate.
        initial_state: ``[N, HV, V, K]`` or None (zeros).
        cu_seqlens: ``[N + 1]`` integers with B = 1, or None (then N = B). Its contents are read on the host.
        allow_neg_eigval: doubles the sigmoid of beta.

    Returns:
        ``(o, final_state)``, float64: ``[B, T, HV, V]`` and ``[N, HV, V, K]``. Tokens that no sequence covers
        are zero in ``o``.
    """
    batch, tokens, heads, dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // heads
    qn = normalise(q).repeat_interleave(group, dim=2) * (dim**-0.5 if scale is None else scale)
    kn = normalise(k).repeat_interleave(group, dim=2)
    gate = decay_log(g, A_log, dt_bias, lower_bound)
    b = torch.sigmoid(beta.double()) * (2.0 if allow_neg_eigval else 1.0)
    vd = v.double()
    out = torch.zeros_like(vd)
    finals = []
    for n, (row, span) in enumerate(_sequences(batch, tokens, cu_seqlens)):
        start = (
            vd.new_zeros(value_heads, value_dim, dim) if initial_state is None else initial_state[n].double()
        )
        out[row, span], last = _recur(
            qn[row, span], kn[row, span], vd[row, span], gate[row, span], b[row, span], start
        )
        finals.append(last)
    final = torch.stack(finals) if finals else vd.new_zeros(0, value_heads, value_dim, dim)
    return out, final
