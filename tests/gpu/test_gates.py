"""Gates at their ends, nearly parallel keys, sizes of q and k."""

from __future__ import annotations

import math

import pytest
import torch
from kda_gpu import DEVICE, Problem, check, make, normal

# Logits with exp(A_log) = 1: the gate is -5 sigmoid(x).
AT_BOUND, AT_MINUS_ONE, NEAR_ZERO = 40.0, math.log(0.25), -30.0
TOKENS = 200


def plain(tokens: int = TOKENS, heads: int = 2, **options: object) -> Problem:
    return make(2, tokens, heads, a_log=False, dt_bias=False, **options)  # type: ignore[arg-type]


def with_gate(p: Problem, logit: float) -> Problem:
    return p.with_(g=torch.full_like(p.g, logit))


@pytest.mark.parametrize("logit", [AT_BOUND, AT_MINUS_ONE, NEAR_ZERO, -8.0, 8.0, 0.0])
def test_one_gate_for_the_whole_sequence(logit: float) -> None:
    check(with_gate(plain(), logit))


def test_gates_mixed_per_channel() -> None:
    p = plain()
    choices = torch.tensor(
        [AT_BOUND, AT_MINUS_ONE, NEAR_ZERO, -8.0, 8.0], dtype=torch.bfloat16, device=DEVICE
    )
    channel = torch.arange(p.g.shape[-1], device=DEVICE) % len(choices)
    check(p.with_(g=choices[channel].expand_as(p.g).contiguous()))


def test_gates_that_jump_from_token_to_token() -> None:
    p = plain()
    sign = normal(*p.g.shape, seed=5).sign()
    check(p.with_(g=8.0 * sign))


@pytest.mark.parametrize("logit", [1e30, -1e30])
def test_gate_logits_beyond_reason(logit: float) -> None:
    check(with_gate(plain(40), logit))


@pytest.mark.parametrize("logit", [AT_BOUND, NEAR_ZERO])
@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_sizes_of_v_and_scale(size: float, logit: float) -> None:
    """Inside the kernels U meets exp(80): both ends of what docs/numerics.md promises."""
    p = with_gate(plain(), logit)
    assert p.initial_state is not None
    check(p.with_(v=p.v * size, initial_state=p.initial_state * size))
    check(p.with_(scale=p.scale * size))


@pytest.mark.parametrize("lower_bound", [-5.0, -2.5, -1.0, -0.01])
def test_lower_bound(lower_bound: float) -> None:
    check(make(2, TOKENS, 2, lower_bound=lower_bound))


@pytest.mark.parametrize("a_log", [-6.0, 0.0, math.log(16.0), 5.0])
def test_rate(a_log: float) -> None:
    p = make(2, TOKENS, 2)
    check(p.with_(A_log=torch.full((2,), a_log, device=DEVICE)))


def parallel_keys(noise: float, beta: float, gate: float, tokens: int = 512) -> Problem:
    """Keys that are one vector plus noise, as in a long run of one token."""
    p = with_gate(plain(tokens), gate)
    shared = normal(2, 1, 2, 128, seed=31, dtype=torch.float32)
    keys = shared + noise * normal(*p.k.shape, seed=32, dtype=torch.float32)
    return p.with_(k=keys.bfloat16(), beta=torch.full_like(p.beta, beta))


# Bounds: the best peer's error on the same kind of input, 1.0e-2 and 6.5e-2, and what another draw may add.
PARALLEL = [
    (0.3, 2.0, -6.0, 1.5e-2),
    (1e-3, 8.0, -8.0, 8e-2),
    (0.0, 8.0, -8.0, 8e-2),
    (1e-3, 8.0, -30.0, 8e-2),
]


@pytest.mark.parametrize(("noise", "beta", "gate", "bound"), PARALLEL)
def test_nearly_parallel_keys(noise: float, beta: float, gate: float, bound: float) -> None:
    check(parallel_keys(noise, beta, gate), bound)


@pytest.mark.parametrize("beta", [-30.0, 30.0])
def test_beta_at_its_ends(beta: float) -> None:
    p = plain()
    check(p.with_(beta=torch.full_like(p.beta, beta)))


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1e4, 1e12])
def test_size_of_q_and_k(size: float) -> None:
    p = make(2, TOKENS, 2)
    check(p.with_(q=p.q * size, k=p.k * size))


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_size_of_v(size: float) -> None:
    p = make(2, TOKENS, 2, initial=None)
    check(p.with_(v=p.v * size))


def test_rows_of_zeros() -> None:
    """q = k = 0: the norm's epsilon keeps the division finite and the output is zero."""
    p = make(1, 60, 2)
    q, k = p.q.clone(), p.k.clone()
    q[:, 7:20], k[:, 7:20] = 0, 0
    out, _ = check(p.with_(q=q, k=k))
    assert bool((out[:, 7:20] == 0).all())


def test_all_zeros() -> None:
    p = make(1, 40, 2, initial=None)
    names = ("q", "k", "v", "g", "beta")
    out, final = check(p.with_(**{name: torch.zeros_like(getattr(p, name)) for name in names}))
    assert final is not None and bool((out == 0).all()) and bool((final == 0).all())
