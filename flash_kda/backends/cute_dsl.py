"""Kernels compiled at run time by the CuTe DSL (``flash_kda/cute``): K = V = 128, both gates."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import dsl
from ..arch import Capability
from ..dispatch import CUTE_DSL_NATIVE_ONLY


@functools.cache
def load() -> Callable[..., None]:
    """The compiled kernels' entry. Imports the DSL, which takes seconds."""
    # The entry alone would import it when a kernel is first compiled: too late to take another backend.
    importlib.import_module("flash_kda.cute.recurrent")
    entry: Callable[..., None] = importlib.import_module("flash_kda.cute.compiled").run
    return entry


def first_device() -> Capability | None:
    """Capability of CUDA device 0, the one that the DSL looks at when it is not told a target."""
    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


def _arch(device: torch.device) -> str:
    """The target to compile for: what the dispatcher's gate found, from the same resolver."""
    capability = torch.cuda.get_device_capability(device)
    return dsl.require_arch(capability, CUTE_DSL_NATIVE_ONLY, first_device, str(device))


def compute(q: Tensor, *rest: Any) -> None:
    """The body of the operator; the arguments are those of ``fwd``. The target is always named: left to
    itself, the DSL compiles for device 0, or for what its variable says."""
    with torch.no_grad():
        load()(_arch(q.device), q, *rest)


def run(q: Tensor, *rest: Tensor | float | None) -> None:
    """Directly, and through the operator ``fwd_cute_dsl`` where the call is traced."""
    if type(q) is Tensor and not torch.compiler.is_compiling():
        compute(q, *rest)
    else:
        torch.ops.flash_kda.fwd_cute_dsl.default(q, *rest)
