"""Runs tests/dsl beside each version of the CuTe DSL in ``ci/matrix.toml``; needs no GPU.

``python -m ci.dsl_matrix [--dsl 4.8.1] [PYTEST ARGS]``. Each version is installed from its lock into an
environment of the cache of its own. The tests compile for real, and read the machine code with cuobjdump.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from ci import matrix, venv
from ci.errors import ConfigError, run_cli

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/dsl"


def chosen(wanted: str | None) -> tuple[str, ...]:
    """The versions to run beside; ConfigError for one that is not in the matrix."""
    every = matrix.load().dsl
    if wanted is None:
        return every
    if wanted not in every:
        raise ConfigError(
            f"--dsl {wanted}: expected one of {', '.join(every)} (ci/matrix.toml).\n"
            "Next: name one of them, or add it there and run nox -s update"
        )
    return (wanted,)


def run(version: str, *arguments: str) -> int:
    """pytest's exit code beside one version (no test found is 5, a failure too)."""
    made = venv.locked("tests", "ci", matrix.dsl_lock(version), torch=matrix.load().project.torch_build)
    print(f"beside nvidia-cutlass-dsl {version}", flush=True)
    command = [str(made.python), "-m", "pytest", TESTS, *arguments]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def main() -> int:
    """Command line; the highest exit code of pytest."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.dsl_matrix", description="Test beside each version of the CuTe DSL, without a GPU."
    )
    parser.add_argument("--dsl", help="one version of nvidia-cutlass-dsl (default: every one of the matrix)")
    given, rest = parser.parse_known_args()
    return max([run(version, *rest) for version in chosen(given.dsl)])


if __name__ == "__main__":
    sys.exit(run_cli(main))
