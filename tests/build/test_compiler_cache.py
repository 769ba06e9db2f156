"""ccache around the compilers: the same objects, and nothing taken from it that a build refuses."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_setup

from ci import build, matrix, toolchain, venv
from ci.errors import ToolchainError
from ci.extension import compiler_cache

LIBRARY = "flash_kda/_C.abi3.so"


def counts(store: Path) -> dict[str, int]:
    program = venv.locked("cache").bin / "ccache"
    command = [program, "--dir", store, "--print-stats"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+)\t(\d+)", said)}


def compile_tree(tree: Path, store: Path | None, **more: str) -> subprocess.CompletedProcess[str]:
    variables = {"CUDA_HOME": str(toolchain.ensure("13.0")), "FLASH_KDA_CUDA_ARCHS": "90a", **more}
    if store:
        variables |= {compiler_cache.ENV: str(venv.locked("cache").bin / "ccache"), "CCACHE_DIR": str(store)}
    return test_setup.setup(tree, ["build_ext"], variables)


def library(tree: Path) -> bytes:
    (path,) = tree.glob(f"build/lib*/{LIBRARY}")
    return path.read_bytes()


def record(tree: Path) -> bytes:
    (path,) = tree.glob("build/lib*/flash_kda/build_record.json")
    return path.read_bytes()


def test_with_and_without_it_the_bytes_are_the_same(tmp_path: Path) -> None:
    store = tmp_path / "store"
    trees = [test_setup.make_tree(tmp_path / name / "source") for name in ("plain", "cold", "warm")]
    for tree, place in zip(trees, (None, store, store), strict=True):
        assert (done := compile_tree(tree, place)).returncode == 0, done.stderr
    assert len({library(tree) for tree in trees}) == len({record(tree) for tree in trees}) == 1
    found = counts(store)
    assert (found["cache_miss"], found["direct_cache_hit"]) == (2, 2)  # binding.cpp and fwd.cu


def test_a_changed_header_is_compiled(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first, second = (test_setup.make_tree(tmp_path / name / "source") for name in ("one", "two"))
    assert compile_tree(first, store).returncode == 0
    header = second / "csrc/kda/fwd.h"
    header.write_text(header.read_text().replace("FACTOR 3", "FACTOR 4"))
    assert compile_tree(second, store).returncode == 0
    assert library(first) != library(second)
    assert counts(store)["cache_miss"] == 3  # the macro is not in what is left of binding.cpp


def test_what_a_build_refuses_is_refused_the_second_time_too(tmp_path: Path) -> None:
    store, bad = tmp_path / "store", test_setup.LOCAL["anonymous variable"]
    for name in ("one", "two"):
        tree = test_setup.make_tree(tmp_path / name / "source", kernel=f"{test_setup.KERNEL}\n{bad}\n")
        done = compile_tree(tree, store)
        assert done.returncode != 0 and "fwd.cu: device code with internal linkage" in done.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_it_is_off_unless_asked_for(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_cache.find({}) is None and compiler_cache.find({compiler_cache.ENV: value}) is None
    monkeypatch.setenv(compiler_cache.ENV, value)
    assert build.as_asked() == build.Conditions()


def test_a_build_by_command_takes_the_locked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler_cache.ENV, "1")
    row = matrix.load().locked_rows[0]
    made = build.environment(row, row.value, build.tools_for(row), build.as_asked())
    assert made[compiler_cache.ENV] == str(venv.locked("cache").bin / "ccache")
    assert made["CCACHE_DIR"].endswith("/ccache")
    assert compiler_cache.find(made) == Path(made[compiler_cache.ENV])


@pytest.mark.parametrize(("value", "got"), [("no-such", "no such program"), ("sh", "got .*/sh")])
def test_another_program_is_refused(value: str, got: str) -> None:
    with pytest.raises(ToolchainError, match=rf"{compiler_cache.ENV}={value}: expected ccache .*{got}"):
        compiler_cache.find({compiler_cache.ENV: value, "PATH": os.environ["PATH"]})


def test_a_compiler_whose_programs_cannot_be_seen_is_refused(tmp_path: Path) -> None:
    class Tools:
        cuda_home = tmp_path
        cxx = ("g++",)

    tools: Any = Tools()
    with pytest.raises(ToolchainError, match=r"bin/ptxas.*expected a program of the compilers"):
        compiler_cache.configure(tools, tmp_path, "x")
    for name in ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    config = Path(compiler_cache.configure(tools, tmp_path, "x")[compiler_cache.CONFIG_ENV]).read_text()
    hashed = re.search(r"extra_files_to_hash = (.+)", config)
    assert hashed and {"cicc", "ptxas", "cc1plus", "as"} <= {Path(path).name for path in hashed[1].split(":")}
