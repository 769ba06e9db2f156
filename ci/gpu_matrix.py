"""The GPU tests that CI has to run, from the ``[[gpu]]`` rows of ci/matrix.toml: ``python -m ci.gpu_matrix
[--json | --github]``."""

from __future__ import annotations

import sys

from ci import jobs, matrix
from ci.errors import run_cli


def tests(table: matrix.Matrix) -> list[dict[str, str]]:
    """One job for each GPU, wheel with code for it, and torch; ``target`` is what ``nox -s gpu_tests``
    takes."""
    return [
        {"cuda": row.label, "target": f"sm{gpu.target}", "runner": gpu.runner, "torch": torch}
        for gpu in table.gpus
        for row in table.rows
        if gpu.target in row.archs
        for torch in gpu.torch
    ]


def main() -> int:
    """Command line."""
    return jobs.main("gpu_matrix", "GPU tests that CI runs.", tests(matrix.load()))


if __name__ == "__main__":
    sys.exit(run_cli(main))
