"""What a cubin says it was compiled for.

ptxas leaves its options in the ELF section ``.note.nv.tkinfo`` (little endian; worked out from the cubins of
the DSL 4.6.2 to 4.8.1 and what cuobjdump prints for them)::

    note           0  u32 name bytes      4  u32 description bytes      8  u32 type (2000)      12  name
    description    0  u32 version (2)     4  u32 0     8, 12, 16, 20  u32 offsets into the strings of the
                   tool's name, its version, its branch, its options   24  strings, each ended by a zero

Nothing else in such a cubin tells an ``f`` target from a plain one: the ELF flags of both are the same.

The DSL without its extra ``cu13`` has CUDA 12.9's ptxas, which for compute capability 9.0 and older writes
the ELF files of before: ABI version 7, no such note, and in the flags the number (bits 0 to 7) and the suffix
``a`` (bit 11). They have no ``f`` targets.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from ..fatbin import FatbinError, Section, sections

SECTION = b".note.nv.tkinfo"
_NOTE_TYPE = 2000
_OPTIONS_FIELD = 20
_STRINGS = 24

_ABI_AT = 7  # u8 0x33, u8 version, in the ELF header
_OLD_ABI = b"\x33\x07"
_FLAGS_AT = 0x30
_OLD_SUFFIX_BIT = 0x800
_FIRST_FAMILY = 100  # compute capability 10.0, the oldest with f targets


def _descriptions(data: bytes, section: Section) -> list[bytes]:
    """The descriptions of a note section's notes of the one known type."""
    found = []
    at, end = section.offset, section.offset + section.size
    while at + 12 <= end:
        name_size, size, kind = struct.unpack_from("<III", data, at)
        start = at + 12 + (name_size + 3) // 4 * 4
        if start + size > end:
            raise FatbinError(f"a note at byte {at} reaches past its section")
        if kind == _NOTE_TYPE:
            found.append(data[start : start + size])
        at = start + (size + 3) // 4 * 4
    return found


def _options(description: bytes) -> str:
    if len(description) < _STRINGS:
        raise FatbinError(f"a description of {len(description)} bytes, expected {_STRINGS} or more")
    (offset,) = struct.unpack_from("<I", description, _OPTIONS_FIELD)
    return description[_STRINGS + offset :].split(b"\0", 1)[0].decode("ascii", "replace")


def tool_options(data: bytes) -> list[str]:
    """The recorded options of the tools that made a cubin, one string a tool; empty without the section."""
    if not data.startswith(b"\x7fELF\x02\x01"):
        raise FatbinError("not a 64-bit little-endian ELF file")
    notes = [section for section in sections(data) if section.name == SECTION]
    return [_options(text) for section in notes for text in _descriptions(data, section)]


def _arch_in_flags(data: bytes) -> str | None:
    """The architecture of a cubin of the old ABI; None for others."""
    if data[_ABI_AT : _ABI_AT + 2] != _OLD_ABI:
        return None
    (flags,) = struct.unpack_from("<I", data, _FLAGS_AT)
    number = flags & 0xFF
    if number >= _FIRST_FAMILY:
        return None
    return f"sm_{number}{'a' if flags & _OLD_SUFFIX_BIT else ''}"


def recorded_arch(data: bytes) -> str:
    """The architecture that the cubin was assembled for, such as ``sm_100f``; FatbinError when unclear."""
    lines = [text.split() for text in tool_options(data)]
    archs = {after for line in lines for word, after in pairwise(line) if word == "-arch"}
    if not lines and (old := _arch_in_flags(data)) is not None:
        return old
    if len(archs) != 1:
        raise FatbinError(
            f"expected one -arch in the recorded options {SECTION.decode()}, got {sorted(archs)}"
        )
    return archs.pop()
