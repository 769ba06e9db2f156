"""Gathers the facts of one artifact: a wheel, or a shared library given alone."""

from __future__ import annotations

import hashlib
import re
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ci.errors import ConfigError
from ci.verify.archive import members, read_wheel
from ci.verify.audits import audit_contents, audit_platform, audit_python, audit_torch
from ci.verify.device import read_images, read_toolkits
from ci.verify.elf import read_elf
from ci.verify.facts import Facts, Library
from ci.verify.floor import is_library


def gather_facts(path: Path, cuobjdump: Path, oldest_python: str) -> Facts:
    """Read everything from `path`; `oldest_python` is the limited API's baseline, for example ``3.10``.

    ConfigError when `path` is neither a wheel nor a library; ToolchainError when a tool fails or its output
    is unknown; MetadataError when a wheel cannot be opened as one.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: expected a wheel or a shared library, got no such file.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if path.suffix == ".whl":
        return _gather_wheel(path, digest, cuobjdump, oldest_python)
    if is_library(path.name):
        return Facts(path.name, digest, (read_library(path, path.name, cuobjdump, oldest_python),))
    raise ConfigError(f"{path}: expected a name that ends in .whl or .so, got {path.name}.")


def read_library(path: Path, name: str, cuobjdump: Path, oldest_python: str) -> Library:
    """Facts of one library; `name` is its place in the wheel."""
    elf = read_elf(path)
    has_images = ".nv_fatbin" in elf.sections
    return Library(
        path=name,
        size=path.stat().st_size,
        elf=elf,
        images=read_images(path, cuobjdump) if has_images else (),
        toolkits=read_toolkits(path, cuobjdump) if has_images else (),
        torch=audit_torch(path),
        python=audit_python(path, oldest_python),
    )


def _gather_wheel(path: Path, digest: str, cuobjdump: Path, oldest_python: str) -> Facts:
    archive = read_wheel(path)
    with tempfile.TemporaryDirectory(prefix="flash-kda-verify-") as folder:
        places = extract(path, Path(folder))
        for place in places.values():
            read_elf(place)  # before the other checkers, which end in tracebacks where it names the fault
        libraries = tuple(
            read_library(place, member, cuobjdump, oldest_python) for member, place in places.items()
        )
    wheel = replace(archive, platform=audit_platform(path), content_problems=audit_contents(path))
    return Facts(path.name, digest, libraries, wheel)


def extract(path: Path, folder: Path) -> dict[str, Path]:
    """Write the libraries of a wheel below `folder`; where each member is."""
    libraries = sorted((name, data) for name, data in members(path).items() if is_library(name))
    return {name: _write(name, data, folder / str(number)) for number, (name, data) in enumerate(libraries)}


def _write(member: str, data: bytes, folder: Path) -> Path:
    """Write one library under its own name less what follows ``.so``: abi3audit knows no other ending."""
    folder.mkdir()
    target = folder / re.sub(r"\.so[.\d]*$", ".so", PurePosixPath(member).name)
    target.write_bytes(data)
    return target
