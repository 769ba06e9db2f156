"""Which backend runs a call, and why the others do not: a pure decision over facts.

Three questions, asked of each backend in this order and never merged:

1. capability: have kernels been written for this device? (``no_device``, ``no_kernel``) Static: the same
   answer whatever is installed (``is_backend_supported``).
2. availability: can this install deliver them now? (``missing_file``, ``undefined_symbol``, ``load_error``,
   ``name_taken``, ``not_in_wheel``; ``no_package``, ``dsl_arch``, ``env_arch``, ``native_only``,
   ``probe_error``, ``import_error``) Only now is anything looked for.
3. suitability: do they do these sizes, this gate? (``unsuitable``)

``decide`` imports no torch, reads no device and never raises. ``auto`` takes the first backend of ``ORDER``
without a refusal; a named backend is taken or refused, nothing else is tried. What a backend raises when it
runs is no refusal: it reaches the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import dsl
from ._library import LOADED
from .arch import (
    CUTE_DSL_CAPABILITIES,
    KERNEL_TARGETS,
    Capability,
    Choice,
    best_for,
    dotted,
    parse_capability,
    runs,
)
from .reasons import (
    NO_DEVICE,
    NO_KERNEL,
    NOT_IN_WHEEL,
    PROBE_ERROR,
    UNKNOWN_BACKEND,
    UNSUITABLE,
    Reason,
)

AUTO = "auto"
CUDA = "cuda"
CUTE_DSL = "cute_dsl"
FLA = "fla"
REFERENCE = "reference"
ORDER = (CUDA, CUTE_DSL, FLA, REFERENCE)  # fastest first
NAMES = (AUTO, *ORDER)
ENV = "FLASH_KDA_BACKEND"

CUDA_HEAD_DIM = 128
FLA_HEAD_MIN, FLA_HEAD_K_MAX = 16, 256  # a Triton matrix product has no shorter side; fla asserts the other
# What a traced head size is to the decision when it is not 128: one in that range, one outside it.
TRACED_HEAD, TRACED_OTHER_HEAD = -1, 0
FLA_OLDEST: Capability = (8, 0)
# Whether the kernels of flash_kda/cute use what only a device's own target has, so that a family's won't do.
CUTE_DSL_NATIVE_ONLY = False
BOUNDED = "bounded"
SOFTPLUS = "softplus"

NAME = "name"  # of what was asked for: is there such a backend?
CAPABILITY = "capability"
AVAILABILITY = "availability"
SUITABILITY = "suitability"


@dataclass(frozen=True)
class DeviceFacts:
    """A device: torch's type, its index, its compute capability (CUDA only).

    ``hip``: torch calls AMD's GPUs ``cuda`` too, and their capability has nothing to do with NVIDIA's: an
    MI250 says 9.0.
    """

    type: str
    index: int | None = None
    capability: Capability | None = None
    hip: bool = False

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
    """Everything a decision may depend on besides the request.

    ``cute_dsl`` (what is installed and pinned of the DSL) and ``fla`` (why flash-linear-attention cannot be
    called, None when it can) are functions, called when the answer is needed and no sooner: a call that the
    kernels in the wheel run looks for nothing else. ``broken`` has the backends whose import failed.
    """

    device: DeviceFacts
    library: LibraryFacts
    cute_dsl: Callable[[], dsl.DslFacts]
    fla: Callable[[], Reason | None]
    broken: Mapping[str, Reason] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What a call asks for: backend name or ``auto``, head sizes, kind of gate. Tensors are bf16 by then.

    ``pinned``: the name comes from ``FLASH_KDA_BACKEND``, for messages.
    """

    backend: str = AUTO
    head_k: int = CUDA_HEAD_DIM
    head_v: int = CUDA_HEAD_DIM
    gate: str = BOUNDED
    pinned: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why a backend does not run the call: a stable ``code`` and a text that ends with what to do."""

    backend: str
    code: str
    text: str


@dataclass(frozen=True)
class Decision:
    """The backend chosen (None when every one asked refused) and the refusals met on the way.

    ``cause``: the first exception that a refusal was made of.
    """

    backend: str | None
    refusals: tuple[Refusal, ...] = ()
    cause: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """One backend's answer in a trace: the question that ended it (None: it can run the call), its code and
    text; for a backend that can, ``text`` says what would run."""

    backend: str
    question: str | None
    code: str
    text: str

    def __str__(self) -> str:
        if self.question is None:
            return f"{self.backend:<10} yes: {self.text}"
        return f"{self.backend:<10} no, {self.question}: {self.code}: {self.text}"


class Unavailable(ValueError):
    """No backend can run the call. ``refusals`` holds every reason; the first one's fields are attributes.

    Attributes:
        backend: the backend asked for, or ``auto``.
        device: torch's spelling of the device.
        cc: its compute capability, None where there is none.
        code: code of the first refusal.
        text: text of the first refusal.
        refusals: every refusal.
    """

    def __init__(
        self,
        backend: str,
        device: str,
        refusals: tuple[Refusal, ...],
        cc: Capability | None = None,
        pinned: bool = False,
    ) -> None:
        self.backend = backend
        self.device = device
        self.refusals = refusals
        self.cc = cc
        self.pinned = pinned
        self.code = refusals[0].code if refusals else ""
        self.text = refusals[0].text if refusals else ""
        asked = f"backend={backend!r}" + (f" (of {ENV})" if pinned else "")
        reasons = (f"{r.backend}: {r.text}" if backend == AUTO else r.text for r in refusals)
        super().__init__(f"{asked} cannot run on {device}: " + "; ".join(reasons))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is copied by calling its class with ``args``, which holds the message alone; one that
        # cannot be copied hangs a multiprocessing pool.
        arguments = (self.backend, self.device, self.refusals, self.cc, self.pinned)
        return type(self), arguments, vars(self)


# ---- capability --------------------------------------------------------------------------------------------


def _has_image(cc: Capability) -> bool:
    return any(runs(row.target, cc) for row in KERNEL_TARGETS)


# What each backend was written for. No entry of it may depend on what is installed.
_WRITTEN_FOR: dict[str, Callable[[Capability], bool]] = {
    CUDA: _has_image,
    CUTE_DSL: lambda cc: cc in CUTE_DSL_CAPABILITIES,
    FLA: lambda cc: cc >= FLA_OLDEST,
    REFERENCE: lambda cc: True,
}
_THERE_IS: dict[str, str] = {
    CUDA: ", ".join(row.target.name for row in KERNEL_TARGETS),
    CUTE_DSL: ", ".join(map(dotted, CUTE_DSL_CAPABILITIES)),
    FLA: f"{dotted(FLA_OLDEST)} and newer",
}


def is_backend_supported(backend: str, capability: object) -> bool:
    """Whether a backend has kernels for NVIDIA GPUs of a compute capability: the same on every machine, for
    whether what is installed can deliver them is another question: :func:`flash_kda.explain`.

    Args:
        backend: ``cuda``, ``cute_dsl``, ``fla`` or ``reference``.
        capability: ``(9, 0)``, ``"9.0"`` or ``9.0``.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: no such backend, or not a compute capability.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend={backend!r}: takes one of {', '.join(ORDER)}")
    if backend not in ORDER:
        raise ValueError(f"backend={backend!r}: there is no such backend; there are: {', '.join(ORDER)}")
    return _WRITTEN_FOR[backend](parse_capability(capability))


def _capability(backend: str, device: DeviceFacts) -> Reason | None:
    if backend == REFERENCE or (backend == FLA and device.type == "cuda" and device.hip):
        return None
    if device.type != "cuda" or device.capability is None:
        return Reason(NO_DEVICE, f"it runs on CUDA tensors, and these are on {device.name}")
    if device.hip:
        return Reason(NO_KERNEL, f"{device.name} is an AMD GPU, and its kernels are NVIDIA machine code")
    if _WRITTEN_FOR[backend](device.capability):
        return None
    said = f"no kernels for compute capability {dotted(device.capability)} (there are: {_THERE_IS[backend]})"
    return Reason(NO_KERNEL, said)


# ---- availability ------------------------------------------------------------------------------------------


def _wanted(cc: Capability) -> list[str]:
    """Targets that would serve a device, the exact one first."""
    fitting = (row.target for row in KERNEL_TARGETS if runs(row.target, cc))
    return [target.name for target in sorted(fitting, key=lambda target: target.suffix != "a")]


def _library_availability(facts: Facts) -> Reason | None:
    library, device = facts.library, facts.device
    if library.code != LOADED:
        return Reason(library.code, library.text)
    if device.capability is None or best_for(library.choices, device.capability) is not None:
        return None
    held = ", ".join(choice.name for choice in library.choices) or "nothing"
    wanted = _wanted(device.capability)
    gpu = "the GPU" if device.index is None else device.name
    text = (
        f"this build holds machine code for {held}, and {gpu} is of compute capability "
        f"{dotted(device.capability)} (needs {' or '.join(wanted)}); install a wheel that lists "
        f"it, or rebuild with FLASH_KDA_CUDA_ARCHS={wanted[0]}"
    )
    return Reason(NOT_IN_WHEEL, text)


def _cute_arch(facts: Facts) -> str | Reason:
    device = facts.device
    assert device.capability is not None  # capability was asked before
    return dsl.compile_arch(facts.cute_dsl(), device.capability, CUTE_DSL_NATIVE_ONLY, device.name)


def _cute_availability(facts: Facts) -> Reason | None:
    answer = _cute_arch(facts)
    return answer if isinstance(answer, Reason) else None


_AVAILABILITY: dict[str, Callable[[Facts], Reason | None]] = {
    CUDA: _library_availability,
    CUTE_DSL: _cute_availability,
    FLA: lambda facts: facts.fla(),
    REFERENCE: lambda facts: None,
}


def _availability(backend: str, facts: Facts) -> Reason | None:
    """A requirement that raises NotImplementedError has refused; anything else it raises is a bug."""
    try:
        return facts.broken.get(backend) or _AVAILABILITY[backend](facts)
    except NotImplementedError as error:
        return Reason(PROBE_ERROR, str(error) or type(error).__name__, error)


# ---- suitability -------------------------------------------------------------------------------------------


def _shown(request: Request) -> str:
    k, v = (size if size > 0 else "?" for size in (request.head_k, request.head_v))
    return f"the head sizes are K = {k}, V = {v}"


def _square(request: Request) -> Reason | None:
    if (request.head_k, request.head_v) == (CUDA_HEAD_DIM, CUDA_HEAD_DIM):
        return None
    return Reason(UNSUITABLE, f"{_shown(request)}, the kernels take K = V = {CUDA_HEAD_DIM}")


def _cuda_suitability(request: Request) -> Reason | None:
    if request.gate != BOUNDED:
        text = "lower_bound is None (softplus gate), the kernels take a bounded gate in [-5, 0)"
        return _square(request) or Reason(UNSUITABLE, text)
    return _square(request)


def _fla_suitability(request: Request) -> Reason | None:
    fits_k = FLA_HEAD_MIN <= request.head_k <= FLA_HEAD_K_MAX or request.head_k == TRACED_HEAD
    fits_v = request.head_v >= FLA_HEAD_MIN or request.head_v == TRACED_HEAD
    if fits_k and fits_v:
        return None
    takes = f"K from {FLA_HEAD_MIN} to {FLA_HEAD_K_MAX} and V from {FLA_HEAD_MIN}"
    return Reason(UNSUITABLE, f"{_shown(request)}, the kernels take {takes}")


_SUITABILITY: dict[str, Callable[[Request], Reason | None]] = {
    CUDA: _cuda_suitability,
    CUTE_DSL: _square,
    FLA: _fla_suitability,
    REFERENCE: lambda request: None,
}


# ---- the decision ------------------------------------------------------------------------------------------


def _ask(backend: str, facts: Facts, request: Request) -> tuple[str, Reason] | None:
    """The first of the three questions that a backend fails, and why; None when it can run the call."""
    if reason := _capability(backend, facts.device):
        return CAPABILITY, reason
    if reason := _availability(backend, facts):
        return AVAILABILITY, reason
    if reason := _SUITABILITY[backend](request):
        return SUITABILITY, reason
    return None


def _unknown(request: Request) -> Refusal | None:
    if request.backend in NAMES:
        return None
    got = f"{ENV}={request.backend!r}: " if request.pinned else ""
    text = f"{got}there is no such backend; there are: {', '.join(NAMES)}"
    return Refusal(request.backend, UNKNOWN_BACKEND, text)


def decide(facts: Facts, request: Request) -> Decision:
    """The backend for a request, with the refusals met before it. Pure and total."""
    if unknown := _unknown(request):
        return Decision(None, (unknown,))
    refusals: list[Refusal] = []
    cause: Exception | None = None
    for backend in ORDER if request.backend == AUTO else (request.backend,):
        answer = _ask(backend, facts, request)
        if answer is None:
            return Decision(backend, tuple(refusals), cause)
        reason = answer[1]
        refusals.append(Refusal(backend, reason.code, reason.text))
        cause = cause or reason.cause
    return Decision(None, tuple(refusals), cause)


def _what_runs(backend: str, facts: Facts) -> str:
    if backend == CUDA and facts.device.capability is not None:
        choice = best_for(facts.library.choices, facts.device.capability)
        return f"runs the library's {choice.name}" if choice is not None else ""
    if backend == CUTE_DSL:
        return f"compiles for {_cute_arch(facts)} when first called"
    return {FLA: "flash-linear-attention's Triton kernels", REFERENCE: "torch, slow"}.get(backend, "")


def trace(facts: Facts, request: Request) -> tuple[Verdict, ...]:
    """What each backend says of a request, those after the winner too; before them, that there is no such
    backend as it names. Pure; probes what they need."""
    unknown = _unknown(request)
    verdicts = [] if unknown is None else [Verdict(unknown.backend, NAME, unknown.code, unknown.text)]
    for backend in ORDER:
        answer = _ask(backend, facts, request)
        if answer is None:
            verdicts.append(Verdict(backend, None, "", _what_runs(backend, facts)))
        else:
            question, reason = answer
            verdicts.append(Verdict(backend, question, reason.code, reason.text))
    return tuple(verdicts)
