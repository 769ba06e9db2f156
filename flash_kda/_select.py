"""From a call to a backend: gathers the facts once per kind of call, decides, remembers, warns."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping

import torch

from . import _library, backends, dispatch, dsl, fla_install
from .dispatch import Decision, DeviceFacts, Facts, LibraryFacts, Refusal, Request, Unavailable
from .reasons import IMPORT_ERROR, Reason, is_availability

logger = logging.getLogger("flash_kda")
_warned: set[tuple[str, str]] = set()

# Backends whose code is imported when they first win, by what they need: a package that is there and does not
# import is one that is not available.
_LOADERS: dict[str, Callable[[], object]] = {
    dispatch.CUTE_DSL: backends.cute_dsl.load,
    dispatch.FLA: backends.fla.load,
}


def library_facts() -> LibraryFacts:
    """The compiled library as the decision sees it; loads it on the first call."""
    status = _library.load()
    return LibraryFacts(status.code, status.text, _library.built_choices())


def device_facts(device_type: str, index: int | None) -> DeviceFacts:
    """A device as the decision sees it; reads the compute capability of that very device."""
    if device_type != "cuda":
        return DeviceFacts(device_type, index)
    capability = torch.cuda.get_device_capability(index)
    return DeviceFacts(device_type, index, capability, torch.version.hip is not None)


def facts_for(device: DeviceFacts, library: LibraryFacts, broken: Mapping[str, Reason]) -> Facts:
    """The facts of this process; the DSL and flash-linear-attention are looked for when asked."""
    cc = None if device.hip else device.capability
    first = backends.cute_dsl.first_device
    return Facts(device, library, lambda: dsl.facts(first), lambda: fla_install.reason(cc), broken)


def _decide(device: DeviceFacts, request: Request) -> Decision:
    """The decision, with the winner's code imported."""
    library, broken = library_facts(), dict[str, Reason]()
    while True:
        decision = dispatch.decide(facts_for(device, library, broken), request)
        if decision.backend not in _LOADERS:
            return decision
        try:
            _LOADERS[decision.backend]()
        except Exception as error:  # of an import: Triton raises RuntimeError, the DSL what its drivers say
            text = f"it is installed and does not import ({type(error).__name__}: {error}); reinstall it"
            broken[decision.backend] = Reason(IMPORT_ERROR, text, error)
        else:
            return decision


def _warn(key: tuple[str, str], text: str, *values: object) -> None:
    if key not in _warned:
        _warned.add(key)
        logger.warning(text, *values)


def _why(refusals: Iterable[Refusal]) -> str:
    return "; ".join(f"{refusal.backend}: {refusal.code}: {refusal.text}" for refusal in refusals)


def _warn_slow(refusals: tuple[Refusal, ...], device: DeviceFacts) -> None:
    _warn(
        (dispatch.REFERENCE, device.name),
        "calls on %s run on the slow reference backend: %s. "
        "(To give them back to flash-linear-attention's own kernels, set FLA_FLASH_KDA=0.)",
        device.name,
        _why(refusals),
    )


def _report(decision: Decision, device: DeviceFacts) -> None:
    """One INFO line for the winner; once a winner and GPU, one warning: of the faster backends that were
    written for the GPU and that this install does not deliver, or that it is left to the slow one."""
    for refusal in decision.refusals:
        logger.debug(
            "backend %s refused on %s: %s: %s", refusal.backend, device.name, refusal.code, refusal.text
        )
    logger.info("backend %s runs on %s", decision.backend, device.name)
    if device.type != "cuda":
        return
    skipped = [refusal for refusal in decision.refusals if is_availability(refusal.code)]
    if skipped and decision.backend is not None:
        _warn(
            (decision.backend, device.name),
            "backend %s runs on %s, since what is faster is not available here: %s",
            decision.backend,
            device.name,
            _why(skipped),
        )
    elif decision.backend == dispatch.REFERENCE:
        _warn_slow(decision.refusals, device)


def request(backend: str, pin: str | None, head_k: int, head_v: int, gate: str) -> Request:
    """The request of a call: where it says ``auto``, ``FLASH_KDA_BACKEND`` speaks."""
    named = (pin or "").strip() if backend == dispatch.AUTO else ""
    return Request(named or backend, head_k, head_v, gate, pinned=bool(named))


# Calls that the kernels in the wheel run; these come first, so no variable of the DSL changes that.
_settled: set[tuple[str, str | None, str, int | None, int, int, str]] = set()


@functools.lru_cache(maxsize=256)
def _select(
    device_type: str,
    index: int | None,
    call: tuple[str, str | None, int, int, str],
    dsl_pin: str | None,
) -> Decision:
    device, wanted = device_facts(device_type, index), request(*call)
    decision = _decide(device, wanted)
    if wanted.backend == dispatch.AUTO and decision.backend is not None:
        _report(decision, device)
    if decision.backend == dispatch.CUDA:
        backend, pin, head_k, head_v, gate = call
        _settled.add((backend, pin, device_type, index, head_k, head_v, gate))
    return decision


# The variables are part of the keys: a call sees what they say now. (What the DSL makes of its own after it
# was imported is for dsl.pinned to know.) Reading one takes a microsecond, so only where it counts.
def _pin(backend: str) -> str | None:
    return os.environ.get(dispatch.ENV) if backend == dispatch.AUTO else None


def _selected(
    backend: str, device_type: str, index: int | None, head_k: int, head_v: int, gate: str
) -> Decision:
    call = (backend, _pin(backend), head_k, head_v, gate)
    return _select(device_type, index, call, os.environ.get(dsl.ENV))


def select(
    backend: str, device_type: str, index: int | None, head_k: int, head_v: int, gate: str
) -> str | None:
    """Name of the backend for a call, None when none can run it; cached."""
    if (backend, _pin(backend), device_type, index, head_k, head_v, gate) in _settled:
        return dispatch.CUDA
    return _selected(backend, device_type, index, head_k, head_v, gate).backend


def unavailable(
    backend: str, device_type: str, index: int | None, head_k: int, head_v: int, gate: str
) -> Unavailable:
    """The error for a call that ``select`` found no backend for. The caller raises it: what a call folded to
    a constant raises itself reaches the user as an internal error of torch.compile."""
    decision = _selected(backend, device_type, index, head_k, head_v, gate)
    device = device_facts(device_type, index)
    wanted = request(backend, os.environ.get(dispatch.ENV), head_k, head_v, gate)
    error = Unavailable(wanted.backend, device.name, decision.refusals, device.capability, wanted.pinned)
    error.__cause__ = decision.cause
    return error


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
    """Forgets decisions, warnings and what was found installed, for tests."""
    _select.cache_clear()
    _settled.clear()
    _warned.clear()
    dsl.reset()
    fla_install.reset()
