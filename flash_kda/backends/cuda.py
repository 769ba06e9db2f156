"""The kernels in the wheel, through the operator that the compiled library registers."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
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
    """Launches on the current stream of q's device; see ``flash_kda.fwd`` for the arguments."""
    torch.ops.flash_kda.fwd.default(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens
    )
