"""Bytes of each kernel and architecture, and their budget: ``python -m ci.size [--write] [WHEEL ...]``.

The ledger, ``wheels/expectations/size.toml``, has a line for each; verification refuses a wheel that outgrew
it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from ci import matrix, platforms, wheels
from ci.archs import arch
from ci.errors import ConfigError, missing_package, run_cli

try:
    from rich.table import Table

    from ci.process import CONSOLE
    from ci.verify import default_cuobjdump
    from ci.verify.expectations import FOLDER, SIZE_FILE, SizeBudget, Sizes, load_sizes
    from ci.verify.facts import Facts
    from ci.verify.gather import gather_facts
    from ci.verify.metadata import code_bytes
    from ci.verify.request import label_of
except ModuleNotFoundError as error:
    raise missing_package(error, ["ci", "verify"]) from error

LEDGER = FOLDER / SIZE_FILE
_HEAD = """\
# Bytes of each row's wheel, library and kernels (instructions, by architecture), written by
# 'nox -s size -- --write' from built wheels.  A wheel larger by more than `growth` percent is refused: look
# at nox -s diff first, then write anew.  A wheel of fewer architectures keeps to the lines of its kernels.
schema = 1
growth = {growth}
"""


def facts_of(wheel: Path) -> Facts:
    """The facts of a wheel, by the newest toolkit's cuobjdump, which reads every older one's output."""
    table = matrix.load()
    return gather_facts(wheel, default_cuobjdump(table, None), table.project.python)


def measure(facts: Facts) -> SizeBudget:
    """What a wheel of those facts takes."""
    assert facts.wheel is not None
    return SizeBudget(
        facts.wheel.size, sum(item.size for item in facts.libraries), code_bytes(facts.libraries)
    )


def ledger_text(growth: int, rows: Mapping[str, SizeBudget]) -> str:
    """The ledger as TOML."""
    lines = [_HEAD.format(growth=growth)]
    for label, size in sorted(rows.items()):
        lines.append(f"[row.{label}]\nwheel = {size.wheel}\nlibrary = {size.library}\n")
        for kernel, archs in sorted(size.code.items()):
            ordered = sorted(archs, key=lambda name: arch.parse_target(name))
            numbers = "".join(f"{name} = {archs[name]}\n" for name in ordered)
            lines.append(f"[row.{label}.code.{kernel}]\n{numbers}")
    return "\n".join(lines)


def _show(name: str, size: SizeBudget) -> None:
    archs = sorted({name for row in size.code.values() for name in row}, key=lambda n: arch.parse_target(n))
    table = Table("bytes of instructions", *(f"sm_{item}" for item in archs))
    for kernel, row in sorted(size.code.items()):
        table.add_row(kernel, *(str(row.get(item, "-")) for item in archs))
    CONSOLE.print(f"{name}: {size.wheel} bytes, library {size.library}")
    CONSOLE.print(table)


def _write(measured: Mapping[str, SizeBudget], path: Path) -> None:
    known = load_sizes(path) if path.is_file() else Sizes(growth=5, rows={})
    table = matrix.load()
    rows = {platforms.line(row.label, name) for name in platforms.PLATFORMS for row in table.on(name).rows}
    if foreign := sorted(set(measured) - rows):
        raise ConfigError(
            f"--write: expected wheels of whole rows ({', '.join(sorted(rows))}), got {', '.join(foreign)}.\n"
            "Next: nox -s build_wheels, then name its wheels"
        )
    kept = {label: size for label, size in known.rows.items() if label in rows}
    path.write_text(ledger_text(known.growth, {**kept, **measured}), encoding="utf-8")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.size", description="Bytes a kernel and architecture.")
    parser.add_argument("wheel", type=Path, nargs="*", help="default: all in wheels/")
    parser.add_argument("--write", action="store_true", help="make these sizes the budget")
    given = parser.parse_args()
    measured: dict[str, SizeBudget] = {}
    for wheel in given.wheel or wheels.built():
        facts = facts_of(wheel)
        if facts.wheel is None:
            raise ConfigError(f"{wheel}: expected a wheel.\nNext: nox -s build_wheels")
        name = platforms.line(label_of(facts.wheel.version), platforms.of_wheel(wheel).name)
        measured[name] = measure(facts)
        _show(wheel.name, measured[name])
    if given.write:
        _write(measured, LEDGER)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
