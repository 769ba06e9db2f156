"""Comparing two builds: what differs is named, and two builds that differ are an error."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci import build, reproduce
from ci.errors import ConfigError, ReproducibilityError

if TYPE_CHECKING:
    from handmade import MakeLibrary, MakeWheel

pytest_plugins = ["handmade"]
FILES = {"flash_kda/__init__.py": "a = 1\n"}
TEXT = 'extern "C" {{ const char* text() {{ return "{}"; }} int number() {{ return 7; }} }}'


def differences(first: Path, second: Path) -> list[str]:
    return [str(difference) for difference in reproduce.compare(first, second)]


def test_the_same_bytes_do_not_differ(make_wheel: MakeWheel) -> None:
    assert differences(make_wheel(FILES, folder="a"), make_wheel(FILES, folder="b")) == []


def test_a_changed_text_is_named_with_its_place(make_wheel: MakeWheel) -> None:
    second = make_wheel({"flash_kda/__init__.py": "a = 2\n"}, folder="b")
    found = differences(make_wheel(FILES, folder="a"), second)
    assert found == ["flash_kda/__init__.py: first at offset 4: b'a = 1\\n' against b'a = 2\\n'"]


def test_a_changed_library_is_named_with_its_section(
    make_wheel: MakeWheel, make_library: MakeLibrary
) -> None:
    member = "flash_kda/_C.abi3.so"
    contents = [
        make_library("l.so", TEXT.format(word), "-Wl,-soname,l.so").read_bytes() for word in ("left", "rite")
    ]
    wheels = [make_wheel({member: data}, folder=f"w{i}") for i, data in enumerate(contents)]
    found = differences(*wheels)
    assert any(line.startswith(f"{member}: section .rodata: first at offset 0: b'left") for line in found)
    assert not any("section .text" in line for line in found)


def test_a_difference_outside_the_sections_is_not_missed(make_library: MakeLibrary) -> None:
    data = bytearray(make_library("l.so", TEXT.format("x")).read_bytes())
    before = bytes(data)
    data[8] ^= 1  # a padding byte of the ELF header
    found = [str(difference) for difference in reproduce._contents("l.so", before, bytes(data))]
    assert found and found[0].startswith("l.so: outside the sections (headers): first at offset 8")


def test_a_member_of_one_wheel_alone_is_named(make_wheel: MakeWheel) -> None:
    second = make_wheel({**FILES, "flash_kda/extra.py": ""}, folder="b")
    assert "flash_kda/extra.py: only in the second wheel" in differences(
        make_wheel(FILES, folder="a"), second
    )


@pytest.mark.parametrize(("field", "text"), [("date_time", "date"), ("external_attr", "mode")])
def test_dates_and_modes_count(field: str, text: str, make_wheel: MakeWheel) -> None:
    first, second = make_wheel(FILES, folder="a"), make_wheel(FILES, folder="b")
    with zipfile.ZipFile(second, "a") as archive:
        value = (1999, 1, 2, 3, 4, 6) if field == "date_time" else 0o777 << 16
        setattr(archive.getinfo("flash_kda/__init__.py"), field, value)
        archive.writestr("touch", "")  # makes zipfile write the directory of the archive again
    assert any(line.startswith(f"flash_kda/__init__.py: {text} ") for line in differences(first, second))


def test_another_compression_is_a_difference(make_wheel: MakeWheel) -> None:
    first, second = make_wheel(FILES, folder="a"), make_wheel(FILES, folder="b")
    with zipfile.ZipFile(first) as source, zipfile.ZipFile(second, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, data)
    assert differences(first, second) == ["zip: same members, other container bytes (compression or layout)"]


def test_another_name_is_a_difference(make_wheel: MakeWheel) -> None:
    first = make_wheel(FILES, folder="a")
    second = make_wheel({**FILES, "x.py": ""}, folder="b", tag="py2-none-any")
    assert any(line.startswith("file name: ") for line in differences(first, second))


def test_builds_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch, make_wheel: MakeWheel) -> None:
    other = make_wheel({"flash_kda/__init__.py": "a = 3\n"}, folder="b")
    made = iter([make_wheel(FILES, folder="a"), other, other])
    asked = []

    def build_row(
        _label: str,
        _archs: str | None,
        _out: Path,
        *,
        work: Path,
        conditions: build.Conditions,
        platform: str,
    ) -> Path:
        asked.append((conditions, platform, work.is_dir()))
        return next(made)

    monkeypatch.setattr(build, "build_row", build_row)
    with pytest.raises(ReproducibilityError, match=r"flash_kda/__init__\.py: first at offset 4"):
        reproduce.reproduce("cu130", None, None, "aarch64")
    (first, *_), (second, *_), (third, *_) = asked
    assert {(platform, there) for _, platform, there in asked} == {("aarch64", True)}
    assert first == reproduce.FIRST and second == replace(
        reproduce.SECOND, compiler_cache=third.compiler_cache
    )
    assert second.compiler_cache is not None


def test_a_wheel_of_somebody_else_is_compared(monkeypatch: pytest.MonkeyPatch, make_wheel: MakeWheel) -> None:
    wheel = make_wheel(FILES, folder="a")
    monkeypatch.setattr(build, "build_row", lambda *_arguments, **_options: wheel)
    monkeypatch.setattr(reproduce, "_refuse_unused", lambda _store: None)
    found = reproduce.reproduce("cu130", None, wheel)
    assert found["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_compiler_cache_that_nothing_came_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReproducibilityError, match="got 0 hits and 0 misses"):
        reproduce._refuse_unused(tmp_path)


def test_everything_that_may_differ_differs_between_the_two_builds() -> None:
    first, second = vars(reproduce.FIRST), vars(reproduce.SECOND)
    # The folder of the compiler cache is made for each run.
    assert [name for name in first if first[name] == second[name]] == ["compiler_cache"]


def test_a_folder_for_records_that_takes_none_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["ci.reproduce", "--cuda", "cu999", "--record", "/dev/null"])
    with pytest.raises(ConfigError, match="give another one with --record"):
        reproduce.main()


def test_a_missing_wheel_to_compare_with_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["ci.reproduce", "--against", str(tmp_path / "none.whl")])
    with pytest.raises(ConfigError, match="no such file"):
        reproduce.main()
