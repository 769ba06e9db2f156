"""Packed sequences: empty ones anywhere, one token, every remainder, many."""

from __future__ import annotations

import pytest
import torch
from kda_gpu import Problem, assert_close, check, make, offsets, oracle, run, same_bits

LENS = {
    "one": [37],
    "even": [16, 32, 48],
    "uneven": [13, 5, 47, 96, 2, 30],
    "one token each": [1] * 9,
    "empty first": [0, 0, 5, 16],
    "empty middle": [7, 0, 0, 0, 33],
    "empty last": [18, 3, 0, 0],
    "empty everywhere": [0, 1, 0, 17, 0, 0, 16, 0],
    "every remainder": list(range(17, 33)),
    "long and short": [700, 1, 3, 260],
}


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", LENS)
def test_lengths(name: str, cu_dtype: torch.dtype) -> None:
    check(make(heads=2, lens=LENS[name], cu_dtype=cu_dtype))


@pytest.mark.parametrize("initial", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_all_empty(count: int, initial: torch.dtype | None) -> None:
    """No token at all: the final state is the initial one, or zeros."""
    p = make(heads=3, lens=[0] * count, initial=initial)
    _, final = run(p)
    want = torch.zeros_like(final) if p.initial_state is None else p.initial_state.to(torch.float32)  # type: ignore[arg-type]
    assert same_bits(final, want)


def test_empty_sequences_hand_on_their_state_exactly() -> None:
    p = make(heads=2, lens=[0, 20, 0])
    _, final = run(p)
    assert final is not None and p.initial_state is not None
    for index in (0, 2):
        assert same_bits(final[index], p.initial_state[index])


@pytest.mark.parametrize("value_heads", [4, 8])
def test_grouped_value_heads(value_heads: int) -> None:
    check(make(heads=2, value_heads=value_heads, lens=[21, 0, 40, 1]))


def test_many_sequences() -> None:
    check(make(heads=2, lens=[(7 * i) % 23 for i in range(300)]))


def test_thousands_of_sequences() -> None:
    """4096 sequences of 16: checked on a sample, as the oracle walks token by token."""
    p = make(heads=4, lens=[16] * 4096)
    out, final = run(p)
    assert final is not None and p.initial_state is not None
    sample = [0, 1, 777, 2048, 4094, 4095]
    for index in sample:
        part = cut(p, 16 * index, 16 * index + 16, p.initial_state[index : index + 1])
        want_out, want_final = oracle(part)
        assert_close("out", out[:, 16 * index : 16 * index + 16], want_out)
        assert_close("final_state", final[index : index + 1], want_final)


def cut(p: Problem, start: int, stop: int, state: torch.Tensor) -> Problem:
    """Tokens [start, stop) of a packed problem as a sequence of its own."""
    names = ("q", "k", "v", "g", "beta")
    parts = {name: getattr(p, name)[:, start:stop] for name in names}
    return p.with_(**parts, cu_seqlens=None, initial_state=state)


def test_batch_and_its_packed_form_agree() -> None:
    p = make(4, 50, 2)
    names = ("q", "k", "v", "g", "beta")
    flat = {name: getattr(p, name).reshape(1, 200, *getattr(p, name).shape[2:]) for name in names}
    packed = p.with_(**flat, cu_seqlens=offsets([50] * 4))
    out, final = check(p)
    packed_out, packed_final = check(packed)
    assert packed_final is not None and final is not None
    assert_close("out", packed_out.reshape(out.shape), out)
    assert_close("final_state", packed_final, final)
