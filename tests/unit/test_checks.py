"""Each argument error, on CPU and meta: the right exception, naming the argument, before any write."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_call

import flash_kda
from flash_kda.checks import check_fwd, quick_sizes

Mutation = Callable[[dict[str, Any]], dict[str, Any]]


def put(name: str, change: Callable[[Any], Any]) -> Mutation:
    return lambda call: call | {name: change(call[name])}


def shaped(*shape: int) -> Callable[[Any], Any]:
    return lambda t: t.new_zeros(shape)


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def given(segment_tokens: Any) -> Mutation:
    return lambda call: call | {"segment_tokens": segment_tokens}


BAD_SEGMENTS = [
    (-1, "got -1, takes None (the kernels choose), 0 (never cut), or a multiple of 16 from 256"),
    (-256, "got -256, "),
    (1, "got 1, "),
    (16, "got 16, "),
    (240, "got 240, "),
    (257, "got 257, "),
    (1000, "got 1000, "),
    (2**31 - 16, "got 2147483632, "),
    (2**31, "got 2147483648, "),
    (10**20, "got 1e+20, "),
    (-(10**5000), "an integer past every float"),
]


def _transposed(t: Any) -> Any:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _odd_rows(t: Any) -> Any:
    """Same shape, rows 132 elements apart: not a multiple of 8."""
    return t.new_zeros(*t.shape[:-1], t.shape[-1] + 4)[..., : t.shape[-1]]


def _off_by(elements: int) -> Callable[[Any], Any]:
    """Same shape, contiguous, first element ``elements`` past the start of its storage."""
    return lambda t: t.new_zeros(t.numel() + elements)[elements:].view(t.shape)


TYPE_ERRORS: list[tuple[str, str, Mutation]] = [
    *[(n, "float32", put(n, lambda t: t.float())) for n in ("q", "k", "v", "g", "beta", "out")],
    *[(n, "float16", put(n, lambda t: t.half())) for n in ("q", "initial_state", "final_state")],
    *[(n, "bfloat16", put(n, lambda t: t.bfloat16())) for n in ("A_log", "dt_bias")],
    *[(n, "None", put(n, constant(None))) for n in ("q", "k", "v", "g", "beta", "out")],
    *[(n, "list", put(n, constant([1.0]))) for n in ("q", "k", "v", "g", "beta", "out", "A_log", "dt_bias")],
    ("initial_state", "list", put("initial_state", constant([0]))),
    ("final_state", "ndarray", put("final_state", constant(np.zeros(3)))),
    ("cu_seqlens", "list", put("cu_seqlens", constant([0, 5]))),
    ("cu_seqlens", "float32", lambda c: packed(c) | {"cu_seqlens": packed(c)["cu_seqlens"].float()}),
    ("scale", "str", put("scale", constant("1"))),
    ("scale", "bool", put("scale", constant(True))),
    ("scale", "Tensor", put("scale", constant(torch.tensor(1.0)))),
    ("lower_bound", "str", put("lower_bound", constant("-5"))),
    ("lower_bound", "bool", put("lower_bound", constant(False))),
    ("lower_bound", "Tensor", put("lower_bound", constant(torch.tensor(-1.0)))),
    ("segment_tokens", "bool", given(False)),
    ("segment_tokens", "float", given(256.0)),
    ("segment_tokens", "str", given("256")),
    ("segment_tokens", "Tensor", given(torch.tensor(256))),
]


def packed(call: dict[str, Any], ends: tuple[int, ...] = (0, 2, 5)) -> dict[str, Any]:
    """The call with B = 1 and cu_seqlens."""
    device = call["q"].device
    index = torch.tensor(ends, dtype=torch.int64)
    call = call | {n: call[n][:1] for n in ("q", "k", "v", "g", "beta", "out")}
    states = call["initial_state"].new_zeros(len(ends) - 1, *call["initial_state"].shape[1:])
    return call | {
        "initial_state": states,
        "final_state": torch.empty_like(states),
        "cu_seqlens": index.to(device),
    }


VALUE_ERRORS: list[tuple[str, str, Mutation]] = [
    ("q", "3 dimensions", put("q", lambda t: t[0])),
    ("beta", "4 dimensions", put("beta", lambda t: t[..., None])),
    ("A_log", "2 dimensions", put("A_log", lambda t: t[None])),
    ("dt_bias", "3 dimensions", put("dt_bias", lambda t: t[None])),
    ("initial_state", "3 dimensions", put("initial_state", lambda t: t[0])),
    ("cu_seqlens", "2 dimensions", lambda c: packed(c) | {"cu_seqlens": packed(c)["cu_seqlens"][None]}),
    ("k", "shape (2, 5, 2, 64)", put("k", lambda t: t[..., :64])),
    ("k", "shape (2, 4, 2, 128)", put("k", lambda t: t[:, :4])),
    ("v", "shape (2, 5, 3, 128)", put("v", shaped(2, 5, 3, 128))),
    ("v", "shape (2, 4, 2, 128)", put("v", lambda t: t[:, :4])),
    ("g", "shape (2, 5, 2, 64)", put("g", lambda t: t[..., :64])),
    ("beta", "shape (2, 5, 3)", put("beta", shaped(2, 5, 3))),
    ("out", "shape (1, 5, 2, 128)", put("out", lambda t: t[:1])),
    ("A_log", "shape (3,)", put("A_log", shaped(3))),
    ("dt_bias", "shape (2, 64)", put("dt_bias", lambda t: t[:, :64])),
    ("dt_bias", "shape (128,)", put("dt_bias", shaped(128))),
    ("initial_state", "shape (1, 2, 128, 128)", put("initial_state", lambda t: t[:1])),
    ("final_state", "shape (2, 2, 128, 64)", put("final_state", lambda t: t[..., :64])),
    (
        "initial_state",
        "shape (1, 2, 128, 128)",
        lambda c: packed(c) | {"initial_state": c["initial_state"][:1]},
    ),
    ("q", "batch 2", lambda c: c | {"cu_seqlens": packed(c)["cu_seqlens"]}),
    ("cu_seqlens", "1 entries", lambda c: packed(c) | {"cu_seqlens": packed(c)["cu_seqlens"][:1]}),
    ("q", "H >= 1", lambda c: c | {n: c[n][:, :, :0] for n in ("q", "k")}),
    *[(n, "stride 1", put(n, _transposed)) for n in ("q", "k", "v", "g", "out", "beta")],
    *[(n, "multiples of 8", put(n, _odd_rows)) for n in ("q", "k", "v", "g", "out")],
    *[(n, "contiguous", put(n, _odd_rows)) for n in ("initial_state", "final_state", "dt_bias")],
    ("A_log", "contiguous", put("A_log", lambda t: t.new_zeros(2, 2)[:, 0])),
    *[(n, "divisible by 16", put(n, _off_by(4))) for n in ("q", "k", "v", "g", "out")],
    *[(n, "divisible by 16", put(n, _off_by(2))) for n in ("initial_state", "final_state")],
    ("out", "v uses too", lambda c: c | {"out": c["v"]}),
    ("out", "q uses too", lambda c: c | {"out": c["q"]}),
    ("out", "g uses too", lambda c: c | {"out": c["g"]}),
    ("out", "twice", put("out", lambda t: t[:, :1].expand(-1, 5, -1, -1))),
    ("final_state", "initial_state uses too", lambda c: c | _sliding_states(c)),
    ("out", "final_state uses too", lambda c: c | {"out": _as_output(c["final_state"], c["out"])}),
    *[
        ("lower_bound", "[-5, 0)", put("lower_bound", constant(x)))
        for x in (0.0, 1.0, -5.001, math.nan, -math.inf)
    ],
    *[("scale", "2^64", put("scale", constant(x))) for x in (math.nan, math.inf, -math.inf)],
    *[("scale", "2^64", put("scale", constant(x))) for x in (1.9e19, -(2.0**65), 10**400, 10**5000)],
    ("lower_bound", "an integer past every float", put("lower_bound", constant(-(10**5000)))),
    *[("segment_tokens", says, given(x)) for x, says in BAD_SEGMENTS],
    (
        "q",
        "dense",
        put(
            "q",
            lambda t: torch.sparse_coo_tensor(
                size=t.shape, dtype=t.dtype, device=t.device, check_invariants=True
            ),
        ),
    ),
]


def _sliding_states(call: dict[str, Any]) -> dict[str, Any]:
    first = call["initial_state"]
    pool = first.new_zeros(3, *first.shape[1:])
    return {"initial_state": pool[:2], "final_state": pool[1:]}


def _as_output(state: Any, out: Any) -> Any:
    return state.view(torch.bfloat16).reshape(-1)[: out.numel()].view(out.shape)


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
        ("q", "divisible by 16", put("q", _off_by(4))),
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
    torch.func.jvp(inside, (call["q"],), (call["q"],))
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
    "beta anywhere": lambda c: c | {"beta": _off_by(3)(c["beta"])},
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


def quick(call: dict[str, Any]) -> Any:
    return quick_sizes(**{n: call[n] for n in NAMES})


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors taken for CUDA ones, whose cu_seqlens are not read."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)


BAD = [
    row for row in (*TYPE_ERRORS, *VALUE_ERRORS) if row[0] != "segment_tokens"
]  # which is checked after it, always


@pytest.mark.parametrize(("name", "says", "mutate"), BAD, ids=ids(BAD))
def test_the_short_way_takes_nothing_wrong(on_a_gpu: None, name: str, says: str, mutate: Mutation) -> None:
    assert quick(mutate(make_call())) is None


@pytest.mark.parametrize(("name", "says", "mutate"), BAD, ids=ids(BAD))
def test_the_short_way_before_outputs_are_there_takes_nothing_wrong(
    on_a_gpu: None, name: str, says: str, mutate: Mutation
) -> None:
    call = mutate(make_call())
    sizes = quick_sizes(**{n: call[n] for n in NAMES} | {"out": None, "final_state": None}, outputs=False)
    # A wrong output is none of its business, and what shares memory with one shares none with a new one.
    assert sizes is None or name in ("out", "final_state") or "memory" in says


@pytest.mark.parametrize("accept", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_the_short_way_gives_the_same_sizes(on_a_gpu: None, accept: Mutation) -> None:
    call = accept(make_call())
    assert quick(call) in (None, check_fwd(**{n: call[n] for n in NAMES}))


@pytest.mark.parametrize(
    "usual",
    [
        lambda c: c,
        packed,
        lambda c: c | dict(zip(("q", "k", "v"), fused(3, c).unbind(2), strict=True)),
        lambda c: c | {"final_state": c["initial_state"]},
        lambda c: c | {"initial_state": None, "final_state": None, "A_log": None, "dt_bias": None},
        lambda c: c | {"scale": None, "lower_bound": None, "dt_bias": c["dt_bias"].view(-1)},
        lambda c: c | {"A_log": torch.nn.Parameter(c["A_log"], requires_grad=False)},
    ],
)
def test_the_usual_calls_go_the_short_way(on_a_gpu: None, usual: Mutation) -> None:
    assert quick(usual(make_call(HV=2))) is not None


def test_the_short_way_is_not_for_what_has_to_be_read_or_has_no_address() -> None:
    assert quick(make_call()) is not None
    assert quick(packed(make_call())) is None
    assert quick(make_call(device="meta")) is None
    assert quick(make_call(T=0)) is None
    call = make_call()
    call["q"].requires_grad_()
    assert quick(call) is None
    with torch.inference_mode():
        made = make_call()
        assert quick(made) is not None
    assert quick(made) is None


def test_memory_that_is_shared_is_seen_the_short_way() -> None:
    call = make_call()
    whole = torch.zeros(3, *call["out"].shape, dtype=torch.bfloat16)
    assert quick(call | {"out": whole[1], "q": whole[0], "k": whole[2]}) is not None
    for name in ("q", "k", "v", "g"):
        assert quick(call | {"out": whole[1], name: whole[1]}) is None
        late = whole.view(-1)[whole[0].numel() - 8 :][: whole[0].numel()].view(whole[0].shape)
        assert quick(call | {"out": whole[1], name: late}) is None
    states = torch.zeros(3, *call["final_state"].shape[1:])
    assert quick(call | {"initial_state": states[:2], "final_state": states[1:]}) is None
