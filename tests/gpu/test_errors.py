"""Bad input raises before anything is launched, names the argument, and leaves the device usable."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import TYPE_ERRORS, VALUE_ERRORS, Mutation, make_call
from kda_gpu import (
    BOUND,
    DEVICE,
    SENTINEL,
    Problem,
    assert_close,
    call,
    make,
    offsets,
    oracle,
    same_bits,
    synchronize,
)

import flash_kda

Change = Callable[[Problem], dict[str, Any]]

# What is changed, the error, the argument that its message must name.
BAD: dict[str, tuple[Change, type[Exception], str]] = {
    "q float16": (lambda p: {"q": p.q.half()}, TypeError, "q"),
    "k float32": (lambda p: {"k": p.k.float()}, TypeError, "k"),
    "v float64": (lambda p: {"v": p.v.double()}, TypeError, "v"),
    "g float32": (lambda p: {"g": p.g.float()}, TypeError, "g"),
    "beta float32": (lambda p: {"beta": p.beta.float()}, TypeError, "beta"),
    "out float32": (lambda p: {"out": torch.empty_like(p.v).float()}, TypeError, "out"),
    "A_log bf16": (lambda p: {"A_log": present(p.A_log).bfloat16()}, TypeError, "A_log"),
    "dt_bias bf16": (lambda p: {"dt_bias": present(p.dt_bias).bfloat16()}, TypeError, "dt_bias"),
    "initial_state float16": (
        lambda p: {"initial_state": present(p.initial_state).half()},
        TypeError,
        "initial_state",
    ),
    "final_state int": (lambda p: {"final_state": state(p).int()}, TypeError, "final_state"),
    "cu_seqlens float": (
        lambda p: {"cu_seqlens": torch.tensor([0.0, 40.0], device=DEVICE)},
        TypeError,
        "cu_seqlens",
    ),
    "q a list": (lambda p: {"q": [1.0]}, TypeError, "q"),
    "q rank 3": (lambda p: {"q": p.q[0]}, ValueError, "q"),
    "k short": (lambda p: {"k": p.k[:, :-1]}, ValueError, "k"),
    "k another head count": (lambda p: {"k": p.k[:, :, :1]}, ValueError, "k"),
    "v heads not a multiple": (lambda p: {"v": p.v[:, :, :3].contiguous()}, ValueError, "v"),
    "g short": (lambda p: {"g": p.g[:, :-1].contiguous()}, ValueError, "g"),
    "beta another head count": (lambda p: {"beta": p.beta[..., :2].contiguous()}, ValueError, "beta"),
    "out short": (lambda p: {"out": torch.empty_like(p.v[:, 1:])}, ValueError, "out"),
    "A_log short": (lambda p: {"A_log": present(p.A_log)[:-1]}, ValueError, "A_log"),
    "dt_bias short": (lambda p: {"dt_bias": present(p.dt_bias)[:-1]}, ValueError, "dt_bias"),
    "initial_state for one": (
        lambda p: {"initial_state": present(p.initial_state)[:1]},
        ValueError,
        "initial_state",
    ),
    "initial_state transposed": (
        lambda p: {"initial_state": present(p.initial_state).transpose(-1, -2)},
        ValueError,
        "initial_state",
    ),
    "final_state for one": (lambda p: {"final_state": state(p)[:1]}, ValueError, "final_state"),
    "cu_seqlens with a batch": (lambda p: {"cu_seqlens": offsets([20, 20])}, ValueError, "q"),
    "cu_seqlens of rank 2": (lambda p: {"cu_seqlens": offsets([40])[None]}, ValueError, "cu_seqlens"),
    "lower_bound 0": (lambda p: {"lower_bound": 0.0}, ValueError, "lower_bound"),
    "lower_bound -6": (lambda p: {"lower_bound": -6.0}, ValueError, "lower_bound"),
    "lower_bound nan": (lambda p: {"lower_bound": float("nan")}, ValueError, "lower_bound"),
    "scale nan": (lambda p: {"scale": float("nan")}, ValueError, "scale"),
    "segment_tokens 256.0": (lambda p: {"segment_tokens": 256.0}, TypeError, "segment_tokens"),
    "segment_tokens 264": (lambda p: {"segment_tokens": 264}, ValueError, "segment_tokens"),
    "segment_tokens -1": (lambda p: {"segment_tokens": -1}, ValueError, "segment_tokens"),
    "out aliases v": (lambda p: {"out": p.v}, ValueError, "out"),
    "out expanded": (lambda p: {"out": torch.empty_like(p.v[:, :1]).expand_as(p.v)}, ValueError, "out"),
}

# Only meaningful where tensors can be on another device, or kernels limit the call.
BAD_ON_CUDA: dict[str, tuple[Change, type[Exception], str]] = {
    "k on the CPU": (lambda p: {"k": p.k.cpu()}, ValueError, "k"),
    "beta on the CPU": (lambda p: {"beta": p.beta.cpu()}, ValueError, "beta"),
    "cu_seqlens on the CPU": (
        lambda p: {**packed(p), "cu_seqlens": offsets([80]).cpu()},
        ValueError,
        "cu_seqlens",
    ),
    "initial_state on the CPU": (
        lambda p: {"initial_state": present(p.initial_state).cpu()},
        ValueError,
        "initial_state",
    ),
    "softplus gate": (lambda p: {"lower_bound": None}, ValueError, "cuda"),
}


def present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def state(p: Problem) -> torch.Tensor:
    return torch.empty(p.state_shape, device=DEVICE)


def packed(p: Problem) -> dict[str, Any]:
    """The batch as one row, without states."""
    flat = {n: getattr(p, n).reshape(1, 80, *getattr(p, n).shape[2:]) for n in ("q", "k", "v", "g", "beta")}
    return {**flat, "out": torch.empty_like(flat["v"]), "initial_state": None, "final_state": None}


def refuse(change: Change, error: type[Exception], name: str) -> None:
    """The call raises, writes nothing, and the next good call is right."""
    p = make(2, 40, 2, 4)
    out = torch.full(p.v.shape, SENTINEL, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    final = torch.full(p.state_shape, 7.0, device=DEVICE)
    with pytest.raises(error, match=name):
        call(p, out, final, **change(p))
    synchronize()
    assert bool((out.view(torch.int16) == SENTINEL).all()), "a refused call wrote to out"
    assert bool((final == 7.0).all()), "a refused call wrote to final_state"
    call(p, out, final)
    assert_close("out", out, oracle(p)[0], BOUND)


@pytest.mark.parametrize("what", BAD)
def test_refused(what: str) -> None:
    refuse(*BAD[what])


@pytest.mark.cuda_only
@pytest.mark.parametrize("what", BAD_ON_CUDA)
def test_refused_on_cuda(what: str) -> None:
    refuse(*BAD_ON_CUDA[what])


ROWS = [
    (row, error) for rows, error in ((TYPE_ERRORS, TypeError), (VALUE_ERRORS, ValueError)) for row in rows
]


@pytest.mark.cuda_only
@pytest.mark.parametrize(("row", "error"), ROWS, ids=[f"{row[0]}-{row[1]}" for row, _ in ROWS])
def test_what_is_refused_on_the_cpu_is_refused_here_in_the_same_words(
    row: tuple[str, str, Mutation], error: type[Exception]
) -> None:
    """Calls come to the operator unchecked: what it lets pass nobody refuses."""
    name, says, mutate = row
    bad = mutate(make_call(device=str(DEVICE)))
    written = [t for t in (bad["out"], bad["final_state"]) if type(t) is torch.Tensor]
    before = [t.clone() for t in written]
    with pytest.raises(error, match=re.escape(says)) as caught:
        flash_kda.fwd(**bad)
    assert f"argument '{name}'" in str(caught.value)
    synchronize()
    assert all(same_bits(*pair) for pair in zip(written, before, strict=True)), "a refused call wrote"


@pytest.mark.cuda_only
def test_the_operator_itself_refuses_a_short_buffer() -> None:
    """torch.ops.flash_kda.fwd skips the Python checks: it must not read or write outside all the same."""
    p = make(2, 40, 2)
    out = torch.empty_like(p.v[:, :20].contiguous())
    with pytest.raises(RuntimeError, match="out"):
        torch.ops.flash_kda.fwd(
            p.q, p.k, p.v, p.g, p.beta, p.scale, out, p.A_log, p.dt_bias, -5.0, p.initial_state, None, None
        )
    synchronize()


@pytest.mark.cuda_only
@pytest.mark.parametrize("bad", [1, 16, 240, 255, 264, 1000, 2**31, 2**62])
def test_the_operator_itself_refuses_a_segment_that_is_none(bad: int) -> None:
    p = make(2, 40, 2)
    out = torch.full(p.v.shape, SENTINEL, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    final = state(p).fill_(7.0)
    inputs = (
        p.q,
        p.k,
        p.v,
        p.g,
        p.beta,
        p.scale,
        out,
        p.A_log,
        p.dt_bias,
        -5.0,
        p.initial_state,
        final,
        None,
    )
    with pytest.raises(RuntimeError, match="segment_tokens"):
        torch.ops.flash_kda.fwd(*inputs, bad)
    synchronize()
    assert bool((out.view(torch.int16) == SENTINEL).all()) and bool((final == 7.0).all()), "it wrote"
    torch.ops.flash_kda.fwd(*inputs, 256)
    assert_close("out", out, oracle(p)[0], BOUND)
