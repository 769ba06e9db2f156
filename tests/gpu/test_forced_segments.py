"""Segments where the kernels would not choose any: many heads, short sequences."""

from __future__ import annotations

import pytest
import torch
from kda_gpu import (
    BOUND,
    ROW_FACTOR,
    SCAN,
    Problem,
    check,
    kernels,
    make,
    oracle,
    relative,
    run,
    same_bits,
    worst_row,
)

cuda_only = pytest.mark.cuda_only

LENS = [0, 1, 255, 256, 257, 1000, 3000]
EDGES = [511, 512, 513, 0, 16, 768, 271, 272, 273]


def many_heads(
    lens: list[int],
    segment_tokens: int | None = 256,
    initial: torch.dtype | None = torch.float32,
    final: torch.dtype | None = torch.float32,
) -> Problem:
    p = make(heads=8, value_heads=40, lens=lens, initial=initial, final=final)
    return p.with_(segment_tokens=segment_tokens)


@cuda_only
def test_these_calls_are_cut_by_the_switch_alone() -> None:
    assert SCAN in kernels(many_heads(LENS)), "the tests below would not test segments"
    assert SCAN not in kernels(many_heads(LENS, None))


@pytest.mark.parametrize("segment_tokens", [256, *(pytest.param(n, marks=cuda_only) for n in (272, 1024))])
def test_packed_sequences(segment_tokens: int) -> None:
    check(many_heads(LENS, segment_tokens))


@cuda_only
@pytest.mark.parametrize("initial", [None, torch.bfloat16])
def test_lengths_around_whole_segments(initial: torch.dtype | None) -> None:
    """Of 116 000 rows one may be far off by chance: then it is so without cuts too."""
    p = many_heads(EDGES, initial=initial, final=torch.bfloat16)
    for cut, uncut, want in zip(run(p), run(p.with_(segment_tokens=0)), oracle(p), strict=True):
        assert cut is not None and uncut is not None
        assert relative(cut, want) <= BOUND
        assert worst_row(cut, want) <= max(ROW_FACTOR * BOUND, 1.25 * worst_row(uncut, want))


def test_fixed_length() -> None:
    check(make(3, 1000, 8, 40).with_(segment_tokens=256))


def test_a_segment_longer_than_every_sequence() -> None:
    p = many_heads([300, 0, 17])
    got, want = run(p.with_(segment_tokens=2**31 - 32)), run(p.with_(segment_tokens=0))
    assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])


def test_no_tokens() -> None:
    check(many_heads([0, 0, 0]))
    check(make(2, 0, 2).with_(segment_tokens=256))


@cuda_only
def test_same_bits_every_time() -> None:
    p = many_heads(LENS)
    first = run(p)
    for _ in range(5):
        again = run(p)
        assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])
