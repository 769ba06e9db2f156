"""The oracle against an independent matrix form, its identities, and mutants it must not resemble."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from calls import make_call
from conftest import oracle, relative

from flash_kda.reference import decay_log, kda_reference

SMALL = {"B": 2, "T": 37, "H": 2, "HV": 4, "K": 8, "V": 6}
ORACLE_BOUND = 1e-12  # two float64 evaluations of one formula
OUT_BOUND = 2.5e-3  # reference backend: bf16 rounding of the output, 2^-9 at worst per element
STATE_BOUND = 1e-6  # reference backend: fp32 rounding of the state


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def chunk_form(q: Any, k: Any, v: Any, log_decay: Any, b: Any, s0: Any, chunk: int) -> tuple[Any, Any]:
    """One head as matrices over chunks, numpy float64, q and k normalised: not the oracle's algorithm.

    With G the running sum of the log decay in a chunk: U = (I + diag(b) A)^-1 diag(b) (V - Kd S^T),
    O = Qd S^T + P U, S' = S diag(exp G_C) + U^T (k exp(G_C - G)).
    """
    out = np.zeros_like(v)
    state = s0.copy()
    for start in range(0, len(v), chunk):
        span = slice(start, min(start + chunk, len(v)))
        G = np.cumsum(log_decay[span], axis=0)
        ratio = np.exp(np.minimum(G[:, None] - G[None, :], 0.0))  # the pairs s > t are masked below
        A = np.tril(np.einsum("tc,sc,tsc->ts", k[span], k[span], ratio), -1)
        P = np.tril(np.einsum("tc,sc,tsc->ts", q[span], k[span], ratio))
        decayed = np.exp(G)
        rhs = b[span, None] * (v[span] - (k[span] * decayed) @ state.T)
        U = np.linalg.solve(np.eye(len(G)) + b[span, None] * A, rhs)
        out[span] = (q[span] * decayed) @ state.T + P @ U
        state = state * decayed[-1] + U.T @ (k[span] * np.exp(G[-1] - G))
    return out, state


def matrix_reference(call: dict[str, Any], chunk: int = 16, neg: bool = False) -> tuple[Any, Any]:
    """A whole call through ``chunk_form``, head by head."""
    arrays = {
        n: t.double().numpy() for n, t in call.items() if isinstance(t, torch.Tensor) and n != "cu_seqlens"
    }
    q, k, v, g = (arrays[n] for n in ("q", "k", "v", "g"))
    group = v.shape[2] // q.shape[2]
    z = g + arrays["dt_bias"]
    rate = np.exp(arrays["A_log"])[:, None]
    log_decay = (
        -rate * np.logaddexp(z, 0) if call["lower_bound"] is None else call["lower_bound"] * sigmoid(rate * z)
    )
    b = sigmoid(arrays["beta"]) * (2 if neg else 1)
    qn = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * call["scale"]
    kn = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    out, final = np.zeros_like(v), np.zeros_like(arrays["initial_state"])
    for n in range(v.shape[0]):
        for h in range(v.shape[2]):
            out[n, :, h], final[n, h] = chunk_form(
                qn[n, :, h // group],
                kn[n, :, h // group],
                v[n, :, h],
                log_decay[n, :, h],
                b[n, :, h],
                arrays["initial_state"][n, h],
                chunk,
            )
    return torch.from_numpy(out), torch.from_numpy(final)


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0, -1e-3, None])
@pytest.mark.parametrize("neg", [False, True])
def test_oracle_equals_matrix_form(lower_bound: float | None, neg: bool) -> None:
    call = make_call(**SMALL) | {"lower_bound": lower_bound}
    names = ("q", "k", "v", "g", "beta", "scale", "A_log", "dt_bias", "lower_bound", "initial_state")
    out, final = kda_reference(**{n: call[n] for n in names}, allow_neg_eigval=neg)
    want_out, want_final = matrix_reference(call, neg=neg)
    assert relative(out, want_out) < ORACLE_BOUND
    assert relative(final, want_final) < ORACLE_BOUND


def test_the_chunk_size_of_the_matrix_form_does_not_matter() -> None:
    call = make_call(**SMALL)
    assert relative(matrix_reference(call, 1)[0], matrix_reference(call, 64)[0]) < ORACLE_BOUND


def _transposed_state(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"initial_state": call["initial_state"].transpose(-1, -2).contiguous()}


def _interleaved_groups(call: dict[str, Any]) -> dict[str, Any]:
    order = torch.tensor([0, 2, 1, 3])  # head h reading q/k head h % H
    return call | {n: call[n][:, :, order] for n in ("v", "g", "beta")}


def _activated_beta(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"beta": torch.sigmoid(call["beta"].float()).bfloat16()}


def _bias_left_out(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"dt_bias": None}


def _looser_gate(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"lower_bound": -4.9}


@pytest.mark.parametrize(
    "mutate", [_transposed_state, _interleaved_groups, _activated_beta, _bias_left_out, _looser_gate]
)
def test_the_bounds_reject_a_mutant(mutate: Any) -> None:
    call = make_call(**(SMALL | {"K": 8, "V": 8, "T": 6}))
    out, final = oracle(call)
    wrong_out, wrong_final = oracle(mutate(call))
    assert relative(wrong_out, out) > OUT_BOUND or relative(wrong_final, final) > STATE_BOUND


def test_each_gate_has_its_stated_range() -> None:
    g = torch.linspace(-30, 30, 64).reshape(1, 8, 8)
    bounded = decay_log(g, torch.zeros(8), None, -5.0)
    assert bounded.min() >= -5.0 and bounded.max() <= 0.0 and bounded.min() < -4.999
    soft = decay_log(g, None, None, None)
    assert torch.allclose(soft, -torch.log1p(torch.exp(g.double())), rtol=1e-12, atol=0)


def test_carrying_the_state_equals_one_call() -> None:
    call = make_call(**SMALL)
    whole_out, whole_final = oracle(call)
    cut = 13
    tokens = ("q", "k", "v", "g", "beta")
    first = oracle(call | {n: call[n][:, :cut] for n in tokens})
    rest = oracle(call | {n: call[n][:, cut:] for n in tokens} | {"initial_state": first[1]})
    assert torch.equal(torch.cat([first[0], rest[0]], dim=1), whole_out)
    assert torch.equal(rest[1], whole_final)


def test_packed_sequences_equal_separate_calls() -> None:
    ends = [0, 0, 5, 6, 6, 20]
    call = make_call(**(SMALL | {"B": 1, "T": 20}), cu_seqlens=ends)
    out, final = oracle(call)
    for n, (a, z) in enumerate(pairwise(ends)):
        alone = call | {name: call[name][:, a:z] for name in ("q", "k", "v", "g", "beta")}
        alone |= {"initial_state": call["initial_state"][n : n + 1], "cu_seqlens": None}
        one_out, one_final = oracle(alone)
        assert relative(one_out[0], out[0, a:z]) < ORACLE_BOUND
        assert relative(one_final[0], final[n]) < ORACLE_BOUND


def test_an_empty_sequence_hands_its_state_through() -> None:
    call = make_call(**(SMALL | {"B": 1, "T": 4}), cu_seqlens=[0, 4, 4])
    assert torch.equal(oracle(call)[1][1], call["initial_state"][1].double())
