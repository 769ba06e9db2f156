"""What other people's checkers say, as facts: auditwheel, abi3audit, torch-abi-audit, check-wheel-contents.

Output in a form that is not known here is an error: a checker that did not run found nothing wrong.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ci.errors import ToolchainError
from ci.verify.facts import PlatformAudit, PythonAudit, TorchAudit

_INSTALL = "Install the pinned tools: python -m pip install -r ci/requirements/verify.txt"
_CONTENT_LINE = re.compile(r"^(?:.*\.whl): (?:(W\d+: .*|invalid wheel: .*)|(OK))$")


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _json_of(tool: str, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        value = json.loads(done.stdout)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ToolchainError(
            f"{tool}: expected a JSON object, got exit status {done.returncode} and:\n"
            f"{done.stdout}{done.stderr}\n{_INSTALL}"
        )
    return value


def audit_platform(wheel: Path) -> PlatformAudit:
    """``auditwheel show --json``: which manylinux tag the symbols of `wheel` allow."""
    done = _run("auditwheel", "show", "--json", str(wheel))
    result = _json_of("auditwheel", done)
    if result.get("version") != 1 or "sym_tag" not in result:
        return PlatformAudit("none", "none", False, {"auditwheel": (str(result.get("error", result)),)})
    return PlatformAudit(
        symbol_tag=str(result["sym_tag"]),
        overall_tag=str(result["overall_tag"]),
        unsupported_isa=bool(result["unsupported_isa"]),
        blockers={tag: _blockers(entry) for tag, entry in sorted(result["policy_upgrades"].items())},
    )


def _blockers(entry: dict[str, Any]) -> tuple[str, ...]:
    libraries = [str(name) for name in entry.get("libs_to_eliminate", [])]
    symbols = entry.get("blacklisted_symbols", {})
    return tuple(libraries + [f"{library}: {', '.join(names)}" for library, names in sorted(symbols.items())])


def audit_python(library: Path, baseline: str) -> PythonAudit:
    """abi3audit on one library; `baseline` is the oldest Python served, for example ``3.10``."""
    arguments = ("--strict", "--report", "--assume-minimum-abi3", baseline, str(library))
    result = _json_of("abi3audit", _run("abi3audit", *arguments))
    try:
        (spec,) = result["specs"].values()
        found = spec["object"]["result"]
        future = [
            f"{name} (since Python {since})" for name, since in sorted(found["future_abi3_objects"].items())
        ]
        outside = [f"{name} (not in the limited API)" for name in sorted(found["non_abi3_symbols"])]
        return PythonAudit(str(found["baseline"]), str(found["computed"]), tuple(outside + future))
    except (KeyError, ValueError, TypeError) as error:
        raise ToolchainError(f"abi3audit: expected one audited object, got: {result}") from error


def audit_torch(library: Path) -> TorchAudit:
    """torch-abi-audit on one library.

    Trap: it reads symbols with ``nm`` and takes a failing nm for a library without symbols, so its counts are
    compared with our own reading of .dynsym (ci/verify/abi.py).
    """
    if sys.version_info < (3, 11):
        raise ToolchainError(
            "torch-abi-audit needs Python 3.11 or newer, this is 3.10: the torch ABI cannot be judged.\n"
            "Run: python3.11 -m nox -s verify_wheels"
        )
    from torch_abi_audit import inspect_extension

    if shutil.which("nm") is None:
        raise ToolchainError("torch-abi-audit needs 'nm': expected it on PATH, got none. Install binutils.")
    report = inspect_extension(library)
    if report.error:
        raise ToolchainError(f"torch-abi-audit on {library.name}: {report.error}")
    verdict = report.torch
    return TorchAudit(
        unstable=tuple(sorted(verdict.unstable_symbols)),
        shims=verdict.stable_shim_count,
        minimum=verdict.min_torch_version,
        minimum_because=verdict.version_defining_symbols,
        unknown_shims=verdict.unknown_shim_symbols,
    )


def audit_contents(wheel: Path) -> tuple[str, ...]:
    """check-wheel-contents: bytecode, duplicates, empty or common top levels; each finding one line."""
    done = _run("check_wheel_contents", "--no-config", str(wheel))
    findings: list[str] = []
    matched = False
    for line in (done.stdout + done.stderr).splitlines():
        match = _CONTENT_LINE.match(line)
        matched = matched or match is not None
        if match and match.group(1):
            findings.append(match.group(1))
    if not matched or (done.returncode != 0) != bool(findings):
        raise ToolchainError(
            f"check-wheel-contents: expected 'FILE: OK' or 'FILE: Wnnn: ...', got exit status "
            f"{done.returncode} and:\n{done.stdout}{done.stderr}\n{_INSTALL}"
        )
    return tuple(findings)
