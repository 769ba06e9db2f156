"""Registration with torch: the parts of the operators that are written in Python.

The compiled library defines ``flash_kda::fwd`` and its CUDA kernel. Without it the same schema is defined
here, so that CPU and meta tensors, ``torch.compile`` and ``torch.export`` work on any machine.
``fwd_reference`` is the reference backend as an operator of its own, for devices where ``fwd`` means the
kernels; ``fwd_cute_dsl`` and ``fwd_fla`` are those backends, for tracing, which cannot see through them.

In all of them ``lower_bound`` is a float: 0.0 stands for the softplus gate (a bounded gate at 0 would never
decay). ``segment_tokens`` is an int: -1 stands for None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from . import _library
from .backends import cute_dsl, fla, reference
from .checks import check_fwd, check_segment_tokens

NAMESPACE = "flash_kda"
ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor? A_log, "
    "Tensor? dt_bias, float lower_bound, Tensor? initial_state, Tensor(b!)? final_state, "
    "Tensor? cu_seqlens, int segment_tokens=-1) -> ()"
)
SCHEMA = "fwd" + ARGUMENTS


def _fake(
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
    segment_tokens: int = reference.CHOSEN_SEGMENTS,
) -> None:
    """Checks what metadata shows; nothing is returned, and what is written in place keeps its metadata.

    Torch also runs this for a call with a meta tensor among others, which would else do nothing in silence.
    """
    bound = None if lower_bound == reference.SOFTPLUS_LOWER_BOUND else lower_bound
    check_fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, bound, initial_state, final_state, cu_seqlens)
    check_segment_tokens(None if segment_tokens == reference.CHOSEN_SEGMENTS else segment_tokens)


def _checked(compute: Callable[..., None]) -> Callable[..., None]:
    """An operator's body: checks again (a compiled graph comes without the checks of addresses and contents),
    then computes."""

    def body(*arguments: Any) -> None:
        _fake(*arguments)
        with torch.no_grad():
            compute(*arguments)

    return body


_MARK = "_registered_by_python"  # attribute of torch.ops.flash_kda, which outlives a reload of this package
_KERNELS = {
    "fwd": ("CPU", reference.compute),
    "fwd_reference": ("CompositeExplicitAutograd", reference.compute),
    "fwd_cute_dsl": ("CompositeExplicitAutograd", cute_dsl.compute),
    "fwd_fla": ("CompositeExplicitAutograd", fla.compute),
}


def _register() -> tuple[Any, frozenset[str]]:
    """Defines and implements the operators whose names no other library has; once a process."""
    earlier = vars(torch.ops.flash_kda).get(_MARK)
    if earlier is not None:
        return cast(tuple[Any, frozenset[str]], earlier)
    library: Any = cast(Any, torch.library.Library)(NAMESPACE, "FRAGMENT")  # torch leaves its methods untyped
    compiled = {"fwd"} if _library.load().loaded else set()
    free = {name for name in _KERNELS if not torch._C._dispatch_has_kernel(f"{NAMESPACE}::{name}")}
    for name in free:
        library.define(name + ARGUMENTS, tags=(torch.Tag.pt2_compliant_tag,))
    for name in compiled | free:
        key, compute = _KERNELS[name]
        library.impl(name, _checked(compute), key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=library)
        # Only the forward exists. Without this, torch hangs a warning node on the tensors written in place.
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return library, frozenset(compiled | free)


# Lives as long as the process: dropping the library would remove the registrations.
_REGISTERED = vars(torch.ops.flash_kda)[_MARK] = _register()
reference.operators = _REGISTERED[1]
