"""Where the peers come from: a folder of their own, or the environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

# tokenspeed-flashkda's import name is this package's own: in one environment, one would overwrite the other.
MISSING = {
    "flashkda": "peer 'flashkda' needs a folder of its own, for its import name is flash_kda too; "
    "run: pip install --no-deps --target DIR tokenspeed-flashkda==0.0.1.post20260728; "
    "then give --flashkda-path DIR",
    "fla": "peer 'fla' is not installed and has no folder; "
    "run: pip install fla-core==0.6.0 (flash-linear-attention==0.6.0 brings it too); or give --fla-path DIR",
}
INSTALLED_AS = ("fla-core", "flash-linear-attention")


def is_installed(name: str) -> bool:
    """Whether the peer can be imported without a folder. Only FLA can: see MISSING."""
    if name != "fla":
        return False
    spec = importlib.util.find_spec("fla")
    return spec is not None and spec.origin is not None


def problem(name: str, folder: Path | None) -> str | None:
    """Why this peer cannot take part; None when it can."""
    if name not in MISSING:
        return f"no peer is called {name!r}; known: {', '.join(MISSING)}"
    if folder is None:
        return None if is_installed(name) else MISSING[name]
    return None if folder.is_dir() else f"peer {name!r}: no folder {folder}"


def choose(wanted: str, given: dict[str, Path | None]) -> dict[str, Path | None]:
    """Folder of each peer that takes part, None for the installed one; ValueError with every one missing.

    `wanted`: names with commas; empty means those with a folder.
    """
    names = wanted.split(",") if wanted else [name for name, folder in given.items() if folder]
    problems = [text for name in names if (text := problem(name, given.get(name)))]
    if problems:
        raise ValueError("\n".join(problems))
    return {name: folder.resolve() if (folder := given[name]) else None for name in names}


def _installed_version() -> str:
    for package in INSTALLED_AS:
        try:
            return f"{package.replace('-', '_')}-{importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def version(folder: Path | None) -> str:
    """Name and version of a peer, from the metadata beside its package."""
    if folder is None:
        return _installed_version()
    labels = sorted(path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info"))
    return next((label for label in labels if "kda" in label or "fla" in label), "unknown")
