"""Verdict on the platform floor: symbol versions, libraries needed, search paths, sections, exports, tag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from ci.errors import PlatformError
from ci.verify.expectations import PlatformExpectation
from ci.verify.facts import Library, VersionNeed, Wheel
from ci.verify.request import Request
from ci.verify.verdicts import Sheet, Verdict, listing

_VERSION = re.compile(r"^([A-Z]+)_(\d+(?:\.\d+)*)$")
_MANYLINUX = re.compile(r"^manylinux_(\d+)_(\d+)_(\w+)$")
_HINT = "Link against the sysroot of ci/sysroot.py and repair with: nox -s build_wheels"


def check_platform(libraries: Iterable[Library], wheel: Wheel | None, request: Request) -> Verdict:
    """Judge each library, and the archive's tag, against the policy of the platform tag in ci/matrix.toml."""
    sheet = Sheet("platform", PlatformError, _HINT)
    plat = request.project.plat
    floor = request.platform.floor.get(plat)
    if sheet.check(
        floor is not None, plat, "platform tag without a policy", listing(request.platform.floor), plat
    ):
        for library in libraries:
            _check_library(sheet, library, floor or {}, request.platform)
    if wheel is not None:
        _check_archive(sheet, wheel, request)
    return sheet.verdict()


def _check_library(
    sheet: Sheet, library: Library, floor: Mapping[str, str], platform: PlatformExpectation
) -> None:
    elf, path = library.elf, library.path
    sheet.equal(path, "machine", floor.get("machine"), elf.machine)
    for need in elf.version_needs:
        _check_version(sheet, path, need, floor)
    unexpected = set(elf.needed) - set(platform.needed_allowed)
    sheet.check(
        not unexpected,
        path,
        "NEEDED library not allowed",
        listing(platform.needed_allowed),
        listing(unexpected),
    )
    missing = set(platform.needed_required) - set(elf.needed)
    sheet.check(not missing, path, "missing NEEDED library", listing(missing), listing(elf.needed))
    sheet.check(not elf.rpath, path, "search path", "no RPATH and no RUNPATH", listing(elf.rpath))
    left = [name for name in elf.sections if _matches(name, platform.sections_forbidden)]
    sheet.check(not left, path, "not stripped", "no debug sections and no .symtab", listing(left))
    shown = [name for name in elf.exported if not _matches(name, platform.exported)]
    sheet.check(not shown, path, "exported symbol not allowed", listing(platform.exported), listing(shown))
    absent = [name for name in platform.exported if not any(fnmatchcase(item, name) for item in elf.exported)]
    sheet.check(not absent, path, "missing exported symbol", listing(absent), listing(elf.exported))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_version(sheet: Sheet, path: str, need: VersionNeed, floor: Mapping[str, str]) -> None:
    match = _VERSION.match(need.version)
    limit = floor.get(match.group(1)) if match else None
    fine = match is not None and limit is not None and _number(match.group(2)) <= _number(limit)
    expected = (
        f"at most {match.group(1)}_{limit}"
        if match and limit
        else f"one of {listing(set(floor) - {'machine'})}"
    )
    sheet.check(fine, path, f"symbol version needed of {need.library}", expected, need.version)


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _check_archive(sheet: Sheet, wheel: Wheel, request: Request) -> None:
    plat = request.project.plat
    platforms = {tag.split("-")[2] for tag in wheel.tags}
    sheet.check(platforms == {plat}, wheel.filename, "platform tag", plat, listing(platforms))
    grafted = [
        name for name in wheel.members if any(part.endswith(".libs") for part in PurePosixPath(name).parts)
    ]
    sheet.check(not grafted, wheel.filename, "grafted library", "no .libs folder", listing(grafted))
    known = {library.path for library in request.libraries}
    strangers = [name for name in wheel.members if is_library(name) and name not in known | set(grafted)]
    sheet.check(not strangers, wheel.filename, "library nobody expects", listing(known), listing(strangers))
    _check_auditwheel(sheet, wheel, plat, request.platform.needed_from_torch)


def is_library(name: str) -> bool:
    """Whether a member of a wheel is named like a shared library (``x.so``, ``x.so.1``)."""
    return re.search(r"\.so(\.\d+)*$", name) is not None


def _check_auditwheel(sheet: Sheet, wheel: Wheel, plat: str, from_torch: Iterable[str]) -> None:
    audit = wheel.platform
    if (
        not sheet.check(audit is not None, wheel.filename, "auditwheel's verdict", "one", "none")
        or audit is None
    ):
        return
    allowed, got = _MANYLINUX.match(plat), _MANYLINUX.match(audit.symbol_tag)
    fine = (
        allowed is not None
        and got is not None
        and allowed.group(3) == got.group(3)
        and (int(got.group(1)), int(got.group(2))) <= (int(allowed.group(1)), int(allowed.group(2)))
    )
    sheet.check(
        fine, wheel.filename, "tag that auditwheel gives by symbols", f"{plat} or older", audit.symbol_tag
    )
    isa = "none beyond the baseline"
    sheet.check(
        not audit.unsupported_isa, wheel.filename, "instruction set extensions (auditwheel)", isa, "some"
    )
    against = set(audit.blockers.get(plat, ())) | set(audit.blockers.get("auditwheel", ()))
    strange = against - set(from_torch)
    sheet.check(not strange, wheel.filename, "auditwheel's objections", listing(from_torch), listing(strange))
