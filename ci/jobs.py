"""Command line of the programs that tell CI its jobs: for people, as JSON, or as output of a workflow's
step."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.errors import ConfigError

OUTPUT = "GITHUB_OUTPUT"  # the file from which GitHub reads a step's outputs


def main(name: str, text: str, found: Sequence[Mapping[str, str]]) -> int:
    """Say the jobs `found` as ``python -m ci.<name>`` is asked to; ConfigError when there is none."""
    parser = argparse.ArgumentParser(prog=f"python -m ci.{name}", description=text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one line of JSON, for fromJSON")
    form.add_argument("--github", action="store_true", help=f"the same as output 'matrix', to ${OUTPUT}")
    given = parser.parse_args()
    if not found:  # a workflow with an empty matrix is green and has done nothing
        raise ConfigError("ci/matrix.toml: expected at least one job, got none.\nNext: add a row")
    line = json.dumps({"include": found})
    if given.github:
        _append(f"matrix={line}\n")
    elif given.json:
        print(line)
    else:
        for job in found:
            print(", ".join(f"{key} {value}" for key, value in job.items()))
    return 0


def _append(line: str) -> None:
    named = os.environ.get(OUTPUT)
    if not named:
        raise ConfigError(
            f"--github: expected the variable {OUTPUT}, got none.\nNext: use --json outside of a workflow"
        )
    with Path(named).open("a", encoding="utf-8") as file:
        file.write(line)
