"""Turns the workers' lines into the result file, a table and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _cases import Case
from _words import NAMES

Lines = dict[str, list[dict[str, Any]]]
TIMED = tuple(NAMES)
SHAPE = ("case", "batch", "seqlen", "nheads", "lens")
FIGURES = ("floor_ms", "ours_ms", "tflops", "gbps", "over_floor")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines a worker managed to write. One that was cut short is an error among them."""
    if not path.exists():
        return []
    return [_read_line(line) for line in path.read_text(errors="replace").splitlines() if line.strip()]


def _read_line(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
        if not isinstance(line, dict) or "kind" not in line:
            raise ValueError(f"expected an object with a kind, got {text:.80}")
        return line
    except ValueError as error:
        return {"kind": "error", "what": "a line of results", "error": f"cannot be read: {error}"}


def of_kind(lines: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What the lines of one kind hold."""
    return [{k: v for k, v in line.items() if k != "kind"} for line in lines if line["kind"] == kind]


def times_of(results: Lines, name: str) -> dict[str, dict[str, Any]]:
    """The lines of one process that hold a time, by case."""
    return {line["case"]: line for line in of_kind(results.get(name, []), "time")}


def _kernels(case: Case, results: Lines) -> dict[str, list[dict[str, Any]]]:
    """What each implementation ran for the case; an empty list where its profiler saw nothing."""
    return {
        name: line["kernels"]
        for name in TIMED
        for line in of_kind(results.get(name, []), "kernels")
        if line["case"] == case.name
    }


def shape_of(case: Case) -> dict[str, Any]:
    """Name and shape of a case as a result file keeps them: generated lengths as their text."""
    return {
        "case": case.name,
        "batch": case.batch,
        "seqlen": case.seqlen,
        "nheads": case.nheads,
        "lens": case.generator or (None if case.lens is None else list(case.lens)),
    }


def build_row(case: Case, results: Lines, copy_gbps: float) -> dict[str, Any]:
    """One row of the result file; None where an implementation has no time."""
    floor_ms = case.bytes_moved / copy_gbps / 1e6
    times = {name: times_of(results, name).get(case.name) for name in TIMED}
    ours = times["ours"]
    row: dict[str, Any] = {
        **shape_of(case),
        "floor_ms": floor_ms,
        "ours_ms": ours["ms"] if ours else None,
        "peers": {name: line["ms"] for name in TIMED[1:] if (line := times[name])},
    }
    if ours:
        row["tflops"] = case.flops / ours["ms"] / 1e9
        row["gbps"] = case.bytes_moved / ours["ms"] / 1e6
        row["over_floor"] = ours["ms"] / floor_ms
    row["spread"] = {name: line["spread"] for name, line in times.items() if line}
    hosts = {name: line["host_us"] for name, line in times.items() if line}
    row["host_us"] = {name: value for name, value in hosts.items() if value is not None}
    row["kernels"] = _kernels(case, results)
    return row


def disagreements(cases: list[Case], results: Lines, names: Sequence[str] = TIMED) -> list[str]:
    """Cases on which two implementations had other inputs or other outputs: their times do not compare."""
    found = []
    for case in cases:
        lines = {name: line for name in names if (line := times_of(results, name).get(case.name))}
        if len({line["checksum"] for line in lines.values()}) > 1:
            found.append(f"{case.name}: the inputs differ between processes")
        for key in ("o_rms", "s_rms"):
            values = [line[key] for line in lines.values()]
            if values and max(values) > 1.02 * min(values):
                sizes = ", ".join(f"{name} {line[key]:.4g}" for name, line in lines.items())
                found.append(f"{case.name}: {key} differs by more than 2 %: {sizes}")
    return found


def errors(results: Lines) -> list[str]:
    """Everything a worker could not do."""
    return [
        f"{name}: {line['what']}: {line['error']}"
        for name, lines in results.items()
        for line in of_kind(lines, "error")
    ]


def about(machine: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """What every result file says of its run: the machine by a worker's line (None where there is none), and
    the facts that the parent gathered."""
    seen = {key: machine.get(key) for key in ("device", "torch")}
    return seen | {key: facts[key] for key in ("driver", "date", "commit", "wheel_sha256", "versions")}


def build_result(cases: list[Case], results: Lines, facts: dict[str, Any]) -> dict[str, Any]:
    """The result file. `facts`: see `about`."""
    machine = next(iter(of_kind(results.get("ours", []), "machine")), {})
    copy_gbps: float = machine.get("copy_gbps", math.nan)
    return {
        **about(machine, facts),
        "copy_gbps": copy_gbps,
        "matmul_tflops": machine.get("matmul_tflops"),
        "rows": [build_row(case, results, copy_gbps) for case in cases],
        "accuracy_setup": facts["accuracy_setup"],
        "accuracy": of_kind(results.get("judge", []), "accuracy"),
        "problems": errors(results) + disagreements(cases, results) + facts["problems"],
    }


def finite(value: Any) -> Any:
    """What a result file holds of a value: JSON has neither NaN nor infinities, so they become null."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many digits; `-` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def time_table(result: dict[str, Any]) -> str:
    """The times as fixed-width text."""
    head = (
        f"{'case, times in ms':18s} {'floor':>7s} {'ours':>8s} {'x floor':>7s} {'TFLOP/s':>7s} {'GB/s':>6s}"
    )
    head += f" {'flashkda':>8s} {'x':>5s} {'fla':>8s} {'x':>5s} {'+-%':>5s} {'host us':>7s}"
    lines = [head]
    for row in result["rows"]:
        ours, peers = row["ours_ms"], row["peers"]
        cells = f"{row['case']:18s} {number(row['floor_ms']):>7s} {number(ours):>8s} "
        cells += f"{number(row.get('over_floor'), 2):>7s} {number(row.get('tflops'), 0):>7s} "
        cells += f"{number(row.get('gbps'), 0):>6s}"
        for name in TIMED[1:]:
            ms = peers.get(name)
            cells += f" {number(ms):>8s} {number(ms / ours if ms and ours else None, 2):>5s}"
        spread = row["spread"].get("ours")
        cells += f" {number(100 * spread if spread is not None else None, 1):>5s}"
        lines.append(cells + f" {number(row['host_us'].get('ours'), 0):>7s}")
    return "\n".join(lines)


def kernel_table(result: dict[str, Any]) -> str:
    """The kernels of one call of each case and implementation, in the order of their launch."""
    nothing = "none (cpu)" if str(result["device"]).startswith("cpu") else "none seen by the profiler"
    lines = [f"{'kernels of a call':18s} {'':8s} {'count':>5s} {'us':>8s}  name"]
    for row in result["rows"]:
        for name, kernels in row["kernels"].items():
            head = f"{row['case']:18s} {name:8s}"
            cells = [f"{kernel['count']:5d} {kernel['us']:8.1f}  {kernel['name']}" for kernel in kernels]
            lines += [f"{head} {cell}" for cell in cells or [f"{'-':>5s} {'-':>8s}  {nothing}"]]
    return "\n".join(lines)


def accuracy_table(result: dict[str, Any]) -> str:
    """Errors (output / final state) as fixed-width text; '!' marks a line where a peer is over 5 % better."""
    names = [name for name in (result["accuracy"] or [{}])[0] if name != "case"]
    lines = [" ".join([f"{'relative error o / s':76s}", *(f"{name:>18s}" for name in names)])]
    for row in result["accuracy"]:
        cells = [f"{row['case']:76s}"]
        for name in names:
            error = row[name]
            cells.append(f"{'-' if error is None else '{o:.2e} / {s:.2e}'.format(**error):>18s}")
        lines.append(" ".join(cells) + ("  !" if worse_than_peer(row) else ""))
    return "\n".join(lines)


def worse_than_peer(row: dict[str, Any], margin: float = 1.05) -> bool:
    """Whether our error exceeds the better peer's by more than the margin (or is not a number)."""
    if row.get("ours") is None:
        return True
    for key in ("o", "s"):
        peers = [row[name][key] for name in TIMED[1:] if row.get(name)]
        finite = [error for error in peers if math.isfinite(error)]
        if not math.isfinite(row["ours"][key]) or (finite and row["ours"][key] > margin * min(finite)):
            return True
    return False


def to_csv(result: dict[str, Any]) -> str:
    """The times as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    columns = (*SHAPE, *FIGURES)
    writer.writerow([*columns, "flashkda_ms", "fla_ms"])
    for row in result["rows"]:
        lens = row["lens"] or ""
        cells = {**row, "lens": lens if isinstance(lens, str) else " ".join(map(str, lens))}
        peers = [row["peers"].get(name) for name in TIMED[1:]]
        writer.writerow([*(cells.get(name) for name in columns), *peers])
    return buffer.getvalue()
