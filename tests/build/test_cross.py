"""What wheels of another platform are linked with.

The build itself is ``nox -s build_wheels -- --platform aarch64``, which .ci/run does: it needs a cross
compiler.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci import cache, cross, toolchain
from ci.errors import ToolchainError
from ci.platforms import PLATFORMS
from ci.toolchain import runtime
from ci.venv import Venv

if TYPE_CHECKING:
    from handmade import MakeLibrary

pytest_plugins = ["handmade"]
AARCH64 = PLATFORMS["aarch64"]


def headers(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_runtime_is_of_the_other_machine() -> None:
    archive = runtime.library("13.0", AARCH64)
    members = subprocess.run(["readelf", "-h", archive], capture_output=True, text=True, check=True).stdout
    assert members.count("AArch64") == members.count("Machine:") > 0
    assert archive.read_bytes() != (toolchain.ensure("13.0") / "lib" / archive.name).read_bytes()


def test_a_runtime_lost_from_the_cache_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV, str(tmp_path))
    monkeypatch.setattr(runtime, "_install", lambda *_: None)
    with pytest.raises(ToolchainError, match=r"expected one .*libcudart_static\.a, found 0\.\nNext: rm -r "):
        runtime.library("13.0", AARCH64)


def test_a_file_that_is_not_the_locked_one_is_refused(tmp_path: Path) -> None:
    good = runtime._pin(toolchain.lock_path("13.0"))
    bad = toolchain.Pin(good.name, good.version, ("0" * 64,))
    with pytest.raises(
        ToolchainError, match=r"Expected sha256 0{64}[\s\S]*Got [\s\S]*\nNext: .*git checkout"
    ):
        runtime._install(bad, tmp_path, AARCH64)


def test_a_lock_without_a_runtime_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "13.0.lock"
    lock.write_text(f"nvidia-cuda-crt==13.0.88 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ToolchainError, match="expected nvidia-cuda-runtime, got none"):
        runtime._pin(lock)


def test_headers_that_are_not_the_toolkits_are_refused(tmp_path: Path) -> None:
    ours = headers(tmp_path / "ours", **{"a.h": "1", "crt/b.h": "2", "more.h": "3"})
    runtime.check_headers(headers(tmp_path / "same", **{"a.h": "1", "crt/b.h": "2"}), ours)
    for name, files in {"changed": {"a.h": "1", "crt/b.h": "9"}, "new": {"x.h": ""}, "none": {}}.items():
        with pytest.raises(ToolchainError, match=r"got others: (crt/b\.h|x\.h|no headers)\.\nNext: "):
            runtime.check_headers(headers(tmp_path / name, **files), ours)


def test_torchs_stubs_need_its_shim(tmp_path: Path, make_library: MakeLibrary) -> None:
    folder = tmp_path / "lib" / "python3.11" / "site-packages" / "torch" / "lib"
    folder.mkdir(parents=True)
    make_library("libtorch_cpu.so", 'extern "C" int another() { return 1; }').rename(
        folder / "libtorch_cpu.so"
    )
    with pytest.raises(ToolchainError, match=r"expected exported names such as aoti_torch_\*, .*got none"):
        cross._add_torch(tmp_path, Venv(tmp_path), AARCH64)
    (folder / "libtorch_cpu.so").write_text("no library")
    with pytest.raises(ToolchainError, match=r"nm on .*libtorch_cpu\.so failed"):
        cross._add_torch(tmp_path, Venv(tmp_path), AARCH64)


def test_the_shim_is_what_a_library_exports(make_library: MakeLibrary) -> None:
    text = 'extern "C" { int aoti_torch_a() { return 1; } int torch_b(); int c() { return torch_b(); } }'
    assert set(cross._exported(make_library("lib.so", text))) >= {"aoti_torch_a", "c"}
    assert "torch_b" not in cross._exported(make_library("lib.so", text))
