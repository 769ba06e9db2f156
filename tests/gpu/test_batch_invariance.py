"""With fixed cuts a sequence's bits are its own: alone, packed with others, or a row of a batch.

The neighbours decide how the work is spread: 4, 2 or 1 blocks a head, in order or by length, in one pass or
in segments. None of it may show.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kda_gpu import ORDER, SCAN, Problem, check, kernels, make, offsets, run, same_bits

cuda_only = pytest.mark.cuda_only

HEADS, VALUE_HEADS = 2, 6
# A dry run takes the first of each: the reference backend ignores the one and is slow on the other.
SEGMENTS = [0, *(pytest.param(n, marks=cuda_only) for n in (256, 1024))]
# 94 chunks, the last of 12 tokens; whole chunks and whole segments.
TOKENS = [1500, pytest.param(4096, marks=cuda_only)]
INPUTS = ("q", "k", "v", "g", "beta")

# Lengths of the other sequences, and before which of them the sequence stands.
FEW = [700, 0, 2100]
MANY = [0, 1, 15, 16, 17, 255, 256, 257, *((97 * i * i) % 800 for i in range(32))]
PACKED = {
    "alone": ([], 0),
    "first of 4": (FEW, 0),
    "third of 4": (FEW, 2),
    "last of 4": (FEW, 3),
    "among 40": (MANY, 17),
}


def alone(tokens: int, segment_tokens: int | None) -> Problem:
    """A sequence of little decay in most heads: else nothing of one segment would be left in the next."""
    p = make(1, tokens, HEADS, VALUE_HEADS, seed=1)
    return p.with_(g=(p.g.float() - 6.0).bfloat16(), segment_tokens=segment_tokens)


def join(dim: int, at: int, others: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    before, after = others.split([at, others.shape[dim] - at], dim)
    return torch.cat([before, one, after], dim)


def pack(one: Problem, lens: Sequence[int], place: int) -> Problem:
    """The sequence before number `place` of others of the lengths `lens`."""
    others = make(heads=HEADS, value_heads=VALUE_HEADS, lens=lens, seed=2) if lens else one.tokens(0, 0)
    start = sum(lens[:place])
    parts = {name: join(1, start, getattr(others, name), getattr(one, name)) for name in INPUTS}
    assert one.initial_state is not None and others.initial_state is not None
    states = others.initial_state if lens else others.initial_state[:0]
    all_lens = [*lens[:place], one.q.shape[1], *lens[place:]]
    return one.with_(
        **parts, initial_state=join(0, place, states, one.initial_state), cu_seqlens=offsets(all_lens)
    )


def stack(one: Problem, rows: int, place: int) -> Problem:
    """The sequence as row `place` of a batch of `rows`."""
    others = make(rows - 1, one.q.shape[1], HEADS, VALUE_HEADS, seed=3)
    names = (*INPUTS, "initial_state")
    return one.with_(**{name: join(0, place, getattr(others, name), getattr(one, name)) for name in names})


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("segment_tokens", SEGMENTS)
def test_packed_with_others(segment_tokens: int, tokens: int, name: str) -> None:
    lens, place = PACKED[name]
    one = alone(tokens, segment_tokens)
    want_out, want_final = run(one)
    out, final = run(pack(one, lens, place))
    start = sum(lens[:place])
    assert want_final is not None and final is not None
    assert same_bits(out[:, start : start + tokens], want_out)
    assert same_bits(final[place : place + 1], want_final)


@pytest.mark.parametrize(("rows", "place"), [(1, 0), (9, 0), (9, 5)])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("segment_tokens", SEGMENTS)
def test_a_row_of_a_batch(segment_tokens: int, tokens: int, rows: int, place: int) -> None:
    one = alone(tokens, segment_tokens)
    want_out, want_final = run(one)
    out, final = run(stack(one, rows, place))
    assert want_final is not None and final is not None
    assert same_bits(out[place : place + 1], want_out)
    assert same_bits(final[place : place + 1], want_final)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("segment_tokens", SEGMENTS)
def test_those_bits_are_right(segment_tokens: int, tokens: int) -> None:
    check(alone(tokens, segment_tokens))


@cuda_only
@pytest.mark.parametrize("segment_tokens", [256, 1024])
def test_cuts_change_the_last_bits(segment_tokens: int) -> None:
    """Else the tests above would compare what no cut can change."""
    cut, whole = run(alone(4096, segment_tokens)), run(alone(4096, 0))
    assert not same_bits(cut[0], whole[0]) and not same_bits(cut[1], whole[1])
    first = slice(0, segment_tokens)
    assert same_bits(cut[0][:, first], whole[0][:, first]), "the first segment has nothing cut before it"


@cuda_only
def test_the_switch_and_the_neighbours_reach_every_way_to_run() -> None:
    one, lens = alone(4096, 0), PACKED["among 40"][0]
    ways = {
        "alone": kernels(one),
        "a batch of 9": kernels(stack(one, 9, 0)),
        "among 40": kernels(pack(one, lens, 17)),
    }
    assert not any(SCAN in names for names in ways.values()), "cut, where 0 says never"
    assert ORDER in ways["among 40"] and ORDER not in ways["alone"]
    assert len({frozenset(names) for names in ways.values()}) == 3, f"two of these run alike: {ways}"
    for p in (one, stack(one, 9, 0), pack(one, lens, 17)):
        assert SCAN in kernels(p.with_(segment_tokens=256)), "not cut, where each 256 tokens are to be"
