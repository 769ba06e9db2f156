"""TOML on every supported Python: the standard library from 3.11 on, else tomli, else the copy in setuptools.

The last one matters for ``pip install --no-build-isolation .`` under Python 3.10, where setuptools is the
only package a build can rely on.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from ci.errors import ConfigError


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
    """Parse a TOML file; ConfigError when it cannot be read, say with a conflict of git in it."""
    try:
        table: dict[str, Any] = _TOML.loads(path.read_text(encoding="utf-8"))
    except (OSError, TomlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return table


class Table:
    """One TOML table being read: hands out checked values and refuses what nobody asked for."""

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected a table, got {value!r}.")
        self.where = where
        self.left: dict[str, Any] = dict(value)

    def fail(self, key: str, expected: str, got: object) -> ConfigError:
        """The error for a wrong value, to be raised."""
        return ConfigError(f"{self.where}: '{key}': expected {expected}, got {got!r}.")

    def take(self, key: str) -> Any:
        """The value as it is."""
        if key not in self.left:
            raise ConfigError(f"{self.where}: key '{key}' is missing.")
        return self.left.pop(key)

    def text(self, key: str, pattern: str = r"(?s).+", expected: str = "a text") -> str:
        """A text that matches `pattern` as a whole; `expected` says so in words."""
        value = self.take(key)
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise self.fail(key, expected, value)
        return value

    def texts(self, key: str, pattern: str, expected: str) -> tuple[str, ...]:
        """One or more different texts that match `pattern`."""
        values = self.take(key)
        good = isinstance(values, list) and bool(values)
        good = good and all(isinstance(v, str) and re.fullmatch(pattern, v) for v in values)
        if not good or len(set(values)) != len(values):
            raise self.fail(key, f"a list without repeats of {expected}", values)
        return tuple(values)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, which may be empty."""
        values = self.take(key)
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise self.fail(key, "a list of names", values)
        return tuple(values)

    def number(self, key: str) -> int:
        """A whole number of 0 or more."""
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fail(key, "a number of 0 or more", value)
        return value

    def table(self, key: str) -> Table:
        """A table inside this one."""
        return Table(f"{self.where}: {key}", self.take(key))

    def tables(self, key: str) -> list[Table]:
        """One or more tables, as ``[[key]]`` writes them."""
        values = self.take(key)
        if not isinstance(values, list) or not values:
            raise self.fail(key, f"at least one [[{key}]] table", values)
        return [Table(f"{self.where}: {key}[{i}]", value) for i, value in enumerate(values)]

    def done(self) -> None:
        """Refuse what is left."""
        if self.left:
            raise ConfigError(f"{self.where}: unknown key {', '.join(map(repr, sorted(self.left)))}.")


def open_table(path: Path) -> Table:
    """A TOML file to be read with care; ConfigError when it cannot be parsed."""
    return Table(path.name, read_toml(path))
