"""Nsight Compute: how one call is profiled, and its raw page (CSV) read into plain numbers.

Versions of ncu name the same figure differently, so each figure has a list of names, best first. One that no
name gives stays None and is listed as missing.
"""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

from _words import kernel_name

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "Occupancy",
    "LaunchStats",
)
TOP_STALLS = 4


Names = tuple[tuple[str, float], ...]  # each with the factor that brings ncu's base unit to ours


def _named(*names: str, factor: float = 1.0) -> Names:
    return tuple((name, factor) for name in names)


METRICS: dict[str, Names] = {
    "us": _named("gpu__time_duration.sum", "gpu__time_duration.avg", factor=1e-3),  # nanoseconds
    "blocks": _named("launch__grid_size"),
    "threads": _named("launch__block_size"),
    "registers": _named("launch__registers_per_thread"),
    "dynamic_smem": _named("launch__shared_mem_per_block_dynamic"),
    "issue": (
        ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1.0),
        ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
        ("smsp__issue_active.avg.per_cycle_active", 100.0),
        ("sm__inst_issued.avg.per_cycle_active", 25.0),
        ("sm__inst_executed.avg.per_cycle_active", 25.0),
    ),
    "tensor": _named(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_subpipe_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    ),
    "shared": _named(
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active",
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2": _named(
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram": _named(
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "warps": (
        ("sm__warps_active.avg.per_cycle_active", 1.0),
        ("smsp__warps_active.avg.per_cycle_active", 4.0),
    ),
}
# One family of stalls is used, never a mixture: the first of which the page has a value.
STALLS = (
    r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio",
    r"smsp__average_warp_latency_issue_stalled_(\w+)\.ratio",
    r"smsp__warp_issue_stalled_(\w+)_per_warp_active\.pct",
)

Row = dict[str, str]  # column -> value, as printed


def command(ncu: str, log: Path) -> list[str]:
    """What stands before a program's command line to profile its kernels between its profiler's start and
    stop; the raw page goes to `log`."""
    sections = [word for name in SECTIONS for word in ("--section", name)]
    fixed = ["--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    chosen = ["--kernel-name", "regex:kda_fwd", *sections]
    # Base units: the automatic ones differ from row to row and round 32768 bytes to 32.77 Kbyte.
    page = ["--page", "raw", "--csv", "--print-units", "base", "--log-file", str(log)]
    return [ncu, *fixed, *chosen, *page]


def parse(text: str) -> list[Row]:
    """One row a kernel; ValueError for a page that is not whole or holds no kernel."""
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        said = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))]
        raise ValueError("no table in ncu's output; expected a line of column names; " + _said(said))
    body = [line for line in lines[start:] if line.strip() and not line.startswith("==")]
    try:
        head, *rest = csv.reader(body, strict=True)
    except csv.Error as error:
        raise ValueError(f"ncu's table is cut off or damaged: {error}") from error
    if "Kernel Name" not in head or not rest:
        raise ValueError(f"ncu's table is cut off: {len(head)} column names and {len(rest)} rows below them")
    for index, cells in enumerate(rest):
        if len(cells) != len(head):
            raise ValueError(f"ncu's table is cut off: row {index} has {len(cells)} cells of {len(head)}")
    units, *kernels = rest
    if units[head.index("ID")]:
        raise ValueError("ncu's table has no row of units below the names; expected --page raw --csv")
    for name, unit in zip(head, units, strict=True):
        if name.startswith("gpu__time_duration") and unit not in ("ns", "nsecond"):
            raise ValueError(f"ncu's {name} is in {unit!r}, expected nanoseconds of --print-units base")
    profiled = sum(line.startswith('==PROF== Profiling "') for line in lines)
    if not kernels or (profiled and profiled != len(kernels)):
        raise ValueError(f"ncu's table has {len(kernels)} kernels, expected {profiled or 'at least one'}")
    return [dict(zip(head, cells, strict=True)) for cells in kernels]


def _said(lines: list[str]) -> str:
    return "ncu said: " + (" / ".join(lines)[:600] or "nothing")


def number(text: str) -> float | None:
    """A cell; None where ncu has no value: "n/a", "nan", "inf" or empty."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def look_up(row: Row, names: Names) -> tuple[float | None, str | None]:
    """The figure and the name it was found under."""
    for name, factor in names:
        value = number(row[name]) if name in row else None
        if value is not None:
            return value * factor, name
    return None, None


def stalls(row: Row) -> list[dict[str, Any]]:
    """Where the warps' time went, as shares of all of it, largest first. `selected` is no stall: the warp
    issued."""
    for pattern in STALLS:
        found: dict[str, float] = {}
        for column, cell in row.items():
            match = re.fullmatch(pattern, column)
            value = number(cell) if match else None
            if match and value is not None and not match[1].endswith("_not_issued"):
                found[match[1]] = value
        total = sum(found.values())
        if total > 0:
            found.pop("selected", None)
            top = sorted(found.items(), key=lambda item: -item[1])[:TOP_STALLS]
            return [{"reason": reason, "share": round(100 * value / total, 1)} for reason, value in top]
    return []


def _extent(row: Row, column: str) -> list[int] | None:
    """Grid or block: ``(132, 1, 1)``."""
    found = [int(part) for part in re.findall(r"\d+", row.get(column, ""))]
    return found or None


def _tidy(key: str, value: float | None) -> float | int | None:
    if value is None:
        return None
    return round(value) if key in ("blocks", "threads", "registers", "dynamic_smem") else round(value, 3)


def kernel(row: Row, sms: int) -> dict[str, Any]:
    """The figures of one kernel. `metrics` says under which names they stood, `missing` which have none."""
    name = kernel_name(row["Kernel Name"])
    found = {key: look_up(row, names) for key, names in METRICS.items()}
    figures = {key: _tidy(key, value) for key, (value, _) in found.items()}
    extents = {"grid": _extent(row, "Grid Size"), "block": _extent(row, "Block Size")}
    blocks = figures["blocks"]
    share = None if blocks is None else round(100 * min(1.0, blocks / sms), 1)
    result: dict[str, Any] = {"name": name, **extents, **figures, "sm_share": share, "stalls": stalls(row)}
    result["metrics"] = {key: used for key, (_, used) in found.items() if used}
    result["missing"] = [key for key, value in result.items() if value is None or value == []]
    return result


def wanted(key: str) -> str:
    """What was looked for where a figure is missing."""
    if key in METRICS:
        return ", ".join(name for name, _ in METRICS[key])
    return {"grid": "Grid Size", "block": "Block Size", "sm_share": "launch__grid_size"}.get(
        key, ", ".join(STALLS)
    )
