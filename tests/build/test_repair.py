"""Platform tag and canonical zip; each kind of wheel that must not pass."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from verify_artifacts import BUILD_RECORD

from ci import repair, sbom
from ci.errors import ConfigError, MetadataError, PlatformError
from ci.venv import Venv

if TYPE_CHECKING:
    from handmade import MakeLibrary, MakeWheel

pytest_plugins = ["handmade"]
EPOCH = 1_700_000_000
# pthread_create moved into libc with glibc 2.34, so a plain link on a newer system needs that version.
NEW_GLIBC = """
#include <pthread.h>
int f(void* (*g)(void*)) { pthread_t t; return pthread_create(&t, 0, g, 0); }
"""
TAG = "cp310-abi3-linux_x86_64"
RECORD = {**BUILD_RECORD, "source": {"commit": None, "dirty": None, "sha256": "0" * 64}}
RECORDED = {"flash_kda/build_record.json": json.dumps(RECORD)}


def test_members_in_another_order_date_and_mode_give_the_same_bytes(
    tmp_path: Path, make_wheel: MakeWheel
) -> None:
    files = {"flash_kda/b.py": "b", "flash_kda/a.py": "a", "flash_kda/_C.abi3.so": b"\x7fELF"}
    first = make_wheel(files, folder="one")
    second = make_wheel(dict(reversed(files.items())), folder="two")
    with zipfile.ZipFile(second, "a") as archive:
        info = archive.getinfo("flash_kda/a.py")
        info.external_attr, info.date_time = 0o600 << 16, (1999, 1, 1, 0, 0, 0)
    outputs = [
        repair.normalise(first, tmp_path / "1.whl", EPOCH),
        repair.normalise(second, tmp_path / "2.whl", EPOCH),
    ]
    assert first.read_bytes() != second.read_bytes()
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_the_zip_is_sorted_dated_and_recorded(tmp_path: Path, make_wheel: MakeWheel) -> None:
    wheel = make_wheel({"flash_kda/b.py": "b", "flash_kda/_C.abi3.so": b"so", "flash_kda/a.py": "a"})
    with zipfile.ZipFile(repair.normalise(wheel, tmp_path / "out.whl", EPOCH)) as archive:
        infos = archive.infolist()
        record = infos[-1].filename
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        contents = {info.filename: archive.read(info) for info in infos}
    assert record.endswith("/RECORD")
    assert [info.filename for info in infos[:-1]] == sorted(info.filename for info in infos[:-1])
    assert {info.date_time for info in infos} == {(2023, 11, 14, 22, 13, 20)}
    assert {info.filename: info.external_attr >> 16 & 0o777 for info in infos}[
        "flash_kda/_C.abi3.so"
    ] == 0o755
    for name, digest, size in rows[:-1]:
        expected = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(contents[name])))
    assert rows[-1] == [record, "", ""] and len(rows) == len(infos)


def test_a_wheel_without_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.py", "")
    with pytest.raises(MetadataError, match=r"expected one \.dist-info/RECORD"):
        repair.normalise(path, tmp_path / "out.whl", EPOCH)


def test_a_library_that_needs_a_newer_glibc_is_refused(
    tmp_path: Path, tools: Venv, make_wheel: MakeWheel, make_library: MakeLibrary
) -> None:
    library = make_library("_C.abi3.so", NEW_GLIBC)
    wheel = make_wheel({"flash_kda/_C.abi3.so": library.read_bytes()}, tag=TAG)
    with pytest.raises(PlatformError, match="too-recent versioned symbols"):
        repair.repair(wheel, tmp_path / "out", tools, EPOCH)
    assert not (tmp_path / "out").exists()


def test_a_library_that_needs_a_stranger_is_refused(
    tmp_path: Path, tools: Venv, make_wheel: MakeWheel, make_library: MakeLibrary
) -> None:
    make_library("libstranger.so", "int stranger() { return 1; }")
    library = make_library(
        "_C.abi3.so", "int stranger(); int f() { return stranger(); }", "-L.", "-lstranger"
    )
    wheel = make_wheel({"flash_kda/_C.abi3.so": library.read_bytes()}, tag=TAG)
    with pytest.raises(PlatformError, match=r"libstranger\.so"):
        repair.repair(wheel, tmp_path / "out", tools, EPOCH)


def test_a_wheel_with_nothing_to_audit_is_refused(tmp_path: Path, tools: Venv, make_wheel: MakeWheel) -> None:
    with pytest.raises(PlatformError):
        repair.repair(make_wheel({"flash_kda/__init__.py": ""}, tag=TAG), tmp_path / "out", tools, EPOCH)


def test_a_harmless_library_passes_and_torch_stays_outside(
    tmp_path: Path, tools: Venv, make_wheel: MakeWheel, make_library: MakeLibrary
) -> None:
    make_library("libtorch.so", "int torch() { return 1; }")
    library = make_library("_C.abi3.so", "int torch(); int f() { return torch(); }", "-L.", "-ltorch")
    files = {"flash_kda/_C.abi3.so": library.read_bytes(), **RECORDED}
    repaired = repair.repair(make_wheel(files, tag=TAG), tmp_path / "out", tools, EPOCH)
    assert repaired.name == "flash_kda-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(repaired) as archive:
        assert not [name for name in archive.namelist() if "libtorch" in name]
        wheel_file = archive.read("flash_kda-0.1.0.dist-info/WHEEL").decode()
        materials = archive.read(f"flash_kda-0.1.0.dist-info/{sbom.MEMBER}").decode()
        assert sbom.MEMBER in archive.read("flash_kda-0.1.0.dist-info/RECORD").decode()
    assert materials == sbom.make(RECORD, EPOCH)
    assert "Tag: cp310-abi3-manylinux_2_28_x86_64" in wheel_file


def test_a_wheel_without_a_build_record_is_refused(
    tmp_path: Path, tools: Venv, make_wheel: MakeWheel, make_library: MakeLibrary
) -> None:
    make_library("libtorch.so", "int torch() { return 1; }")
    library = make_library("_C.abi3.so", "int torch(); int f() { return torch(); }", "-L.", "-ltorch")
    wheel = make_wheel({"flash_kda/_C.abi3.so": library.read_bytes()}, tag=TAG)
    with pytest.raises(MetadataError, match=r"expected a wheel with flash_kda/build_record\.json"):
        repair.repair(wheel, tmp_path / "out", tools, EPOCH)
    assert not (tmp_path / "out").exists()


def needs_glibc(make_foreign: MakeLibrary, folder: Path, version: str) -> bytes:
    """An aarch64 library that needs symbol version GLIBC_`version` of a libc.so.6."""
    (folder / "libc.map").write_text(f"GLIBC_{version} {{ global: *; }};\n")
    words = ("-Wl,-soname,libc.so.6", "-Wl,--version-script=libc.map")
    make_foreign("libneeded.so", "int needed(void) { return 1; }", *words)
    text = "int needed(void); int f(void) { return needed(); }"
    return make_foreign("_C.abi3.so", text, "./libneeded.so").read_bytes()


def test_an_aarch64_library_gets_its_own_tag(
    tmp_path: Path, tools: Venv, make_wheel: MakeWheel, make_foreign: MakeLibrary
) -> None:
    library = needs_glibc(make_foreign, tmp_path, "2.17")
    wheel = make_wheel({"flash_kda/_C.abi3.so": library, **RECORDED}, tag="cp310-abi3-linux_aarch64")
    repaired = repair.repair(wheel, tmp_path / "out", tools, EPOCH)
    assert repaired.name == "flash_kda-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl"


def test_an_aarch64_library_that_needs_a_newer_glibc_is_refused(
    tmp_path: Path, tools: Venv, make_wheel: MakeWheel, make_foreign: MakeLibrary
) -> None:
    library = needs_glibc(make_foreign, tmp_path, "2.34")
    wheel = make_wheel({"flash_kda/_C.abi3.so": library}, tag="cp310-abi3-linux_aarch64")
    with pytest.raises(PlatformError, match="too-recent versioned symbols"):
        repair.repair(wheel, tmp_path / "out", tools, EPOCH)


@pytest.mark.parametrize("tag", ["linux_aarch64", "linux_x86_64"])
def test_a_library_of_another_machine_is_refused(
    tag: str,
    tmp_path: Path,
    tools: Venv,
    make_wheel: MakeWheel,
    make_library: MakeLibrary,
    make_foreign: MakeLibrary,
) -> None:
    make = make_library if tag.endswith("aarch64") else make_foreign
    library = make("_C.abi3.so", "int f(void) { return 1; }")
    wheel = make_wheel({"flash_kda/_C.abi3.so": library.read_bytes()}, tag=f"cp310-abi3-{tag}")
    with pytest.raises(PlatformError, match=r"architecture found|no ELF"):
        repair.repair(wheel, tmp_path / "out", tools, EPOCH)


def test_a_grafted_library_is_refused(make_wheel: MakeWheel) -> None:
    wheel = make_wheel({"flash_kda.libs/libcudart.so.13": b""})
    with pytest.raises(PlatformError, match=r"libcudart\.so\.13"):
        repair._refuse_grafts(wheel)


def test_absent_output_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="got nothing"):
        repair._only_wheel(tmp_path, Path("x.whl"), "manylinux_2_28_x86_64")


def test_another_tag_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x-1-cp310-abi3-manylinux_2_34_x86_64.whl").touch()
    with pytest.raises(PlatformError, match="manylinux_2_34"):
        repair._only_wheel(tmp_path, Path("x.whl"), "manylinux_2_28_x86_64")


@pytest.mark.parametrize("value", ["", "yesterday", "-1", "1.5"])
def test_a_bad_epoch_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    with pytest.raises(ConfigError, match="SOURCE_DATE_EPOCH"):
        repair.epoch_from_environment()


def test_torch_is_on_the_list_of_what_stays_outside() -> None:
    assert set(repair.excludes()) == {"libtorch.so", "libtorch_cpu.so"}
