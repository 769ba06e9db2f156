"""What a cubin says it was compiled for: ptxas's recorded command line.

ptxas leaves its options in the ELF section ``.note.nv.tkinfo`` (little endian; worked out from the cubins of
the DSL 4.6.2 to 4.8.1 and what cuobjdump prints for them)::

    note           0  u32 name bytes      4  u32 description bytes      8  u32 type (2000)      12  name
    description    0  u32 version (2)     4  u32 0     8, 12, 16, 20  u32 offsets into the strings of the
                   tool's name, its version, its branch, its options   24  strings, each ended by a zero

Nothing else in a cubin tells an ``f`` target from a plain one: the ELF flags of both are the same.
"""

from __future__ import annotations

import struct
from itertools import pairwise

from ..fatbin import FatbinError, Section, sections

SECTION = b".note.nv.tkinfo"
_NOTE_TYPE = 2000
_OPTIONS_FIELD = 20
_STRINGS = 24


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
    """The options of the tools that made a cubin, one string a tool; FatbinError when none are recorded."""
    if not data.startswith(b"\x7fELF\x02\x01"):
        raise FatbinError("not a 64-bit little-endian ELF file")
    notes = [section for section in sections(data) if section.name == SECTION]
    found = [_options(text) for section in notes for text in _descriptions(data, section)]
    if not found:
        raise FatbinError(f"no section {SECTION.decode()} that says how the file was made")
    return found


def recorded_arch(data: bytes) -> str:
    """The architecture that the cubin was assembled for, such as ``sm_100f``; FatbinError when unclear."""
    lines = [text.split() for text in tool_options(data)]
    archs = {after for line in lines for word, after in pairwise(line) if word == "-arch"}
    if len(archs) != 1:
        raise FatbinError(f"expected one -arch in the recorded options, got {sorted(archs)}")
    return archs.pop()
