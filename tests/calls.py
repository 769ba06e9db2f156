"""Arguments of ``flash_kda.fwd``, right ones and wrong ones, for the tests with and without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def make_call(
    B: int = 2,
    T: int = 5,
    H: int = 2,
    HV: int = 2,
    K: int = 128,
    V: int = 128,
    *,
    cu_seqlens: Sequence[int] | None = None,
    state_dtype: Any = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Valid arguments of ``flash_kda.fwd`` by name, random and reproducible."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    state_dtype = state_dtype or torch.float32
    call = {
        "q": normal(B, T, H, K).bfloat16(),
        "k": normal(B, T, H, K).bfloat16(),
        "v": normal(B, T, HV, V).bfloat16(),
        "g": normal(B, T, HV, K).bfloat16(),
        "beta": normal(B, T, HV).bfloat16(),
        "scale": K**-0.5,
        "out": torch.full((B, T, HV, V), float("nan"), dtype=torch.bfloat16),
        "A_log": normal(HV),
        "dt_bias": normal(HV, K),
        "lower_bound": -5.0,
        "initial_state": normal(N, HV, V, K).to(state_dtype),
        "final_state": torch.full((N, HV, V, K), float("nan"), dtype=state_dtype),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int64),
    }
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()
    }


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


def odd_rows(t: Any) -> Any:
    """Same shape, rows 132 elements apart: not a multiple of 8."""
    return t.new_zeros(*t.shape[:-1], t.shape[-1] + 4)[..., : t.shape[-1]]


def off_by(elements: int) -> Callable[[Any], Any]:
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
    *[(n, "multiples of 8", put(n, odd_rows)) for n in ("q", "k", "v", "g", "out")],
    *[(n, "contiguous", put(n, odd_rows)) for n in ("initial_state", "final_state", "dt_bias")],
    ("A_log", "contiguous", put("A_log", lambda t: t.new_zeros(2, 2)[:, 0])),
    *[(n, "divisible by 16", put(n, off_by(4))) for n in ("q", "k", "v", "g", "out")],
    *[(n, "divisible by 16", put(n, off_by(2))) for n in ("initial_state", "final_state")],
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
