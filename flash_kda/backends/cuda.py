"""The kernels in the wheel, through the operator that the compiled library registers."""

from __future__ import annotations

import torch
from torch import Tensor


def run(*arguments: Tensor | float | None) -> None:
    """Launches on the current stream of q's device; the arguments are the operator's, see ``_ops.SCHEMA``."""
    torch.ops.flash_kda.fwd.default(*arguments)
