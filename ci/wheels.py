"""Verifies wheels and keeps their reports: ``python -m ci.wheels [FILE ...]`` (default: all in
``wheels/``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ci import provenance
from ci.errors import CiError, ConfigError, ToolchainError, run_cli
from ci.process import CONSOLE
from ci.selection import check_archs

if TYPE_CHECKING:
    from ci.verify import Report

CHECKERS_NEED = (3, 11)
FOLDER = Path(__file__).resolve().parent.parent / "wheels"


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> None:
    """ToolchainError, before anything is downloaded, under a Python that cannot run every checker."""
    if version < CHECKERS_NEED:
        need, got = (".".join(map(str, pair)) for pair in (CHECKERS_NEED, version))
        raise ToolchainError(
            f"the checkers of wheels need Python {need} (torch-abi-audit does), got {got}.\n"
            f"Next: python{need} -m pip install nox && python{need} -m nox -s build_wheels"
        )


def verify(wheel: Path, archs: str | None = None, reports: Path = FOLDER / "reports") -> Report:
    """Verify one wheel against the checked-in expectations, keep the report in the folder `reports`, return
    it.

    `archs` is what it must hold (default: what its name says, or the whole row).  Raises the CiError of the
    first failure.
    """
    from ci.verify import verify_wheel  # its checkers are installed only where wheels are verified

    report = verify_wheel(wheel, expect=archs)
    report.print(CONSOLE)
    reports.mkdir(parents=True, exist_ok=True)
    (reports / f"{wheel.stem}.json").write_text(report.as_json() + "\n")
    report.raise_on_failure()
    return report


def built(folder: Path = FOLDER) -> list[Path]:
    """The wheels in `folder`; ConfigError when there is none, since verifying nothing is no success."""
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise ConfigError(
            f"no wheel in {folder}; expected at least one.\nNext: nox -s build_wheels, or name a file"
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which wheels a command is about."""
    parser.add_argument("wheel", type=Path, nargs="*", help="default: all in the folder")
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help="default: wheels/")


def main() -> int:
    """Command line: verify every wheel, then fail with the first failure."""
    parser = argparse.ArgumentParser(prog="python -m ci.wheels", description="Verify wheels.")
    add_arguments(parser)
    parser.add_argument(
        "--archs", help="what the wheels must hold, as a comma list (default: by their names)"
    )
    given = parser.parse_args()
    check_python()
    check_archs(given.archs)
    failures: list[CiError] = []
    for wheel in given.wheel or built(given.folder):
        try:
            verify(wheel, given.archs)
            if provenance.place(wheel).exists():
                provenance.check(wheel)
            else:
                CONSOLE.print(
                    f"[yellow]{wheel.name} has no provenance beside it: not to be published[/yellow]"
                )
        except CiError as problem:
            failures.append(problem)
    raise_all(failures)
    return 0


def raise_all(failures: Sequence[CiError]) -> None:
    """Nothing without failures; else one error with the class of the first and the words of all."""
    if failures:
        raise type(failures[0])("\n".join(str(problem) for problem in failures))


if __name__ == "__main__":
    sys.exit(run_cli(main))
