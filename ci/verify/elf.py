"""Facts of the host side of a shared library, read with pyelftools.

Only ``.dynamic``, ``.dynsym`` and ``.gnu.version_r`` are read: a release library is stripped, so a reader of
``.symtab`` would see nothing and find nothing wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from ci.errors import CiError, PlatformError
from ci.verify.facts import Elf, Symbol, VersionNeed

_LOCAL_VERSIONS = (0, 1)  # VER_NDX_LOCAL and VER_NDX_GLOBAL name no version
_VERSION_MASK = 0x7FFF  # the top bit of a version index marks a hidden definition


def read_elf(path: Path) -> Elf:
    """Read the dynamic facts of `path`; PlatformError when it is no shared ELF library."""
    try:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            _refuse_truncated(elf, path)
            return _facts(elf, path)
    except CiError:
        raise
    # Damaged headers send pyelftools past the end or to bytes that are no text; seen: ELFError, OSError,
    # UnicodeDecodeError, AttributeError, AssertionError.  Whatever it is, the file is the cause.
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise PlatformError(f"{path.name}: expected an ELF shared library, got: {said}") from error


def _refuse_truncated(elf: Any, path: Path) -> None:
    """Loading a file that is shorter than its segments ends in SIGBUS, not in an error."""
    size = path.stat().st_size
    ends = [("section headers", elf["e_shoff"] + elf["e_shnum"] * elf["e_shentsize"])]
    ends += [(f"segment {s['p_type']}", s["p_offset"] + s["p_filesz"]) for s in elf.iter_segments()]
    beyond = [f"{name} up to byte {end}" for name, end in ends if end > size]
    if beyond:
        raise PlatformError(
            f"{path.name}: expected all parts within its {size} bytes, got {', '.join(beyond)}.\n"
            "Next: build it again"
        )


def _facts(elf: Any, path: Path) -> Elf:
    dynamic = elf.get_section_by_name(".dynamic")
    if dynamic is None or elf.get_section_by_name(".dynsym") is None:
        raise PlatformError(
            f"{path.name}: expected .dynamic and .dynsym sections, got none: not a shared library."
        )
    tags = list(dynamic.iter_tags())
    undefined, exported = _symbols(elf)
    return Elf(
        machine=str(elf["e_machine"]),
        needed=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        rpath=tuple(_search_paths(tags)),
        version_needs=tuple(_version_table(elf).values()),
        undefined=undefined,
        exported=exported,
        sections=tuple(section.name for section in elf.iter_sections() if section.name),
    )


def _search_paths(tags: list[Any]) -> list[str]:
    rpaths = [f"RPATH {tag.rpath}" for tag in tags if tag.entry.d_tag == "DT_RPATH"]
    return rpaths + [f"RUNPATH {tag.runpath}" for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]


def _version_table(elf: Any) -> dict[int, VersionNeed]:
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return {}
    return {
        int(aux["vna_other"]): VersionNeed(str(need.name), str(aux.name))
        for need, auxiliaries in section.iter_versions()
        for aux in auxiliaries
    }


def _symbols(elf: Any) -> tuple[tuple[Symbol, ...], tuple[str, ...]]:
    versions = _version_table(elf)
    indexes = elf.get_section_by_name(".gnu.version")
    undefined: list[Symbol] = []
    exported: list[str] = []
    for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        binding = str(symbol["st_info"]["bind"])
        if not symbol.name or binding == "STB_LOCAL":
            continue
        if symbol["st_shndx"] == "SHN_UNDEF":
            version = _version_of(indexes, number, versions)
            undefined.append(Symbol(symbol.name, version, binding == "STB_WEAK"))
        else:
            exported.append(symbol.name)
    return tuple(undefined), tuple(exported)


def _version_of(indexes: Any, number: int, versions: dict[int, VersionNeed]) -> str | None:
    if indexes is None:
        return None
    index = indexes.get_symbol(number)["ndx"]
    if isinstance(index, str) or index in _LOCAL_VERSIONS:
        return None
    need = versions.get(index & _VERSION_MASK)
    return need.version if need else None
