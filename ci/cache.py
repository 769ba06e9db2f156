"""Where the factory keeps what it downloads or makes once, and how it makes a folder exactly once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ci.errors import ConfigError

ENV = "FLASH_KDA_CACHE"


def root() -> Path:
    """The cache folder: ``FLASH_KDA_CACHE``, else ``flash_kda`` in the user's cache folder."""
    given = os.environ.get(ENV)
    if given:
        return Path(given).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "flash_kda"


def key(*parts: str | bytes) -> str:
    """Twelve hex digits that change when any of `parts` changes."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:12]


def check_folder(folder: Path, given_by: str) -> None:
    """ConfigError that names `given_by` unless `folder` takes files or can be made; leaves nothing there."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: expected a folder that can be written to, got: {error}.\n"
            f"Next: give another one with {given_by}"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    check_folder(path.parent, ENV)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by ``fill(folder)`` unless an earlier call finished doing so.

    Filled in place and marked when done, because a virtual environment cannot be moved afterwards: a folder
    without the mark is a killed attempt and is made anew.  Safe against other processes doing the same.
    """
    mark = folder / ".complete"
    if mark.exists():
        return folder
    with _locked(folder.with_name(folder.name + ".lock")):
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            fill(folder)
            mark.touch()
    return folder
