"""Which backend runs a call, and why the others do not: a pure decision over facts.

Three questions, asked of each backend in this order and never merged:

1. capability: have kernels been written for this device? (``no_device``, ``no_kernel``)
2. availability: can this install deliver them now? (``missing_file``, ``undefined_symbol``, ``load_error``,
   ``name_taken``, ``not_in_wheel``)
3. suitability: do they do these sizes, this gate? (``unsuitable``)

``decide`` imports no torch, reads no device and never raises. ``auto`` takes the first backend of ``ORDER``
without a refusal; a named backend is taken or refused, nothing else is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._library import LOADED
from .arch import KERNEL_TARGETS, Capability, Choice, best_for, runs

AUTO = "auto"
CUDA = "cuda"
REFERENCE = "reference"
ORDER = (CUDA, REFERENCE)  # fastest first

NO_DEVICE = "no_device"
NO_KERNEL = "no_kernel"
NOT_IN_WHEEL = "not_in_wheel"
UNSUITABLE = "unsuitable"
UNKNOWN_BACKEND = "unknown_backend"

CUDA_HEAD_DIM = 128
BOUNDED = "bounded"
SOFTPLUS = "softplus"


@dataclass(frozen=True)
class DeviceFacts:
    """A device: torch's type, its index, its compute capability (CUDA only)."""

    type: str
    index: int | None = None
    capability: Capability | None = None

    @property
    def name(self) -> str:
        """Torch's spelling, for example ``cuda:0``."""
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True)
class LibraryFacts:
    """The compiled library: ``loaded`` or the code of why not, the text for it, the architectures inside."""

    code: str
    text: str = ""
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything a decision may depend on besides the request."""

    device: DeviceFacts
    library: LibraryFacts


@dataclass(frozen=True)
class Request:
    """What a call asks for: backend name or ``auto``, head sizes, kind of gate. Tensors are bf16 by then."""

    backend: str = AUTO
    head_k: int = CUDA_HEAD_DIM
    head_v: int = CUDA_HEAD_DIM
    gate: str = BOUNDED


@dataclass(frozen=True)
class Refusal:
    """Why a backend does not run the call: a stable ``code`` and a text that ends with what to do."""

    backend: str
    code: str
    text: str


@dataclass(frozen=True)
class Decision:
    """The backend chosen (None when every one asked refused) and the refusals met on the way."""

    backend: str | None
    refusals: tuple[Refusal, ...] = ()


class Unavailable(ValueError):
    """No backend can run the call. ``refusals`` holds every reason; the first one's fields are attributes.

    Attributes:
        backend: the backend asked for, or ``auto``.
        device: torch's spelling of the device.
        code: code of the first refusal.
        refusals: every refusal.
    """

    def __init__(self, backend: str, device: str, refusals: tuple[Refusal, ...]) -> None:
        self.backend = backend
        self.device = device
        self.refusals = refusals
        self.code = refusals[0].code if refusals else ""
        super().__init__(
            f"backend={backend!r} cannot run on {device}: " + "; ".join(r.text for r in refusals)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is copied by calling its class with ``args``, which holds the message alone; one that
        # cannot be copied hangs a multiprocessing pool.
        return type(self), (self.backend, self.device, self.refusals), vars(self)


def _dotted(cc: Capability) -> str:
    return f"{cc[0]}.{cc[1]}"


def _kernel_capability(device: DeviceFacts) -> tuple[str, str] | None:
    if device.type != CUDA or device.capability is None:
        return NO_DEVICE, f"it runs on CUDA tensors, and these are on {device.name}"
    if any(runs(row.target, device.capability) for row in KERNEL_TARGETS):
        return None
    names = ", ".join(row.target.name for row in KERNEL_TARGETS)
    return NO_KERNEL, f"no kernels for compute capability {_dotted(device.capability)} (there are: {names})"


def _wanted(cc: Capability) -> str:
    return " or ".join(row.target.name for row in KERNEL_TARGETS if runs(row.target, cc))


def _library_availability(facts: Facts) -> tuple[str, str] | None:
    library, device = facts.library, facts.device
    if library.code != LOADED:
        return library.code, library.text
    if device.capability is None or best_for(library.choices, device.capability) is not None:
        return None
    held = ", ".join(choice.name for choice in library.choices) or "nothing"
    wanted = _wanted(device.capability)
    text = (
        f"this build holds machine code for {held}, and {device.name} has compute capability "
        f"{_dotted(device.capability)} (needs {wanted}); install a wheel that lists it, or rebuild with "
        f"FLASH_KDA_CUDA_ARCHS={wanted.split(' ')[0]}"
    )
    return NOT_IN_WHEEL, text


def _cuda_suitability(request: Request) -> tuple[str, str] | None:
    if (request.head_k, request.head_v) != (CUDA_HEAD_DIM, CUDA_HEAD_DIM):
        # A traced call knows only that a dynamic size is not 128, and passes 0.
        got = f"K = {request.head_k or '?'}, V = {request.head_v or '?'}"
        return UNSUITABLE, f"the head sizes are {got}, the kernels take K = V = {CUDA_HEAD_DIM}"
    if request.gate != BOUNDED:
        return UNSUITABLE, "lower_bound is None (softplus gate), the kernels take a bounded gate in [-5, 0)"
    return None


def _refuse_cuda(facts: Facts, request: Request) -> tuple[str, str] | None:
    return _kernel_capability(facts.device) or _library_availability(facts) or _cuda_suitability(request)


def _refuse_reference(facts: Facts, request: Request) -> tuple[str, str] | None:
    return None


_RULES: dict[str, Callable[[Facts, Request], tuple[str, str] | None]] = {
    CUDA: _refuse_cuda,
    REFERENCE: _refuse_reference,
}


def decide(facts: Facts, request: Request) -> Decision:
    """The backend for a request, with the refusals met before it. Pure and total."""
    if request.backend != AUTO and request.backend not in _RULES:
        names = ", ".join((AUTO, *ORDER))
        refusal = Refusal(request.backend, UNKNOWN_BACKEND, f"there is no such backend; there are: {names}")
        return Decision(None, (refusal,))
    refusals: list[Refusal] = []
    for backend in ORDER if request.backend == AUTO else (request.backend,):
        reason = _RULES[backend](facts, request)
        if reason is None:
            return Decision(backend, tuple(refusals))
        refusals.append(Refusal(backend, *reason))
    return Decision(None, tuple(refusals))
