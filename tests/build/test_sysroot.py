"""The glibc-2.28 link surface, and the stubs that let a CUDA torch be imported."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci import sysroot, torch_stubs
from ci.errors import ToolchainError
from ci.venv import Venv

if TYPE_CHECKING:
    from handmade import MakeLibrary

pytest_plugins = ["handmade"]
# What drags in newer symbols with GCC 12 and C++20; atexit needs libc_nonshared.a.
DEMANDING = """
#include <cstdlib>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>
static int calls = 0;
extern "C" int demanding() {
    std::atexit([] { ++calls; });
    auto shared = std::make_shared<int>(40);
    auto other = shared;
    std::thread([&] { ++*other; }).join();
    std::ostringstream text;
    text << *shared;
    try { throw std::runtime_error(std::move(text).str()); }
    catch (const std::exception& error) { return std::atoi(error.what()) + 1; }
}
"""
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}


@pytest.fixture(scope="module")
def root(tools: Venv) -> Path:
    return sysroot.ensure(tools)


def link_words(root: Path) -> list[str]:
    return [f"-L{root / 'lib'}", str(root / "compat.o"), "-lpthread", "-ldl", "-Wl,-z,defs"]


def too_new(library: Path) -> set[str]:
    """The symbol versions `library` needs beyond LIMITS."""
    shown = subprocess.run(["objdump", "-p", str(library)], check=True, capture_output=True, text=True).stdout
    found = set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", shown))
    assert found
    return {f"{kind}_{v}" for kind, v in found if tuple(map(int, v.split("."))) > LIMITS[kind]}


def test_a_demanding_library_keeps_to_the_floor(root: Path, make_library: MakeLibrary) -> None:
    assert not too_new(make_library("libfloor.so", DEMANDING, *link_words(root)))


def test_the_same_library_linked_plainly_does_not(make_library: MakeLibrary) -> None:
    assert too_new(make_library("libplain.so", DEMANDING))


def test_it_loads_and_exceptions_work(root: Path, make_library: MakeLibrary) -> None:
    library = make_library("libruns.so", DEMANDING, *link_words(root))
    code = f"import ctypes; assert ctypes.CDLL({str(library)!r}).demanding() == 42"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_second_call_makes_nothing(root: Path, tools: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysroot, "_fill", lambda *_: pytest.fail("made again"))
    assert sysroot.ensure(tools) == root


def test_without_a_compiler_the_error_says_so(tools: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolchainError, match=r"g\+\+ cannot be run"):
        sysroot.ensure(tools)


def test_without_zig_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages").mkdir(parents=True)
    with pytest.raises(ToolchainError, match="no ziglang package"):
        sysroot.ensure(Venv(tmp_path))


def test_missing_stubs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="no stub of libm"):
        sysroot._add_plain_names(tmp_path)


def test_stubs_satisfy_a_library_whose_needs_are_gone(tmp_path: Path, make_library: MakeLibrary) -> None:
    script = tmp_path / "gone.map"
    script.write_text("GONE_1 { gone_*; };\n")
    versioned = make_library(
        "libgone.so.1", 'extern "C" int gone_f() { return 1; }', f"-Wl,--version-script={script}"
    )
    loose = make_library("libloose.so.2", 'extern "C" int loose_f() { return 2; }')
    text = 'extern "C" { int gone_f(); int loose_f(); int sum() { return gone_f() + loose_f(); } }'
    user = make_library("libuser.so", text, str(versioned.name), str(loose.name), "-Wl,-rpath,$ORIGIN", "-lm")
    versioned.unlink()
    loose.unlink()
    with pytest.raises(OSError, match="cannot open shared object"):
        ctypes.CDLL(str(user))
    assert torch_stubs.write(tmp_path) == ["libgone.so.1", "libloose.so.2"]
    assert ctypes.CDLL(str(user)).sum() == 2 * torch_stubs.INSUFFICIENT_DRIVER


def test_nothing_missing_makes_no_stub(tmp_path: Path, make_library: MakeLibrary) -> None:
    make_library("libself.so", "int f() { return 1; }")
    assert torch_stubs.write(tmp_path) == []
