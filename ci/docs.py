"""Writes the generated tables of README.md: ``python -m ci.docs`` (``--check`` fails when one is stale).

GPUs come from ci/matrix.toml and the kernel table, with the records of wheels/records behind the words
"run on hardware"; times and errors come from benchmarks/results/prefill_h200.json, beside which its picture
lies. A missing file gives a sentence that says so, never an older number. Each table stands between two
comments, see `_BLOCK`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks._words import NAMES, machine, shape, versions
from ci import matrix
from ci.archs import arch
from ci.errors import ConfigError, LintError, run_cli

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RECORDS = ROOT / "wheels" / "records"
RESULTS = ROOT / "benchmarks" / "results" / "prefill_h200.json"
RUN = "run on hardware"

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    cells = list(head)
    lines = [cells, ["---"] * len(cells), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def passed_on(target: str, records: Path) -> tuple[str, ...]:
    """Devices on which a wheel passed the GPU suite for `target` (``sm90a``), by the records."""
    devices = set()
    for path in sorted(records.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["target"] == target and record["verdict"] == "passed":
            devices.add(str(record["device"]))
    return tuple(sorted(devices))


def status(info: matrix.ArchInfo, records: Path) -> str:
    """The matrix's word, with the devices behind it; ConfigError for "run on hardware" without a record."""
    if info.status != RUN:
        return info.status
    devices = passed_on(info.gpu_test, records)
    if not devices:
        raise ConfigError(
            f"ci/matrix.toml says {info.name} was {RUN}, but {records} has no pass on {info.gpu_test}.\n"
            f"Next: nox -s gpu_tests -- --target {info.gpu_test}, or write 'built, not run'"
        )
    return f"{RUN} ({', '.join(devices)})"


def gpu_table(found: matrix.Matrix, records: Path = RECORDS) -> str:
    """Which GPUs the wheels serve, and how far each architecture was tried."""
    rows = []
    for kernel in arch.KERNEL_TARGETS:
        target = kernel.target
        wheels = [row.label for row in found.rows if target.name in row.archs]
        rows.append(
            (
                ", ".join(kernel.gpus),
                f"{target.major}.{target.minor}",
                f"`{target.name}`",
                ", ".join(wheels) or "on request",
                status(found.archs[target.name], records),
            )
        )
    return table(("GPUs", "capability", "architecture", "in the wheels", "tried"), rows)


def _over(value: float | None, base: float | None) -> str:
    """A time in ms with its ratio to `base` in brackets; empty without the time."""
    if value is None:
        return ""
    return f"{value:.3f} ({value / base:.2f} x)" if base else f"{value:.3f}"


def _times(row: dict[str, Any]) -> tuple[str, ...]:
    ours, peers = row["ours_ms"], row["peers"]
    cells = [_over(peers.get(name), ours) for name in ("flashkda", "fla")]
    return (shape(row), f"{row['floor_ms']:.3f}", _over(ours, row["floor_ms"]), *cells)


def _error(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['o']:.1e} / {value['s']:.1e}"


def results(path: Path) -> dict[str, Any] | None:
    """The result file, or None when there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _missing(path: Path) -> str:
    return f"No figures: `{path.relative_to(ROOT)}` is not in this tree. The command below makes it.\n"


def times_table(path: Path = RESULTS) -> str:
    """Times of one run, ours and the peers', with the machine they were measured on."""
    found = results(path)
    if found is None:
        return _missing(path)
    intro = (
        f"{machine(found)}, commit `{(found['commit'] or 'unknown')[:12]}`; {versions(found)}. "
        f"Copy rate in the same run: {found['copy_gbps'] / 1000:.2f} TB/s.\n\n"
    )
    head = ("batch x tokens (D = 128)", "floor, ms", *(f"{name}, ms" for name in NAMES.values()))
    return intro + table(head, (_times(row) for row in found["rows"])) + _picture(path.with_suffix(".png"))


def _picture(path: Path) -> str:
    """The picture of the times; nothing where there is none."""
    if not path.is_file():
        return ""
    return f"\n![The same times beside the floor, logarithmic]({path.relative_to(ROOT).as_posix()})\n"


def errors_table(path: Path = RESULTS) -> str:
    """Relative errors against the float64 oracle, output / final state."""
    found = results(path)
    if found is None:
        return _missing(path)
    if not found["accuracy"]:
        return f"No figures: the run of `{path.name}` judged no accuracy. The command above does.\n"
    setup = found["accuracy_setup"]
    intro = (
        f"{setup['seqlen']} tokens, {setup['nheads']} heads, mean over {setup['batch']} draws and no initial "
        "state, unless the line says so.\n\n"
    )
    return intro + table(
        ("inputs", *NAMES.values()),
        ((row["case"], *(_error(row.get(name)) for name in NAMES)) for row in found["accuracy"]),
    )


def render(text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """`text` with every generated block written anew; ConfigError for a block nobody writes."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise ConfigError(f"no table is called {name!r}; known: {', '.join(sorted(blocks))}.")
        return f"{match[1]}{blocks[name]()}{match[3]}"

    return _BLOCK.sub(fill, text)


def blocks() -> dict[str, Callable[[], str]]:
    """The tables by name."""
    return {"gpus": lambda: gpu_table(matrix.load()), "times": times_table, "errors": errors_table}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a table is stale")
    given = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = render(old, blocks())
    if new == old:
        return 0
    if given.check:
        raise LintError("README.md: a generated table differs from its source.\nNext: python -m ci.docs")
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
