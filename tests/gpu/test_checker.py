"""The bounds of this folder reject wrong answers: each mutation must fail what real output passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kda_gpu import Guarded, Problem, assert_close, call, make, oracle, run

MUTATIONS: dict[str, Callable[[Problem], Problem]] = {
    "state transposed": lambda p: p.with_(initial_state=_state(p).transpose(-1, -2).contiguous()),
    "state ignored": lambda p: p.with_(initial_state=None),
    "heads swapped": lambda p: p.with_(v=p.v.flip(2)),
    "one token late": lambda p: p.with_(k=p.k.roll(1, 1)),
    "beta without sigmoid's sign": lambda p: p.with_(beta=-p.beta),
    "no scale": lambda p: p.with_(scale=1.0),
    "dt_bias dropped": lambda p: p.with_(dt_bias=None),
    "A_log dropped": lambda p: p.with_(A_log=None),
    "another lower bound": lambda p: p.with_(lower_bound=-4.0),
}


def _state(p: Problem) -> torch.Tensor:
    assert p.initial_state is not None
    return p.initial_state


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_computation_fails_the_bound(name: str) -> None:
    p = make(2, 24, 2, seed=3)
    out, _ = run(p)
    want, _ = oracle(MUTATIONS[name](p))
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("out", out, want)


def test_zeros_fail_the_bound() -> None:
    want, _ = oracle(make(1, 20, 2))
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("out", torch.zeros_like(want), want)


def test_nan_fails_the_bound() -> None:
    want, _ = oracle(make(1, 20, 2))
    got = want.clone()
    got[0, 3, 1, 5] = float("nan")
    with pytest.raises(AssertionError, match="relative error nan"):
        assert_close("out", got, want)


def test_one_wrong_row_of_many_fails_the_bound() -> None:
    want, _ = oracle(make(8, 600, 4, initial=None).tokens(0, 24))
    want = want.repeat(1, 60, 1, 1)
    got = want.clone()
    got[3, 700, 2] *= 1.3
    with pytest.raises(AssertionError, match="worst row"):
        assert_close("out", got, want)


def test_guards_see_a_write_outside_and_a_hole_inside() -> None:
    p = make(1, 20, 2)
    out = Guarded(p.v.shape, torch.bfloat16)
    call(p, out.tensor, None)
    out.check("out")
    out.raw[3] = 0
    with pytest.raises(AssertionError, match="before"):
        out.check("out")
    hole = Guarded(p.v.shape, torch.bfloat16)
    with pytest.raises(AssertionError, match="not written"):
        hole.check("out")
