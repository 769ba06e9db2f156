"""CUDA architectures: their spelling, what runs on what, and the choice of what to build.

Standard library only and free of imports from this package: ``setup.py`` and ``ci`` load this file by its
path, so that planning a build needs neither torch nor nvcc.  The table ``KERNEL_TARGETS`` is the one home of
the architectures that have kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

ENV = "FLASH_KDA_CUDA_ARCHS"
Capability = tuple[int, int]


@dataclass(frozen=True, order=True)
class Target:
    """One nvcc architecture: compute capability and feature suffix (``""``, ``"a"`` or ``"f"``).

    ``a`` is code for exactly that capability, ``f`` for its family; compare targets, never formatted strings.
    """

    major: int
    minor: int
    suffix: str = ""

    @property
    def name(self) -> str:
        """Canonical spelling, for example ``90a``."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def sm(self) -> str:
        """Name of the machine code, for example ``sm_90a``."""
        return f"sm_{self.name}"

    @property
    def compute(self) -> str:
        """Name of the virtual architecture, for example ``compute_90a``."""
        return f"compute_{self.name}"

    @property
    def cc(self) -> Capability:
        """Compute capability ``(major, minor)``."""
        return (self.major, self.minor)


@dataclass(frozen=True, order=True)
class Choice:
    """One architecture to build: its machine code and, when ``ptx``, its PTX beside it."""

    target: Target
    ptx: bool = False

    @property
    def name(self) -> str:
        """Spelling in ``FLASH_KDA_CUDA_ARCHS``, for example ``100f+PTX``."""
        return self.target.name + ("+PTX" if self.ptx else "")


@dataclass(frozen=True)
class KernelTarget:
    """A target that has kernels: the GPUs it serves, the oldest CUDA that emits it, whether ``all`` means it.

    ``min_cuda`` is for messages only: the nvcc that will be used is asked.
    """

    target: Target
    gpus: tuple[str, ...]
    min_cuda: tuple[int, int]
    default_in_all: bool

    @property
    def needs(self) -> str:
        """Suffix the kernels need, ``"a"`` or ``"f"``."""
        return self.target.suffix


KERNEL_TARGETS: tuple[KernelTarget, ...] = (
    KernelTarget(Target(9, 0, "a"), ("H100", "H200", "GH200"), (12, 0), True),
    KernelTarget(Target(10, 0, "a"), ("B200", "GB200"), (12, 8), True),
    KernelTarget(Target(10, 0, "f"), ("B200", "GB200", "B300", "GB300", "Rubin"), (12, 9), False),
    KernelTarget(Target(10, 3, "a"), ("B300", "GB300"), (12, 9), True),
    KernelTarget(Target(10, 7, "a"), ("Rubin",), (13, 4), True),
    KernelTarget(Target(12, 0, "a"), ("RTX 50", "RTX PRO Blackwell"), (12, 8), True),
    KernelTarget(Target(12, 0, "f"), ("RTX 50", "RTX PRO Blackwell", "GB10"), (12, 9), False),
)


# Devices that the kernels compiled at run time (flash_kda/cute) were written for.
CUTE_DSL_CAPABILITIES: tuple[Capability, ...] = ((9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1))


@dataclass(frozen=True)
class Problem:
    """Why one item of a request (or one GPU) cannot be served; ``code`` is stable, ``text`` is for people."""

    item: str
    code: str
    text: str


class ArchSelectionError(ValueError):
    """A request for architectures that cannot be built; ``problems`` holds every reason at once."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[Problem, ...] = tuple(problems)

    @property
    def codes(self) -> tuple[str, ...]:
        """The distinct problem codes, sorted."""
        return tuple(sorted({problem.code for problem in self.problems}))


class ProbeError(RuntimeError):
    """nvcc could not answer (no host compiler, broken install): not the same as "unsupported"."""


Emit = Callable[[Target], bool]
Devices = Callable[[], Sequence[Capability]]
# Compiles an empty kernel for the choices; returns what the compiler said for those that failed.
CompileCheck = Callable[[Sequence[Choice]], Mapping[Choice, str]]


@dataclass(frozen=True)
class Resolution:
    """What to build, sorted, and the notices to print."""

    choices: tuple[Choice, ...]
    notices: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Spellings of the choices."""
        return tuple(choice.name for choice in self.choices)

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets of the choices."""
        return tuple(choice.target for choice in self.choices)


# ---- what runs on what -------------------------------------------------------------------------------------

_FIRST_A, _FIRST_F = (9, 0), (10, 0)


def native(cc: Capability) -> Target:
    """The target for exactly one device: suffix ``a`` from 9.0 on, as the CuTe DSL and Triton choose it."""
    return Target(*cc, "a" if cc >= _FIRST_A else "")


def runs(target: Target, cc: Capability) -> bool:
    """Whether machine code for `target` loads on a device of compute capability `cc`.

    ``a``: that capability alone; ``f`` and plain: same major, device minor at least the target's.
    Source: CUDA Blackwell Compatibility Guide; agrees with ptxas 13.0 and 13.5 on all 20 targets.
    """
    if target.suffix == "a":
        return target.cc == tuple(cc)
    return target.major == cc[0] and target.minor <= cc[1]


def runs_ptx(target: Target, cc: Capability) -> bool:
    """Whether the driver can compile PTX for `target` on a device of compute capability `cc`.

    Plain PTX crosses majors upwards; ``f`` stays in its family; ``a`` reaches its own capability alone.
    """
    if target.suffix:
        return runs(target, cc)
    return target.cc <= tuple(cc)


def best_for(choices: Iterable[Choice], cc: Capability) -> Choice | None:
    """The choice that serves `cc` best: exact ``a``, else highest minor, else PTX; None when nothing does."""
    every = list(choices)
    loadable = [choice for choice in every if runs(choice.target, cc)]
    if loadable:
        return max(loadable, key=lambda choice: (choice.target.suffix == "a", choice.target))
    return max((c for c in every if c.ptx and runs_ptx(c.target, cc)), default=None)


def gencode_flags(choices: Iterable[Choice | Target]) -> list[str]:
    """nvcc arguments, two a choice: ``-gencode``, ``arch=compute_T,code=sm_T`` (or ``[sm_T,compute_T]``)."""
    flags: list[str] = []
    for item in choices:
        choice = item if isinstance(item, Choice) else Choice(item)
        target = choice.target
        code = f"[{target.sm},{target.compute}]" if choice.ptx else target.sm
        flags += ["-gencode", f"arch={target.compute},code={code}"]
    return flags


# ---- grammar -----------------------------------------------------------------------------------------------

_ITEM = re.compile(r"(?:sm_?)?(?:([1-9][0-9]?)\.([0-9])|([1-9][0-9]?)([0-9]))([af]?)(\+ptx)?")
_SEPARATORS = re.compile(r"[,;\s]+")
_FORMS = "write 90a, sm_90a or 9.0a"
_KEYWORDS = ("all", "auto")


def _parse_item(text: str) -> Choice | Problem:
    lowered = text.lower()
    match = _ITEM.fullmatch(lowered)
    if match is None:
        return Problem(text, "syntax", _syntax_reason(lowered))
    dotted_major, dotted_minor, major, minor, suffix, ptx = match.groups()
    target = Target(int(dotted_major or major), int(dotted_minor or minor), suffix)
    if ptx and suffix == "a":
        reason = (
            f"PTX of {target.name} compiles for that GPU alone, so it adds no reach; write {target.name}."
        )
        return Problem(text, "ptx", reason)
    return Choice(target, bool(ptx))


def _syntax_reason(lowered: str) -> str:
    if lowered in _KEYWORDS:
        return f"'{lowered}' stands alone; it cannot be part of a list."
    if lowered.startswith("compute_"):
        return "names a virtual architecture; write 90a (machine code) or 100f+PTX (machine code and PTX)."
    return f"not an architecture; {_FORMS}."


def parse_target(text: str) -> Target:
    """Read one architecture such as ``90a``, ``sm_90a`` or ``9.0a`` (case and outer space ignored).

    Raises ArchSelectionError naming the text and the accepted forms.
    """
    item = _parse_item(text.strip())
    if isinstance(item, Choice) and not item.ptx:
        return item.target
    reason = item.text if isinstance(item, Problem) else f"'+PTX' is not part of a target; {_FORMS}."
    code = item.code if isinstance(item, Problem) else "ptx"
    raise ArchSelectionError(f"architecture {text!r}: {reason}", [Problem(text, code, reason)])


def parse_list(value: str) -> tuple[list[Choice], list[Problem]]:
    """Split a list of architectures into the choices, sorted and merged, and every problem found."""
    parsed = [_parse_item(token) for token in _SEPARATORS.split(value) if token]
    with_ptx = {item.target for item in parsed if isinstance(item, Choice) and item.ptx}
    targets = {item.target for item in parsed if isinstance(item, Choice)}
    choices = [Choice(target, target in with_ptx) for target in sorted(targets)]
    return choices, [item for item in parsed if isinstance(item, Problem)]


def dotted(capability: Capability) -> str:
    """A compute capability as NVIDIA writes it, for example ``9.0``."""
    return f"{capability[0]}.{capability[1]}"


_CAPABILITY = re.compile(r"([1-9][0-9]?)\.([0-9])")


def parse_capability(value: object) -> Capability:
    """Read a compute capability: ``(9, 0)``, ``"9.0"`` or ``9.0``.

    Raises:
        TypeError: another type.
        ValueError: not a capability.
    """
    takes = 'takes a compute capability such as "9.0" or (9, 0)'
    if isinstance(value, (tuple, list)):
        if not all(type(part) is int for part in value):  # bool is an int to Python
            raise TypeError(f"capability={value!r}: {takes}")
        text = ".".join(map(str, value))
    elif isinstance(value, (str, float)):
        text = str(value).strip()
    else:
        raise TypeError(f"capability={value!r}: {takes}")
    match = _CAPABILITY.fullmatch(text)
    if match is None:
        raise ValueError(f"capability={value!r}: {takes}")
    return int(match[1]), int(match[2])


# ---- resolver ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    value: str | None
    table: tuple[KernelTarget, ...]
    emit: Emit
    devices: Devices
    strict: bool
    compiler: str

    def rows(self) -> dict[Target, KernelTarget]:
        return {row.target: row for row in self.table}

    def too_old(self, target: Target) -> str:
        need = ".".join(str(part) for part in self.rows()[target].min_cuda)
        return f"{self.compiler} cannot emit {target.name}; needs CUDA {need} or newer"


def resolve(
    value: str | None,
    table: Iterable[KernelTarget],
    emit: Emit,
    devices: Devices,
    strict: bool = False,
    *,
    compiler: str = "nvcc",
    compile_check: CompileCheck | None = None,
) -> Resolution:
    """Choose the architectures to build.

    `value` is ``FLASH_KDA_CUDA_ARCHS`` (None when unset, meaning ``auto``); `emit` says whether the nvcc that
    will be used can emit a target (it may raise ProbeError); `devices` lists the visible GPUs' capabilities;
    `strict` turns a target dropped from ``all`` into an error; `compiler` names nvcc in messages;
    `compile_check` compiles an empty kernel for the choices and returns what nvcc said of those that failed.

    Raises ArchSelectionError, with every reason at once, before anything is compiled.
    """
    rows = tuple(sorted(table, key=lambda row: row.target))
    request = _Request(value, rows, emit, devices, strict, compiler)
    keyword = "auto" if value is None else value.strip().lower()
    if keyword == "all":
        resolution = _resolve_all(request)
    elif keyword == "auto":
        resolution = _resolve_auto(request)
    else:
        resolution = _resolve_list(request)
    _check_compiles(request, resolution, compile_check)
    return resolution


def _resolve_all(request: _Request) -> Resolution:
    wanted = [row.target for row in request.table if row.default_in_all]
    dropped = [target for target in wanted if not request.emit(target)]
    kept = [target for target in wanted if target not in dropped]
    problems = [Problem(t.name, "not_emittable", f"{request.too_old(t)}.") for t in dropped]
    if problems and (request.strict or not kept):
        raise _error(request, problems)
    notices = tuple(f"{ENV}='all': {problem.item} left out: {problem.text}" for problem in problems)
    return Resolution(tuple(Choice(target) for target in kept), notices)


def _resolve_auto(request: _Request) -> Resolution:
    capabilities = sorted(set(request.devices()))
    if not capabilities:
        names = ",".join(row.target.name for row in request.table)
        text = f"no visible CUDA GPU; set {ENV} to 'all' or to a list out of {names}."
        raise _error(request, [Problem("auto", "no_device", text)])
    found: set[Target] = set()
    problems: list[Problem] = []
    for cc in capabilities:
        answer = _target_for_device(request, cc)
        if isinstance(answer, Problem):
            problems.append(answer)
        else:
            found.add(answer)
    if not found:
        raise _error(request, problems)
    notices = tuple(f"{ENV}: the GPU of compute capability {p.item} is left out: {p.text}" for p in problems)
    return Resolution(tuple(Choice(target) for target in sorted(found)), notices)


def _target_for_device(request: _Request, cc: Capability) -> Target | Problem:
    fitting = [row.target for row in request.table if runs(row.target, cc)]
    fitting.sort(key=lambda target: (target.suffix == "a", target), reverse=True)
    for target in fitting:
        if request.emit(target):
            return target
    name = dotted(cc)
    if fitting:
        return Problem(name, "not_emittable", f"{request.too_old(fitting[0])}.")
    return Problem(name, "no_kernel", f"no kernels for compute capability {name}.")


def _resolve_list(request: _Request) -> Resolution:
    choices, problems = parse_list(request.value or "")
    if not choices and not problems:
        text = "the value is blank; an unset variable means 'auto', a blank one is taken for a mistake."
        problems = [Problem(request.value or "", "blank", text)]
    known = request.rows()
    unknown = [choice.target for choice in choices if choice.target not in known]
    problems += [Problem(t.name, "unknown", _unknown_reason(t, request.table)) for t in unknown]
    # A value that is wrong in itself is refused without starting nvcc, which may be slow or absent.
    if not any(problem.code in VALUE_CODES for problem in problems):
        old = [
            choice.target for choice in choices if choice.target in known and not request.emit(choice.target)
        ]
        problems += [Problem(t.name, "not_emittable", _not_emittable_reason(request, t)) for t in old]
    if problems:
        raise _error(request, problems)
    return Resolution(tuple(choices))


def _check_compiles(request: _Request, resolution: Resolution, check: CompileCheck | None) -> None:
    failed = check(resolution.choices) if check is not None else {}
    if failed:
        text = f"{request.compiler} accepts it but cannot compile an empty kernel: "
        raise _error(request, [Problem(c.name, "compile_failed", text + said) for c, said in failed.items()])


# ---- messages ----------------------------------------------------------------------------------------------

# Problems of the value itself, whatever the nvcc is.
VALUE_CODES = frozenset({"blank", "syntax", "ptx"})
# CUDA 13.0 renamed 10.1 (Thor) to 11.0; nvcc 12.9 still takes the old name.
_RENAMED = {(10, 1): (11, 0)}


def _unknown_reason(target: Target, table: tuple[KernelTarget, ...]) -> str:
    if target.cc in _RENAMED:
        major, minor = _RENAMED[target.cc]
        return f"renamed {major}{minor}{target.suffix} in CUDA 13.0; flash_kda has no kernels for it."
    if target.suffix == "f" and target.cc < _FIRST_F:
        return "no such target; family targets start at 10.0."
    if target.suffix == "a" and target.cc < _FIRST_A:
        return "not an architecture flash_kda has kernels for (nor one nvcc knows: suffix 'a' starts at 9.0)."
    same = [row.target.name for row in table if row.target.cc == target.cc]
    if target.suffix == "" and same:
        names = " or ".join(same)
        return f"the kernels use instructions only present in {names}; write {names}."
    wider = [row.target for row in table if row.target.suffix == "f" and runs(row.target, target.cc)]
    hint = f"; {wider[-1].name} would cover {dotted(target.cc)}" if wider else ""
    return f"not an architecture flash_kda has kernels for{hint}."


def _not_emittable_reason(request: _Request, target: Target) -> str:
    wider = [
        family.name
        for family in sorted(request.rows())
        if family.suffix == "f" and family != target and runs(family, target.cc) and request.emit(family)
    ]
    hint = f" (or use {wider[-1]})" if wider else ""
    return f"flash_kda has kernels for it, but {request.too_old(target)}{hint}."


def _supported_line(table: tuple[KernelTarget, ...]) -> str:
    exact = [f"{row.target.name} ({'/'.join(row.gpus)})" for row in table if row.target.suffix != "f"]
    families = [row.target.name for row in table if row.target.suffix == "f"]
    text = ", ".join(exact)
    return f"{text}, families {', '.join(families)}" if families else text


def _emit_line(request: _Request, problems: Sequence[Problem]) -> str:
    if any(problem.code in VALUE_CODES for problem in problems):
        return f"{request.compiler} was not asked: the value itself is wrong."
    try:
        names = [row.target.name for row in request.table if request.emit(row.target)]
    except ProbeError as error:
        return f"{request.compiler} could not be asked: {error}"
    return f"{request.compiler} can emit: {' '.join(names) or 'none of these'}."


def _error(request: _Request, problems: Sequence[Problem]) -> ArchSelectionError:
    shown = "unset, so 'auto'" if request.value is None else repr(request.value)
    items = ", ".join(problem.item.strip() or "a blank value" for problem in problems)
    lines = [f"{ENV}={shown}: cannot build for {items}."]
    lines += [f"  {problem.item.strip() or 'blank'}: {problem.text}" for problem in problems]
    lines.append(f"  flash_kda supports: {_supported_line(request.table)}.")
    lines.append(f"  {_emit_line(request, problems)}")
    lines.append("  Use 'auto', 'all', or a comma list such as 90a,100a.")
    return ArchSelectionError("\n".join(lines), problems)
