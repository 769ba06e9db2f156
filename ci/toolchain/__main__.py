"""``python -m ci.toolchain ensure|path TOOLKIT`` and ``python -m ci.toolchain update [TOOLKIT ...]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ci import matrix, toolchain
from ci.errors import run_cli
from ci.toolchain import image
from ci.toolchain.update import update


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ci.toolchain", description=toolchain.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("ensure", "install it and print CUDA_HOME"),
        ("path", "print where it is or would be"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("toolkit", help="a CUDA version such as 13.0, or a row's label such as cu130")
    many = commands.add_parser("update", help="write the locks anew")
    many.add_argument("toolkit", nargs="*", help="CUDA versions (default: those of ci/matrix.toml)")
    return parser.parse_args()


def _version(name: str) -> str:
    return matrix.load().cuda_row(name).toolkit if name.startswith("cu") else name


def _ensure(name: str) -> Path:
    rows = [row for row in matrix.load().rows if name in (row.label, row.toolkit)]
    if rows and rows[0].toolkit_from == matrix.IMAGE:
        return image.find(rows[0])
    return toolchain.ensure(_version(name))


def main() -> int:
    """Run the command; prints paths on stdout."""
    given = _arguments()
    if given.command == "update":
        for path in update(given.toolkit):
            print(path)
    elif given.command == "ensure":
        print(_ensure(given.toolkit))
    else:
        print(toolchain.folder(_version(given.toolkit)))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
