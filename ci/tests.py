"""Runs the tests that need no GPU, in an environment of the cache: ``python -m ci.tests [PYTEST ARGS]``.

Without arguments, first those beside the newest CuTe DSL of the matrix; ``nox -s dsl_matrix`` has the others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ci import dsl_matrix, matrix, wheels
from ci.errors import run_cli
from ci.venv import checks

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Command line (default: pyproject.toml's testpaths); returns the higher of pytest's exit codes (no test
    found is 5, a failure too). The large suite comes last: its summary is the last line."""
    wheels.check_python()
    beside_the_dsl = dsl_matrix.run(matrix.load().dsl[-1]) if len(sys.argv) == 1 else 0
    command = [str(checks().python), "-m", "pytest", *sys.argv[1:]]
    return max(beside_the_dsl, subprocess.run(command, check=False, cwd=ROOT).returncode)


if __name__ == "__main__":
    sys.exit(run_cli(main))
