"""TOML on every supported Python: the standard library from 3.11 on, else tomli, else the copy in setuptools.

The last one matters for ``pip install --no-build-isolation .`` under Python 3.10, where setuptools is the
only package a build can rely on.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any


def _reader() -> ModuleType:
    for name in ("tomllib", "tomli", "setuptools._vendor.tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError("no TOML reader: run 'python -m pip install tomli' (needed below Python 3.11)")


_TOML = _reader()
TomlError: type[ValueError] = _TOML.TOMLDecodeError


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; raises TomlError or OSError."""
    table: dict[str, Any] = _TOML.loads(path.read_text(encoding="utf-8"))
    return table
