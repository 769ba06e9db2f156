"""Sequences do not touch: NaN or Inf in one leaves every other one's bits unchanged."""

from __future__ import annotations

import pytest
import torch
from kda_gpu import Problem, make, run, same_bits

BAD = [float("nan"), float("inf"), float("-inf")]
NAMES = ["q", "k", "v", "g", "beta", "initial_state"]
LENS = [20, 37, 0, 16, 55]
VICTIM = 1


def poison(p: Problem, name: str, value: float, index: tuple[slice, ...]) -> Problem:
    tensor = getattr(p, name).clone()
    tensor[index] = value
    return p.with_(**{name: tensor})


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name: str, value: float) -> None:
    p = make(heads=2, lens=LENS)
    start, stop = sum(LENS[:VICTIM]), sum(LENS[: VICTIM + 1])
    where = (slice(VICTIM, VICTIM + 1),) if name == "initial_state" else (slice(0, 1), slice(start, stop))
    clean_out, clean_final = run(p)
    out, final = run(poison(p, name, value, where))
    assert clean_final is not None and final is not None
    keep = [n for n in range(len(LENS)) if n != VICTIM]
    assert same_bits(out[:, :start], clean_out[:, :start]) and same_bits(out[:, stop:], clean_out[:, stop:])
    assert same_bits(final[keep], clean_final[keep])


@pytest.mark.parametrize("name", NAMES)
def test_batch_entries(name: str) -> None:
    p = make(3, 33, 2)
    clean_out, clean_final = run(p)
    out, final = run(poison(p, name, float("nan"), (slice(VICTIM, VICTIM + 1),)))
    assert clean_final is not None and final is not None
    keep = [0, 2]
    assert same_bits(out[keep], clean_out[keep]) and same_bits(final[keep], clean_final[keep])


@pytest.mark.parametrize("name", ["v", "g", "beta", "initial_state"])
def test_heads(name: str) -> None:
    """Heads share q and k at most: a value head with NaN leaves the others alone."""
    p = make(1, 40, 2, 4)
    head = (slice(None), slice(1, 2)) if name == "initial_state" else (slice(None), slice(None), slice(1, 2))
    clean_out, clean_final = run(p)
    out, final = run(poison(p, name, float("nan"), head))
    assert clean_final is not None and final is not None
    keep = [0, 2, 3]
    assert same_bits(out[:, :, keep], clean_out[:, :, keep]) and same_bits(
        final[:, keep], clean_final[:, keep]
    )


def test_a_poisoned_sequence_says_so() -> None:
    """The NaN must come out where it went in, not vanish."""
    p = make(2, 40, 2)
    out, _ = run(poison(p, "v", float("nan"), (slice(0, 1), slice(10, 11))))
    assert bool(torch.isnan(out[0, 10]).any()) and not bool(torch.isnan(out[1]).any())


def test_later_tokens_do_not_reach_earlier_ones() -> None:
    """Causality, bit for bit: another value for the last tokens leaves the earlier chunks' outputs alone."""
    p = make(1, 100, 2)
    v = p.v.clone()
    v[:, 64:] = 3.0
    assert same_bits(run(p)[0][:, :64], run(p.with_(v=v))[0][:, :64])
