"""The steps of the work on the kernels (benchmarks/steps.toml), and what each brought by a result file of
benchmarks/bench_steps.py. ci/docs.py makes the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.errors import ConfigError
from ci.toml import open_table

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "steps.toml"
# Of cases.toml: many heads, the most for the quarter kernel, few, fewer; short sequences; a long one.
CASES = ("t8192_h96", "t8192_h32", "t8192_h12", "t8192_h8", "varlen64x128_h32", "t65536_h8")


_TEXT = r"[^|<>\x00-\x1f\x7f-\x9f\u2028\u2029]+"  # of a cell: <!-- would end the generated part of the page


@dataclass(frozen=True)
class Step:
    """One step: its commit (ten digits or more), what it is, what was predicted and why, why it came so."""

    commit: str
    name: str
    expected: str
    why: str

    @property
    def cells(self) -> tuple[str, str]:
        """What a line of the table says of it besides times."""
        return (f"{self.name} (`{self.commit[:10]}`)", self.expected)


def load(path: Path = PATH) -> list[Step]:
    """The steps in order; ConfigError for a file that cannot stand in a table."""
    top = open_table(path)
    found = []
    for entry in top.tables("step"):
        commit = entry.text("commit", r"[0-9a-f]{10,40}", "ten to forty digits of a commit")
        line = "a line without |, <, > and control characters"
        found.append(Step(commit, *(entry.text(key, _TEXT, line) for key in ("name", "expected", "why"))))
        entry.done()
    top.done()
    return found


def _is_timed(row: dict[str, Any], wheels: int) -> bool:
    """Whether a row has times, or null: one a wheel, and the first one's second."""
    times = [ms for ms in (*row["ms"], row["again_ms"]) if ms is not None]
    return len(row["ms"]) == wheels and all(isinstance(ms, int | float) and ms > 0 for ms in times)


def rows(found: dict[str, Any], file: str) -> list[dict[str, Any]]:
    """The result's rows of CASES; ConfigError when the run left one out, or a row has no times."""
    count = len(found["wheels"])
    for row in found["rows"]:
        if not _is_timed(row, count):
            raise ConfigError(
                f"{file}: {row['case']}: expected {count} ms and again_ms, each positive or null, "
                f"got {row['ms']} and {row['again_ms']}.\n"
                "Next: run benchmarks/bench_steps.py again with --suite h200"
            )
    by_name = {row["case"]: row for row in found["rows"]}
    absent = [name for name in CASES if name not in by_name]
    if absent:
        raise ConfigError(
            f"{file} has no case {', '.join(absent)}; expected {', '.join(CASES)}.\n"
            "Next: run benchmarks/bench_steps.py again with --suite h200"
        )
    return [by_name[name] for name in CASES]


def wheel_of(step: Step, found: dict[str, Any]) -> int | None:
    """Which of the result's wheels is the step's, None without one. Changed sources (+dirty) are no step."""
    commits = [wheel["commit"] for wheel in found["wheels"]]
    return next(
        (i for i, full in enumerate(commits) if full.startswith(step.commit) and "+" not in full), None
    )


def times(steps: list[Step], found: dict[str, Any], row: dict[str, Any]) -> list[float | None]:
    """A case's time at each step, None without one."""
    wheels = [wheel_of(step, found) for step in steps]
    return [None if index is None else row["ms"][index] for index in wheels]


def brought(ms: list[float | None]) -> list[str]:
    """A case through the steps: ms of the first, then the ratio to the step before, with ms of the last."""
    cells = []
    for index, now in enumerate(ms):
        before = ms[index - 1] if index else None
        ratio = f"{now / before:.2f} x" if now and before else ""
        shown = f"{now:.3f} ms" if now and index in (0, len(ms) - 1) else ""
        cells.append(", ".join(filter(None, (ratio, shown))) or "-")
    return cells


def noise(every: list[dict[str, Any]]) -> str:
    """How far the two runs of the first wheel lie apart, over all rows that have both."""
    pairs = [(row["ms"][0], row["again_ms"]) for row in every]
    ratios = [last / first for first, last in pairs if first and last]
    if not ratios:
        return "The first wheel did not run twice: the noise of this run is unknown."
    return (
        "The first wheel ran once more at the end, and took "
        f"{min(ratios):.3f} to {max(ratios):.3f} of its first times: the noise of the run."
    )
