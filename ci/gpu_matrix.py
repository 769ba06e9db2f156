"""The GPU tests that CI has to run, from the ``[[gpu]]`` rows of ci/matrix.toml: ``python -m ci.gpu_matrix
[--json]``.

With ``--json`` one line for GitHub's ``strategy: matrix: ${{ fromJSON(...) }}``.
"""

from __future__ import annotations

import argparse
import json
import sys

from ci import matrix
from ci.errors import run_cli


def jobs(table: matrix.Matrix) -> list[dict[str, str]]:
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
    parser = argparse.ArgumentParser(prog="python -m ci.gpu_matrix", description="GPU tests that CI runs.")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for fromJSON")
    given = parser.parse_args()
    found = jobs(matrix.load())
    if given.json:
        print(json.dumps({"include": found}))
        return 0
    for job in found:
        print(f"{job['cuda']} on {job['target']} ({job['runner']}), torch {job['torch']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
