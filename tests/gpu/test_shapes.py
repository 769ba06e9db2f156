"""Lengths, batches and heads: every remainder modulo the chunk, and the edges of it."""

from __future__ import annotations

import pytest
from kda_gpu import check, make


@pytest.mark.parametrize("tokens", [*range(71), 127, 128, 129, 1024])
def test_every_length(tokens: int) -> None:
    check(make(1, tokens, 2, seed=tokens))


@pytest.mark.parametrize("tokens", [5, 16, 50])
def test_every_length_without_state(tokens: int) -> None:
    check(make(2, tokens, 3, initial=None, final=None))


SHAPES = [
    # batch, tokens, heads, value heads
    (1, 33, 1, 1),
    (3, 50, 2, 2),
    (1, 100, 5, 5),
    (2, 40, 96, 96),
    (7, 20, 12, 12),
    (64, 17, 4, 4),
    (0, 16, 2, 2),
    (2, 0, 2, 2),
    (2, 64, 2, 4),
    (2, 47, 1, 4),
    (4, 19, 3, 12),
    (1, 300, 4, 16),
]


@pytest.mark.parametrize(("batch", "tokens", "heads", "value_heads"), SHAPES)
def test_batch_and_heads(batch: int, tokens: int, heads: int, value_heads: int) -> None:
    check(make(batch, tokens, heads, value_heads))


def test_long_sequence() -> None:
    check(make(1, 5000, 1))


def test_more_sequences_than_multiprocessors() -> None:
    check(make(300, 18, 4))


@pytest.mark.parametrize("scale", [1.0, 0.01, -0.3])
def test_scale(scale: float) -> None:
    check(make(2, 40, 2, scale=scale))


@pytest.mark.parametrize("a_log", [False, True])
@pytest.mark.parametrize("dt_bias", [False, True])
def test_absent_gate_parameters(a_log: bool, dt_bias: bool) -> None:
    check(make(2, 37, 2, 4, a_log=a_log, dt_bias=dt_bias))


def test_flat_dt_bias() -> None:
    p = make(1, 40, 4)
    assert p.dt_bias is not None
    check(p.with_(dt_bias=p.dt_bias.reshape(-1)))
