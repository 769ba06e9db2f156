"""NVRTC of a toolkit and the headers it reads, from PyPI: compiles device code where PyPI has no nvcc."""

from __future__ import annotations

from pathlib import Path

from ci import cache
from ci.toolchain import FOLDER, install

LOCKS = FOLDER / "nvrtc"


def ensure(toolkit: str) -> Path:
    """The folder ``nvidia`` with the locked packages of `toolkit`, installed into the cache on first use."""
    lock = LOCKS / f"{toolkit}.lock"
    target = cache.root() / "toolchain" / f"nvrtc-{toolkit}-{cache.key(lock.read_bytes())}"
    return cache.make_once(target, lambda folder: install(f"{toolkit} NVRTC", lock, folder)) / "nvidia"
