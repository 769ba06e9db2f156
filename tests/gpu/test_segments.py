"""Long sequences with few heads: cut into segments that run side by side and are chained by a scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kda_gpu import (
    DEVICE,
    HALF,
    QUARTER,
    SCAN,
    STATE,
    WHOLE,
    Problem,
    call,
    check,
    kernels,
    make,
    normal,
    offsets,
    run,
    same_bits,
    synchronize,
)

cuda_only = pytest.mark.cuda_only

LONG = 3001  # 188 chunks, the last of them one token wide
MIXED = [2500, 0, 1, 6200, 15, 1300]  # sequences of several segments among sequences of one
OTHER = [1300, 6000, 16, 0, 2699, 1]  # as many tokens, cut elsewhere


@cuda_only
@pytest.mark.parametrize(
    ("tokens", "heads", "expected"),
    [
        (LONG, lambda sms: 2, {STATE, SCAN, QUARTER}),
        (8192, lambda sms: sms // 16, {STATE, SCAN, HALF}),
        (8192, lambda sms: sms // 8, {STATE, SCAN, WHOLE}),
        (256, lambda sms: sms // 4, {QUARTER}),
        (256, lambda sms: sms // 4 + 1, {HALF}),
        (256, lambda sms: sms // 2, {HALF}),
        (256, lambda sms: sms // 2 + 1, {WHOLE}),
    ],
)
def test_the_layout_that_was_meant_is_the_one_that_runs(
    tokens: int, heads: Callable[[int], int], expected: set[str]
) -> None:
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert kernels(make(1, tokens, heads(sms))) == expected


@cuda_only
@pytest.mark.parametrize("lens", [MIXED, OTHER])
def test_packed_sequences_are_cut(lens: list[int]) -> None:
    assert SCAN in kernels(make(heads=2, lens=lens)), "the tests below would not test segments"


@pytest.mark.parametrize("initial", [None, torch.bfloat16, torch.float32])
def test_fixed_length(initial: torch.dtype | None) -> None:
    check(make(2, LONG, 1, 2, initial=initial))


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
def test_sequences_of_one_segment_and_of_many(cu_dtype: torch.dtype) -> None:
    check(make(heads=1, value_heads=2, lens=MIXED, cu_dtype=cu_dtype))


@pytest.mark.parametrize("tokens", [2048, 2049, 2063, 4095, 4096, 4097])
def test_lengths_around_whole_segments(tokens: int) -> None:
    check(make(1, tokens, 2))


def few_heads(dtype: torch.dtype) -> Problem:
    return make(1, LONG, 2, initial=dtype, final=dtype)


def more_segments_than_run_at_once(dtype: torch.dtype) -> Problem:
    lens = [0, 1, 255, 256, 257, 1000, 3000]
    return make(heads=8, value_heads=40, lens=lens, initial=dtype, final=dtype).with_(segment_tokens=256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "problem", [few_heads, pytest.param(more_segments_than_run_at_once, marks=cuda_only)]
)
def test_final_state_in_place_of_the_initial(
    problem: Callable[[torch.dtype], Problem], dtype: torch.dtype
) -> None:
    # The last segment writes the state that the first one reads.
    p = problem(dtype)
    want_out, want_final = run(p)
    assert p.initial_state is not None
    for _ in range(3):
        state, out = p.initial_state.clone(), torch.empty_like(p.v)
        call(p, out, state, initial_state=state)
        assert same_bits(out, want_out) and same_bits(state, want_final)


def test_without_a_final_state() -> None:
    p = make(1, LONG, 2)
    assert same_bits(run(p)[0], run(p.with_(final_dtype=None))[0])


@pytest.mark.parametrize("logit", [40.0, -8.0, -30.0])
def test_gates_at_their_ends(logit: float) -> None:
    p = make(1, LONG, 2, a_log=False, dt_bias=False)
    check(p.with_(g=torch.full_like(p.g, logit)))


def test_nearly_parallel_keys() -> None:
    p = make(1, LONG, 2, a_log=False, dt_bias=False)
    one = normal(1, 1, 2, p.k.shape[-1], seed=11, dtype=torch.float32)
    keys = (one + 1e-3 * normal(*p.k.shape, seed=12, dtype=torch.float32)).to(p.k.dtype)
    # No decay and beta near 1: rounding is amplified by the problem itself; see test_gates.py.
    check(p.with_(k=keys, g=torch.full_like(p.g, -8.0), beta=torch.full_like(p.beta, 8.0)), bound=8e-2)


def test_same_bits_every_time() -> None:
    p = make(heads=2, lens=MIXED)
    first = run(p)
    for _ in range(5):
        again = run(p)
        assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sequence_leaves_the_others_alone(bad: float) -> None:
    p = make(heads=2, lens=MIXED)
    want, want_final = run(p)
    q, v = p.q.clone(), p.v.clone()
    q[:, 512:600], v[:, 512:600] = bad, bad  # from a chunk of the first sequence on
    got, got_final = run(p.with_(q=q, v=v))
    assert same_bits(got[:, MIXED[0] :], want[:, MIXED[0] :])
    assert got_final is not None and want_final is not None
    assert same_bits(got_final[1:], want_final[1:])
    assert same_bits(got[:, :512], want[:, :512]), "chunks before the bad ones changed"


@cuda_only
def test_graph_whose_lengths_change_between_replays() -> None:
    p = make(heads=2, lens=MIXED)
    assert sum(OTHER) == sum(MIXED)
    out = torch.empty_like(p.v)
    final = torch.empty(p.state_shape, device=p.v.device)
    call(p, out, final)
    synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(p, out, final)
    assert p.cu_seqlens is not None
    for lens in (OTHER, MIXED):
        p.cu_seqlens.copy_(offsets(lens))
        out.fill_(float("nan"))
        final.fill_(float("nan"))
        graph.replay()
        synchronize()
        want_out, want_final = run(p)
        assert same_bits(out, want_out) and same_bits(final, want_final)


@cuda_only
def test_decreasing_offsets_do_no_harm() -> None:
    """They count tokens twice, so more segments than there are places for; the host cannot see it.

    What they write where they should not is for the memory checker to find (sanitizer_set.py). Here: no
    error, and the next call is right.
    """
    p = make(heads=1, lens=[4096] * 9)
    wrong = torch.tensor([0, 36864] * 5, device=DEVICE)
    out, final = torch.empty_like(p.v), torch.empty(p.state_shape, device=p.v.device)
    call(p, out, final, cu_seqlens=wrong)
    synchronize()
    assert SCAN in kernels(p)
    check(p)
