"""Which platform a wheel is for, and what is said where its wheels cannot be made."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from ci import matrix
from ci.errors import ToolchainError
from ci.platforms import HOST, PLATFORMS, check_tools, of_wheel


def test_each_platform_of_the_matrix_is_known() -> None:
    assert set(matrix.load().others) == set(PLATFORMS) - {HOST}


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("a-1-cp310-abi3-manylinux_2_28_aarch64.whl", "aarch64"),
        ("a-1-cp310-abi3-linux_aarch64.whl", "aarch64"),
        ("a-1-cp310-abi3-manylinux_2_28_x86_64.whl", HOST),
        ("a-1-py3-none-any.whl", HOST),
        ("lib_aarch64.so", HOST),  # a library's name says nothing
    ],
)
def test_the_platform_in_a_name(name: str, platform: str) -> None:
    assert of_wheel(Path(name)).name == platform


def test_a_missing_compiler_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for target, package in ((HOST, r"g\+\+"), ("aarch64", r"g\+\+-aarch64-linux-gnu")):
        with pytest.raises(ToolchainError, match=rf"got none\.\nNext: apt-get install {package}$"):
            check_tools(PLATFORMS[target])


def test_another_machine_builds_no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for target in PLATFORMS.values():
        with pytest.raises(ToolchainError, match=r"are built on x86_64; this machine is aarch64\.\nNext: "):
            check_tools(target)
