"""Imports of another machine's wheels: what is refused, and that only passes leave a record.

The emulation itself is ``nox -s import_aarch64``: it needs qemu, and a torch of 150 MB.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from ci import import_emulated, wheels
from ci.errors import AbiError, ConfigError, MetadataError, ToolchainError
from ci.platforms import PLATFORMS

AARCH64 = PLATFORMS["aarch64"]
SOURCE = {"commit": "a" * 40, "dirty": False, "sha256": "b" * 64}
MACHINE = import_emulated.Machine(AARCH64, Path("/root-of-it"), "3.11", "qemu-aarch64 version 7.2")


def test_a_missing_emulator_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolchainError, match=r"qemu-aarch64-static: .*\n.*apt-get install qemu-user-static"):
        import_emulated.machine(AARCH64)


def test_a_wheel_of_this_machine_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "flash_kda-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"")
    with pytest.raises(MetadataError, match="not a supported wheel on this platform"):
        import_emulated.check(wheel, MACHINE, tmp_path)


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> int:
    """Run the command for two wheels, as if the one named `fails` did not load."""

    def check(wheel: Path, _machine: import_emulated.Machine, _beside: Path) -> str:
        if wheel.name == fails:
            raise AbiError("it does not load")
        return f"used {wheel.name}"

    for name in ("a.whl", "b.whl"):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("flash_kda/build_record.json", json.dumps({"source": {**SOURCE, "files": {}}}))
    monkeypatch.setattr(import_emulated, "machine", lambda _target: MACHINE)
    monkeypatch.setattr(import_emulated, "packages", lambda _machine, _torch: folder)
    monkeypatch.setattr(import_emulated, "check", check)
    found = [str(folder / name) for name in ("a.whl", "b.whl")]
    monkeypatch.setattr(sys, "argv", ["ci.import_emulated", "--records", str(folder / "records"), *found])
    return import_emulated.main()


def test_a_pass_is_recorded_with_what_it_was_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(tmp_path, monkeypatch) == 0
    record = json.loads((tmp_path / "records" / "aarch64.json").read_text())
    digest = hashlib.sha256((tmp_path / "b.whl").read_bytes()).hexdigest()
    wanted = {"wheel": "b.whl", "wheel_sha256": digest, "source": SOURCE, "said": "used b.whl"}
    assert record["wheels"][1] == wanted
    assert (record["target"], record["verdict"], record["torch"]) == ("aarch64", "passed", "2.10.0")
    assert MACHINE.qemu in record["emulator"] and record["date"].endswith("Z")


def test_a_wheel_that_does_not_load_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AbiError):
        started(tmp_path, monkeypatch, fails="b.whl")
    assert not (tmp_path / "records").exists()


def test_no_wheel_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["ci.import_emulated"])
    with pytest.raises(ConfigError, match="no wheel in"):
        import_emulated.main()
