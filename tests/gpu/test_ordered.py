"""More packed (sequence, head) pairs than multiprocessors: blocks take the longest sequences first."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kda_gpu import ORDER, Problem, check, kernels, make, offsets, run, same_bits

cuda_only = pytest.mark.cuda_only

HEADS, VALUE_HEADS = 2, 6
# 50 sequences, 300 pairs: empty ones at both ends and inside, one far longer than the rest, many alike.
SPECIAL = [0, 0, 1, 3000, 15, 16, 0, 17, 700, 0, 2, 1500, 31, 33]
LENS = [*SPECIAL, *((37 * i * i) % 150 for i in range(33)), 64, 0, 0]
STATES = [None, torch.bfloat16, torch.float32]


def spans(lens: list[int]) -> list[slice]:
    ends = torch.tensor([0, *lens]).cumsum(0).tolist()
    return [slice(a, z) for a, z in pairwise(ends)]


def permuted(p: Problem, order: list[int]) -> Problem:
    """The same sequences, packed in another order."""
    where = spans(LENS)
    names = ("q", "k", "v", "g", "beta")
    parts = {name: torch.cat([getattr(p, name)[:, where[n]] for n in order], 1) for name in names}
    state = None if p.initial_state is None else p.initial_state[order]
    return p.with_(**parts, initial_state=state, cu_seqlens=offsets([LENS[n] for n in order]))


ORDERS = {
    "longest first": sorted(range(len(LENS)), key=lambda n: -LENS[n]),
    "longest last": sorted(range(len(LENS)), key=lambda n: LENS[n]),
    "backwards": list(range(len(LENS)))[::-1],
    "shuffled": torch.randperm(len(LENS), generator=torch.Generator().manual_seed(5)).tolist(),
}


@cuda_only
def test_they_are_ordered() -> None:
    p = make(heads=HEADS, value_heads=VALUE_HEADS, lens=LENS)
    assert ORDER in kernels(p), "the tests below would not test it"


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("initial", STATES)
def test_lengths_far_apart(initial: torch.dtype | None, cu_dtype: torch.dtype) -> None:
    check(make(heads=HEADS, value_heads=VALUE_HEADS, lens=LENS, initial=initial, cu_dtype=cu_dtype))


@pytest.mark.parametrize("segment_tokens", [None, *(pytest.param(n, marks=cuda_only) for n in (0, 256))])
@pytest.mark.parametrize("name", ORDERS)
def test_a_permutation_permutes_the_results(name: str, segment_tokens: int | None) -> None:
    p = make(heads=HEADS, value_heads=VALUE_HEADS, lens=LENS).with_(segment_tokens=segment_tokens)
    order = ORDERS[name]
    want_out, want_final = run(p)
    out, final = run(permuted(p, order))
    assert want_final is not None and final is not None
    for n, span, here in zip(
        order, [spans(LENS)[n] for n in order], spans([LENS[n] for n in order]), strict=True
    ):
        assert same_bits(out[:, here], want_out[:, span]), f"output of sequence {n}, of {LENS[n]} tokens"
    assert same_bits(final, want_final[order])


def test_empty_sequences_hand_on_their_state_exactly() -> None:
    p = make(heads=HEADS, value_heads=VALUE_HEADS, lens=LENS)
    _, final = run(p)
    empty = [n for n, length in enumerate(LENS) if length == 0]
    assert final is not None and p.initial_state is not None and len(empty) > 5
    assert same_bits(final[empty], p.initial_state[empty])


def test_a_bad_sequence_leaves_the_others_alone() -> None:
    p = make(heads=HEADS, value_heads=VALUE_HEADS, lens=LENS)
    want_out, want_final = run(p)
    victim = LENS.index(700)
    bad, where = p.v.clone(), spans(LENS)[victim]
    bad[:, where] = float("nan")
    out, final = run(p.with_(v=bad))
    assert want_final is not None and final is not None
    keep = [n for n in range(len(LENS)) if n != victim]
    assert same_bits(out[:, : where.start], want_out[:, : where.start])
    assert same_bits(out[:, where.stop :], want_out[:, where.stop :])
    assert same_bits(final[keep], want_final[keep])
    assert bool(torch.isnan(out[:, where]).any())
