"""Finding and loading the compiled library, and saying honestly why it could not be loaded.

``import flash_kda`` never fails because of the library: a missing file, a symbol this torch does not have and
any other refusal of the loader become a status with a code of its own, a text and the next command. A backend
that needs the library reports that status; the reference backend serves without it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import struct
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

WITHOUT_KERNELS = "built without kernels (a source tree, or FLASH_KDA_SKIP_CUDA_BUILD)"
_REBUILD = "build one, from a source checkout: pip install -v --no-build-isolation ."
_EXPORTS = ("flash_kda_cuda_archs", "flash_kda_version")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_SEGMENT_LOADED = 1
_VERSION = re.compile(r"\d+(\.\d+)*")
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


def _well_formed(record: Any) -> bool:
    """Whether what this package reads of a build record is of the types the build writes."""
    if not isinstance(record, dict):
        return False
    names, cuda = record.get("architectures", []), record.get("cuda", {})
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    toolkit = cuda.get("toolkit", "0") if isinstance(cuda, dict) else None
    return isinstance(toolkit, str) and _VERSION.fullmatch(toolkit) is not None


def build_record(path: Path = BUILD_RECORD) -> dict[str, Any] | None:
    """The JSON record the build left in the wheel; None without one (source tree, CPU-only install) and for a
    damaged one."""
    try:
        return parse_record(path.read_bytes())
    except OSError:
        return None


def parse_record(data: bytes) -> dict[str, Any] | None:
    """A build record from its bytes, None for a damaged one."""
    try:
        record = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return record if _well_formed(record) else None


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
    text = f"{WITHOUT_KERNELS}: no {path.name} in {path.parent}. Install a CUDA wheel, or {_REBUILD}"
    return LibraryStatus(MISSING_FILE, str(path), text)


def _past_the_end(path: Path) -> str | None:
    """What an ELF file describes past its own end, None when it is whole or no such file at all.

    The dynamic loader maps a segment without looking whether the file reaches that far: the first touch of a
    missing page is SIGBUS, which no ``except`` sees. Everything else it refuses itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        data = file.read(64)
        if len(data) < 64 or not data.startswith(_ELF64_LITTLE):
            return None
        segments, sections = struct.unpack_from("<QQ", data, 0x20)
        segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<HHHH", data, 0x36)
        file.seek(min(segments, size))  # no file can be sought to the 2^63 that a damaged header may say
        headers = file.read(segment_bytes * segment_count)
    ends = {
        "segment headers": segments + segment_bytes * segment_count,
        "section headers": sections + section_bytes * section_count,
    }
    for at in range(0, len(headers) - 55, max(segment_bytes, 56)):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", headers, at)
        if kind == _SEGMENT_LOADED:
            ends[f"the segment at byte {offset}"] = offset + length
    what, end = max(ends.items(), key=lambda item: item[1])
    return f"the file has {size} bytes, and {what} end at byte {end}" if end > size else None


def _load_error(path: Path, why: str) -> LibraryStatus:
    return LibraryStatus(
        LOAD_ERROR, str(path), f"{path.name} was not loaded: {why}. Reinstall, or {_REBUILD}"
    )


def _damage(path: Path) -> str | None:
    """What can be seen to be wrong with a file before it is loaded."""
    if not path.is_file():
        return f"{path} is a folder or a link to nothing"
    try:
        return _past_the_end(path)
    except OSError as error:
        return str(error)


def _foreign(path: Path, operator: str) -> str | None:
    """What a file that did load lacks to be the library of this package."""
    import torch

    if not torch._C._dispatch_has_kernel(operator):
        return f"it loads, and registers no {operator}: it is another library under this name"
    library = ctypes.CDLL(str(path))
    missing = [name for name in _EXPORTS if not hasattr(library, name)]
    return f"it exports no {', '.join(missing)}: it is another library under this name" if missing else None


def load_file(path: Path, operator: str = OPERATOR) -> LibraryStatus:
    """Loads the library that registers ``operator`` into torch; never raises. Imports torch."""
    import torch

    if not os.path.lexists(path):
        return _missing(path)
    known = (
        os.path.realpath(path) in torch.ops.loaded_libraries
    )  # an earlier import of this package loaded it
    if torch._C._dispatch_has_kernel(operator) and not known:
        # Registering a schema twice throws inside the loader, and that aborts the process: look first.
        text = (
            f"{operator} is already registered in this process, by another library or by an earlier import "
            f"without this file; {path} was not loaded. Start a process that loads this package alone; who "
            "else installs the name is shown by: python -m flash_kda"
        )
        return LibraryStatus(NAME_TAKEN, str(path), text)
    damage = _damage(path)
    if damage is not None:
        return _load_error(path, damage)
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        # torch replaces the loader's message by one without the reason and keeps the first as the cause.
        return classify(str(error.__cause__ or error), path, build_record(), str(torch.__version__))
    foreign = _foreign(path, operator)
    if foreign is not None:
        return _load_error(path, foreign)
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
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


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
