"""Runs the tests that compile the CuTe DSL's kernels, beside each locked version of the DSL; needs no GPU.

``python -m ci.cute_tests [--dsl 4.8.1] [PYTEST ARGS]``; without ``--dsl`` every version that
``ci/requirements`` has a ``cute-VERSION.txt`` for, in an environment of the cache each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from ci import matrix, venv
from ci.errors import ConfigError, run_cli

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/build/test_cute_compile.py"
PREFIX = "cute-"


def versions(folder: Path = venv.REQUIREMENTS) -> list[str]:
    """The versions of the DSL that have a lock."""
    return sorted(path.name[len(PREFIX) : -len(".txt")] for path in folder.glob(f"{PREFIX}*.txt"))


def chosen(wanted: str | None) -> list[str]:
    """The versions to run beside; ConfigError for one without a lock."""
    every = versions()
    if wanted is None:
        return every
    if wanted not in every:
        raise ConfigError(
            f"--dsl {wanted}: expected one of {', '.join(every)}.\n"
            f"Next: write ci/requirements/{PREFIX}{wanted}.in and run nox -s update"
        )
    return [wanted]


def main() -> int:
    """Command line; the highest exit code of pytest (no test found is 5, a failure too)."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.cute_tests", description="Test the CuTe DSL's kernels without a GPU."
    )
    parser.add_argument("--dsl", help="one version of nvidia-cutlass-dsl (default: every locked one)")
    given, rest = parser.parse_known_args()
    codes = []
    for version in chosen(given.dsl):
        made = venv.locked("tests", "ci", f"{PREFIX}{version}", torch=matrix.load().project.torch_build)
        print(f"nvidia-cutlass-dsl {version}", flush=True)
        command = [str(made.python), "-m", "pytest", "-m", "cute_dsl", TESTS, *rest]
        codes.append(subprocess.run(command, check=False, cwd=ROOT).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(run_cli(main))
