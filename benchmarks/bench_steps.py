#!/usr/bin/env python3
"""Time several wheels of ours in one run: what each step of the work brought.

    python benchmarks/bench_steps.py WHEEL [WHEEL ...] --json benchmarks/results/steps_h200.json
    python benchmarks/bench_steps.py old.whl new.whl --suite t8192_h96,t8192_h8

Wheels are unpacked, not installed, and run in the order given, each in a process of its own on the same
seeded inputs. The first one runs once more at the end: how far its two times lie apart is the noise of the
run. docs/performance.md has a table of the steps in steps.toml: a wheel is a step's by its commit.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _cases import Case, cases_of, shrink
from _report import Lines, disagreements, errors, number, of_kind, read_lines, shape_of, times_of
from _run import (
    Run,
    add_dry_run,
    add_run_options,
    check_device,
    dry_run_lines,
    gather_facts,
    prepared,
    publish,
    publish_nothing,
    spawn,
    wait,
)
from _words import machine

# RuntimeError: encrypted, or compressed in a way that Python does not know
UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
RECORD = Path("flash_kda") / "build_record.json"


@dataclass(frozen=True)
class Wheel:
    """An unpacked wheel. `tag` names its process; `facts`: see gather_facts."""

    tag: str
    folder: Path
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What the result file says of it."""
        return {
            "commit": self.facts["commit"],
            "sha256": self.facts["wheel_sha256"],
            "version": self.facts["versions"]["flash_kda"],
        }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL", help="in the order of the work")
    parser.add_argument("--suite", default="h200", help="a suite, or case names (a,b); default h200")
    add_run_options(parser, timeout_s=400)
    add_dry_run(parser)
    parser.set_defaults(ours_path=None)
    return parser.parse_args(argv)


# ---- wheels ----


def unpack(path: Path, folder: Path) -> None:
    """Unpack a wheel; ValueError when it is none of ours."""
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error  # without the path, which is of this machine alone
        raise ValueError(f"cannot be unpacked, expected a wheel: {reason}") from error
    try:
        json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"holds no {RECORD.as_posix()} that can be read, expected a wheel of this project; "
            "next: nox -s build_wheels at the step's commit"
        ) from error


def open_wheel(path: Path, index: int, folder: Path, run: Run) -> Wheel:
    """Unpack a wheel and read what it was built from; ValueError when it does not say."""
    unpack(path, folder)
    facts = gather_facts(replace(run, ours_path=folder), path)
    if facts["commit"] is None:
        raise ValueError(
            "its build record names no commit, so no step is its own; "
            "next: build it in a checkout, or with FLASH_KDA_SOURCE_COMMIT set"
        )
    return Wheel(f"{index + 1}-{facts['commit'][:10]}", folder, facts)


def open_all(paths: Sequence[Path], base: Path, run: Run) -> tuple[list[Wheel], list[str]]:
    """Every wheel that can be used, unpacked below `base`, and what is wrong with the others."""
    wheels, problems = [], []
    for index, path in enumerate(paths):
        try:
            wheels.append(open_wheel(path, index, base / str(index), run))
        except ValueError as error:
            problems.append(f"{path.name}: {error}")
            print(problems[-1], file=sys.stderr, flush=True)
    return wheels, problems


# ---- the run ----


def time_wheel(wheel: Wheel, tag: str, run: Run) -> tuple[list[dict[str, Any]], list[str]]:
    """Time every case with one wheel: the worker's lines and the problems."""
    print(f"running {tag} ...", file=sys.stderr, flush=True)
    job = {"impl": "ours", "times_only": True, "cases": [case.to_json() for case in run.cases]}
    process = spawn("_worker.py", tag, "ours", job, replace(run, ours_path=wheel.folder))
    problems = wait(process, tag, run, run.timeout_s)
    return read_lines(run.scratch / f"{tag}.jsonl"), problems


def again(wheels: Sequence[Wheel]) -> str:
    """The tag of the first wheel's second run."""
    return f"{wheels[0].tag}-again"


def run_all(wheels: Sequence[Wheel], run: Run) -> tuple[Lines, list[str]]:
    """Every wheel in order, then the first once more; the lines by tag and the problems."""
    results: Lines = {}
    problems: list[str] = []
    for wheel, tag in [*((wheel, wheel.tag) for wheel in wheels), (wheels[0], again(wheels))]:
        results[tag], found = time_wheel(wheel, tag, run)
        problems += found
    return results, problems


# ---- the result ----


def time_of(results: Lines, tag: str, case: Case) -> float | None:
    """The time of a case in one process; None without one."""
    line = times_of(results, tag).get(case.name)
    return None if line is None else float(line["ms"])


def build(cases: list[Case], wheels: Sequence[Wheel], results: Lines, problems: list[str]) -> dict[str, Any]:
    """The result file; `ms` of a row has one time a wheel, `again_ms` is the first one's second."""
    machines = [line for lines in results.values() for line in of_kind(lines, "machine")]
    seen = machines[0] if machines else {}
    rows = [
        {
            **shape_of(case),
            "ms": [time_of(results, wheel.tag, case) for wheel in wheels],
            "again_ms": time_of(results, again(wheels), case),
        }
        for case in cases
    ]
    return {
        **{key: seen.get(key) for key in ("device", "torch")},
        **{key: wheels[0].facts[key] for key in ("driver", "date")},
        "wheels": [wheel.to_json() for wheel in wheels],
        "rows": rows,
        "problems": problems + errors(results) + disagreements(cases, results, list(results)),
    }


def short(commit: str) -> str:
    """A commit in a few digits, with a + where the wheel's sources differed from it."""
    return commit[:10] + ("+" if commit.endswith("+dirty") else "")


def step_table(result: dict[str, Any]) -> str:
    """The times as fixed-width text; `noise` is the first wheel's second time over its first."""
    head = [*(short(wheel["commit"]) for wheel in result["wheels"]), "again", "noise"]
    lines = [f"{'ms':18s}" + "".join(f" {name:>11s}" for name in head)]
    for row in result["rows"]:
        first, last = row["ms"][0], row["again_ms"]
        cells = [number(ms) for ms in (*row["ms"], last)]
        cells.append(number(last / first if first and last else None))
        lines.append(f"{row['case']:18s}" + "".join(f" {cell:>11s}" for cell in cells))
    return "\n".join(lines)


def benchmark(args: argparse.Namespace) -> int:
    """Time what was asked for; the exit code is 1 when something of it went wrong."""
    cases = cases_of(args.suite)
    check_device(args.device)
    if args.tiny:
        cases = [shrink(case) for case in cases]
    # Not in the scratch folder: libraries cannot be loaded from a /dev/shm that is mounted noexec.
    with (
        prepared(args, cases, device=args.device) as run,
        tempfile.TemporaryDirectory(prefix="bench_kda_wheels_") as base,
    ):
        wheels, problems = open_all(args.wheels, Path(base), run)
        if not wheels:
            return publish_nothing("nothing was timed", problems, args.json)
        results, found = run_all(wheels, run)
    result = build(cases, wheels, results, problems + found)
    if all(ms is None for row in result["rows"] for ms in row["ms"]):
        return publish_nothing("nothing was timed", result["problems"], args.json)
    return publish(
        result, args.json, "\n".join([*dry_run_lines(args, result), machine(result), step_table(result)])
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return benchmark(args)
    except ValueError as error:
        print(f"bench_steps: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
