"""Strided inputs and outputs: right values, or an error that names the tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kda_gpu import (
    DEVICE,
    GUARD,
    SENTINEL,
    D,
    Problem,
    assert_close,
    call,
    check,
    make,
    normal,
    oracle,
    run,
    same_bits,
)


def fused_qkv(batch: int, tokens: int, heads: int) -> torch.Tensor:
    return normal(batch, tokens, 3, heads, D, seed=77)


def test_views_of_a_fused_projection() -> None:
    p = make(2, 70, 3)
    q, k, v = fused_qkv(2, 70, 3).unbind(2)
    check(p.with_(q=q, k=k, v=v))


def test_views_of_one_wide_row() -> None:
    """[B, T, H * D] pieces of one row that holds q, k, v, g and 16 more columns."""
    p = make(2, 41, 2)
    wide = normal(2, 41, 4 * 2 * D + 16, seed=78)
    q, k, v, g = (wide[..., i * 2 * D : (i + 1) * 2 * D].view(2, 41, 2, D) for i in range(4))
    check(p.with_(q=q, k=k, v=v, g=g))


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_head_major_memory(name: str) -> None:
    p = make(2, 50, 3)
    tensor = head_major(getattr(p, name))
    assert not tensor.is_contiguous()
    check(p.with_(**{name: tensor}))


def head_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


# A stride of 0 is none that TMA takes: such a call loads its inputs otherwise.
VIEWS: dict[str, Callable[[Problem], dict[str, torch.Tensor]]] = {
    "k of one head": lambda p: {"k": p.k[:, :, :1].expand_as(p.k)},
    "g of one token": lambda p: {"g": p.g[:, :1].expand_as(p.g)},
    "v of one row": lambda p: {"v": p.v[:1].expand_as(p.v)},
    "q of one vector": lambda p: {"q": p.q[:1, :1, :1].expand_as(p.q)},
    "q, g, v head by head": lambda p: {name: head_major(getattr(p, name)) for name in ("q", "g", "v")},
    "k of one head beside them": lambda p: {
        **{name: head_major(getattr(p, name)) for name in ("q", "g", "v")},
        "k": p.k[:, :, :1].expand_as(p.k),
    },
}

# For an H200: four, two and one block a head, in order, and segments.
CALLS: dict[str, Callable[[], Problem]] = {
    "few heads": lambda: make(2, 75, 4),
    "more heads": lambda: make(2, 75, 12, 24),
    "many heads": lambda: make(2, 75, 80),
    "packed": lambda: make(heads=3, value_heads=6, lens=[(11 * i) % 70 for i in range(40)]),
    "segments": lambda: make(2, 1000, 2).with_(segment_tokens=256),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_as_from_contiguous_inputs(name: str, view: str) -> None:
    p = CALLS[name]()
    views = VIEWS[view](p)
    assert name == "packed" or not any(tensor.is_contiguous() for tensor in views.values())
    want_out, want_final = run(p.with_(**{name: tensor.contiguous() for name, tensor in views.items()}))
    out, final = run(p.with_(**views))
    assert same_bits(out, want_out) and same_bits(final, want_final)


def test_a_key_that_all_heads_share() -> None:
    p = make(2, 75, 4)
    check(p.with_(k=p.k[:, :, :1].expand_as(p.k)))


def test_slices_of_longer_tensors() -> None:
    p = make(3, 90, 2)
    cut = p.tokens(17, 81)
    assert not cut.q.is_contiguous()
    check(cut)


def test_strided_beta() -> None:
    p = make(2, 50, 4)
    wide = normal(2, 50, 9, seed=79)
    check(p.with_(beta=wide[..., 3:7]))


def test_heads_cut_from_more_heads() -> None:
    p = make(2, 50, 6)
    names = ("q", "k", "v", "g", "beta")
    parts = {name: getattr(p, name)[:, :, 2:4] for name in names}
    assert p.initial_state is not None and p.A_log is not None and p.dt_bias is not None
    check(
        p.with_(
            **parts,
            initial_state=p.initial_state[:, 2:4].contiguous(),
            A_log=p.A_log[2:4],
            dt_bias=p.dt_bias[2:4],
        )
    )


def test_strided_out_leaves_its_neighbours_alone() -> None:
    p = make(2, 45, 3)
    wide = torch.full((2, 45, 3, 3 * D), SENTINEL, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    out = wide[..., D : 2 * D]
    final = torch.empty(p.state_shape, device=DEVICE)
    call(p, out, final)
    want_out, want_final = oracle(p)
    assert_close("out", out, want_out)
    assert_close("final_state", final, want_final)
    bits = wide.view(torch.int16)
    assert bool((bits[..., :D] == SENTINEL).all()) and bool((bits[..., 2 * D :] == SENTINEL).all())


def test_out_beside_q_in_one_buffer() -> None:
    p = make(2, 45, 2)
    both = normal(2, 45, 2, 2, D, seed=80)
    q, out = both.unbind(2)
    kept = q.clone()
    call(p, out, None, q=q)
    want_out, _ = oracle(p.with_(q=kept))
    assert_close("out", out, want_out)
    assert same_bits(q, kept)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out"])
def test_misaligned_address_is_refused(name: str) -> None:
    p = make(1, 32, 2)
    out = torch.empty_like(p.v)
    source = out if name == "out" else getattr(p, name)
    shifted = torch.empty(source.numel() + GUARD, dtype=torch.bfloat16, device=DEVICE)[1 : 1 + source.numel()]
    shifted = shifted.view(source.shape).copy_(source)
    with pytest.raises(ValueError, match=name):
        call(p, out, None, **{name: shifted})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out"])
def test_inner_stride_is_refused(name: str) -> None:
    p = make(1, 32, 2)
    out = torch.empty_like(p.v)
    source = out if name == "out" else getattr(p, name)
    spread = torch.zeros(*source.shape, 2, dtype=torch.bfloat16, device=DEVICE)[..., 0]
    with pytest.raises(ValueError, match=name):
        call(p, out, None, **{name: spread})


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_odd_stride_is_refused(name: str) -> None:
    p = make(1, 32, 2)
    source = getattr(p, name)
    odd = torch.zeros(1, 32, 2, D + 4, dtype=torch.bfloat16, device=DEVICE)[..., :D].copy_(source)
    with pytest.raises(ValueError, match=name):
        call(p, torch.empty_like(p.v), None, **{name: odd})
