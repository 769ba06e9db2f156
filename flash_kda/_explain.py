"""The whole decision for one device, for people: what every backend says, and what would run."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from . import _select, dispatch
from .arch import Capability, dotted, parse_capability
from .checks import check_backend, check_head_size, check_lower_bound
from .dispatch import DeviceFacts, Verdict


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` returns; ``str`` makes the text.

    Attributes:
        device: torch's spelling of the device, or ``cuda`` for one that need not be here.
        capability: its compute capability, None for other devices.
        asked: the backend asked for, and by whom where it was ``FLASH_KDA_BACKEND``.
        backend: what would run, None when nothing can.
        verdicts: what each backend says, fastest first.
    """

    device: str
    capability: Capability | None
    asked: str
    backend: str | None
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        where = self.device
        if self.capability is not None:
            where += f", compute capability {dotted(self.capability)}"
        first = f"{where}; asked for: {self.asked}; runs: {self.backend or 'nothing'}"
        return "\n".join([first, *(f"  {verdict}" for verdict in self.verdicts)])


def _gpu(index: int | None) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (index or 0) >= count:
        asked = "cuda" if index is None else f"cuda:{index}"
        raise ValueError(
            f"flash_kda: explain of {asked}: torch can use {count} GPUs; for a GPU that is not here, give "
            'its compute capability, as capability="9.0"'
        )
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _spelled(device: torch.device | str | int) -> torch.device:
    """The device; torch.device(0) would be one of the accelerator that is here, and fail without one."""
    try:
        return torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"flash_kda: explain of {device!r}: expected a device of torch, as 'cuda:0' or 'cpu'"
        ) from error


def _device(device: torch.device | str | int | None) -> DeviceFacts:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    there = _spelled(device)
    if there.type == "cuda":
        there = _gpu(there.index)
    return _select.device_facts(there.type, there.index)


def explain(
    device: torch.device | str | int | None = None,
    *,
    capability: object = None,
    backend: str = dispatch.AUTO,
    head_k: int = dispatch.CUDA_HEAD_DIM,
    head_v: int = dispatch.CUDA_HEAD_DIM,
    lower_bound: float | None = -5.0,
) -> Explanation:
    """Which backend would run a call, and what every one says: ``print(flash_kda.explain())``.

    Looks at what is installed, and imports none of it; so a package that is there and broken still counts.

    Args:
        device: a torch device; None means the current GPU, or the CPU where there is none.
        capability: instead of ``device``, the compute capability of an NVIDIA GPU that need not be here:
            ``"10.7"`` or ``(10, 7)``.
        backend: as in a call; ``FLASH_KDA_BACKEND`` speaks where it is ``auto``.
        head_k, head_v: channels of a q/k head and of a v head.
        lower_bound: as in a call; None means the softplus gate.

    Raises:
        TypeError, ValueError: a bad argument, or both a device and a capability.
    """
    check_backend(backend)
    check_head_size("head_k", head_k)
    check_head_size("head_v", head_v)
    check_lower_bound(lower_bound)
    if capability is not None and device is not None:
        raise ValueError("flash_kda: explain takes a device or a capability, got both")
    there = _device(device) if capability is None else DeviceFacts("cuda", None, parse_capability(capability))
    gate = dispatch.SOFTPLUS if lower_bound is None else dispatch.BOUNDED
    request = _select.request(backend, os.environ.get(dispatch.ENV), head_k, head_v, gate)
    facts = _select.facts_for(there, _select.library_facts(), {})
    asked = request.backend + (f" (of {dispatch.ENV})" if request.pinned else "")
    runs = dispatch.decide(facts, request).backend
    return Explanation(there.name, there.capability, asked, runs, dispatch.trace(facts, request))
