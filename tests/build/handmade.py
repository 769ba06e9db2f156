"""A pytest plugin with what the factory's tests share: the tools of a build, a real wheel, wheels by hand.

Not a conftest.py: tests/unit has one, and of two modules named conftest only one can be imported by name.
"""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ci import build, matrix, venv

MakeWheel = Callable[..., Path]
MakeLibrary = Callable[..., Path]
_WHEEL = "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: {tag}\n"


@pytest.fixture(scope="session")
def tools() -> venv.Venv:
    """The environment of a build, from the cache."""
    return venv.locked("build", torch=matrix.load().project.torch_build)


@pytest.fixture(scope="session")
def real_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repaired wheel of the sources as they are, for the first architecture of the first row."""
    row = matrix.load().rows[0]
    return build.build_row(row.label, row.archs[0], tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    """Write a wheel by hand: ``make_wheel({"flash_kda/__init__.py": "..."}, name="flash_kda",
    tag="py3-none-any")``."""

    def make(
        files: Mapping[str, str | bytes],
        *,
        name: str = "flash_kda",
        version: str = "0.1.0",
        tag: str = "py3-none-any",
        folder: str = "handmade",
    ) -> Path:
        info = f"{name}-{version}.dist-info"
        path = tmp_path / folder / f"{name}-{version}-{tag}.whl"
        path.parent.mkdir(exist_ok=True)
        rest = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": _WHEEL.format(tag=tag),
        }
        members = [*files, *rest, f"{info}/RECORD"]
        rest[f"{info}/RECORD"] = "".join(
            f"{member},,\n" for member in members
        )  # auditwheel reads what it lists
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in {**files, **rest}.items():
                archive.writestr(member, content)
        return path

    return make


@pytest.fixture
def make_library(tmp_path: Path) -> MakeLibrary:
    """Compile C++ text into a shared library: ``make_library("libx.so", "int x() { return 1; }", "-lz")``."""

    def make(name: str, text: str, *arguments: str) -> Path:
        source, path = tmp_path / "sources" / f"{name}.cc", tmp_path / name
        source.parent.mkdir(exist_ok=True)
        source.write_text(text)
        command = ["g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-o", str(path), str(source), *arguments]
        subprocess.run(command, check=True, cwd=tmp_path)
        return path

    return make


@pytest.fixture
def make_foreign(tmp_path: Path, tools: venv.Venv) -> MakeLibrary:
    """Compile C text into an aarch64 library, with the zig of the build; the same call as `make_library`."""

    def make(name: str, text: str, *arguments: str) -> Path:
        source, path = tmp_path / "sources" / f"{name}.c", tmp_path / name
        source.parent.mkdir(exist_ok=True)
        source.write_text(text)
        command = [str(tools.python), "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28", "-nostdlib"]
        command += ["-shared", "-fPIC", "-s", "-o", str(path), str(source), *arguments]
        zig = str(tmp_path / "zig")
        env = {"PATH": "/usr/bin:/bin", "ZIG_GLOBAL_CACHE_DIR": zig, "ZIG_LOCAL_CACHE_DIR": zig}
        subprocess.run(command, check=True, cwd=tmp_path, env=env)
        return path

    return make
