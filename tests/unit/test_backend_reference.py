"""Backend reference against the oracle: gates at their bounds, repeated keys, lengths, views, isolation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import make_call
from conftest import oracle, relative

import flash_kda
from flash_kda.backends import reference

OUT_BOUND = 2.5e-3  # bf16 rounding of the output
STATE_BOUND = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}


def run(call: dict[str, Any]) -> tuple[Any, Any]:
    flash_kda.fwd(**call)
    return call["out"], call["final_state"]


def check(call: dict[str, Any]) -> None:
    want_out, want_final = oracle(call)
    out, final = run(call)
    if want_out.numel():
        assert relative(out, want_out) < OUT_BOUND
    if final is not None:
        assert relative(final, want_final) < STATE_BOUND[final.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("HV", [2, 6])
def test_fixed_length(dtype: torch.dtype, HV: int) -> None:
    check(make_call(T=70, HV=HV, K=16, V=24, state_dtype=dtype))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gates_and_full_head_size(lower_bound: float | None) -> None:
    check(make_call(T=20) | {"lower_bound": lower_bound})


@pytest.mark.parametrize("missing", ["A_log", "dt_bias", "initial_state", "final_state", "scale"])
def test_optional_arguments(missing: str) -> None:
    check(make_call(T=9, K=16, V=16) | {missing: None})


def test_flat_bias_is_the_same_bias() -> None:
    call = make_call(T=9)
    flat = make_call(T=9) | {"dt_bias": call["dt_bias"].reshape(-1)}
    assert torch.equal(run(call)[0], run(flat)[0])


@pytest.mark.parametrize("raw", [-40.0, -8.0, 8.0, 40.0, "mixed"])
def test_gate_at_its_bounds_stays_finite(raw: float | str) -> None:
    call = make_call(T=64, K=16, V=16)
    g = torch.full_like(call["g"], 40.0) if raw == "mixed" else torch.full_like(call["g"], float(raw))
    if raw == "mixed":
        g[..., ::2] = -40.0
    check(call | {"g": g})


def test_nearly_parallel_keys() -> None:
    call = make_call(T=96, K=16, V=16)
    one = torch.nn.functional.normalize(torch.randn(16), dim=0)
    call["k"] = (one + 1e-3 * torch.randn(call["k"].shape)).bfloat16()
    call["beta"] = torch.full_like(call["beta"], 8.0)
    call["g"] = torch.full_like(call["g"], -8.0)
    check(call)


@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65])
def test_every_kind_of_length(T: int) -> None:
    check(make_call(T=T, K=8, V=8))


@pytest.mark.parametrize(
    ("ends", "says"),
    [((0, 3), "3 as last"), ((0, 9, 5), "5 after 9"), ((0, 4, 2, 5), "2 after 4"), ((1, 5), "1 as")],
)
def test_ends_that_are_read_are_checked(ends: tuple[int, ...], says: str) -> None:
    """What a GPU's tensor holds is seen here for the first time; a wrong end is an index past the tokens."""
    with pytest.raises(ValueError, match=says):
        reference._Rows(1, 5, torch.tensor(ends), torch.device("cpu"))


def test_no_batch_is_no_work() -> None:
    run(make_call(B=0, T=3, K=8, V=8))


@pytest.mark.parametrize(
    "ends", [[0, 7], [0, 0, 0, 7], [0, 7, 7], [0, 1, 2, 3], [0, 66, 66, 67, 140], [0, 0], [0, 0, 0, 0]]
)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_packed_sequences(ends: list[int], index: torch.dtype) -> None:
    call = make_call(B=1, T=ends[-1], HV=4, K=8, V=8, cu_seqlens=ends)
    check(call | {"cu_seqlens": call["cu_seqlens"].to(index)})


def test_views_of_fused_buffers_equal_contiguous_copies() -> None:
    call = make_call(T=11, H=3, HV=3)
    fused = torch.stack([call["q"], call["k"], call["v"], call["g"], torch.zeros_like(call["v"])], dim=2)
    names = ("q", "k", "v", "g", "out")
    views = (
        call | {n: fused[:, :, i] for i, n in enumerate(names)} | {"final_state": call["final_state"].clone()}
    )
    assert not views["out"].is_contiguous()
    want_out, want_final = run(call)
    out, final = run(views)
    assert torch.equal(out, want_out) and torch.equal(final, want_final)
    assert torch.equal(fused[:, :, 0], call["q"]) and torch.equal(fused[:, :, 3], call["g"])


def test_the_state_may_be_updated_in_place() -> None:
    call = make_call(T=7)
    want_out, want_final = run(call)
    again = make_call(T=7)
    again["final_state"] = again["initial_state"]
    out, final = run(again)
    assert torch.equal(out, want_out) and torch.equal(final, want_final)


def test_inputs_are_left_alone() -> None:
    call = make_call(T=7)
    before = {n: t.clone() for n, t in call.items() if isinstance(t, torch.Tensor)}
    run(call)
    for name in before.keys() - {"out", "final_state"}:
        assert torch.equal(call[name], before[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_stays_in_its_sequence(bad: float) -> None:
    ends = [0, 30, 33, 70]
    clean = make_call(B=1, T=70, K=8, V=8, cu_seqlens=ends)
    dirty = make_call(B=1, T=70, K=8, V=8, cu_seqlens=ends)
    for name in ("q", "k", "v", "g", "beta"):
        dirty[name][0, 31] = bad
    run(clean), run(dirty)
    for span in (slice(0, 30), slice(33, 70)):
        assert torch.equal(clean["out"][0, span], dirty["out"][0, span])
    assert torch.equal(clean["final_state"][[0, 2]], dirty["final_state"][[0, 2]])
    assert not torch.isfinite(dirty["final_state"][1]).all()


@pytest.mark.parametrize("segment_tokens", [0, 256, 288])
def test_segments_change_nothing(segment_tokens: int) -> None:
    want_out, want_final = run(make_call(B=1, T=600, K=8, V=8, cu_seqlens=[0, 530, 600]))
    call = make_call(B=1, T=600, K=8, V=8, cu_seqlens=[0, 530, 600])
    out, final = run(call | {"segment_tokens": segment_tokens})
    assert torch.equal(out, want_out) and torch.equal(final, want_final)


def test_the_same_inputs_give_the_same_bits() -> None:
    first, second = run(make_call(T=40)), run(make_call(T=40))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
