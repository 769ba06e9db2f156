"""Finding and loading the compiled library, and saying honestly why it could not be loaded.

``import flash_kda`` never fails because of the library: a missing file, a symbol this torch does not have and
any other refusal of the loader become a status with a code of its own, a text and the next command. A backend
that needs the library reports that status; the reference backend serves without it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arch import Choice, parse_list

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "_C.abi3.so"
BUILD_RECORD = FOLDER / "build_record.json"
OPERATOR = "flash_kda::fwd"

LOADED = "loaded"
MISSING_FILE = "missing_file"
UNDEFINED_SYMBOL = "undefined_symbol"
LOAD_ERROR = "load_error"
NAME_TAKEN = "name_taken"

_REBUILD = "build one, from a source checkout: pip install -v --no-build-isolation ."
_SYMBOL = re.compile(r"undefined symbol: ([^\s,]+)")


@dataclass(frozen=True)
class LibraryStatus:
    """What became of the library: a stable ``code`` (``loaded`` or why not) and a text for people."""

    code: str
    path: str
    text: str

    @property
    def loaded(self) -> bool:
        """Whether the operators of the library can be called."""
        return self.code == LOADED


def build_record(path: Path = BUILD_RECORD) -> dict[str, Any] | None:
    """The JSON record the build left in the wheel, or None without one (source tree, CPU-only install)."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _built_for(record: dict[str, Any] | None) -> str:
    """Torch the library was built for, in words, from the build record."""
    torch_record = (record or {}).get("torch")
    if not isinstance(torch_record, dict):
        return "an unknown torch (no build record)"
    target, build = torch_record.get("target", "?"), torch_record.get("built_with", "?")
    return f"torch >= {target} (compiled against {build})"


def classify(message: str, path: Path, record: dict[str, Any] | None, torch_version: str) -> LibraryStatus:
    """Turns what the dynamic loader said into a status.

    Args:
        message: text of the OSError.
        path: the library that did not load.
        record: the build record, or None.
        torch_version: version of the torch found.
    """
    symbol = _SYMBOL.search(message)
    if symbol is None:
        text = (
            f"{path.name} did not load: {message}. It was built for {_built_for(record)}; "
            f"found torch {torch_version}. See what it needs with: ldd {path}; or {_REBUILD}"
        )
        return LibraryStatus(LOAD_ERROR, str(path), text)
    text = (
        f"{path.name} needs the symbol {symbol[1]}, which the torch found ({torch_version}) does not have; "
        f"the library was built for {_built_for(record)}. Install such a torch, or {_REBUILD}"
    )
    return LibraryStatus(UNDEFINED_SYMBOL, str(path), text)


def _missing(path: Path) -> LibraryStatus:
    missing = f"{path.name} is not in {path.parent}: this install has no CUDA code"
    text = f"{missing}. Install a CUDA wheel, or {_REBUILD}"
    return LibraryStatus(MISSING_FILE, str(path), text)


def load_file(path: Path, operator: str = OPERATOR) -> LibraryStatus:
    """Loads the library that registers ``operator`` into torch; never raises. Imports torch."""
    import torch

    if not path.is_file():
        return _missing(path)
    if torch._C._dispatch_has_kernel(operator):
        # Registering a schema twice throws inside the loader, and that aborts the process: look first.
        text = f"{operator} is already registered by another library in this process; {path} was not loaded."
        return LibraryStatus(NAME_TAKEN, str(path), text)
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        # torch replaces the loader's message by one without the reason and keeps the first as the cause.
        return classify(str(error.__cause__ or error), path, build_record(), str(torch.__version__))
    return LibraryStatus(LOADED, str(path), f"loaded {path}")


@functools.cache
def load() -> LibraryStatus:
    """Loads the library of this package, once a process."""
    return load_file(LIBRARY)


def c_string(path: Path, function: str) -> str:
    """What an exported ``const char* function(void)`` returns."""
    symbol = getattr(ctypes.CDLL(str(path)), function)
    symbol.restype = ctypes.c_char_p
    value = symbol()
    return value.decode() if isinstance(value, bytes) else ""


@functools.cache
def built_choices() -> tuple[Choice, ...]:
    """Architectures the loaded library says it holds; empty when it is not loaded."""
    if not load().loaded:
        return ()
    choices, _ = parse_list(c_string(LIBRARY, "flash_kda_cuda_archs"))
    return tuple(choices)


def library_version() -> str | None:
    """Version compiled into the loaded library, or None when it is not loaded."""
    return c_string(LIBRARY, "flash_kda_version") if load().loaded else None
