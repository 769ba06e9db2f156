"""docs/releasing.md, followed: its commands in its order, in a clone, with a wheel of one architecture.

Not run here: what needs a GPU (its record is written instead), two releases, or a web server of one's own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from verify_artifacts import ROOT

from ci import gpu_tests
from ci.errors import ReleaseError
from ci.provenance import sha256

PAGE = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
NOT_HERE = {"diff": "two releases", "gpu_tests": "a GPU"}
# What is added to a command to make it one of the smallest wheel, or of this Python.
NARROWED = {
    "build_wheels": ["--cuda", "cu130", "--archs", "90a"],
    "index_check": ["--python", sys.executable],
}


def commands() -> list[tuple[str, list[str]]]:
    """Session and arguments of each nox command of the page."""
    found = re.findall(r"^    nox -s (\w+)(?: -- (.*))?$", PAGE, re.MULTILINE)
    return [(session, arguments.split()) for session, arguments in found]


def module_of(session: str) -> str:
    """What a session of the noxfile runs."""
    body = NOXFILE.partition(f"def {session}(")[2].partition("@nox")[0]
    match = re.search(r'call\(session, "(\w+)"|"ci\.(\w+)"', body)
    assert match, f"the noxfile has no session {session}"
    return f"ci.{match[1] or match[2]}"


def run(repository: Path, session: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module_of(session), *arguments]
    return subprocess.run(
        command, cwd=repository, env=os.environ, capture_output=True, text=True, check=False
    )


def test_the_page_names_every_step_in_order() -> None:
    order = list(dict.fromkeys(session for session, _ in commands()))
    steps = ["build_wheels", "sdist", "verify_wheels", "size", "diff", "rebuild", "gpu_matrix", "gpu_tests"]
    assert order == [*steps, "release_check", "index", "index_check"]
    for session, _ in commands():
        module_of(session)


def test_the_page_is_followed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(repository)], check=True)
    wheel = Path("not built")
    for session, given in commands():
        if session in NOT_HERE or "--slim" in given:
            continue
        if session == "release_check":
            refused = run(repository, session, given)
            assert refused.returncode == ReleaseError.exit_code, refused.stderr
            write_record(repository, wheel)
        arguments = [str(wheel) if word == "WHEEL" else word for word in given]
        done = run(repository, session, arguments + NARROWED.get(session, []))
        assert done.returncode == 0, f"{session}\n{done.stdout}{done.stderr}"
        if session == "build_wheels":
            (wheel,) = (repository / "wheels").glob("*.whl")
    folder = repository / "wheels" / "index" / "cu130" / "sm90a" / "flash-kda"
    assert (folder / wheel.name).read_bytes() == wheel.read_bytes()
    record = repository / "wheels" / "records" / "import" / "index.json"
    installed = json.loads(record.read_text())["installed"]
    assert [line["installer"] for line in installed] == ["pip", "uv"]


def write_record(repository: Path, wheel: Path) -> None:
    """In place of the GPU tests."""
    counts = {"passed": 1, "failed": 0, "errors": 0}
    said = {"wheel_sha256": sha256(wheel), "target": "sm90a", "verdict": "passed"}
    gpu_tests.write_record({**said, "counts": counts, "exit_code": 0}, repository / "wheels" / "records")


def test_a_session_that_the_noxfile_lacks_is_told() -> None:
    assert module_of("import_matrix") == "ci.import_check"
    with pytest.raises(AssertionError, match="has no session nothing"):
        module_of("nothing")
