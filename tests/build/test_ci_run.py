""".ci/run fails when a session fails: its sessions are stood in for, the script is the real one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AARCH64 = "build_wheels -- --platform aarch64"
SESSIONS = ["lint", "build_wheels", AARCH64, "reproduce", "tests"]
SUMMARY = "===== 1 failed, 2 passed in 0.10s ====="

PYTHON = """#!/bin/sh
# `python3 -m venv DIR`: a folder without programs, so that those beside this one are found.
[ "$2" = venv ] && mkdir -p "$3/bin"
exit 0
"""
NOX = """#!/bin/sh
shift; echo "$*" >> "{log}"
[ "$*" = tests ] && echo "{summary}" && echo "nox > Session tests ended."
[ "$*" != "{broken}" ]
"""


def run(folder: Path, broken: str) -> tuple[int, list[str], list[str]]:
    """Exit code, the sessions that were begun, and what was printed, where session `broken` fails."""
    log = folder / "sessions"
    programs = {
        "python3": PYTHON,
        **dict.fromkeys(("pip", "g++", "aarch64-linux-gnu-g++", "git"), "#!/bin/sh\n"),
        "apt-get": "#!/bin/sh\nexit 1\n",  # nothing is missing; the real one would change the machine
        "nox": NOX.format(log=log, summary=SUMMARY, broken=broken),
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        capture_output=True,
        text=True,
        env={"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"},
        timeout=60,
    )
    return done.returncode, log.read_text().splitlines(), done.stdout.splitlines()


@pytest.mark.parametrize("broken", SESSIONS)
def test_a_session_that_fails_ends_it(tmp_path: Path, broken: str) -> None:
    code, begun, _ = run(tmp_path, broken)
    assert code != 0
    assert begun == SESSIONS[: SESSIONS.index(broken) + 1]


@pytest.mark.parametrize(("broken", "passes"), [("tests", False), ("none", True)])
def test_the_summary_is_the_last_line(tmp_path: Path, broken: str, passes: bool) -> None:
    code, _, printed = run(tmp_path, broken)
    assert (code == 0) is passes
    assert printed[-1] == SUMMARY
