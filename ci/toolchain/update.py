"""Regenerates the locks: asks pip which files make up each toolkit of the matrix, writes their hashes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import matrix
from ci.errors import ToolchainError
from ci.toml import read_toml
from ci.toolchain import FOLDER, Pin

_META = "cuda-toolkit"
_HEADER = """\
# CUDA {toolkit}: written by 'python -m ci.toolchain update' from packages.toml; do not edit.
# Installed with pip --require-hashes --no-deps; hashes are for {platforms}.
"""


@dataclass(frozen=True)
class Recipe:
    """``packages.toml``: which extras of cuda-toolkit compile, which read machine code, which make up NVRTC;
    platforms."""

    compile: tuple[str, ...]
    read: tuple[str, ...]
    read_toolkit: str
    nvrtc: tuple[str, ...]
    platforms: tuple[str, ...]


def recipe() -> Recipe:
    """Read ``packages.toml``."""
    table = read_toml(FOLDER / "packages.toml")
    return Recipe(
        tuple(table["compile"]),
        tuple(table["read"]),
        table["read_toolkit"],
        tuple(table["nvrtc"]),
        tuple(table["platforms"]),
    )


def update(toolkits: Sequence[str] | None = None, folder: Path = FOLDER) -> list[Path]:
    """Write ``<toolkit>.lock`` for each toolkit (default: those of the matrix's rows); returns the paths.

    For one that comes from the builder image, ``nvrtc/<toolkit>.lock``.
    """
    rows = matrix.load().rows
    images = {row.toolkit for row in rows if row.toolkit_from == matrix.IMAGE}
    paths = []
    for toolkit in toolkits or sorted({row.toolkit for row in rows}):
        path = folder / ("nvrtc" if toolkit in images else "") / f"{toolkit}.lock"
        requests = nvrtc_requests if toolkit in images else toolkit_requests
        locked = pins(requests(toolkit, recipe()), recipe().platforms)
        path.write_text(lock_text(toolkit, locked), encoding="utf-8")
        paths.append(path)
    return paths


def toolkit_requests(toolkit: str, parts: Recipe) -> list[str]:
    """What pip is asked for: a compiler of `toolkit`, and programs that read what it makes."""
    wanted = [(parts.compile, toolkit), (parts.read, parts.read_toolkit)]
    return [f"{_META}[{','.join(extras)}]=={version}.*" for extras, version in wanted]


def nvrtc_requests(toolkit: str, parts: Recipe) -> list[str]:
    """What pip is asked for: NVRTC of `toolkit` and its headers."""
    return [f"{_META}[{','.join(parts.nvrtc)}]=={toolkit}.*"]


def lock_text(toolkit: str, locked: Sequence[Pin]) -> str:
    """The lock file: header, then one pin a line, sorted by name."""
    header = _HEADER.format(toolkit=toolkit, platforms=", ".join(recipe().platforms))
    return header + "".join(pin.line() + "\n" for pin in sorted(locked, key=lambda pin: pin.name))


def pins(requests: Sequence[str], platforms: Sequence[str]) -> list[Pin]:
    """Resolve one toolkit: versions from cuda-toolkit's own requirements, hashes for every platform."""
    versions: dict[str, str] = {}
    for request in requests:
        for name, found, _ in _ask([request], platforms[0], deps=True):
            if name != _META:
                versions.setdefault(name, found)
    exact = [f"{name}=={version}" for name, version in sorted(versions.items())]
    hashes: dict[str, list[str]] = {name: [] for name in versions}
    for platform in platforms:
        for name, _, digest in _ask(exact, platform, deps=False):
            if digest not in hashes[name]:
                hashes[name].append(digest)
    return [Pin(name, version, tuple(hashes[name])) for name, version in versions.items()]


def _ask(requirements: Sequence[str], platform: str, *, deps: bool) -> list[tuple[str, str, str]]:
    """What pip would install, as (name, version, sha256)."""
    arch = platform.split("_", 1)[1]
    tags = [platform, f"manylinux2010_{arch}", f"manylinux_2_28_{arch}"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary=:all:", *(f"--platform={tag}" for tag in tags)]
    command += [] if deps else ["--no-deps"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command += ["--target", scratch, "--report", str(report), *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ToolchainError(
                f"pip cannot resolve {' '.join(requirements)} for {platform}:\n{done.stderr}\n"
                "Next: check the network and ci/toolchain/packages.toml"
            )
        return [_entry(item) for item in json.loads(report.read_text(encoding="utf-8"))["install"]]


def _entry(item: dict[str, Any]) -> tuple[str, str, str]:
    metadata = item["metadata"]
    digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return str(metadata["name"]).lower().replace("_", "-"), str(metadata["version"]), str(digest)
