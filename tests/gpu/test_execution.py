"""How a call runs: same bits, right stream and device, no waiting, in graphs and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kda_gpu import (
    DEVICE,
    Problem,
    assert_close,
    call,
    check,
    make,
    offsets,
    oracle,
    run,
    same_bits,
    synchronize,
)

import flash_kda

cuda: Any = torch.cuda  # torch leaves many of its methods untyped
cuda_only = pytest.mark.cuda_only
INPUTS = ("q", "k", "v", "g", "beta")


def sleep(seconds: float) -> None:
    """Keep the current stream busy (cycles of a clock of at most 2 GHz)."""
    spin: Any = cuda._sleep
    spin(int(seconds * 2e9))


def buffers(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(p.v, float("nan"), memory_format=torch.contiguous_format)
    return out, torch.full(p.state_shape, float("nan"), device=DEVICE)


@pytest.mark.parametrize("lens", [None, [333, 0, 12, 700, 5]])
def test_same_bits_run_after_run(lens: list[int] | None) -> None:
    p = make(4, 263, 12, lens=lens)
    first = run(p)
    for _ in range(5):
        again = run(p)
        assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])


@cuda_only
def test_same_bits_beside_other_work() -> None:
    """Neighbours on the GPU change the order in which blocks finish, not the result."""
    p = make(2, 512, 24)
    want = run(p)
    side = cuda.Stream()
    left = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    with torch.cuda.stream(side):
        for _ in range(20):
            left = left @ left
            left = left / left.norm()
    got = run(p)
    synchronize()
    assert same_bits(want[0], got[0]) and same_bits(want[1], got[1])


@cuda_only
def test_runs_on_the_current_stream() -> None:
    """The inputs become right only after a delay on a side stream; a call on any other stream reads NaN."""
    p = make(2, 100, 4)
    want_out, want_final = run(p)
    late = p.with_(**{name: torch.full_like(getattr(p, name), float("nan")) for name in INPUTS})
    out, final = buffers(p)
    synchronize()
    side = cuda.Stream()
    before = torch.cuda.current_stream()
    with torch.cuda.stream(side):
        sleep(0.05)
        for name in INPUTS:
            getattr(late, name).copy_(getattr(p, name))
        call(late, out, final)
        copied = out.clone()
    assert torch.cuda.current_stream() == before
    side.synchronize()
    assert same_bits(out, want_out) and same_bits(copied, want_out) and same_bits(final, want_final)


@cuda_only
def test_does_not_wait_for_the_device() -> None:
    p = make(heads=4, lens=[40, 0, 77])
    out, final = buffers(p)
    call(p, out, final)
    synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sleep(0.2)
        call(p, out, final)
        done = cuda.Event()
        done.record()
        assert not done.query(), "the call returned only after the device had caught up"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronize()


@cuda_only
def test_device_of_the_tensors() -> None:
    """The call runs where the tensors are, whatever device is current, and leaves that one current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here; a second is needed to make another device current")
    p = make(2, 50, 2)
    want = run(p)
    with torch.cuda.device(1):
        got = run(p)
        assert torch.cuda.current_device() == 1
    other = {n: t.to("cuda:1") if isinstance(t := getattr(p, n), torch.Tensor) else t for n in vars(p)}
    moved = p.with_(**other)
    out, final = torch.empty_like(moved.v), torch.empty(p.state_shape, device="cuda:1")
    call(moved, out, final)
    assert torch.cuda.current_device() == 0
    assert (
        same_bits(want[0], got[0])
        and same_bits(out.to(DEVICE), want[0])
        and same_bits(final.to(DEVICE), want[1])
    )


def record_graph(p: Problem, out: torch.Tensor, final: torch.Tensor) -> torch.cuda.CUDAGraph:
    call(p, out, final)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(p, out, final)
    return graph


@cuda_only
def test_graph_of_a_fixed_length_call() -> None:
    p, fresh = make(3, 70, 4, seed=1), make(3, 70, 4, seed=2)
    out, final = buffers(p)
    graph = record_graph(p, out, final)
    want = run(fresh)
    for name in (*INPUTS, "A_log", "dt_bias", "initial_state"):
        getattr(p, name).copy_(getattr(fresh, name))
    out.fill_(float("nan"))
    final.fill_(float("nan"))
    graph.replay()
    synchronize()
    assert same_bits(out, want[0]) and same_bits(final, want[1])


@cuda_only
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
def test_graph_whose_lengths_change_between_replays(cu_dtype: torch.dtype) -> None:
    p = make(heads=4, lens=[50, 50, 50, 50], cu_dtype=cu_dtype)
    out, final = buffers(p)
    graph = record_graph(p, out, final)
    assert p.cu_seqlens is not None
    for lens in ([200, 0, 0, 0], [0, 0, 0, 200], [1, 2, 3, 194], [64, 16, 17, 103]):
        p.cu_seqlens.copy_(offsets(lens, cu_dtype))
        out.fill_(float("nan"))
        final.fill_(float("nan"))
        graph.replay()
        synchronize()
        want_out, want_final = oracle(p)
        assert_close("out", out, want_out)
        assert_close("final_state", final, want_final)


def doubled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A caller's function: allocate, call, use."""
    out, final = torch.empty_like(v), torch.empty_like(state)
    flash_kda.fwd(q, k, v * 2, g, beta, 0.1, out, None, None, -5.0, state, final)
    return out * 2, final


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=cuda_only)])
def test_compiles_without_a_graph_break(backend: str) -> None:
    p = make(2, 40, 2)
    arguments = (p.q, p.k, p.v, p.g, p.beta, p.initial_state)
    compiled: Any = torch.compile(doubled, fullgraph=True, backend=backend)
    with torch.no_grad():
        want, got = doubled(*arguments), compiled(*arguments)  # type: ignore[arg-type]
    assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])


def test_inference_mode() -> None:
    with torch.inference_mode():
        p = make(2, 40, 2)
        got = check(p)
    want = run(make(2, 40, 2))
    assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])


OPTIONS: dict[str, Any] = {"lower_bound": -3.0, "output_final_state": True}


def functional(p: Problem) -> dict[str, Any]:
    """What the calls that return their results take besides q, k, v, g, beta."""
    return {"A_log": p.A_log, "dt_bias": p.dt_bias, "initial_state": p.initial_state, **OPTIONS}


def test_fixed_length_function() -> None:
    p = make(2, 40, 2, lower_bound=-3.0)
    want = run(p)
    o, s = flash_kda.flash_kda_func(p.q, p.k, p.v, p.g, p.beta, **functional(p))
    assert same_bits(o, want[0]) and same_bits(s, want[1])


def test_packed_function() -> None:
    p = make(heads=2, lens=[30, 0, 17], lower_bound=-3.0)
    want = run(p)
    q, k, v, g, beta = (getattr(p, name)[0] for name in INPUTS)
    assert p.cu_seqlens is not None
    o, s = flash_kda.flash_kda_varlen_func(q, k, v, g, beta, p.cu_seqlens, **functional(p))
    assert same_bits(o, want[0][0]) and same_bits(s, want[1])


def test_fused_projection_function() -> None:
    p = make(2, 40, 2, lower_bound=-3.0)
    want = run(p)
    qkv = torch.stack([p.q, p.k, p.v], dim=2)
    o, s = flash_kda.flash_kda_qkvpacked_func(qkv, p.g, p.beta, **functional(p))
    assert same_bits(o, want[0]) and same_bits(s, want[1])


@cuda_only
def test_many_calls_in_flight() -> None:
    """Calls queued faster than they run keep their results apart."""
    problems = [make(1, 64, 8, seed=seed) for seed in range(8)]
    wants = [run(p) for p in problems]
    outs = [buffers(p) for p in problems]
    synchronize()
    sleep(0.02)
    for p, (out, final) in zip(problems, outs, strict=True):
        call(p, out, final)
    synchronize()
    for want, got in zip(wants, outs, strict=True):
        assert same_bits(want[0], got[0]) and same_bits(want[1], got[1])
