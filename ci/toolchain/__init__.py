"""A CUDA toolkit out of PyPI wheels: `ensure` installs what ``<toolkit>.lock`` names into the cache.

No root, no container and no CUDA on the machine: every file's hash is in the lock, and pip refuses any other.
``python -m ci.toolchain ensure 13.0`` prints the folder to use as ``CUDA_HOME``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ci import cache
from ci.errors import ToolchainError
from ci.nvcc import tool_version
from ci.process import run

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
_UPDATE = "python -m ci.toolchain update"
# The installed programs that say their version, and the package that brings each.
_PROGRAMS = {
    "nvcc": "nvidia-cuda-nvcc",
    "ptxas": "nvidia-cuda-nvcc",
    "cuobjdump": "nvidia-cuda-cuobjdump",
    "nvdisasm": "nvidia-cuda-nvdisasm",
}
_LINE = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9.]+)(?P<hashes>(\s+--hash=sha256:[0-9a-f]{64})+)")


@dataclass(frozen=True)
class Pin:
    """One locked package: exact version and the sha256 of each wheel that may be installed."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def line(self) -> str:
        """The pin as pip's requirements format writes it."""
        return f"{self.name}=={self.version}" + "".join(f" \\\n    --hash=sha256:{h}" for h in self.hashes)


def lock_path(toolkit: str) -> Path:
    """The lock file of `toolkit` (``"13.0"``); ToolchainError naming the toolkits that have one."""
    path = FOLDER / f"{toolkit}.lock"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.lock"))) or "none"
        raise ToolchainError(f"no lock for CUDA {toolkit!r}: there are locks for {known}.\nNext: {_UPDATE}")
    return path


def read_lock(path: Path) -> tuple[Pin, ...]:
    """The pins of a lock file; ToolchainError naming the line that is not one."""
    pins = tuple(_pins(path))
    if not pins:
        raise ToolchainError(f"{path}: expected pinned packages, got none.\n{_restore(path)}")
    return pins


def _restore(lock: Path) -> str:
    shown = lock.relative_to(ROOT) if lock.is_relative_to(ROOT) else lock
    return f"Next: if the lock was edited, 'git checkout {shown}'; else '{_UPDATE}'"


def _pins(path: Path) -> Iterator[Pin]:
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except UnicodeDecodeError as error:
        raise ToolchainError(f"{path}: expected UTF-8 text, got: {error}.\n{_restore(path)}") from error
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ToolchainError(
                f"{path}: expected 'name==version --hash=sha256:...', got {line!r}.\nNext: {_UPDATE}"
            )
        hashes = tuple(re.findall(r"sha256:([0-9a-f]{64})", match["hashes"]))
        yield Pin(match["name"], match["version"], hashes)


def folder(toolkit: str, lock: Path | None = None) -> Path:
    """Where `toolkit` is (or would be) installed: the name changes with the lock's content."""
    path = lock or lock_path(toolkit)
    return cache.root() / "toolchain" / f"{toolkit}-{cache.key(path.read_bytes())}"


def cuda_home(installed: Path) -> Path:
    """The ``CUDA_HOME`` inside an installed toolchain folder."""
    homes = sorted(installed.glob("nvidia/cu*/bin/nvcc"))
    if len(homes) != 1:
        raise ToolchainError(
            f"{installed}: expected one nvidia/cu*/bin/nvcc, found {len(homes)}.\nNext: rm -r {installed}"
        )
    return homes[0].parent.parent


def ensure(toolkit: str, lock: Path | None = None) -> Path:
    """Install `toolkit` unless the cache has it, check that it runs, and return its ``CUDA_HOME``.

    `lock`: another lock file, for tests.  Raises ToolchainError: expected and got hash or version.
    """
    path = lock or lock_path(toolkit)
    pins = read_lock(path)

    def fill(target: Path) -> None:
        install(toolkit, path, target)
        verify(cuda_home(target), toolkit, pins)

    home = cuda_home(cache.make_once(folder(toolkit, path), fill))
    verify(home, toolkit, pins)  # the cache is a folder like any other: files in it get lost and replaced
    return home


def install(toolkit: str, lock: Path, target: Path) -> None:
    """``pip install`` what `lock` names into the folder `target`, and nothing else."""
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--target", str(target), "-r", str(lock)]
    try:
        run(
            command,
            title=f"installing the CUDA {toolkit} toolkit",
            error=ToolchainError,
            hint="check the network and pip's index",
        )
    except ToolchainError as error:
        raise _hash_error(lock, str(error)) or _version_error(lock, str(error)) or error from None


def _hash_error(lock: Path, output: str) -> ToolchainError | None:
    expected = re.findall(r"(?:Expected|or) sha256 ([0-9a-f]{64})", output)
    got = re.search(r"Got\s+([0-9a-f]{64})", output)
    if not expected or got is None:
        return None
    names = [pin.name for pin in read_lock(lock) if set(pin.hashes) & set(expected)]
    return ToolchainError(
        f"{lock.name}: {', '.join(names)}: the downloaded file is not the locked one.\n"
        f"  expected sha256 {' or '.join(expected)}\n  got      sha256 {got[1]}\n"
        f"{_restore(lock)}"
    )


def _version_error(lock: Path, output: str) -> ToolchainError | None:
    # pip's words; with an index out of reach the list of versions is "none".
    missing = re.search(r"No matching distribution found for (\S+)", output)
    offered = re.search(r"\(from versions: (?!none)([^)]*)\)", output)
    if missing is None or offered is None:
        return None
    return ToolchainError(
        f"{lock.name}: expected {missing[1]}, the index has {offered[1]}.\n{_restore(lock)}"
    )


def verify(home: Path, toolkit: str, pins: tuple[Pin, ...]) -> None:
    """Run each program of the toolkit; ToolchainError when one does not start or is not as locked."""
    versions = {pin.name: pin.version for pin in pins}
    for program, package in _PROGRAMS.items():
        try:
            got = tool_version(home / "bin" / program)
        except ToolchainError as error:
            got = str(error).partition("\n")[0]
        if got != versions.get(package):
            raise ToolchainError(
                f"{home / 'bin' / program}: expected version {versions.get(package)} "
                f"({package} in the lock), got {got}.\n"
                f"Next: rm -r {home.parent.parent} && python -m ci.toolchain ensure {toolkit}"
            )
