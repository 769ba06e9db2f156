"""From a call to a backend: gathers the facts once per kind of call, decides, remembers, warns."""

from __future__ import annotations

import functools
import logging

import torch

from . import _library, dispatch
from .dispatch import Decision, DeviceFacts, Facts, LibraryFacts, Request, Unavailable

logger = logging.getLogger("flash_kda")
_warned: set[tuple[str, str, str]] = set()


def library_facts() -> LibraryFacts:
    """The compiled library as the decision sees it; loads it on the first call."""
    status = _library.load()
    return LibraryFacts(status.code, status.text, _library.built_choices())


def device_facts(device_type: str, index: int | None) -> DeviceFacts:
    """A device as the decision sees it; reads the compute capability of that very device."""
    if device_type != "cuda":
        return DeviceFacts(device_type, index)
    return DeviceFacts(device_type, index, torch.cuda.get_device_capability(index))


def _report(decision: Decision, device: DeviceFacts) -> None:
    """One INFO line for the winner; one warning for each reason a GPU is left to the slow backend."""
    for refusal in decision.refusals:
        logger.debug(
            "backend %s refused on %s: %s: %s", refusal.backend, device.name, refusal.code, refusal.text
        )
    logger.info("backend %s runs on %s", decision.backend, device.name)
    if device.type != "cuda" or decision.backend != dispatch.REFERENCE:
        return
    for refusal in decision.refusals:
        key = (refusal.backend, refusal.code, device.name)
        if key not in _warned:
            _warned.add(key)
            logger.warning(
                "calls on %s run on the slow reference backend: backend %s: %s. "
                "(To give them back to flash-linear-attention's own kernels, set FLA_FLASH_KDA=0.)",
                device.name,
                refusal.backend,
                refusal.text,
            )


@functools.lru_cache(maxsize=256)
def _select(device_type: str, index: int | None, request: Request) -> Decision:
    device = device_facts(device_type, index)
    decision = dispatch.decide(Facts(device, library_facts()), request)
    if request.backend == dispatch.AUTO and decision.backend is not None:
        _report(decision, device)
    return decision


def select(
    backend: str, device_type: str, index: int | None, head_k: int, head_v: int, gate: str
) -> str | None:
    """Name of the backend for a call, None when none can run it; cached."""
    return _select(device_type, index, Request(backend, head_k, head_v, gate)).backend


def unavailable(
    backend: str, device_type: str, index: int | None, head_k: int, head_v: int, gate: str
) -> Unavailable:
    """The error for a call that ``select`` found no backend for. The caller raises it: what a call folded to
    a constant raises itself reaches the user as an internal error of torch.compile."""
    decision = _select(device_type, index, Request(backend, head_k, head_v, gate))
    return Unavailable(backend, DeviceFacts(device_type, index).name, decision.refusals)


def explanation(
    backend: str, device_type: str, index: int | None, head_k: int, head_v: int, gate: str
) -> str:
    """The text of ``unavailable``, for tracing, which cannot build that exception."""
    return str(unavailable(backend, device_type, index, head_k, head_v, gate))


# Tracing sees a constant: the facts of an install do not change under a compiled graph. This is the mark that
# torch.compiler.assume_constant_result sets; calling it would import torch._dynamo, 1.7 s at every start.
vars(select)["_dynamo_marked_constant"] = True
vars(explanation)["_dynamo_marked_constant"] = True


def reset() -> None:
    """Forgets decisions and warnings, for tests."""
    _select.cache_clear()
    _warned.clear()
