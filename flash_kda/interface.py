"""The public calls: checks, defaults, the choice of a backend. ``reference.py`` describes the computation."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _ops  # noqa: F401  (registers the operators)
from ._select import explanation, select, unavailable
from .backends import cuda, cute_dsl, fla, reference
from .checks import (
    Sizes,
    check_backend,
    check_fwd,
    check_packed,
    check_segment_tokens,
    check_sources,
    operator_checks_the_rest,
    outputs_are_plain,
)
from .dispatch import (
    BOUNDED,
    CUDA,
    CUDA_HEAD_DIM,
    CUTE_DSL,
    FLA,
    FLA_HEAD_K_MAX,
    FLA_HEAD_MIN,
    REFERENCE,
    SOFTPLUS,
    TRACED_HEAD,
    TRACED_OTHER_HEAD,
)

_BACKENDS = {CUDA: cuda, CUTE_DSL: cute_dsl, FLA: fla, REFERENCE: reference}


def _head_size(size: int) -> int:
    """A Python int for the decision; a traced size, which may be dynamic, becomes guards and their answer."""
    if size == CUDA_HEAD_DIM:
        return CUDA_HEAD_DIM
    if not torch.compiler.is_compiling():
        return int(size)  # make_fx traces with symbolic sizes, and that is no compiling to torch
    return TRACED_HEAD if FLA_HEAD_MIN <= size <= FLA_HEAD_K_MAX else TRACED_OTHER_HEAD


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
    segment_tokens: int | None = None,
) -> None:
    """Kimi Delta Attention forward; writes ``out`` and, when given, ``final_state`` in place.

    Forward only: there are no gradients. The letters in the shapes are those of :func:`flash_kda_func`.

    Args:
        q, k: bf16 ``[B, T, H, K]``, before normalisation (``x / sqrt(sum x^2 + 1e-6)`` is applied here).
        v: bf16 ``[B, T, HV, V]``; HV is a multiple of H, value head h reads q/k head ``h // (HV // H)``.
        g: bf16 ``[B, T, HV, K]``, gate before activation.
        beta: bf16 ``[B, T, HV]``, logits.
        scale: factor on the normalised q, at most 2^64 in size; None means ``K ** -0.5``.
        out: bf16 ``[B, T, HV, V]``, written; shares no memory with another argument.
        A_log: fp32 ``[HV]``, logarithm of the gate's rate, or None (zeros).
        dt_bias: fp32 ``[HV, K]`` or ``[HV * K]``, or None (zeros).
        lower_bound: bound of the natural-log decay per token, in [-5, 0); None means the softplus gate.
        initial_state: bf16 or fp32 ``[N, HV, V, K]``, contiguous, or None (zeros). N = B, or the number of
            sequences with ``cu_seqlens``.
        final_state: bf16 or fp32 ``[N, HV, V, K]``, contiguous, written; may be ``initial_state`` itself.
        cu_seqlens: int64 or int32 ``[N + 1]`` on the device of q: sequence n is tokens
            ``cu_seqlens[n] : cu_seqlens[n + 1]`` of the one batch row; 0 first, T last, never decreasing (not
            checked on a GPU, which would have to be waited for, but by ``reference``, which reads them).
        backend: ``auto``: the first of the following that can run the call; an ``auto`` is overruled by the
            environment variable ``FLASH_KDA_BACKEND``, a name is not. ``cuda``: the kernels in the wheel.
            ``cute_dsl``: kernels compiled when first called, ``pip install 'flash-kda[cute]'``. ``fla``:
            flash-linear-attention's Triton kernels, ``pip install 'flash-kda[fla]'``. ``reference``: torch,
            on any device, slowly. A named backend runs the call or raises.
        segment_tokens: where the CUDA kernels cut sequences into segments that are computed side by side. A
            cut rounds the states between segments differently. None (default): the kernels choose, by the
            number of sequences, tokens and heads of the call and by the GPU, so the last bits of a sequence's
            result may change with its batch. An int fixes the cuts, and the output and final state of a
            sequence depend on nothing but that sequence: bitwise the same alone, in a batch or packed with
            others. 0: never cut; slow for long sequences with few heads, which then use a part of the GPU.
            Else every sequence is cut after each so many tokens, a multiple of 16 from 256 to 2^31 - 17:
            costs a workspace of 128 KiB for each segment and value head, so small segments cost memory
            and time. The other backends give the same result for any value.

    q, k, v, g and out may be strided views: stride 1 in the last dimension, the other strides multiples of 8
    elements and the first element on a 16-byte boundary when the head dimension is a multiple of 8.

    Runs on the current stream of q's device and does not synchronise (the backends ``reference``, and ``fla``
    with more than 64 tokens, read ``cu_seqlens`` on the host).

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: any other bad argument that metadata can show, named in the message, before anything is
            launched (contents of ``cu_seqlens`` of a GPU only by ``reference``). Among them a tensor that
            requires grad outside ``torch.no_grad()`` and ``torch.inference_mode()``, and a dual tensor of
            forward-mode differentiation: there are no derivatives.
        flash_kda.Unavailable: (a ValueError) the backend cannot run this call here; ``refusals`` says why.
    """
    given = (q, k, v, g, beta, scale)
    last = (A_log, dt_bias, lower_bound, initial_state)
    if (
        not torch.compiler.is_compiling()
        and operator_checks_the_rest(*given, *last, cu_seqlens, backend)
        and outputs_are_plain(out, final_state)
        and _takes_the_kernels(q, v, backend)
    ):
        _launch(*given, out, *last, final_state, cu_seqlens, segment_tokens)
    else:
        sizes = check_fwd(*given, out, *last, final_state, cu_seqlens)
        _run(sizes, *given, out, *last, final_state, cu_seqlens, backend, segment_tokens)


def _takes_the_kernels(q: Tensor, v: Tensor, backend: str) -> bool:
    """Whether a call on CUDA tensors with a bounded gate is one for the kernels in the wheel."""
    return select(backend, "cuda", q.device.index, q.shape[3], v.shape[3], BOUNDED) == CUDA


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    segment_tokens: int | None,
) -> None:
    """The kernels in the wheel, whose operator checks the call before it launches anything."""
    if segment_tokens is None:
        segment_tokens = reference.CHOSEN_SEGMENTS
    else:
        check_segment_tokens(segment_tokens)
    factor = CUDA_HEAD_DIM**-0.5 if scale is None else scale
    tensors, states = (q, k, v, g, beta), (initial_state, final_state, cu_seqlens)
    try:
        cuda.run(*tensors, factor, out, A_log, dt_bias, lower_bound, *states, segment_tokens)
        return
    except RuntimeError as error:
        refusal = error
    check_fwd(*tensors, scale, out, A_log, dt_bias, lower_bound, *states)  # says what is wrong, if that is it
    raise refusal


def _run(
    sizes: Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
    segment_tokens: int | None,
) -> None:
    """A call whose tensors have been checked: the backend that runs it, and the operator's arguments."""
    check_backend(backend)
    check_segment_tokens(segment_tokens)
    device = q.device
    gate = SOFTPLUS if lower_bound is None else BOUNDED
    wanted = (backend, device.type, device.index, _head_size(sizes.K), _head_size(sizes.V), gate)
    chosen = select(*wanted)
    if chosen is None:
        if torch.compiler.is_compiling():
            # With fullgraph=True torch quotes this, else it calls again eagerly.
            raise ValueError(explanation(*wanted))
        raise unavailable(*wanted)
    if dt_bias is not None and dt_bias.dim() == 1:
        dt_bias = dt_bias.view(sizes.HV, sizes.K)
    _BACKENDS[chosen].run(
        q,
        k,
        v,
        g,
        beta,
        sizes.K**-0.5 if scale is None else float(scale),
        out,
        A_log,
        dt_bias,
        reference.SOFTPLUS_LOWER_BOUND if lower_bound is None else float(lower_bound),
        initial_state,
        final_state,
        cu_seqlens,
        reference.CHOSEN_SEGMENTS if segment_tokens is None else segment_tokens,
    )


def flash_kda_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, forward only (no gradients): :func:`fwd` that allocates and returns its results.

    Letters in the shapes: B batch rows; T tokens of a row; H heads of q and k; HV heads of v, a multiple of H
    (value head h reads q/k head ``h // (HV // H)``); K channels of a q/k head; V channels of a v head; N
    sequences, each with a state: N = B, or what ``cu_seqlens`` says. Backends ``cuda`` and ``cute_dsl`` take
    K = V = 128, ``fla`` K from 16 to 256 and V from 16.

    Args:
        q, k: bf16 ``[B, T, H, K]``, raw: each head vector is L2-normalised here
            (``x / sqrt(sum x^2 + 1e-6)``).
        v: bf16 ``[B, T, HV, V]``.
        g: bf16 ``[B, T, HV, K]``, gate before activation. The natural-log decay of a key channel is
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, and with ``lower_bound=None``
            ``-exp(A_log) * softplus(g + dt_bias)``.
        beta: bf16 ``[B, T, HV]``, logits: the sigmoid is taken here.
        A_log: fp32 ``[HV]``; None (default) means zeros.
        dt_bias: fp32 ``[HV, K]`` or ``[HV * K]``; None (default) means zeros.
        scale: factor on the normalised q, at most 2^64 in size; None (default) means ``K ** -0.5``.
        lower_bound: bound of the decay per token, in [-5, 0), default -5.0; None means the softplus gate,
            which the backend ``cuda`` does not have.
        initial_state: bf16 or fp32 ``[N, HV, V, K]``, contiguous, not written; None (default) means zeros.
        cu_seqlens: int64 or int32 ``[N + 1]`` on the device of q, with B = 1: sequence n is tokens
            ``cu_seqlens[n] : cu_seqlens[n + 1]``; 0 first, T last, never decreasing. None (default): each row
            is one sequence.
        output_final_state: whether to return the state after the last token of each sequence; default False.
        backend: ``auto`` (default: the fastest that can run the call, or what ``FLASH_KDA_BACKEND`` names),
            ``cuda``, ``cute_dsl``, ``fla`` or ``reference``: see :func:`fwd`.
        segment_tokens: None (default): the kernels choose how to cut long sequences. 0: never cut. A multiple
            of 16 from 256 on: cut after each so many tokens. What each costs, and whether a result's last
            bits depend on the batch: see :func:`fwd`.

    Returns:
        ``(o, final_state)``: bf16 ``[B, T, HV, V]``, and fp32 ``[N, HV, V, K]`` or None without
        ``output_final_state``.

    Raises:
        TypeError, ValueError, flash_kda.Unavailable: as :func:`fwd`, where strides are described too.
    """
    given = (q, k, v, g, beta, scale)
    last = (A_log, dt_bias, lower_bound, initial_state)
    kernels = (
        not torch.compiler.is_compiling()
        and operator_checks_the_rest(*given, *last, cu_seqlens, backend)
        and _takes_the_kernels(q, v, backend)
    )
    if not kernels:
        check_sources(q, v, cu_seqlens)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = None
    if output_final_state:
        batch, _, _, head_k = q.shape  # asking for a shape costs a third of a microsecond
        _, _, value_heads, head_v = v.shape
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final_state = q.new_empty((sequences, value_heads, head_v, head_k), dtype=torch.float32)
    if kernels:
        _launch(*given, out, *last, final_state, cu_seqlens, segment_tokens)
    else:
        sizes = check_fwd(*given, out, *last, final_state, cu_seqlens)
        _run(sizes, *given, out, *last, final_state, cu_seqlens, backend, segment_tokens)
    return out, final_state


def flash_kda_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_kda_func` for N sequences packed along one dimension of ``total`` tokens; forward only.

    Args:
        q, k: bf16 ``[total, H, K]``, normalised here.
        v: bf16 ``[total, HV, V]``.
        g: bf16 ``[total, HV, K]``, gate before activation.
        beta: bf16 ``[total, HV]``, logits.
        cu_seqlens: int64 or int32 ``[N + 1]`` on the device of q, required: 0 first, total last, never
            decreasing.
        A_log, dt_bias, scale, lower_bound: as in :func:`flash_kda_func`.
        output_final_state, backend, segment_tokens: as there.
        initial_state: bf16 or fp32 ``[N, HV, V, K]``, one state a sequence; None (default) means zeros.

    Returns:
        ``(o, final_state)``: bf16 ``[total, HV, V]``, and fp32 ``[N, HV, V, K]`` or None without
        ``output_final_state``.

    Raises:
        TypeError, ValueError, flash_kda.Unavailable: as :func:`fwd`.
    """
    if cu_seqlens is None:
        raise TypeError(
            "flash_kda: argument 'cu_seqlens': got None, takes an int64 or int32 tensor of N + 1 entries."
        )
    for name, tensor, rank in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("g", g, 3), ("beta", beta, 2)):
        check_packed(name, tensor, rank)
    out, final_state = flash_kda_func(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        g.unsqueeze(0),
        beta.unsqueeze(0),
        A_log,
        dt_bias,
        scale=scale,
        lower_bound=lower_bound,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
        backend=backend,
        segment_tokens=segment_tokens,
    )
    return out.squeeze(0), final_state


def flash_kda_qkvpacked_func(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_kda_func` on a fused projection, without copying it; HV = H and K = V = D; forward only.

    Args:
        qkv: bf16 ``[B, T, 3, H, D]``: q, k and v in this order along dimension 2.
        g: bf16 ``[B, T, H, D]``, gate before activation.
        beta: bf16 ``[B, T, H]``, logits.
        A_log, dt_bias, scale, lower_bound, initial_state, cu_seqlens: as in :func:`flash_kda_func`.
        output_final_state, backend, segment_tokens: as there.

    Returns:
        ``(o, final_state)``: bf16 ``[B, T, H, D]``, and fp32 ``[N, H, D, D]`` or None without
        ``output_final_state``.

    Raises:
        TypeError, ValueError, flash_kda.Unavailable: as :func:`fwd`.
    """
    check_packed("qkv", qkv, 5)
    if qkv.shape[2] != 3:
        raise ValueError(f"flash_kda: argument 'qkv': got shape {tuple(qkv.shape)}, takes [B, T, 3, H, D].")
    q, k, v = qkv.unbind(2)
    return flash_kda_func(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        scale=scale,
        lower_bound=lower_bound,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
        backend=backend,
        segment_tokens=segment_tokens,
    )
