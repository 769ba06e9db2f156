"""The costs of csrc/kda/fwd_plan.h from start and end times of kernels: what to run, how to fit and compare.

Nothing here touches a GPU.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from _report import about, of_kind

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "kda" / "fwd_plan.h"


def read_constant(text: str, name: str) -> int:
    """A whole number that the header's text defines; ValueError when it does not."""
    found = re.search(rf"^constexpr int {name} = (\d+);", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"fwd_plan.h defines no {name}; expected constexpr int {name} = a number")
    return int(found[1])


@cache
def size(name: str) -> int:
    """A whole number of the header; read when it is needed, so that a damaged header is no traceback."""
    return read_constant(HEADER.read_text(encoding="utf-8"), name)


def min_segment() -> int:
    """Tokens of the shortest segment."""
    return size("kMinSegmentChunks") * size("kChunk")


OUTPUTS = {"kda_fwd_kernel": "whole", "kda_fwd_half_kernel": "half", "kda_fwd_quarter_kernel": "quarter"}
KERNELS = {cost: name for name, cost in OUTPUTS.items()}
STATE, SCAN = "kda_fwd_state_kernel", "kda_fwd_scan_kernel"
COSTS = ("whole", "half", "quarter", "state", "scan_step", "uncut", "cut")

TOLERANCE = 0.25  # of a measured cost against the header's
STRAIGHT = 0.1  # how far a time may lie from its line

SWEEP_HEADS = (1, 4, 8, 12, 16, 24, 32, 48)
SWEEP_TOKENS = (2048, 8192, 32768)
SWEEP_SEGMENTS = (4, 8, 16, 32)


def read_costs(text: str) -> dict[str, float]:
    """The constants of `FwdCosts` in the header's text; ValueError when they are not those of COSTS."""
    body = re.search(r"struct FwdCosts \{(.*?)\};", text, re.DOTALL)
    found = dict(re.findall(r"(\w+) = ([^,;]+)", body[1])) if body else {}
    wrong = [
        name for name, value in found.items() if not re.fullmatch(r"\d+(\.\d*)?", value) or not float(value)
    ]
    if wrong:
        raise ValueError(f"fwd_plan.h: {', '.join(wrong)} of FwdCosts: expected positive decimal numbers")
    if tuple(found) != COSTS:
        raise ValueError(
            f"fwd_plan.h: FwdCosts has {', '.join(found) or 'nothing'}; expected {', '.join(COSTS)}"
        )
    return {name: float(value) for name, value in found.items()}


# ---- what is run ----


@dataclass(frozen=True)
class Point:
    """One call: a single sequence, cut into equal segments or (segment_tokens 0) not."""

    what: str
    heads: int
    segment_tokens: int
    segments: int
    tokens: int

    @property
    def chunks(self) -> int:
        """Of a segment."""
        return self.tokens // self.segments // size("kChunk")

    def kernels(self) -> set[str]:
        """What it may run last; a point that runs something else measures something else."""
        return {KERNELS[self.what]} if self.segment_tokens == 0 else set(OUTPUTS)


def points(sms: int) -> list[Point]:
    """Every call of the measurement for a GPU of so many multiprocessors (H200: 96, 64, 32 and 8 heads).

    All of a kernel's blocks run at once, so that its time is a fixed one and a number of chunks.
    """
    found = []
    for what, heads in (("whole", min(96, sms)), ("half", min(64, sms // 2)), ("quarter", min(32, sms // 4))):
        found += [Point(what, heads, 0, 1, tokens) for tokens in (1024, 4096, 8192)]
    heads = min(8, sms // size("kScanParts"))
    segments = sms // 2 // heads + 1
    found += [
        Point("state", heads, tokens, segments, segments * tokens) for tokens in (512, 1024, 2048, 4096)
    ]
    least = min_segment()
    found += [Point("scan", heads, least, count, count * least) for count in (8, 32, 64)]
    return found


# ---- from spans to times ----


@dataclass(frozen=True)
class Span:
    """When a kernel ran, in microseconds of any clock."""

    name: str
    start: float
    end: float


def calls_of(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans of each call, in order: an output kernel ends a call. ValueError when one is left open."""
    calls: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: span.start):
        calls[-1].append(span)
        if span.name in OUTPUTS:
            calls.append([])
    if calls[-1]:
        raise ValueError(f"kernels without an output pass behind them: {[span.name for span in calls[-1]]}")
    return calls[:-1]


def own_times(call: Sequence[Span]) -> list[float]:
    """Of each kernel, from the end of the one before it, for which it waits once it has started."""
    times, before = [], -math.inf
    for span in call:
        times.append(span.end - max(span.start, before))
        before = span.end
    return times


def point_times(point: Point, spans: Iterable[Span], skip: int) -> dict[str, Any]:
    """Medians of a point over its calls but the first `skip`; ValueError where other kernels ran."""
    calls = calls_of(spans)[skip:]
    names = [span.name for span in calls[0]] if calls else []
    if any([span.name for span in call] != names for call in calls) or not names:
        raise ValueError(f"{point.what}: the calls of a point ran different kernels, or none")
    wanted = [] if point.segment_tokens == 0 else [STATE, SCAN]
    if names[:-1] != wanted or names[-1] not in point.kernels():
        raise ValueError(
            f"{point.what}: {point.heads} heads, segments of {point.segment_tokens} tokens ran "
            f"{', '.join(names)}; expected {', '.join([*wanted, ' or '.join(sorted(point.kernels()))])}"
        )
    times = [statistics.median(column) for column in zip(*map(own_times, calls), strict=True)]
    whole = [call[-1].end - call[0].start for call in calls]
    return {
        **asdict(point),
        "chunks": point.chunks,
        "us": dict(zip(names, times, strict=True)),
        "call_us": statistics.median(whole),
        "spread": (max(whole) - min(whole)) / statistics.median(whole),
        "calls": len(calls),
    }


# ---- from times to costs ----


def is_time(value: float) -> bool:
    """Whether it can be one: positive, and a number."""
    return 0 < value < math.inf


@dataclass(frozen=True)
class Line:
    """time = intercept + x * slope; `residual` is the largest distance of a time from it, relative."""

    slope: float
    intercept: float
    residual: float


def fit(samples: Sequence[tuple[float, float]]) -> Line:
    """The line through (x, time) with the least relative errors; ValueError when there is no such line.

    By hand, for numpy need not be where torch is: torch does not depend on it.
    """
    if len({x for x, _ in samples}) < 2 or not all(is_time(y) for _, y in samples):
        raise ValueError(f"no line through {list(samples)}: expected two or more x and positive times")
    weights = [1 / y**2 for _, y in samples]
    total = sum(weights)
    x0 = sum(w * x for w, (x, _) in zip(weights, samples, strict=True)) / total
    y0 = sum(w * y for w, (_, y) in zip(weights, samples, strict=True)) / total
    rise = sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, samples, strict=True))
    slope = rise / sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, samples, strict=True))
    intercept = y0 - slope * x0
    return Line(slope, intercept, max(abs(intercept + slope * x - y) / y for x, y in samples))


def lines_of(measured: Sequence[dict[str, Any]]) -> dict[str, Line]:
    """A line for each kind of point: over the chunks of its kernel, or over the segments of the scan."""
    found = {}
    for what in (*KERNELS, "state", "scan"):
        rows = [row for row in measured if row["what"] == what]
        kernel = {**KERNELS, "state": STATE, "scan": SCAN}[what]
        x = "segments" if what == "scan" else "chunks"
        samples = [(row[x], row["us"][kernel]) for row in rows]
        with suppress(ValueError):  # too few: the run ended early; or no times: "not measured" will be said
            found[what] = fit(samples)
    return found


def left_over(row: dict[str, Any], costs: dict[str, float]) -> float:
    """What of a call with segments the other costs do not explain: its `cut`."""
    output = OUTPUTS[list(row["us"])[-1]]
    chunks = row["chunks"] * (costs["state"] + costs[output])
    return float(row["call_us"] - chunks - row["segments"] * costs["scan_step"])


def costs_of(measured: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Line]]:
    """The costs, as far as the points give them, and the lines they are from."""
    lines = lines_of(measured)
    costs = {("scan_step" if what == "scan" else what): line.slope for what, line in lines.items()}
    if starts := [line.intercept for what, line in lines.items() if what in KERNELS]:
        costs["uncut"] = statistics.median(starts)
    cut = [row for row in measured if row["what"] == "state"]
    if cut and set(costs) == set(COSTS) - {"cut"}:
        costs["cut"] = statistics.median(left_over(row, costs) for row in cut)
    return costs, lines


# ---- comparison ----


def compare(header: dict[str, float], costs: dict[str, float]) -> list[dict[str, Any]]:
    """Each constant of the header beside what was measured; `off` when it was not, or is not near."""
    rows = []
    for name in COSTS:
        value = costs.get(name)
        ratio = None if value is None else value / header[name]
        near = ratio is not None and abs(ratio - 1) <= TOLERANCE  # NaN is not
        rows.append(
            {"cost": name, "header": header[name], "measured": value, "ratio": ratio, "off": not near}
        )
    return rows


def problems_of(rows: Iterable[dict[str, Any]], lines: dict[str, Line]) -> list[str]:
    """What is wrong with the header, or with the measurement."""
    found = []
    for row in rows:
        if row["measured"] is None:
            found.append(f"{row['cost']}: not measured")
        elif row["off"]:
            text = f"measured {row['measured']:.3g}, fwd_plan.h has {row['header']:.3g}"
            found.append(f"{row['cost']}: {text}: more than {TOLERANCE:.0%} apart")
    for what, line in lines.items():
        if line.residual > STRAIGHT:
            found.append(f"{what}: its times lie up to {line.residual:.0%} off a line: no cost of a chunk")
    return found


# ---- sweep ----


def alternatives(tokens: int) -> list[int]:
    """Values of segment_tokens to hold against the choice."""
    chunk = size("kChunk")
    lengths = [-(-tokens // (count * chunk)) * chunk for count in SWEEP_SEGMENTS]
    return [0, *(length for length in lengths if length >= min_segment())]


def judge_sweep(timed: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each size timed in full: the choice's time over that of the best, the choice among them."""
    sizes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in timed:
        sizes.setdefault((line["heads"], line["tokens"]), []).append(line)
    rows = []
    for (heads, tokens), lines in sizes.items():
        chosen = [line for line in lines if line["segment_tokens"] is None]
        if not chosen or len(lines) < 1 + len(alternatives(tokens)):
            continue  # the run ended early, and says so
        best = min(lines, key=lambda line: float(line["ms"]))
        rows.append(
            {
                "heads": heads,
                "tokens": tokens,
                "chosen_segments": chosen[0]["segments"],
                "chosen_ms": chosen[0]["ms"],
                "best_segments": best["segments"],
                "best_ms": best["ms"],
                "ratio": chosen[0]["ms"] / best["ms"],
                "times": [{key: line[key] for key in ("segment_tokens", "segments", "ms")} for line in lines],
            }
        )
    return rows


# ---- result ----


def build_result(
    lines: list[dict[str, Any]], header: dict[str, float], facts: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """The result file from the worker's lines."""
    machine = next(iter(of_kind(lines, "machine")), {})
    measured = of_kind(lines, "point")
    costs, fitted = costs_of(measured)
    rows = compare(header, costs)
    timed = of_kind(lines, "sweep")
    sweep = judge_sweep(line for line in timed if is_time(line["ms"]))
    bad = [
        f"sweep: {line['heads']} heads, {line['tokens']} tokens: {line['ms']} ms; expected a positive time"
        for line in timed
        if not is_time(line["ms"])
    ]
    failed = [f"{line['what']}: {line['error']}" for line in of_kind(lines, "error")]
    return {
        **about(machine, facts),
        "sms": machine.get("sms"),
        "costs": rows,
        "lines": {what: asdict(line) for what, line in fitted.items()},
        "cuts": [left_over(row, costs) for row in measured if row["what"] == "state" and "cut" in costs],
        "points": measured,
        "sweep": sweep,
        "worst": max((row["ratio"] for row in sweep), default=None),
        "problems": [*problems, *failed, *bad, *problems_of(rows, fitted)],
    }


def cost_table(result: dict[str, Any]) -> str:
    """The constants as fixed-width text, in microseconds; '!' marks one that is off."""
    lines = [f"{'constant':10s} {'fwd_plan.h':>14s} {'measured':>14s} {'ratio':>6s}"]
    for row in result["costs"]:
        known = row["measured"] is not None
        cells = (
            (f"{row['measured']:14.3f}", f"{row['ratio']:6.2f}") if known else (f"{'-':>14s}", f"{'-':>6s}")
        )
        lines.append(f"{row['cost']:10s} {row['header']:14.3f} {' '.join(cells)}" + " !" * row["off"])
    return "\n".join(lines)


def sweep_table(result: dict[str, Any]) -> str:
    """The choice and the best of each size, in milliseconds, and into how many it was cut."""
    lines = [
        f"{'heads':>5s} {'tokens':>7s} "
        + f"{'chosen':>8s} {'cut':>4s} {'best':>8s} {'cut':>4s} {'ratio':>6s}"
    ]
    for row in result["sweep"]:
        cells = [f"{row[f'{key}_ms']:8.4f} {row[f'{key}_segments']:4d}" for key in ("chosen", "best")]
        lines.append(f"{row['heads']:5d} {row['tokens']:7d} {' '.join(cells)} {row['ratio']:6.3f}")
    worst = max(result["sweep"], key=lambda row: float(row["ratio"]))
    where = f"{worst['heads']} heads, {worst['tokens']} tokens"
    return "\n".join([*lines, f"worst: {worst['ratio']:.3f} x the best ({where})"])
