"""Compiles the recurrent kernel, remembers it, launches it. The DSL is imported by the first compilation."""

from __future__ import annotations

import ctypes
import functools
import tempfile
import threading
from typing import Any

import torch
from torch import Tensor

from .. import dsl
from ..backends.reference import CHOSEN_SEGMENTS, SOFTPLUS_LOWER_BOUND
from ..fatbin import FatbinError
from .arguments import BFLOAT16, FLOAT32, INT32, INT64, MAX_HEADS, MAX_SEQUENCES, MAX_TOKENS, Block, Variant
from .cubin import recorded_arch

_DTYPES = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int32: INT32,
    torch.int64: INT64,
}

_compiled: dict[tuple[Variant, str], Any] = {}
_compiling = threading.Lock()  # the DSL compiles one function at a time


class WrongArchitecture(RuntimeError):
    """The DSL does not know the architecture asked for, or made code for another one; such code is never kept
    or launched."""


def check_arch(cubin: object, arch: str) -> None:
    """WrongArchitecture unless ``cubin`` says that it was assembled for ``arch``."""
    if not isinstance(cubin, bytes):
        raise WrongArchitecture(f"expected a cubin for {arch}, the DSL kept none")
    try:
        found = recorded_arch(cubin)
    except FatbinError as error:
        raise WrongArchitecture(f"expected a cubin for {arch}, got one that does not say: {error}") from error
    if found != arch:
        raise WrongArchitecture(f"expected a cubin for {arch}, the DSL made one for {found}")


def _compile(variant: Variant, arch: str) -> Any:
    from cutlass import Int64, cute
    from cutlass.base_dsl.compiler import DumpDir

    from . import recurrent

    install = dsl.installed()
    if arch not in install.members:  # the gate does not let one through; the DSL would say a bare KeyError
        names = ", ".join(install.members) or "none that could be read"
        raise WrongArchitecture(f"{dsl.DISTRIBUTION} {install.version} has no target {arch}; it has {names}")
    # The DSL hands out a cubin by way of a file, by default in the working directory.
    with tempfile.TemporaryDirectory(prefix="flash_kda_cute_") as folder:
        compiler = cute.compile[cute.GPUArch(arch), cute.KeepCUBIN(), DumpDir(folder)]
        return compiler(recurrent.launch, Int64(0), cute.runtime.make_fake_stream(), variant)


def compile_kernel(variant: Variant, arch: str) -> Any:
    """The recurrent kernel for one variant and architecture (such as ``sm_90a``), compiled once a process.

    Needs no GPU. The architecture is always stated to the DSL: what it would choose by itself depends on the
    environment and, without a GPU, is a fixed guess.

    Returns:
        The DSL's compiled object; ``__cubin__`` holds its machine code.

    Raises:
        WrongArchitecture: the DSL does not know ``arch``, or made code for another one; nothing is
            remembered.
        ImportError: no DSL.
    """
    key = (variant, arch)  # in memory alone: the DSL and the sources are this process's
    with _compiling:
        kernel = _compiled.get(key)
        if kernel is None:
            kernel = _compile(variant, arch)
            check_arch(kernel.__cubin__, arch)
            _compiled[key] = kernel
        return kernel


@functools.cache
def _kernel(
    arch: str,
    initial_state: torch.dtype | None,
    final_state: torch.dtype | None,
    cu_seqlens: torch.dtype | None,
    has_rate: bool,
    has_bias: bool,
    softplus: bool,
) -> Any:
    """``compile_kernel`` by what a call has at hand: the cheap look-up of every call."""
    first, last, ends = (
        None if dtype is None else _DTYPES[dtype] for dtype in (initial_state, final_state, cu_seqlens)
    )
    return compile_kernel(Variant(first, last, ends, has_rate, has_bias, softplus), arch)


def reset() -> None:
    """Forgets what was compiled, for tests. Kernels still running keep their code only while referenced."""
    _kernel.cache_clear()
    _compiled.clear()


class _Slot:
    """An argument in the DSL's calling convention: addresses of its values in host memory."""

    __slots__ = ("addresses",)

    def __init__(self, address: int) -> None:
        self.addresses = [address]

    def __c_pointers__(self) -> list[int]:
        return self.addresses


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _check_sizes(sequences: int, tokens: int, value_heads: int) -> None:
    """ValueError for what 32-bit numbers of the grid or of tokens cannot hold."""
    for what, size, limit in (
        ("sequences", sequences, MAX_SEQUENCES),
        ("tokens in a batch row", tokens, MAX_TOKENS),
        ("value heads", value_heads, MAX_HEADS),
    ):
        if size > limit:
            raise ValueError(f"flash_kda: got {size} {what}, the cute_dsl kernel takes {limit} at most.")


def _launch(kernel: Any, block: Block, device: int | None) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream
    values = (ctypes.c_int64 * 2)(ctypes.addressof(block), stream)
    first = ctypes.addressof(values)
    kernel(_Slot(first), _Slot(first + 8))


def run(
    arch: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    segment_tokens: int = CHOSEN_SEGMENTS,
) -> None:
    """Launches on the current stream of q's device; does not synchronise.

    Args:
        arch: what to compile for, such as ``sm_90a``.
        segment_tokens: without effect; nothing is cut here.

    The others are the operator's (``_ops.SCHEMA``), checked by the caller. The first call of a variant
    compiles it.

    Raises:
        ValueError: more sequences, tokens or heads than the kernel can count.
        WrongArchitecture: see :func:`compile_kernel`.
    """
    batch, tokens, heads, _ = q.shape
    value_heads = v.shape[2]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _check_sizes(sequences, tokens, value_heads)
    if sequences == 0:
        return
    kernel = _kernel(
        arch,
        _dtype(initial_state),
        _dtype(final_state),
        _dtype(cu_seqlens),
        A_log is not None,
        dt_bias is not None,
        lower_bound == SOFTPLUS_LOWER_BOUND,
    )
    block = Block(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        g.data_ptr(),
        beta.data_ptr(),
        out.data_ptr(),
        _address(A_log),
        _address(dt_bias),
        _address(initial_state),
        _address(final_state),
        _address(cu_seqlens),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *g.stride()[:3],
        *beta.stride()[:2],
        *out.stride()[:3],
        sequences,
        tokens,
        value_heads,
        value_heads // heads,
        scale,
        lower_bound,
    )
    device = q.device
    if device.index == torch.cuda.current_device():
        _launch(kernel, block, device.index)
    else:
        with torch.cuda.device(device):
            _launch(kernel, block, device.index)
