"""``flash_kda/build_record.json``: what a wheel was made with; nothing depends on the time or the folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci import source
from ci.errors import CiError, MetadataError
from ci.extension.toolset import Toolset
from ci.matrix import Matrix

MEMBER = "flash_kda/build_record.json"
_TOOLS = ("setuptools", "ninja")


def sources(root: Path) -> dict[str, object]:
    """What the wheel is made from: sha256 of each source, of all together, and the commit.

    ``ci.verify`` compares the package's files in the wheel with these, byte for byte.
    """
    files = source.digests(root)
    return {"sha256": source.combined(files), "files": files, **commit(root)}


def commit(root: Path, environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Commit and whether the sources differ from it; both None when nobody knows, as in an sdist.

    FLASH_KDA_SOURCE_COMMIT (``<sha>`` or ``<sha>+dirty``) is believed, else git is asked.
    """
    if environ.get(source.COMMIT):
        state = source.told(environ)
        return {"commit": state.commit, "dirty": state.dirty}
    try:
        state = source.revision(root)
    except CiError:  # no commit yet, or git refuses the folder: a record without a commit is still true
        return {"commit": None, "dirty": None}
    return {"commit": state.commit, "dirty": state.dirty if state.commit else None}


def of_wheel(wheel: Path) -> dict[str, Any]:
    """The record inside `wheel`; MetadataError when it has none that can be read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = json.loads(archive.read(MEMBER))
        if not isinstance(found, dict):
            raise ValueError(f"{found!r:.80}")
    # RuntimeError: an encrypted member, an unknown compression, JSON too deep.
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise MetadataError(
            f"{wheel.name}: expected a wheel with {MEMBER}, a JSON object, got: {error}.\n"
            "Next: build the wheel again"
        ) from error
    return found


def tool_versions() -> dict[str, str | None]:
    """Versions of the build's Python packages; None for one that is not a Python package here."""
    return {name: _version(name) for name in _TOOLS}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def make(
    version: str,
    toolset: Toolset,
    archs: Sequence[str],
    flags: Mapping[str, Sequence[str]],
    table: Matrix,
    source: Mapping[str, object],
) -> dict[str, object]:
    """The record as plain data; `table` knows the oldest torch and Python served and what was run on a GPU,
    `source` is what `sources` says."""
    project = table.project
    return {
        "schema": 1,
        "name": "flash-kda",
        "version": version,
        "cuda": {
            "toolkit": toolset.nvcc.toolkit,
            "nvcc": toolset.nvcc.version,
            "ptxas": toolset.ptxas_version,
        },
        "cxx": toolset.cxx_version,
        "linker": toolset.linker_version,
        # Without the local label: headers of a CPU and a CUDA build are the same, and so is the wheel.
        "torch": {"built_with": toolset.torch_version.partition("+")[0], "target": project.torch_target},
        "python": f"{project.python_tag}-abi3",
        "architectures": list(archs),
        "built_not_run": table.not_run(archs),  # python -m flash_kda shows it
        "flags": {name: list(words) for name, words in flags.items()},
        "tools": tool_versions(),
        "source": dict(source),
    }


def write(path: Path, record: Mapping[str, object]) -> None:
    """Write the record, keys sorted, one final newline."""
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
