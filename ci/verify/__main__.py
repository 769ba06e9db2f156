"""``python -m ci.verify``: exit status 0, or that of the first failure's class (ci/errors.py)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ci import matrix
from ci.errors import run_cli
from ci.verify import default_cuobjdump, verify_wheel
from ci.verify.gather import gather_facts
from ci.verify.observe import observe

_WIDTH = 160  # of the report when it goes to a file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["observe"]:
        options = _observe_parser().parse_args(words[1:])
        return run_cli(lambda: _observe(options))
    options = _parser().parse_args(words)
    return run_cli(lambda: _verify(options), as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ci.verify",
        description="Verify a wheel or a library. 'observe ARTIFACT' prints an expectation file instead.",
    )
    parser.add_argument("artifact", type=Path, help="a .whl or .so file")
    parser.add_argument(
        "--expect", metavar="LIST", help="architectures, such as 90a,100f+PTX (default: the row's)"
    )
    parser.add_argument(
        "--row", metavar="LABEL", help="row of ci/matrix.toml (default: the wheel's local label)"
    )
    parser.add_argument(
        "--platform",
        metavar="NAME",
        help="such as aarch64 (default: by the wheel's name; x86_64 for a library)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--cuobjdump", type=Path, metavar="PATH", help="default: that of the locked toolkit")
    parser.add_argument("--expectations", type=Path, metavar="FOLDER", help="default: wheels/expectations")
    return parser


def _observe_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ci.verify observe",
        description="Print the artifact as a kernels.toml of wheels/expectations, for a person to review.",
    )
    parser.add_argument("artifact", type=Path, help="a .whl or .so file")
    parser.add_argument(
        "--cuobjdump", type=Path, metavar="PATH", help="default: that of the newest locked toolkit"
    )
    return parser


def _verify(options: argparse.Namespace) -> int:
    report = verify_wheel(
        options.artifact,
        expect=options.expect,
        row=options.row,
        platform=options.platform,
        cuobjdump=options.cuobjdump,
        expectations=options.expectations,
    )
    if options.json:
        print(report.as_json())
    else:
        report.print(Console() if sys.stdout.isatty() else Console(width=_WIDTH))
    return report.exit_code


def _observe(options: argparse.Namespace) -> int:
    table = matrix.load()
    tool = options.cuobjdump or default_cuobjdump(table, None)
    print(observe(gather_facts(options.artifact, tool, table.project.python)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
