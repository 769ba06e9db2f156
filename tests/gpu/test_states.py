"""Initial and final states: dtypes, absence, in-place update, carrying from call to call."""

from __future__ import annotations

import pytest
import torch
from kda_gpu import (
    DEVICE,
    STATES,
    D,
    assert_close,
    call,
    check,
    make,
    oracle,
    run,
    same_bits,
)


@pytest.mark.parametrize("lens", [None, [20, 0, 33, 1]])
@pytest.mark.parametrize("final", STATES)
@pytest.mark.parametrize("initial", STATES)
def test_dtypes(initial: torch.dtype | None, final: torch.dtype | None, lens: list[int] | None) -> None:
    check(make(3, 45, 2, lens=lens, initial=initial, final=final))


def test_absent_initial_state_is_zeros() -> None:
    p = make(2, 40, 2, initial=None)
    zeros = p.with_(initial_state=torch.zeros(p.state_shape, device=p.q.device))
    for a, b in zip(run(p), run(zeros), strict=True):
        assert same_bits(a, b)


def test_final_state_may_be_absent_without_changing_the_output() -> None:
    p = make(2, 40, 2)
    assert same_bits(run(p)[0], run(p.with_(final_dtype=None))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_final_state_in_place_of_the_initial(dtype: torch.dtype) -> None:
    p = make(3, 50, 2, initial=dtype, final=dtype)
    want_out, want_final = run(p)
    assert p.initial_state is not None
    state, out = p.initial_state.clone(), torch.empty_like(p.v)
    call(p, out, state, initial_state=state)
    assert same_bits(out, want_out)
    assert same_bits(state, want_final)


@pytest.mark.parametrize("cut", [0, 1, 16, 301, 512, 776])
def test_two_calls_that_carry_the_state(cut: int) -> None:
    p = make(2, 777, 2)
    first_out, first_state = run(p.tokens(0, cut))
    second_out, second_state = run(p.tokens(cut, 777).with_(initial_state=first_state))
    want_out, want_final = oracle(p)
    assert second_state is not None
    assert_close("out", torch.cat([first_out, second_out], dim=1), want_out)
    assert_close("final_state", second_state, want_final)
    whole_out, whole_final = run(p)
    assert whole_final is not None
    # Not bit for bit: a cut inside a chunk moves the chunks, and with them every rounding.
    assert_close("out against one call", torch.cat([first_out, second_out], dim=1), whole_out)
    assert_close("final_state against one call", second_state, whole_final)


def test_state_rows_are_value_channels() -> None:
    """One token, no decay to speak of: S = beta v k^T, so row v of the state is k scaled."""
    p = make(1, 1, 1, initial=None, a_log=False, dt_bias=False)
    _, final = run(p)
    assert final is not None
    k = p.k[0, 0, 0].double()
    k = k / (k.square().sum() + 1e-6).sqrt()
    beta = torch.sigmoid(p.beta[0, 0, 0].double())
    want = beta * torch.outer(p.v[0, 0, 0].double(), k)
    assert_close("final_state", final[0, 0], want)
    assert final.shape == (1, 1, D, D) and final.device.type == p.q.device.type == torch.device(DEVICE).type


def test_initial_state_is_not_written() -> None:
    p = make(2, 40, 2)
    assert p.initial_state is not None
    before = p.initial_state.clone()
    run(p)
    assert same_bits(before, p.initial_state)
