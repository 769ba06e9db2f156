"""Locks, sessions and the CI script agree with each other."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci import dsl_matrix, matrix, update, venv
from ci.errors import ConfigError, ToolchainError

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = {
    "build_wheels",
    "verify_wheels",
    "reproduce",
    "rebuild",
    "diff",
    "size",
    "index",
    "index_check",
    "gpu_matrix",
    "wheel_matrix",
    "sdist",
    "release_check",
    "tests",
    "dsl_matrix",
    "gpu_tests",
    "fallthrough",
    "lint",
    "update",
    "import_matrix",
    "import_aarch64",
    "cibw",
    "containers",
}
INPUTS = sorted(venv.REQUIREMENTS.glob("*.in"))
LOCKS = sorted(venv.REQUIREMENTS.glob("*.txt"))


def session_functions() -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {node.name: node for node in functions}


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.stem)
def test_each_input_has_a_lock_with_its_pins_and_hashes(path: Path) -> None:
    lock = path.with_suffix(".txt").read_text()
    pins = re.findall(r"^([A-Za-z0-9_-]+)==([0-9.]+)", path.read_text(), re.MULTILINE)
    for name, version in pins:
        assert re.search(rf"^{name.replace('_', '-')}=={re.escape(version)}\b", lock, re.MULTILINE), name


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_each_lock_has_a_source_and_hashes_alone(path: Path, tmp_path: Path) -> None:
    update.write_dsl_inputs(matrix.load().dsl, tmp_path)
    assert path.stem in {source.stem for source in (*INPUTS, *tmp_path.iterdir())}
    lock = path.read_text()
    requirements = re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n", "", lock).strip())
    for requirement in requirements:
        assert "==" in requirement and "--hash=sha256:" in requirement


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.stem)
def test_each_requirement_says_why(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(" # " in line for line in lines)


def test_an_unknown_lock_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of build, cache, ci"):
        update.inputs(["nothing"], venv.REQUIREMENTS)


def test_each_version_of_the_dsl_has_a_lock(tmp_path: Path) -> None:
    versions = matrix.load().dsl
    update.write_dsl_inputs(versions, tmp_path)
    names = [matrix.dsl_lock(version) for version in versions]
    assert sorted(names) == sorted(path.stem for path in LOCKS if path.stem.startswith("cute-"))
    assert [path.stem for path in update.inputs(names, venv.REQUIREMENTS, tmp_path)] == names
    for version, name in zip(versions, names, strict=True):
        lock = (venv.REQUIREMENTS / f"{name}.txt").read_text()
        assert re.search(rf"^nvidia-cutlass-dsl=={re.escape(version)} ", lock, re.MULTILINE)


def test_a_version_of_the_dsl_that_is_not_in_the_matrix_is_refused() -> None:
    assert dsl_matrix.chosen(None) == matrix.load().dsl and dsl_matrix.chosen("4.8.1") == ("4.8.1",)
    with pytest.raises(ConfigError, match=r"--dsl 4\.8: expected one of 4\.6\.2, "):
        dsl_matrix.chosen("4.8")


def test_the_sessions_are_those_the_readme_may_name() -> None:
    assert set(session_functions()) == SESSIONS


def test_sessions_are_short_and_call_modules_that_exist() -> None:
    for function in session_functions().values():
        assert len(function.body) <= 4 and ast.get_docstring(function)
    text = (ROOT / "noxfile.py").read_text()
    called = set(re.findall(r'call\(session, "(\w+)"', text)) | set(re.findall(r'"ci\.(\w+)"', text))
    assert {"build", "wheels", "reproduce", "tests", "lint", "gpu_tests", "update", "toolchain"} <= called
    for name in called:
        importlib.import_module(f"ci.{name}")


def test_the_ci_script_runs_the_readmes_commands_with_the_tests_last() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"nox -s (\w+)", text) == ["lint", "build_wheels", "build_wheels", "reproduce", "tests"]
    assert "pip install --quiet nox" in text
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=False).returncode == 0


# Those that the documents call without nox, and of those that sessions call one for each way to the packages.
@pytest.mark.parametrize(
    "words",
    [
        ["ci.verify", "x.whl"],
        ["ci.wheels", "x.whl"],
        ["ci.build"],
        ["ci.containers"],
        ["ci.stand_in"],
        ["ci.toolchain", "ensure", "cu130"],
        ["ci.reproduce"],
        ["ci.dsl_matrix"],
    ],
    ids="-".join,
)
def test_without_the_pinned_packages_a_command_says_what_to_install(words: list[str]) -> None:
    # -S: no site-packages, so nothing but the standard library is there.
    done = subprocess.run(
        [sys.executable, "-S", "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == ToolchainError.exit_code, done.stderr
    assert "Next: use nox, or: python -m pip install" in done.stderr and "Traceback" not in done.stderr
