"""The locked toolkits: the locks, the install, and what a wrong hash leads to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci import cache, matrix, nvcc, toolchain
from ci.errors import ToolchainError
from ci.toolchain import update

ROOT = Path(__file__).resolve().parents[2]
TOOLKITS = sorted({row.toolkit for row in matrix.load().locked_rows})


@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_locks_name_every_part_with_hashes(toolkit: str) -> None:
    path = toolchain.lock_path(toolkit)
    pins = {pin.name: pin for pin in toolchain.read_lock(path)}
    assert set(pins) == {
        "nvidia-cuda-cccl",
        "nvidia-cuda-crt",
        "nvidia-cuda-cuobjdump",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-nvdisasm",
        "nvidia-cuda-runtime",
        "nvidia-nvvm",
    }
    platforms = len(update.recipe().platforms)
    assert all(1 <= len(pin.hashes) <= platforms for pin in pins.values())
    assert pins["nvidia-cuda-nvcc"].version.startswith(f"{toolkit}.")
    assert "://" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_locks_are_as_update_writes_them(toolkit: str) -> None:
    path = toolchain.lock_path(toolkit)
    assert update.lock_text(toolkit, toolchain.read_lock(path)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_installed_toolkit_runs_and_is_as_locked(toolkit: str) -> None:
    home = toolchain.ensure(toolkit)
    pins = {pin.name: pin.version for pin in toolchain.read_lock(toolchain.lock_path(toolkit))}
    assert nvcc.tool_version(home / "bin" / "nvcc") == pins["nvidia-cuda-nvcc"]
    assert nvcc.tool_version(home / "bin" / "cuobjdump") == pins["nvidia-cuda-cuobjdump"]
    assert (home / "lib" / "libcudart_static.a").is_file()
    assert (home / "include" / "cuda_runtime.h").is_file()


def test_ensure_twice_installs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    home = toolchain.ensure("13.0")
    monkeypatch.setattr(toolchain, "install", lambda *_: pytest.fail("installed again"))
    assert toolchain.ensure("13.0") == home


def _small_lock(folder: Path, hashes: list[str]) -> Path:
    pin = next(p for p in toolchain.read_lock(toolchain.lock_path("13.0")) if p.name == "nvidia-cuda-crt")
    path = folder / "13.0.lock"
    path.write_text(toolchain.Pin(pin.name, pin.version, tuple(hashes)).line() + "\n", encoding="utf-8")
    return path


def test_a_wrong_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV, str(tmp_path / "cache"))
    lock = _small_lock(tmp_path, ["0" * 64])
    with pytest.raises(ToolchainError) as caught:
        toolchain.ensure("13.0", lock)
    text = str(caught.value)
    good = next(p for p in toolchain.read_lock(toolchain.lock_path("13.0")) if p.name == "nvidia-cuda-crt")
    assert "nvidia-cuda-crt" in text
    assert f"expected sha256 {'0' * 64}" in text
    assert any(f"got      sha256 {h}" in text for h in good.hashes)
    assert "Next:" in text
    assert not list((tmp_path / "cache").rglob(".complete"))


def test_an_incomplete_toolkit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Right hashes, but not a toolkit: nothing may be marked complete.
    monkeypatch.setenv(cache.ENV, str(tmp_path / "cache"))
    good = next(p for p in toolchain.read_lock(toolchain.lock_path("13.0")) if p.name == "nvidia-cuda-crt")
    lock = _small_lock(tmp_path, list(good.hashes))
    with pytest.raises(ToolchainError, match="expected one nvidia"):
        toolchain.ensure("13.0", lock)
    assert not list((tmp_path / "cache").rglob(".complete"))


def test_a_program_of_another_version_is_refused() -> None:
    home = toolchain.ensure("13.0")
    pins = toolchain.read_lock(toolchain.lock_path("13.5"))
    with pytest.raises(ToolchainError, match=r"expected version 13\.5.*got 13\.0"):
        toolchain.verify(home, "13.0", pins)


@pytest.mark.parametrize(
    "line",
    [
        "nvidia-cuda-nvcc==13.0.88",
        "nvidia-cuda-nvcc>=13.0 --hash=sha256:" + "0" * 64,
        "nvidia-cuda-nvcc==13.0.88 --hash=sha256:12",
        "nvidia-cuda-nvcc==13.0.88 --hash=md5:" + "0" * 32,
        "--index-url somewhere",
    ],
)
def test_lines_that_are_no_pins(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.lock"
    path.write_text(f"# comment\n{line}\n", encoding="utf-8")
    with pytest.raises(ToolchainError, match="expected 'name==version --hash=sha256"):
        toolchain.read_lock(path)


@pytest.mark.parametrize(
    "content", [b"", b"# a comment\n\n", b"\xff\xfe\n"], ids=["empty", "comment", "binary"]
)
def test_locks_without_pins_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "13.0.lock"
    path.write_bytes(content)
    with pytest.raises(ToolchainError, match=r"expected .*\nNext: .*git checkout"):
        toolchain.ensure("13.0", path)


def test_the_way_back_to_a_lock_works_from_the_root() -> None:
    lock = toolchain.lock_path("13.0")
    assert "'git checkout ci/toolchain/13.0.lock'" in toolchain._restore(lock)


@pytest.mark.parametrize("junk", [b"junk", b"", b"#!/bin/sh\nexit 3\n"])
def test_a_program_damaged_in_the_cache_is_noticed(
    junk: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = toolchain.ensure("13.0")
    monkeypatch.setenv(cache.ENV, str(tmp_path / "cache"))
    home = toolchain.folder("13.0") / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    for program in good.joinpath("bin").iterdir():
        (home / "bin" / program.name).symlink_to(program)
    (home.parent.parent / ".complete").touch()
    assert toolchain.ensure("13.0") == home
    (home / "bin" / "nvcc").unlink()
    (home / "bin" / "nvcc").write_bytes(junk)
    (home / "bin" / "nvcc").chmod(0o755)
    with pytest.raises(
        ToolchainError, match=r"bin/nvcc: expected version 13[\s\S]*\nNext: rm -r .*ensure 13\.0"
    ):
        toolchain.ensure("13.0")


def test_a_version_that_the_index_lacks_is_no_fault_of_the_network() -> None:
    said = (
        "ERROR: Could not find a version that satisfies the requirement nvidia-cuda-crt==13.0.1 "
        "(from versions: 13.0.48, 13.0.88)\n"
        "ERROR: No matching distribution found for nvidia-cuda-crt==13.0.1\n"
    )
    error = toolchain._version_error(toolchain.lock_path("13.0"), said)
    assert error is not None
    assert "expected nvidia-cuda-crt==13.0.1, the index has 13.0.48, 13.0.88" in str(error)
    offline = said.replace("13.0.48, 13.0.88", "none")
    assert toolchain._version_error(toolchain.lock_path("13.0"), offline) is None


def test_an_unknown_toolkit_names_the_known_ones() -> None:
    with pytest.raises(ToolchainError, match=r"13\.0, 13\.5"):
        toolchain.lock_path("9.9")


def test_command_line() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ci.toolchain", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    home = run("ensure", "cu130")
    assert (home.returncode, home.stdout) == (0, f"{toolchain.ensure('13.0')}\n"), home.stderr
    assert run("path", "13.0").stdout == f"{toolchain.folder('13.0')}\n"
    unknown = run("ensure", "9.9")
    assert unknown.returncode == ToolchainError.exit_code
    assert "ToolchainError" in unknown.stderr
