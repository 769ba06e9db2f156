"""Runs the tests that need no GPU, in an environment of the cache: ``python -m ci.tests [PYTEST ARGS]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ci import wheels
from ci.errors import run_cli
from ci.venv import checks

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Command line (default: pyproject.toml's testpaths); returns pytest's exit code (no test found is 5,
    a failure too)."""
    wheels.check_python()
    command = [str(checks().python), "-m", "pytest", *sys.argv[1:]]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(run_cli(main))
