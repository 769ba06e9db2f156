"""Writes the generated tables of README.md and docs/performance.md: ``python -m ci.docs`` (``--check`` fails
when one is stale).

GPUs come from ci/matrix.toml and the kernel table, with the records of wheels/records behind the words
"run on hardware"; times and errors come from benchmarks/results/prefill_h200.json, beside which its picture
lies; what limits each kernel comes from profile_h200.json there, and what the steps of benchmarks/steps.toml
brought from steps_h200.json. A missing file gives a sentence that says so, never an older number. Each table
stands between two comments, see `_BLOCK`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks._words import LIMITS, NAMES, cells, machine, percent, shape, versions
from ci import matrix, source, steps
from ci.archs import arch
from ci.errors import ConfigError, LintError, run_cli

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
PAGES = (README, PERFORMANCE)
RECORDS = ROOT / "wheels" / "records"
RESULTS = ROOT / "benchmarks" / "results" / "prefill_h200.json"
PROFILE = ROOT / "benchmarks" / "results" / "profile_h200.json"
STEPS = ROOT / "benchmarks" / "results" / "steps_h200.json"
RUN = "run on hardware"

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    names = list(head)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(path: Path) -> dict[str, Any]:
    """A JSON file of an object without NaN; ConfigError when it is none."""

    def refuse(number: str) -> None:
        raise ValueError(f"the number {number}")

    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
        if not isinstance(found, dict):
            raise ValueError(f"{found!r:.80}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: expected a JSON object, got {error}.\n"
            "Next: restore it (git checkout), or run again what wrote it"
        ) from error
    return found


def passed_on(target: str, records: Path) -> dict[str, bool]:
    """Devices on which a wheel passed the GPU suite for `target` (``sm90a``), by the records, and whether one
    of them ran the kernels of this tree."""
    here = source.kernels(source.digests(ROOT))
    devices: dict[str, bool] = {}
    for path in sorted(records.glob("*.json")):
        record = read(path)
        try:
            kernels = record["source"]["kernels_sha256"]
            passed = record["target"] == target and record["verdict"] == "passed"
            device = str(record["device"])
        except (LookupError, TypeError) as error:
            raise ConfigError(
                f"{path}: expected target, verdict, device and source.kernels_sha256, got none of {error}.\n"
                "Next: restore it (git checkout wheels/records), or write it anew: nox -s gpu_tests"
            ) from error
        if passed:
            devices[device] = devices.get(device, False) or kernels == here
    return devices


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
    said = (
        name if current else f"{name}, kernels before a change" for name, current in sorted(devices.items())
    )
    return f"{RUN} ({'; '.join(said)})"


def wheels_with(target: arch.Target, found: matrix.Matrix) -> str:
    """Labels of the wheels that hold `target`, those of other platforms after the platform's name."""
    every = {"": found.locked_rows, **{f"{name}: ": found.on(name).locked_rows for name in found.others}}
    labels = {name: [row.label for row in rows if target.name in row.archs] for name, rows in every.items()}
    return "; ".join(f"{name}{', '.join(some)}" for name, some in labels.items() if some)


def gpu_table(found: matrix.Matrix, records: Path = RECORDS) -> str:
    """Which GPUs the wheels serve, and how far each architecture was tried."""
    rows = []
    for kernel in arch.KERNEL_TARGETS:
        target = kernel.target
        rows.append(
            (
                ", ".join(kernel.gpus),
                f"{target.major}.{target.minor}",
                f"`{target.name}`",
                wheels_with(target, found) or "on request",
                status(found.archs[target.name], records),
            )
        )
    return table(("GPUs", "capability", "architecture", "in the wheels", "tried"), rows)


def _over(value: float | None, base: float | None) -> str:
    """A time in ms with its ratio to `base` in brackets; empty without the time."""
    if value is None:
        return ""
    return f"{value:.3f} ({value / base:.2f} x)" if base else f"{value:.3f}"


_BLANK = (
    "\nA blank cell was not measured: FLA tunes itself anew for each number of heads, packed or not, and "
    "takes long; it runs the rows whose `peers` in [benchmarks/cases.toml](benchmarks/cases.toml) name it.\n"
)


def _times(row: dict[str, Any]) -> tuple[str, ...]:
    ours, peers = row["ours_ms"], row["peers"]
    others = [_over(peers.get(name), ours) for name in ("flashkda", "fla")]
    return (shape(row), f"{row['floor_ms']:.3f}", _over(ours, row["floor_ms"]), *others)


def _error(value: dict[str, float | None] | None) -> str:
    """Output / final state; one that is no number stands as null in the file."""
    if value is None:
        return ""
    return " / ".join("-" if error is None else f"{error:.1e}" for error in (value["o"], value["s"]))


def results(path: Path) -> dict[str, Any] | None:
    """The result file, or None when there is none."""
    return read(path) if path.is_file() else None


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
    lines = [_times(row) for row in found["rows"]]
    blank = _BLANK if any("" in line for line in lines) else ""
    return intro + table(head, lines) + blank + _picture(path.with_suffix(".png"))


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


def _profiled(row: dict[str, Any], kernel: dict[str, Any]) -> tuple[str, ...]:
    """A kernel's line: time, blocks, and how busy it kept what it runs on."""
    us, *rest = cells(kernel)
    blocks = "-" if kernel["blocks"] is None else f"{kernel['blocks']} ({percent(kernel['sm_share'])})"
    warps = "-" if kernel["warps"] is None else f"{kernel['warps']:.1f}"
    return (shape(row), f"`{kernel['name']}`", us, blocks, warps, *rest)


def _measured_as(found: dict[str, Any]) -> str:
    """Which of ncu's metrics stands behind each column of percent, and which gave nothing."""
    used = {head: found["metrics"].get(key) for key, head in LIMITS.items()}
    return "; ".join(
        f"{head}: {', '.join(f'`{name}`' for name in names) if names else 'not given by this ncu'}"
        for head, names in used.items()
    )


def profile_table(path: Path = PROFILE) -> str:
    """What limits each kernel of each case, by one profiled call."""
    found = results(path)
    if found is None:
        return (
            f"No profile is on record: `{path.relative_to(ROOT).as_posix()}` is not in this tree. "
            "On a machine with an H200 and Nsight Compute, this makes it:\n\n"
            f"    python benchmarks/profile_rows.py --suite h200 --json {path.relative_to(ROOT).as_posix()}\n"
        )
    intro = (
        f"{machine(found)}, ncu {found['ncu']}, commit `{(found['commit'] or 'unknown')[:12]}`; "
        f"{versions(found)}. {found['sms']} SMs.\n\n"
        "One call, one kernel at a time: none overlaps another; the L2 cache is as the run before left it. "
        "In brackets after the blocks: the share of the SMs that had one, %. Warps: active on an SM, on "
        f"average. Then % of the peak ({_measured_as(found)}), "
        "and the largest shares, %, of the warps' time.\n\n"
    )
    head = ("batch x tokens (D = 128)", "kernel", "us", "blocks", "warps", *LIMITS.values(), "top stalls")
    blank = ("not profiled", *[""] * (len(head) - 2))
    lines = [
        line
        for row in found["rows"]
        for line in [_profiled(row, kernel) for kernel in row["kernels"]] or [(shape(row), *blank)]
    ]
    return intro + table(head, lines)


def _steps_missing(listed: list[steps.Step], path: Path) -> str:
    """The steps without times, and the command that brings them."""
    name = path.relative_to(ROOT).as_posix()
    return (
        f"No times are on record: `{name}` is not in this tree. "
        "With a wheel of each step's commit, on a machine with an H200, this makes it:\n\n"
        f"    python benchmarks/bench_steps.py WHEEL [WHEEL ...] --suite h200 --json {name}\n\n"
    ) + table(("step", "expected"), (step.cells for step in listed))


def steps_table(path: Path = STEPS, steps_file: Path = steps.PATH) -> str:
    """What each step of the work brought, beside what was predicted."""
    listed, found = steps.load(steps_file), results(path)
    if found is None:
        return _steps_missing(listed, path)
    rows = steps.rows(found, path.name)
    intro = (
        f"{machine(found)}; all wheels in one run. {steps.noise(found['rows'])}\n\n"
        "Time over that of the step before; ms for the first step and the last. "
        "`-`: no time of this step, or none of the one before.\n\n"
    )
    head = ("step", "expected", *(shape(row) for row in rows), "why")
    columns = [steps.brought(steps.times(listed, found, row)) for row in rows]
    lines = ((*step.cells, *cells, step.why) for step, *cells in zip(listed, *columns, strict=True))
    return intro + table(head, lines)


def written(name: str, block: Callable[[], str]) -> str:
    """A block's text; ConfigError where its file is not what the script writes."""
    try:
        return block()
    except ConfigError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"table {name!r}: its data cannot be read ({error!r}); expected a file that its script wrote.\n"
            "Next: restore it (git checkout benchmarks/results wheels/records), or run the script again"
        ) from error


def render(text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """`text` with every generated block written anew; ConfigError for a block nobody writes."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise ConfigError(f"no table is called {name!r}; known: {', '.join(sorted(blocks))}.")
        return f"{match[1]}{written(name, blocks[name])}{match[3]}"

    return _BLOCK.sub(fill, text)


def blocks() -> dict[str, Callable[[], str]]:
    """The tables by name."""
    return {
        "gpus": lambda: gpu_table(matrix.load()),
        "times": times_table,
        "errors": errors_table,
        "profile": profile_table,
        "steps": steps_table,
    }


def stale(page: Path) -> str | None:
    """The page's text as it should be; None where it is so already."""
    old = page.read_text(encoding="utf-8")
    new = render(old, blocks())
    return None if new == old else new


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a table is stale")
    given = parser.parse_args()
    texts = {page: text for page in PAGES if (text := stale(page)) is not None}
    if texts and given.check:
        names = ", ".join(page.relative_to(ROOT).as_posix() for page in texts)
        raise LintError(f"{names}: a generated table differs from its source.\nNext: python -m ci.docs")
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
