"""Verdict on the stable ABI: the torch symbols a library uses, how old a torch has them, Python's C API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from packaging.version import Version

from ci.errors import AbiError
from ci.verify.expectations import PlatformExpectation
from ci.verify.facts import Library, Symbol
from ci.verify.request import Request
from ci.verify.verdicts import Sheet, Verdict, listing

# A mangled name with at::, c10:: or torch:: as an outer namespace or inside a type: the C++ side of libtorch.
_TORCH_CXX = re.compile(r"^_Z.*(?<![0-9])(?:2at|3c10|5torch)")
_PYTHON = re.compile(r"^_?Py")
_HINT = "Include torch/csrc/stable and torch/headeronly only, and compile with TORCH_TARGET_VERSION set."


def check_abi(libraries: Iterable[Library], request: Request) -> Verdict:
    """Only torch's stable C shim, none newer than the target torch; nothing outside Python's limited API."""
    sheet = Sheet("abi", AbiError, _HINT)
    for library in libraries:
        shims = [symbol for symbol in library.elf.undefined if _is_shim(symbol, request.platform)]
        for symbol in library.elf.undefined:
            _check_symbol(sheet, library.path, symbol, request.platform)
        _check_torch(sheet, library, shims, request.project.torch_target)
        _check_python(sheet, library)
    return sheet.verdict()


def _is_shim(symbol: Symbol, platform: PlatformExpectation) -> bool:
    return symbol.version is None and any(fnmatchcase(symbol.name, item) for item in platform.torch_stable)


def _check_symbol(sheet: Sheet, path: str, symbol: Symbol, platform: PlatformExpectation) -> None:
    if _TORCH_CXX.match(symbol.name):
        sheet.check(False, path, "unstable torch symbol", listing(platform.torch_stable), symbol.name)
    elif _PYTHON.match(symbol.name):
        allowed = symbol.name in platform.python_undefined
        sheet.check(allowed, path, "Python C API symbol", listing(platform.python_undefined), symbol.name)
    elif _is_shim(symbol, platform):
        weak = symbol.weak or not any(fnmatchcase(symbol.name, item) for item in platform.torch_weak_only)
        sheet.check(
            weak, path, "symbol that CPU-only torch lacks", "looked up at run time, or weak", symbol.name
        )
    elif symbol.version is None:
        # No version and no shim: nothing that the library NEEDs defines it, so RTLD_NOW fails at import.
        known = symbol.name in platform.undefined
        sheet.check(
            known, path, "symbol that nothing provides", "torch's C shim or a versioned symbol", symbol.name
        )


def _check_torch(sheet: Sheet, library: Library, shims: list[Symbol], target: str) -> None:
    audit, path = library.torch, library.path
    sheet.check(bool(shims), path, "torch symbols in use", "at least one (it registers operators)", "none")
    sheet.equal(path, "stable shims that torch-abi-audit counts", len(shims), audit.shims)
    sheet.check(
        not audit.unstable, path, "unstable torch symbol (torch-abi-audit)", "none", listing(audit.unstable)
    )
    unknown = audit.unknown_shims
    sheet.check(
        not unknown, path, "shim of no torch release on record", f"torch {target} or older", listing(unknown)
    )
    new = audit.minimum is not None and Version(audit.minimum) > Version(target)
    because = f"{audit.minimum}, for {listing(audit.minimum_because)}"
    sheet.check(not new, path, "oldest torch that has the shims", f"{target} or older", because)


def _check_python(sheet: Sheet, library: Library) -> None:
    sheet.check(".abi3." in library.path, library.path, "file name", "NAME.abi3.so", library.path)
    outside = library.python.violations
    sheet.check(
        not outside, library.path, "outside Python's limited API (abi3audit)", "none", listing(outside)
    )
