"""Each argument error, on CPU and meta: the right exception, naming the argument, before any write."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from calls import (
    TYPE_ERRORS,
    VALUE_ERRORS,
    Mutation,
    given,
    make_call,
    off_by,
    packed,
    put,
)
from torch.autograd import forward_ad

import flash_kda
from flash_kda import interface
from flash_kda.checks import check_fwd, operator_checks_the_rest, outputs_are_plain

CONTENT_ERRORS = [
    ((1, 2, 5), "1 as first"),
    ((0, 2, 4), "4 as last"),
    ((0, 6, 5), "5 after 6"),
    ((0, 2, 6), "6 as last"),
]


def expect(error: type[Exception], name: str, says: str, call: dict[str, Any]) -> None:
    with pytest.raises(error, match=re.escape(says)) as caught:
        flash_kda.fwd(**call)
    assert f"argument '{name}'" in str(caught.value)
    assert "takes" in str(caught.value)


def ids(rows: list[tuple[str, str, Mutation]]) -> list[str]:
    return [f"{name}-{says}" for name, says, _ in rows]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "says", "mutate"), TYPE_ERRORS, ids=ids(TYPE_ERRORS))
def test_wrong_type(device: str, name: str, says: str, mutate: Mutation) -> None:
    expect(TypeError, name, says, mutate(make_call(device=device)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "says", "mutate"), VALUE_ERRORS, ids=ids(VALUE_ERRORS))
def test_wrong_value(device: str, name: str, says: str, mutate: Mutation) -> None:
    expect(ValueError, name, says, mutate(make_call(device=device)))


@pytest.mark.parametrize(("ends", "says"), CONTENT_ERRORS)
def test_wrong_cu_seqlens_contents(ends: tuple[int, ...], says: str) -> None:
    expect(ValueError, "cu_seqlens", says, packed(make_call(), ends))


def test_meta_contents_are_not_read() -> None:
    flash_kda.fwd(**packed(make_call(device="meta"), (1, 2, 9)))


@pytest.mark.parametrize("name", ["k", "out", "A_log", "final_state", "cu_seqlens"])
def test_mixed_devices(name: str) -> None:
    call = packed(make_call())
    expect(ValueError, name, "on meta", call | {name: call[name].to("meta")})


def test_an_output_that_requires_grad() -> None:
    call = make_call()
    call["out"].requires_grad_()
    expect(ValueError, "out", "requires grad", call)
    with torch.no_grad():
        flash_kda.fwd(**call)


@pytest.mark.parametrize("name", ["q", "beta", "A_log", "dt_bias", "initial_state"])
def test_an_input_that_requires_grad(name: str) -> None:
    call = make_call()
    call[name].requires_grad_()
    expect(ValueError, name, "requires grad", call)
    with torch.no_grad():
        flash_kda.fwd(**call)


@pytest.mark.parametrize("name", ["q", "beta", "A_log", "dt_bias", "initial_state", "out"])
def test_a_dual_tensor(name: str) -> None:
    """Its tangent was taken, and the tangent of the result was zero."""
    call = make_call()
    with torch.inference_mode():
        made_elsewhere = make_call()["k"]
    with forward_ad.dual_level(), torch.no_grad():
        call[name] = forward_ad.make_dual(call[name], torch.ones_like(call[name]))
        expect(ValueError, name, "a dual tensor", call)
        flash_kda.fwd(**call | {name: call[name].detach(), "k": made_elsewhere})


def test_the_forward_mode_transforms() -> None:
    call = make_call()
    inputs = {name: call[name] for name in ("k", "v", "g", "beta")}
    with pytest.raises(ValueError, match="argument 'q': got a dual tensor"):
        torch.func.jvp(lambda q: flash_kda.flash_kda_func(q, **inputs)[0], (call["q"],), (call["q"],))


@pytest.mark.parametrize("name", ["out", "final_state"])
def test_an_output_made_in_inference_mode(name: str) -> None:
    with torch.inference_mode():
        call = make_call() | {name: torch.empty_like(make_call()[name])}
        flash_kda.fwd(**call)
    call |= {n: t.clone() for n, t in call.items() if isinstance(t, torch.Tensor) and n != name}
    expect(ValueError, name, "inference_mode", call)


@pytest.mark.parametrize("backend", [[], None, b"auto", {}, 3])
def test_a_backend_that_is_no_name(backend: Any) -> None:
    with pytest.raises(TypeError, match=r"argument 'backend': got .*, takes"):
        flash_kda.fwd(**make_call(), backend=backend)


class Subclass(torch.Tensor):
    """A tensor of another type, with memory of its own."""


def _subclassed(call: dict[str, Any]) -> dict[str, Any]:
    cast = {id(t): t.as_subclass(Subclass) for t in call.values() if isinstance(t, torch.Tensor)}
    return {n: cast.get(id(t), t) for n, t in call.items()}


@pytest.mark.parametrize(
    ("name", "says", "mutate"),
    [
        ("out", "v uses too", lambda c: c | {"out": c["v"]}),
        ("q", "divisible by 16", put("q", off_by(4))),
        ("cu_seqlens", "6 as last entry", lambda c: packed(c, (0, 2, 6))),
    ],
)
def test_a_subclass_skips_no_check(name: str, says: str, mutate: Mutation) -> None:
    flash_kda.fwd(**_subclassed(make_call()))
    expect(ValueError, name, says, _subclassed(mutate(make_call())))


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, like: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_tensors_without_an_address_pass() -> None:
    call = make_call()
    names = list(inspect.signature(check_fwd).parameters)
    passed = []

    def inside(q: Any) -> Any:
        passed.append(check_fwd(**{n: (call | {"q": q})[n] for n in names}))
        return q

    torch.vmap(inside)(call["q"][None])
    torch.func.jvp(lambda q: inside(q.detach()), (call["q"],), (call["q"],))
    inside(Wrapper(call["q"]))
    assert len(passed) == 3


def test_nothing_is_written_by_a_refused_call() -> None:
    call = make_call() | {"lower_bound": 0.5}
    with pytest.raises(ValueError, match="lower_bound"):
        flash_kda.fwd(**call)
    assert call["out"].isnan().all() and call["final_state"].isnan().all()


def fused(parts: int, call: dict[str, Any]) -> Any:
    return torch.zeros(2, 5, parts, 2, 128, dtype=torch.bfloat16, device=call["q"].device)


ACCEPTED: dict[str, Mutation] = {
    "as made": lambda c: c,
    "packed": packed,
    "int32 cu_seqlens": lambda c: packed(c) | {"cu_seqlens": packed(c)["cu_seqlens"].int()},
    "q, k, v, out interleaved by token": lambda c: (
        c | dict(zip(("q", "k", "v", "out"), fused(4, c).unbind(2), strict=True))
    ),
    "v and out interleaved by head": lambda c: (
        c | dict(zip(("v", "out"), fused(2, c).view(2, 5, 2, 2, 128).unbind(3), strict=True))
    ),
    "out between other batches": lambda c: (
        c | dict(zip(("v", "out"), c["v"].new_zeros(2, 2, 5, 2, 128).unbind(1), strict=True))
    ),
    "one buffer for inputs": lambda c: c | {"k": c["q"]},
    "expanded inputs": lambda c: c | {"g": c["g"][:, :1].expand(-1, 5, -1, -1)},
    "state in place": lambda c: c | {"final_state": c["initial_state"]},
    "states of two dtypes": lambda c: c | {"initial_state": c["initial_state"].bfloat16()},
    "beta anywhere": lambda c: c | {"beta": off_by(3)(c["beta"])},
    "numpy numbers": lambda c: c | {"scale": np.float32(0.5), "lower_bound": np.float64(-5.0)},
    "integer bound": lambda c: c | {"lower_bound": -5, "scale": 1},
    "a parameter": lambda c: c | {"A_log": torch.nn.Parameter(c["A_log"], requires_grad=False)},
    "a large scale": lambda c: c | {"scale": -(2.0**64)},
    "segments chosen": given(None),
    "no segments": given(0),
    "the shortest segments": given(256),
    "long segments": given(1008),
    "the longest segments": given(2**31 - 32),
    "segments by a numpy number": given(np.int64(512)),
    "other head sizes": lambda c: (
        c
        | {n: c[n][..., :36].contiguous() for n in ("q", "k", "g")}
        | {
            "dt_bias": None,
            "initial_state": c["initial_state"][..., :36].contiguous(),
            "final_state": c["final_state"][..., :36].contiguous(),
        }
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("accept", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(device: str, accept: Mutation) -> None:
    flash_kda.fwd(**accept(make_call(device=device)))


def test_strides_of_single_entries_do_not_matter() -> None:
    call = make_call(B=1, T=1, H=1, HV=1)
    call["q"] = call["q"].as_strided((1, 1, 1, 128), (3, 5, 7, 1))
    flash_kda.fwd(**call)


def test_sizes_are_returned() -> None:
    call = packed(make_call(HV=4))
    names = list(inspect.signature(check_fwd).parameters)
    sizes = check_fwd(**{n: call[n] for n in names})
    assert sizes == (1, 5, 2, 4, 128, 128, 2)


# ---- the short way: what it says yes to, check_fwd says yes to ---------------------------------------------

NAMES = list(inspect.signature(check_fwd).parameters)


def left_to_the_operator(call: dict[str, Any]) -> bool:
    outputs = ("out", "final_state")
    rest = {n: call[n] for n in NAMES if n not in outputs}
    return operator_checks_the_rest(**rest, backend="auto") and outputs_are_plain(*(call[n] for n in outputs))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors taken for CUDA ones."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


# What the operator cannot refuse: it never sees it, or converts it. That it refuses the rest is shown by
# tests/gpu/test_errors.py.
UNSEEN = ("None", "list", "ndarray", "str", "bool", "Tensor", "2^64", "an integer past every float")
OURS = [row for row in (*TYPE_ERRORS, *VALUE_ERRORS) if row[0] != "segment_tokens" and row[1] in UNSEEN]


@pytest.mark.parametrize(("name", "says", "mutate"), OURS, ids=ids(OURS))
def test_what_the_operator_cannot_see_is_not_left_to_it(
    on_a_gpu: None, name: str, says: str, mutate: Mutation
) -> None:
    assert not left_to_the_operator(mutate(make_call()))


@pytest.mark.parametrize(
    "usual",
    [
        lambda c: c,
        packed,
        lambda c: c | dict(zip(("q", "k", "v"), fused(3, c).unbind(2), strict=True)),
        lambda c: c | {"final_state": c["initial_state"]},
        lambda c: c | {"initial_state": None, "final_state": None, "A_log": None, "dt_bias": None},
        lambda c: c | {"scale": None, "dt_bias": c["dt_bias"].view(-1)},
        lambda c: c | {"A_log": torch.nn.Parameter(c["A_log"], requires_grad=False)},
    ],
)
def test_usual_calls_are_left_to_the_operator(on_a_gpu: None, usual: Mutation) -> None:
    assert left_to_the_operator(usual(make_call(HV=2)))


@pytest.mark.parametrize("name", ["q", "beta", "A_log", "out", "final_state", "initial_state"])
def test_a_gradient_to_lose_is_not_left_to_the_operator(on_a_gpu: None, name: str) -> None:
    call = make_call()
    call[name].requires_grad_()
    assert not left_to_the_operator(call)
    with torch.no_grad():
        assert left_to_the_operator(call)


@pytest.mark.parametrize("name", ["q", "beta", "A_log", "initial_state"])
def test_a_tangent_to_lose_is_not_left_to_the_operator(on_a_gpu: None, name: str) -> None:
    call = make_call()
    with forward_ad.dual_level():
        call[name] = forward_ad.make_dual(call[name], torch.ones_like(call[name]))
        assert not left_to_the_operator(call)
    with torch.inference_mode():
        assert left_to_the_operator(make_call())


def test_only_cuda_tensors_and_writable_outputs_are_left_to_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not left_to_the_operator(make_call())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert not left_to_the_operator(make_call() | {"lower_bound": None})
    assert not left_to_the_operator(_subclassed(make_call()))
    with torch.inference_mode():
        made = make_call()
        assert left_to_the_operator(made)
    assert not left_to_the_operator(make_call() | {"out": made["out"]})


def test_what_the_operator_refuses_is_worded_or_raised_again(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(interface.cuda, "run", refuse)
    monkeypatch.setattr(interface, "select", lambda *_call: "cuda")
    with pytest.raises(ValueError, match="argument 'k': got shape"):
        flash_kda.fwd(**put("k", lambda t: t[:, :4])(make_call()))
    with pytest.raises(RuntimeError, match=r"^refused$") as caught:
        flash_kda.fwd(**make_call())
    assert caught.value.__context__ is None
