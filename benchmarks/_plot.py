"""Draws the times of a result file beside the floor: one row per case, a logarithmic axis.

matplotlib is needed here alone and imported late: the machine with the GPU may do without it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import finite
from _words import NAMES, machine, shape, versions

# Name in the legend, marker and colour of what is drawn, in this order.
STYLES = {
    "floor": ("floor (copy rate)", "|", "black"),
    "ours": (NAMES["ours"], "o", "tab:blue"),
    "flashkda": (NAMES["flashkda"], "s", "tab:orange"),
    "fla": (NAMES["fla"], "^", "tab:green"),
}


@dataclass(frozen=True)
class Picture:
    """What is drawn: `labels` from top to bottom; for each name the rows and times (ms) of its markers."""

    title: str
    labels: list[str]
    points: dict[str, tuple[list[int], list[float]]]
    digest: str


def digest(result: dict[str, Any]) -> str:
    """The sha256 of a result, which its picture carries: it shows which result a picture is of."""
    return hashlib.sha256(json.dumps(finite(result), sort_keys=True).encode()).hexdigest()


def _times(row: dict[str, Any]) -> dict[str, float | None]:
    return {"floor": row["floor_ms"], "ours": row["ours_ms"], **row["peers"]}


def _points(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [(index, _times(row).get(name)) for index, row in enumerate(rows)]
    kept = [(index, ms) for index, ms in found if ms is not None and math.isfinite(ms) and ms > 0]
    return [index for index, _ in kept], [ms for _, ms in kept]


def prepare(result: dict[str, Any]) -> Picture:
    """The picture of a result; names without a single time are left out. ValueError when none is left."""
    points = {name: _points(result["rows"], name) for name in STYLES}
    kept = {name: found for name, found in points.items() if found[0]}
    if not kept:
        raise ValueError("the result holds no times to draw; expected rows with floor_ms, ours_ms or peers")
    title = f"KDA prefill, one forward call: {machine(result)}\n{versions(result)}"
    return Picture(title, [shape(row) for row in result["rows"]], kept, digest(result))


def load_result(path: Path) -> dict[str, Any]:
    """A result file; ValueError when it is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; expected a file that --json wrote") from error
    if not isinstance(result, dict) or "rows" not in result:
        raise ValueError(f"{path} is no result; expected a file that --json wrote")
    return result


def check(path: Path) -> None:
    """ValueError when a picture could not be drawn there: said before a run, not after."""
    if path.suffix != ".png":
        raise ValueError(f"--plot {path}: expected a name that ends in .png")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib ({error}); run: pip install -r ci/requirements/plot.in; "
            "or write --json FILE here, and where there is one: --plot-from FILE --plot FILE.png"
        ) from error


def draw(picture: Picture, path: Path) -> None:
    """Write the PNG. One matplotlib draws the same bytes each time: no date, no style of the user's."""
    style, figures = (importlib.import_module(f"matplotlib.{name}") for name in ("style", "figure"))
    with style.context("default"):
        figure = figures.Figure(figsize=(10, 1.8 + 0.36 * len(picture.labels)), layout="constrained")
        axes = figure.add_subplot()
        for name, (rows, times) in picture.points.items():
            label, marker, colour = STYLES[name]
            axes.plot(times, rows, marker, color=colour, label=label, markersize=14 if name == "floor" else 7)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("ms")
        axes.set_yticks(range(len(picture.labels)), picture.labels)
        axes.set_ylim(len(picture.labels) - 0.5, -0.5)
        axes.grid(alpha=0.3)
        figure.suptitle(picture.title, fontsize=9)
        figure.legend(loc="outside lower center", ncols=len(picture.points))
        metadata = {"Software": None, "Description": picture.digest}
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=100, metadata=metadata)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a result."""
    draw(prepare(result), path)
