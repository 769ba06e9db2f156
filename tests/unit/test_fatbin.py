"""The reader of device images agrees with cuobjdump on real files and refuses what it does not know."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from flash_kda import fatbin
from flash_kda.arch import parse_target

READABLE = ("mixed", "cu135", "cu135b", "two_units", "ptx_only")


def cuobjdump_says(text: str) -> list[tuple[str, str]]:
    pairs = re.findall(r"^Fatbin (elf|ptx) code:\narch = sm_(\w+)$", text, re.MULTILINE)
    assert len(pairs) == text.count("Fatbin") > 0, "the recorded output does not parse"
    return pairs


def found(path: Path) -> list[tuple[str, str]]:
    return [(image.kind, image.target.name) for image in fatbin.images(path)]


@pytest.mark.parametrize("name", READABLE)
def test_agrees_with_cuobjdump(fixtures: Path, name: str) -> None:
    recorded = (fixtures / "fatbin" / f"{name}.cuobjdump.txt").read_text()
    assert found(fixtures / "fatbin" / f"{name}.so") == cuobjdump_says(recorded)


def test_tells_machine_code_from_ptx_and_keeps_the_suffix(fixtures: Path) -> None:
    images = fatbin.images(fixtures / "fatbin" / "mixed.so")
    machine_code = {image.target for image in images if image.kind == "elf"}
    assert machine_code == {parse_target(t) for t in ("90a", "100a", "103a", "120a", "100f")}
    assert [image.target.name for image in images if image.kind == "ptx"] == ["100f"]


def test_ptx_alone_is_no_machine_code(fixtures: Path) -> None:
    assert found(fixtures / "fatbin" / "ptx_only.so") == [("ptx", "100f")]


def test_no_device_code_is_an_empty_list(fixtures: Path) -> None:
    assert fatbin.images(fixtures / "fatbin" / "none.so") == []


@pytest.mark.parametrize(
    ("name", "says"),
    [("rdc.o", "relocatable device code"), ("lto.fatbin", "kind 8"), ("README.md", "not a 64-bit")],
)
def test_refuses_what_it_does_not_know(fixtures: Path, name: str, says: str) -> None:
    with pytest.raises(fatbin.FatbinError, match=says) as caught:
        fatbin.images(fixtures / "fatbin" / name)
    assert name in str(caught.value)


def section_start(data: bytes) -> int:
    return data.index(struct.pack("<I", fatbin.MAGIC))


@pytest.mark.parametrize(
    ("offset", "new", "says"),
    [
        (0, b"\x51", "magic"),
        (4, b"\x02", "version 2"),
        (8, b"\x07\x00\x00\x00", "entries end"),
        (16, b"\x03", "kind 3"),
        (18, b"\x02", "version 0x102"),
        (16 + 4, b"\x10", "header 16"),
        (16 + 8, b"\xff\xff\xff", "past"),
        (16 + 42, b"\x30", "both suffix bits"),
    ],
)
def test_refuses_a_changed_byte(fixtures: Path, tmp_path: Path, offset: int, new: bytes, says: str) -> None:
    data = bytearray((fixtures / "fatbin" / "two_units.so").read_bytes())
    at = section_start(data) + offset
    data[at : at + len(new)] = new
    broken = tmp_path / "broken.so"
    broken.write_bytes(data)
    with pytest.raises(fatbin.FatbinError, match=says):
        fatbin.images(broken)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "says"),
    [
        (0x28, "<Q", 2**63, "section header at byte 9223372036854775808 is cut short"),
        (0x28, "<Q", 2**40, "is cut short"),
        (0x3A, "<H", 0, "no section headers"),
        (0x3A, "<H", 40, "no section headers"),
    ],
)
def test_refuses_section_headers_that_are_elsewhere(
    fixtures: Path, tmp_path: Path, offset: int, layout: str, value: int, says: str
) -> None:
    data = bytearray((fixtures / "fatbin" / "mixed.so").read_bytes())
    struct.pack_into(layout, data, offset, value)
    (tmp_path / "broken.so").write_bytes(data)
    with pytest.raises(fatbin.FatbinError, match=says):
        fatbin.images(tmp_path / "broken.so")


@pytest.mark.parametrize("keep", [0, 5, 30, 200, 4000, -600])
def test_refuses_a_truncated_file(fixtures: Path, tmp_path: Path, keep: int) -> None:
    data = (fixtures / "fatbin" / "mixed.so").read_bytes()
    short = tmp_path / "short.so"
    short.write_bytes(data[:keep])
    with pytest.raises(fatbin.FatbinError):
        fatbin.images(short)


def test_reads_a_bare_fat_binary(fixtures: Path, tmp_path: Path) -> None:
    data = (fixtures / "fatbin" / "ptx_only.so").read_bytes()
    at = section_start(data)
    size = struct.unpack_from("<Q", data, at + 8)[0] + 16
    bare = tmp_path / "bare.fatbin"
    bare.write_bytes(data[at : at + size])
    assert found(bare) == [("ptx", "100f")]
