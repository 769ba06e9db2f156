"""The installed CuTe DSL (``nvidia-cutlass-dsl``): which targets it has, and the one to compile for.

Nothing of it is imported: importing ``cutlass`` takes seconds, and ``find_spec("cutlass.cute")`` would import
the parent. The names are read out of the source of its ``Arch`` enum, in milliseconds.

``compile_arch`` is the one answer to "for which target": the dispatcher asks it whether there is one, the
backend hands what it says to every compile. So they cannot disagree, and no name that the DSL does not know
reaches it (it answers those with a bare ``KeyError``). Whatever goes wrong on the way means "unavailable".
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arch import ArchSelectionError, Capability, Target, dotted, native, parse_target, runs
from .reasons import DSL_ARCH, ENV_ARCH, NATIVE_ONLY, NO_PACKAGE, PROBE_ERROR, Reason

DISTRIBUTION = "nvidia-cutlass-dsl"
MODULE = "cutlass"
ENV = "CUTE_DSL_ARCH"
EXTRA = "pip install 'flash-kda[cute]'"

# First version with a device's own target, for messages; the decision is what the installed source says.
FIRST_VERSION: dict[Capability, str] = {(10, 7): "4.8"}

_SINGLETON = "CUTE_DSL"  # the front end that reads ENV; cute.experimental has another, with its own variable
_PREFIX = "sm_"


@dataclass(frozen=True)
class Install:
    """What is installed: version, names of the targets in the order of the source, which name stands for
    which other one; or ``reason``, why it cannot be used."""

    version: str | None = None
    members: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    reason: Reason | None = None


@dataclass(frozen=True)
class DslFacts:
    """Everything ``compile_arch`` depends on besides the device: the install, the target the user pinned."""

    install: Install
    pin: str | None = None


# ---- what is installed -------------------------------------------------------------------------------------


def _enum_body(source: str) -> list[ast.stmt]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Arch":
            return node.body
    return []


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Pairs of target name and value, also of those under an ``if`` (4.6.2 has some, by CUDA version)."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _assignments([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Assign):
            for name in statement.targets:
                if isinstance(name, ast.Name) and name.id.startswith(_PREFIX):
                    yield name.id, statement.value


def _is_target(name: str) -> bool:
    try:
        parse_target(name)
    except ArchSelectionError:
        return False
    return True


def parse_members(source: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Names of the ``Arch`` members in a Python source, and the pairs (alias, name it stands for).

    A name that is no target, or stands for none, is left out: a newer DSL may have one.
    A name assigned twice counts as it is first: 4.6.2 tells CUDA 13, where 101 is the old name of 110, from
    CUDA 12, where no device reports 11.0, in this order.
    """
    found: dict[str, str | None] = {}
    for name, value in _assignments(_enum_body(source)):
        other = value.id if isinstance(value, ast.Name) else None
        if _is_target(name) and (other is None or _is_target(other)):
            found.setdefault(name, other)
    return tuple(found), tuple((name, other) for name, other in found.items() if other is not None)


def _version() -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folders() -> list[Path]:
    # The top level only: for a submodule find_spec imports the parent.
    spec = importlib.util.find_spec(MODULE)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []


def _sources(folders: list[Path]) -> Iterator[Path]:
    # enums.py since 4.7, where importing arch.py warns; before that arch.py has the class.
    for name in ("enums.py", "arch.py"):
        yield from (path for folder in folders if (path := folder / "base_dsl" / name).is_file())


def _read_install() -> Install:
    version = _version()
    if version is None:
        return Install(reason=Reason(NO_PACKAGE, f"{DISTRIBUTION} is not installed; {EXTRA}"))
    folders = _folders()
    if not any((folder / "base_dsl").is_dir() for folder in folders):
        where = ", ".join(map(str, folders)) or "nowhere"
        text = (
            f"the import name {MODULE} is not {DISTRIBUTION} {version}'s (it is {where}); reinstall: {EXTRA}"
        )
        return Install(version, reason=Reason(NO_PACKAGE, text))
    for path in _sources(folders):
        members, aliases = parse_members(path.read_text(encoding="utf-8"))
        if members:
            return Install(version, members, aliases)
    text = f"{DISTRIBUTION} {version} has no list of targets in base_dsl/enums.py or arch.py"
    return Install(version, reason=_probe_error(text))


def _probe_error(text: str, cause: Exception | None = None) -> Reason:
    return Reason(PROBE_ERROR, f"{text}; use a version between the bounds of the extra: {EXTRA}", cause)


@functools.cache
def installed() -> Install:
    """What is installed, read once a process. Never raises: what cannot be read is not available."""
    try:
        return _read_install()
    except Exception as error:  # whatever a foreign or damaged package makes of it
        text = f"the targets of {DISTRIBUTION} could not be read ({type(error).__name__}: {error})"
        return Install(reason=_probe_error(text, error))


# ---- what the user pinned ----------------------------------------------------------------------------------


def _captured() -> tuple[bool, str | None]:
    """Whether the DSL has read its environment already, and what it took for a target then.

    It does so when it is imported, and a value set later is ignored. ``_arch`` is read, not ``arch``: the
    property would ask the driver and store the answer.
    """
    module: Any = sys.modules.get(f"{MODULE}.base_dsl.dsl")
    try:
        for front_end in module.DSLSingletonMeta._instances.values():
            if front_end.name == _SINGLETON:
                return True, front_end.envar._arch
    except AttributeError:
        pass  # not imported; or other internals: then the variable stands in, and is checked as ever
    return False, None


def pinned(first_device: Callable[[], Capability | None]) -> str | None:
    """The target that the user asked for, None when none: ``CUTE_DSL_ARCH``, or, once the DSL is imported,
    what it captured then.

    Args:
        first_device: capability of CUDA device 0. The DSL stores that device's target too where nobody
            asked for one, so a captured value that equals it is not counted.
    """
    is_captured, value = _captured()
    if not is_captured:
        value = os.environ.get(ENV)
    if value is None or not value.strip():
        return None
    first = first_device() if is_captured else None
    return None if first is not None and value == native(first).sm else value


# ---- the target to compile for -----------------------------------------------------------------------------


def _target(name: str, install: Install) -> Target:
    return parse_target(dict(install.aliases).get(name, name))


def _has(install: Install, target: Target) -> bool:
    """Whether the name means that target: to CUDA 13 an old name of another device's may look like it."""
    return target.sm in install.members and _target(target.sm, install) == target


def _meant(pin: str, members: tuple[str, ...]) -> str | None:
    """A member that differs from the pin in spelling alone."""
    try:
        name = parse_target(pin).sm
    except ArchSelectionError:
        return None
    return name if name in members else None


def _unknown_pin(facts: DslFacts, pin: str, cc: Capability) -> Reason:
    install = facts.install
    meant = _meant(pin, install.members)
    fitting = [name for name in install.members if _target(name, install).major == cc[0]]
    hint = f"did you mean {meant}?" if meant else f"it has {', '.join(fitting) or 'none for this device'}."
    return Reason(
        ENV_ARCH, f"{ENV}={pin!r} is not a target of {DISTRIBUTION} {install.version}; {hint} (or unset it)"
    )


def _needs_native(wanted: Target, got: str, next_step: str) -> Reason:
    text = f"this kernel needs {wanted.sm} itself; {got} is not enough. {next_step}"
    return Reason(NATIVE_ONLY, text)


def _from_pin(facts: DslFacts, pin: str, cc: Capability, native_only: bool, device: str) -> str | Reason:
    if pin not in facts.install.members:  # spelled exactly so: the DSL knows no other spelling
        return _unknown_pin(facts, pin, cc)
    target = _target(pin, facts.install)
    if not runs(target, cc):
        return Reason(ENV_ARCH, f"{ENV}={pin} cannot run on {device} ({dotted(cc)}); unset it")
    if native_only and target != native(cc):
        kind = "family target" if target.suffix == "f" else "target"
        return _needs_native(native(cc), f"{kind} {pin}", f"Unset {ENV}")
    return pin


def _family(install: Install, cc: Capability) -> str | None:
    """The family target that serves a device: the one of minor version 0, else the lowest there is."""
    targets = sorted({_target(name, install) for name in install.members})
    return next((t.sm for t in targets if t.suffix == "f" and runs(t, cc)), None)


def _no_native(install: Install, cc: Capability, native_only: bool, device: str) -> Reason:
    wanted = native(cc).sm
    newer = f"upgrade it to >={FIRST_VERSION[cc]}" if cc in FIRST_VERSION else ""
    text = f"{DISTRIBUTION} {install.version} has no target {wanted} for {device} ({dotted(cc)})"
    if native_only:
        return Reason(DSL_ARCH, f"{text}, and this kernel needs that one; {newer or 'upgrade it'}")
    family = _family(install, cc)
    export = f"export {ENV}={family} before Python starts, to build for the family" if family else ""
    return Reason(DSL_ARCH, f"{text}; {', or '.join(filter(None, (newer, export))) or 'upgrade it'}")


def compile_arch(
    facts: DslFacts, cc: Capability, native_only: bool, device: str = "the device"
) -> str | Reason:
    """Name of the target to compile for, or why there is none. Pure.

    The user's pin wins over the device's own target; a family target is never chosen unasked.

    Args:
        facts: what is installed and pinned.
        cc: compute capability of the device the code will run on.
        native_only: whether the kernel uses what only the device's own target has.
        device: the device in words, for messages.
    """
    install = facts.install
    if install.reason is not None:
        return install.reason
    if facts.pin is not None:
        return _from_pin(facts, facts.pin, cc, native_only, device)
    if _has(install, native(cc)):
        return native(cc).sm
    return _no_native(install, cc, native_only, device)


@functools.lru_cache(maxsize=64)
def _resolved(cc: Capability, native_only: bool, pin: str | None, device: str) -> str | Reason:
    return compile_arch(DslFacts(installed(), pin), cc, native_only, device)


def require_arch(
    cc: Capability, native_only: bool, first_device: Callable[[], Capability | None], device: str
) -> str:
    """``compile_arch`` of this process, cached.

    Raises:
        NotImplementedError: there is no target; the message is the reason's text.
    """
    answer = _resolved(cc, native_only, pinned(first_device), device)
    if isinstance(answer, Reason):
        raise NotImplementedError(answer.text) from answer.cause
    return answer


def facts(first_device: Callable[[], Capability | None]) -> DslFacts:
    """The facts of this process: the install as first read, the pin as it is now."""
    return DslFacts(installed(), pinned(first_device))


def reset() -> None:
    """Forgets what was read, for tests."""
    installed.cache_clear()
    _resolved.cache_clear()
