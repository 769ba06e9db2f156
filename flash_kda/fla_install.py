"""The installed flash-linear-attention: whether its KDA can be called, without importing it or Triton."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path

from .reasons import NO_PACKAGE, PROBE_ERROR, Reason

DISTRIBUTION = "fla-core"  # what flash-linear-attention depends on, and enough by itself
OLDEST = (0, 6)  # the first whose KDA takes raw beta and grouped heads, and states of rows = value channels
EXTRA = "pip install 'flash-kda[fla]'"


def _version() -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None  # a source tree on the import path: its files are looked at all the same


def _too_old(version: str | None) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (int(found[1]), int(found[2])) < OLDEST


def _read() -> Reason | None:
    # Top levels only: for a submodule find_spec imports the parent.
    package, triton = importlib.util.find_spec("fla"), importlib.util.find_spec("triton")
    if package is None:
        return Reason(NO_PACKAGE, f"flash-linear-attention is not installed; {EXTRA}")
    version = _version()
    folders = [Path(folder) / "ops" / "kda" for folder in package.submodule_search_locations or ()]
    if _too_old(version) or not any(folder.is_dir() for folder in folders):
        needs = f"{DISTRIBUTION} >= {OLDEST[0]}.{OLDEST[1]}"
        return Reason(NO_PACKAGE, f"it needs {needs}, found {version or 'one without KDA'}; {EXTRA}")
    if triton is None:
        return Reason(NO_PACKAGE, "it needs triton, which is not installed; pip install triton")
    return None


@functools.cache
def reason() -> Reason | None:
    """Why it cannot be called, None when it can; looked at once a process. Never raises."""
    try:
        return _read()
    except Exception as error:  # whatever a foreign or damaged package makes of it
        text = f"flash-linear-attention could not be looked at ({type(error).__name__}: {error}); {EXTRA}"
        return Reason(PROBE_ERROR, text, error)


def reset() -> None:
    """Forgets the answer, for tests."""
    reason.cache_clear()
