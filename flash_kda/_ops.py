"""Registration with torch: the parts of the operators that are written in Python.

The compiled library defines ``flash_kda::fwd`` and its CUDA kernel. Without it the same schema is defined
here, so that CPU and meta tensors, ``torch.compile`` and ``torch.export`` work on any machine.
``fwd_reference`` is the torch backend as an operator of its own, for devices where ``fwd`` means the
kernels.

``lower_bound`` is a float in both: 0.0 stands for the softplus gate (a bounded gate at 0 would never decay).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from . import _library
from .backends import reference
from .checks import check_fwd

NAMESPACE = "flash_kda"
ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor? A_log, "
    "Tensor? dt_bias, float lower_bound, Tensor? initial_state, Tensor(b!)? final_state, "
    "Tensor? cu_seqlens) -> ()"
)
SCHEMA = "fwd" + ARGUMENTS


def _fake(*_: Any, **__: Any) -> None:
    """Nothing to say: nothing is returned, and what is written in place keeps its metadata."""


@torch.no_grad()
def _compute(
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
) -> None:
    """Checks again (a compiled graph comes without the checks of addresses and contents), then computes."""
    bound = None if lower_bound == reference.SOFTPLUS_LOWER_BOUND else lower_bound
    check_fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, bound, initial_state, final_state, cu_seqlens)
    reference.compute(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens
    )


def _register() -> Any:
    library: Any = cast(Any, torch.library.Library)(NAMESPACE, "FRAGMENT")  # torch leaves its methods untyped
    tags = (torch.Tag.pt2_compliant_tag,)
    if not _library.load().loaded and not torch._C._dispatch_has_kernel(_library.OPERATOR):
        library.define(SCHEMA, tags=tags)
    library.define("fwd_reference" + ARGUMENTS, tags=tags)
    library.impl("fwd", _compute, "CPU")
    library.impl("fwd_reference", _compute, "CompositeExplicitAutograd")
    for name in ("fwd", "fwd_reference"):
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=library)
        # Only the forward exists. Without this, torch hangs a warning node on the tensors written in place.
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return library


_LIBRARY = _register()  # lives as long as the process: dropping it would remove the registrations
