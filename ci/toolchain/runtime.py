"""The CUDA runtime that is linked into wheels of another platform, from the same lock as the compiler."""

from __future__ import annotations

import filecmp
import sys
from pathlib import Path

from ci import cache
from ci.errors import ToolchainError
from ci.platforms import Platform
from ci.process import run
from ci.toolchain import Pin, ensure, lock_path, read_lock

_PACKAGE = "nvidia-cuda-runtime"


def library(toolkit: str, target: Platform) -> Path:
    """``libcudart_static.a`` of `toolkit` for `target`, installed by hash into the cache on first use.

    Raises ToolchainError also when the package's headers are not those of the toolkit, which every platform's
    code is compiled with.
    """
    pin = _pin(lock_path(toolkit))
    name = f"{toolkit}-{target.name}-{cache.key(pin.line())}"
    folder = cache.make_once(cache.root() / "toolchain" / name, lambda path: _install(pin, path, target))
    found = sorted(folder.glob("nvidia/cu*/lib/libcudart_static.a"))
    if len(found) != 1:
        raise ToolchainError(
            f"{folder}: expected one nvidia/cu*/lib/libcudart_static.a, found {len(found)}.\n"
            f"Next: rm -r {folder}"
        )
    check_headers(found[0].parent.parent / "include", ensure(toolkit) / "include")
    return found[0]


def _pin(lock: Path) -> Pin:
    found = [pin for pin in read_lock(lock) if pin.name == _PACKAGE]
    if not found:
        raise ToolchainError(f"{lock}: expected {_PACKAGE}, got none.\nNext: python -m ci.toolchain update")
    return found[0]


def _install(pin: Pin, folder: Path, target: Platform) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text(pin.line() + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", f"--platform=manylinux2014_{target.name}"]
    run(
        [*command, "--target", folder, "-r", wanted],
        title=f"installing {pin.name} {pin.version} for {target.name}",
        error=ToolchainError,
        hint="check the network; a file that is not the locked one: git checkout ci/toolchain",
    )


def check_headers(theirs: Path, ours: Path) -> None:
    """ToolchainError naming the headers below `theirs` that are not, byte for byte, those below `ours`."""
    names = [path.relative_to(theirs).as_posix() for path in theirs.rglob("*") if path.is_file()]
    _, different, absent = filecmp.cmpfiles(theirs, ours, sorted(names), shallow=False)
    if different or absent or not names:
        said = ", ".join([*different, *absent]) or "no headers"
        raise ToolchainError(
            f"{theirs}: expected the headers of {ours}, got others: {said}.\n"
            "Next: python -m ci.toolchain update, so that both are of one version"
        )
