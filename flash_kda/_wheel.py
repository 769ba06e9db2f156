"""The verdict of ``python -m flash_kda`` for a wheel that is not installed; nothing of it is run."""

from __future__ import annotations

import platform
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import _library, fatbin
from ._report import IMPORT_NAME, NO_RECORD, SCHEMA, BackendChoice, architecture_problems, choice_on
from .arch import Choice
from .dispatch import DeviceFacts, LibraryFacts

_PACKAGE = f"{IMPORT_NAME}/__init__.py"
_LIBRARY = f"{IMPORT_NAME}/{_library.LIBRARY.name}"
_RECORD = f"{IMPORT_NAME}/{_library.BUILD_RECORD.name}"
_MACHINE_AT = 0x12  # u16 e_machine, in the ELF header
_MACHINES = {62: "x86_64", 183: "aarch64"}


class WheelError(ValueError):
    """The file is not a wheel of this package, or cannot be read."""


@dataclass(frozen=True)
class WheelReport:
    """Everything ``--wheel FILE --json`` prints, field by field."""

    schema: int
    wheel: str
    build_record: dict[str, Any] | None
    images: tuple[dict[str, str], ...]
    choices: tuple[BackendChoice, ...]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def _members(path: Path) -> dict[str, bytes]:
    """The members of a wheel that are looked at, those that it has."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            return {name: archive.read(name) for name in (_PACKAGE, _LIBRARY, _RECORD) if name in names}
    except Exception as error:  # zipfile lets through what a decompressor raises, as a plain LZMAError
        why = str(error) or type(error).__name__
        raise WheelError(f"{path}: not a wheel that can be read: {why}") from error


def _choices(images: Iterable[fatbin.Image]) -> tuple[Choice, ...]:
    """What a build asked for, from what it left: machine code, and PTX beside it."""
    there = set(images)
    ptx = {image.target for image in there if image.kind == "ptx"}
    return tuple(sorted(Choice(i.target, i.target in ptx) for i in there if i.kind == "elf"))


def _library_facts(path: Path, members: dict[str, bytes]) -> tuple[LibraryFacts, tuple[fatbin.Image, ...]]:
    if _LIBRARY not in members:
        text = f"{path.name} holds no {_LIBRARY}: {_library.WITHOUT_KERNELS}"
        return LibraryFacts(_library.MISSING_FILE, text), ()
    try:
        images = fatbin.images_in(members[_LIBRARY], f"{path}: {_LIBRARY}")
    except fatbin.FatbinError as error:
        raise WheelError(str(error)) from error
    # Whether it would load beside the torch that is here can only be tried.
    return LibraryFacts(_library.LOADED, "", _choices(images)), tuple(dict.fromkeys(images))


def _machine_problems(library: bytes) -> list[str]:
    """A library for another processor, which would not load here whatever the GPU."""
    here, number = platform.machine(), int.from_bytes(library[_MACHINE_AT : _MACHINE_AT + 2], "little")
    built_for = _MACHINES.get(number, here)
    if built_for == here:
        return []
    return [f"the library is for {built_for}, and this machine is {here}: install the wheel for {here} here."]


def _problems(members: dict[str, bytes], record: dict[str, Any] | None, facts: LibraryFacts) -> list[str]:
    if _LIBRARY not in members:
        return [facts.text]
    claims = {"the build record": None if record is None else record.get("architectures")}
    holds = {choice.target.name for choice in facts.choices}
    missing = [NO_RECORD] if record is None else []
    return [*_machine_problems(members[_LIBRARY]), *missing, *architecture_problems(claims, holds)]


def judge(path: Path, devices: Iterable[DeviceFacts], has_torch: bool) -> WheelReport:
    """What a wheel holds, and which backend ``auto`` would run on each device if it were installed here.

    Raises:
        WheelError: the file cannot be read, or is a wheel of another package.
    """
    members = _members(path)
    if _PACKAGE not in members:
        raise WheelError(f"{path}: not a wheel of {IMPORT_NAME}: it holds no {_PACKAGE}")
    facts, images = _library_facts(path, members)
    record = _library.parse_record(members.get(_RECORD, b""))
    return WheelReport(
        schema=SCHEMA,
        wheel=str(path),
        build_record=record,
        images=tuple({"kind": image.kind, "target": image.target.name} for image in images),
        choices=tuple(choice_on(device, facts, has_torch) for device in devices),
        problems=tuple(_problems(members, record, facts)),
    )
