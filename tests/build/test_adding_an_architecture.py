"""docs/adding_an_architecture.md, followed in a clone: the lines it shows, its commands in its order.

Not run here: the tests and linters of the clone, and what needs the GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_releasing import run
from verify_artifacts import ROOT

from ci.errors import ConfigError, LintError, MetadataError
from ci.extension import compiler_cache

PAGE = (ROOT / "docs" / "adding_an_architecture.md").read_text(encoding="utf-8")
NAME = "110a"
COMMANDS = [line.strip() for line in re.findall(r"(?m)^ {4,}((?:nox|python) .+)$", PAGE)]
ALONE = f"nox -s build_wheels -- --cuda cu130 --archs {NAME}"
ROW = "nox -s build_wheels -- --cuda cu130"
WRITE = "nox -s size -- --write wheels/unverified/FILE"
DOCS = "python -m ci.docs"


def shown(beginning: str) -> str:
    """The page's indented lines from the one that begins so."""
    (block,) = re.findall(rf"(?m)^    ({re.escape(beginning)}.*\n(?:    .+\n)*)", PAGE)
    return str(block).replace("\n    ", "\n")


def edit(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, lambda match: match.expand(replacement), path.read_text(), count=1)
    assert count == 1, f"{path}: no {pattern}"
    path.write_text(text)


def follow(repository: Path, command: str) -> subprocess.CompletedProcess[str]:
    session, _, given = command.removeprefix("nox -s ").partition(" -- ")
    return run(repository, session, given.split())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clone of what is committed."""
    folder = tmp_path / "repository"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def name_the_target(repository: Path) -> None:
    edit(
        repository / "flash_kda" / "arch.py",
        r"(KernelTarget\(Target\(12, 0)",
        shown("KernelTarget(") + r"    \1",
    )


def name_the_row(repository: Path) -> None:
    edit(
        repository / "ci" / "matrix.toml",
        r'(label = "cu130"\n(?:.*\n)*?archs = \[.*)("120a")',
        rf'\1"{NAME}", \2',
    )


def give_it_a_table(repository: Path) -> None:
    edit(repository / "ci" / "matrix.toml", r"(\[arch\.120a\])", shown("[arch.") + r"\n\1")


def test_the_page_has_these_commands() -> None:
    assert [
        ALONE,
        ROW,
        WRITE,
        ROW,
        DOCS,
        "nox -s tests lint",
        f"nox -s gpu_tests -- --target sm{NAME} --wheel wheels/FILE --fla-path DIR",
    ] == COMMANDS


def test_the_page_is_followed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler_cache.ENV, "1")  # the row is built twice
    name_the_target(repository)
    name_the_row(repository)
    give_it_a_table(repository)
    for command in (ALONE, ROW):
        refused = follow(repository, command)
        assert refused.returncode == MetadataError.exit_code, refused.stderr
        assert f"for sm_{NAME} over budget: expected at most 0 bytes" in refused.stderr
        assert re.search(r"ok +resources", refused.stderr) and re.search(r"ok +instructions", refused.stderr)
    (wheel,) = (repository / "wheels" / "unverified").glob("*+cu130-*.whl")
    for command in (WRITE.replace("FILE", wheel.name), ROW):
        done = follow(repository, command)
        assert done.returncode == 0, done.stderr
    assert (repository / "wheels" / wheel.name).is_file()
    assert docs(repository, "--check").returncode == LintError.exit_code
    assert docs(repository).returncode == 0
    readme = (repository / "README.md").read_text()
    assert f"| Thor | 11.0 | `{NAME}` | cu130 | built, not run |" in readme


def docs(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *DOCS.split()[1:], *words]
    return subprocess.run(command, cwd=repository, check=False, capture_output=True, text=True)


def test_what_a_step_left_out_says(repository: Path) -> None:
    name_the_row(repository)
    early = follow(repository, ALONE)
    assert early.returncode == ConfigError.exit_code and NAME in early.stderr
    name_the_target(repository)
    early = follow(repository, ALONE)
    assert early.returncode == ConfigError.exit_code and "'arch': expected one table for each" in early.stderr
