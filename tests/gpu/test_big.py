"""More than 2^31 elements: halves that carry the state, far-apart batches, large states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kda_gpu import BACKEND, DEVICE, D, Problem, assert_close, call, make, oracle, synchronize

import flash_kda

pytestmark = pytest.mark.cuda_only

LIMIT = 2**31
HEADS = 64
TOKENS = LIMIT // (HEADS * D) + 4096  # the last 4096 tokens lie beyond element 2^31


def fill(*shape: int, seed: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    return tensor.normal_(generator=torch.Generator(device=DEVICE).manual_seed(seed))


@pytest.fixture
def memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    need = 48 * 2**30
    assert free > need, f"{free / 2**30:.0f} GiB are free on this GPU, the test needs {need / 2**30:.0f} GiB"
    yield
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("memory")
def test_one_sequence_against_two_halves() -> None:
    q, k, v, g = (fill(1, TOKENS, HEADS, D, seed=seed) for seed in range(4))
    beta = fill(1, TOKENS, HEADS, seed=4)
    assert q.numel() > LIMIT
    out = torch.full_like(v, float("nan"))
    final = torch.empty(1, HEADS, D, D, device=DEVICE)
    scale, bound = D**-0.5, -5.0

    def part(
        start: int, stop: int, target: torch.Tensor, state: torch.Tensor | None, last: torch.Tensor
    ) -> None:
        q_, k_, v_, g_, b_ = (x[:, start:stop] for x in (q, k, v, g, beta))
        flash_kda.fwd(q_, k_, v_, g_, b_, scale, target, None, None, bound, state, last, backend=BACKEND)

    part(0, TOKENS, out, None, final)
    half = TOKENS // 2 // 64 * 64
    carried, last = torch.empty_like(final), torch.empty_like(final)
    halves = torch.full_like(v, float("nan"))
    part(0, half, halves[:, :half], None, carried)
    part(half, TOKENS, halves[:, half:], carried, last)
    synchronize()
    for start in range(0, TOKENS, 32768):
        span = slice(start, start + 32768)
        assert_close(f"out from token {start}", out[:, span], halves[:, span])
    assert_close("final_state", final, last)
    # The tail against the oracle: at this decay, 256 tokens forget the state that came before them.
    tail = slice(TOKENS - 320, TOKENS)
    end = Problem(
        q=q[:, tail, :4],
        k=k[:, tail, :4],
        v=v[:, tail, :4],
        g=g[:, tail, :4],
        beta=beta[:, tail, :4],
        scale=scale,
        A_log=None,
        dt_bias=None,
        lower_bound=bound,
        initial_state=None,
        cu_seqlens=None,
        final_dtype=None,
    )
    want_out, want_final = oracle(end)
    assert_close("tail", out[:, TOKENS - 64 :, :4], want_out[:, 256:])
    assert_close("final_state against the oracle", final[:, :4], want_final)


@pytest.mark.usefixtures("memory")
def test_batch_entries_further_apart_than_32_bits_reach() -> None:
    p = make(2, 40, 2)
    far = LIMIT + 1024

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        raw = torch.empty(far + tensor[0].numel(), dtype=tensor.dtype, device=DEVICE)
        return raw.as_strided(tensor.shape, (far, *tensor.stride()[1:])).copy_(tensor)

    names = ("q", "k", "v", "g", "beta")
    wide = p.with_(**{name: spread(getattr(p, name)) for name in names})
    out = spread(torch.full_like(p.v, float("nan")))
    final = torch.empty(p.state_shape, device=DEVICE)
    call(wide, out, final)
    want_out, want_final = oracle(p)
    assert_close("out", out, want_out)
    assert_close("final_state", final, want_final)


@pytest.mark.usefixtures("memory")
def test_state_beyond_2_31_elements() -> None:
    """N * HV * 128 * 128 > 2^31: the last sequences' states lie beyond a 32-bit index."""
    count, heads = 2056, 64
    assert count * heads * D * D > LIMIT
    p = make(count, 3, heads, initial=torch.float32, final=None)
    out, final = torch.empty_like(p.v), torch.empty(p.state_shape, device=DEVICE)
    call(p, out, final)
    assert p.initial_state is not None
    for index in (0, count - 1):
        row = slice(index, index + 1)
        names = ("q", "k", "v", "g", "beta", "initial_state")
        one = p.with_(**{name: getattr(p, name)[row] for name in names})
        want_out, want_final = oracle(one)
        assert_close(f"out of sequence {index}", out[row], want_out)
        assert_close(f"final_state of sequence {index}", final[row], want_final)
