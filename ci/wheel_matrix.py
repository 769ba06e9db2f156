"""The wheels that CI builds, one job a row of ci/matrix.toml: ``python -m ci.wheel_matrix
[--json | --github]``."""

from __future__ import annotations

import sys

from ci import jobs, matrix
from ci.errors import run_cli


def rows(table: matrix.Matrix) -> list[dict[str, str]]:
    """One job for each row; the builder image has every toolkit."""
    return [{"cuda": row.label} for row in table.rows]


def main() -> int:
    """Command line."""
    return jobs.main("wheel_matrix", "Wheels that CI builds.", rows(matrix.load()))


if __name__ == "__main__":
    sys.exit(run_cli(main))
