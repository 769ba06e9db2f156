"""Which device images a compiled file holds, read from its bytes; standard library only.

nvcc leaves them in the ELF section ``.nv_fatbin``, one fat binary a translation unit, each a header and
entries (little endian; worked out by comparing nvcc 13.0's and 13.5's output with what cuobjdump prints for
it, for plain, ``a`` and ``f`` targets, PTX beside and alone, compressed and not)::

    fat binary  0  u32 0xBA55ED50   4  u16 version 1   6  u16 header bytes (16)    8  u64 bytes of entries
    entry       0  u16 kind: 1 PTX, 2 ELF              2  u16 version 0x0101       4  u32 header bytes
                8  u64 payload bytes                  28  u32 architecture number (90, 100, ...)
               40  u64 flags: bit 20 suffix "a", bit 21 suffix "f"

Whatever does not fit this raises FatbinError: a reader that guesses would call a wheel good that it cannot
read. cuobjdump's exit code and a text search for ``sm_90a`` are no substitute: the first is 0 for PTX
alone, the second finds recorded command lines.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .arch import Target

SECTION = b".nv_fatbin"
RELOCATABLE_SECTION = b"__nv_relfatbin"
MAGIC = 0xBA55ED50
KINDS = {1: "ptx", 2: "elf"}
SUFFIXES = {0: "", 1: "a", 2: "f"}

_ELF_MAGIC = b"\x7fELF"
_ELF64_LITTLE = b"\x02\x01"
_SECTION_NOBITS = 8
_SECTION_HEADER = 64
_FAT_HEADER = 16
_ENTRY_MIN = 64
_ENTRY_VERSION = 0x0101
_ARCH_OFFSET = 28
_FLAGS_OFFSET = 40
_SUFFIX_BIT = 20


class FatbinError(ValueError):
    """The file is damaged, or holds something this reader was not written for."""


@dataclass(frozen=True, order=True)
class Image:
    """One device image: ``elf`` (machine code) or ``ptx``, and the target it was made for."""

    kind: str
    target: Target


@dataclass(frozen=True)
class Section:
    """An ELF section: its name, its type, and the bytes of the file it takes."""

    name: bytes
    kind: int
    offset: int
    size: int


def _unpack(layout: str, data: bytes, offset: int, what: str) -> tuple[int, ...]:
    try:
        return struct.unpack_from(layout, data, offset)
    except (struct.error, OverflowError) as error:  # the second for an offset of more than 63 bits
        raise FatbinError(f"{what} at byte {offset} is cut short: the file has {len(data)} bytes") from error


def _section_headers(data: bytes) -> tuple[list[tuple[int, ...]], int]:
    """Section headers and the number of the one that holds the names."""
    (table,) = _unpack("<Q", data, 0x28, "ELF header")
    entry_size, count, names = _unpack("<HHH", data, 0x3A, "ELF header")
    if table == 0 or count == 0 or names >= count or entry_size < _SECTION_HEADER:
        raise FatbinError("the ELF file has no section headers; nothing can be said about its device code")
    headers = [_unpack("<IIQQQQ", data, table + i * entry_size, "section header") for i in range(count)]
    return headers, names


def sections(data: bytes) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file; FatbinError when it is cut short."""
    headers, names = _section_headers(data)
    strings = headers[names][4]
    found = []
    for name_at, kind, _, _, offset, size in headers:
        end = data.find(b"\0", strings + name_at)
        if end < 0 or (kind != _SECTION_NOBITS and offset + size > len(data)):
            raise FatbinError(f"a section reaches past the end of the file ({len(data)} bytes)")
        found.append(Section(data[strings + name_at : end], kind, offset, size))
    return found


def _suffix(flags: int, where: int) -> str:
    bits = (flags >> _SUFFIX_BIT) & 3
    if bits not in SUFFIXES:
        raise FatbinError(f"entry at byte {where}: flags {flags:#x} carry both suffix bits")
    return SUFFIXES[bits]


def _image(block: bytes, at: int) -> tuple[Image, int]:
    """The entry at ``at`` and where the next one starts."""
    kind, version, header, payload = _unpack("<HHIQ", block, at, "entry header")
    if kind not in KINDS or version != _ENTRY_VERSION or header < _ENTRY_MIN:
        got = f"kind {kind}, version {version:#x}, header {header} bytes"
        raise FatbinError(
            f"entry at byte {at}: {got}; known: kinds 1 and 2, version 0x101, header >= {_ENTRY_MIN}"
        )
    end = at + header + payload
    if end > len(block):
        raise FatbinError(f"entry at byte {at} ends at {end}, past the {len(block)} bytes of its section")
    (number,) = _unpack("<I", block, at + _ARCH_OFFSET, "architecture")
    (flags,) = _unpack("<Q", block, at + _FLAGS_OFFSET, "flags")
    target = Target(number // 10, number % 10, _suffix(flags, at))
    return Image(KINDS[kind], target), end


def _walk(block: bytes) -> Iterator[Image]:
    """Every image of a run of fat binaries, padded to 8 bytes."""
    at = 0
    while at < len(block):
        if not any(block[at:]):
            return  # zeros up to the end: padding of the section
        magic, version, header, size = _unpack("<IHHQ", block, at, "fat binary header")
        if magic != MAGIC or version != 1 or header != _FAT_HEADER:
            got = f"magic {magic:#x}, version {version}, header {header} bytes"
            raise FatbinError(f"byte {at}: {got}; expected magic {MAGIC:#x}, version 1, header 16")
        entry, stop = at + header, at + header + size
        if stop > len(block):
            raise FatbinError(f"fat binary at byte {at} ends at {stop}, past its {len(block)} bytes")
        while entry < stop:
            image, entry = _image(block, entry)
            yield image
        if entry != stop:
            raise FatbinError(f"fat binary at byte {at}: entries end at {entry}, the header says {stop}")
        at = stop + -stop % 8


def _blocks(data: bytes) -> list[bytes]:
    if data[:4] == struct.pack("<I", MAGIC):
        return [data]
    if data[:4] != _ELF_MAGIC or data[4:6] != _ELF64_LITTLE:
        start = data[:6].hex() or "nothing"
        raise FatbinError(f"not a 64-bit little-endian ELF file nor a fat binary: starts with {start}")
    found = sections(data)
    if any(s.name == RELOCATABLE_SECTION and s.size for s in found):
        raise FatbinError("holds relocatable device code (__nv_relfatbin), which this reader does not know")
    return [
        data[s.offset : s.offset + s.size] for s in found if s.name == SECTION and s.kind != _SECTION_NOBITS
    ]


def images_in(data: bytes, name: str) -> list[Image]:
    """``images`` of a file's contents; ``name`` is what messages call it."""
    try:
        return [image for block in _blocks(data) for image in _walk(block)]
    except FatbinError as error:
        raise FatbinError(f"{name}: {error}") from None


def images(path: str | Path) -> list[Image]:
    """The device images of a shared library, an object file or a bare ``.fatbin``, in file order.

    Empty when an ELF file holds none: whether that is a fault is the caller's question.

    Raises:
        FatbinError: anything the layout above does not describe.
        OSError: the file cannot be read.
    """
    return images_in(Path(path).read_bytes(), str(path))
