"""``python -m flash_kda [--json]``: what is installed, what it holds, which backend would run and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ._library import LOADED
from ._report import Report, collect


def _line(label: str, value: Any) -> str:
    return f"{label:<14}{value}"


def _full_version(report: Report) -> str:
    """The version with the local label of the build (``+cu130``), which only its record knows."""
    recorded = (report.build_record or {}).get("version")
    if isinstance(recorded, str) and recorded.startswith(report.version + "+"):
        return recorded
    return report.version


def _library_lines(report: Report) -> list[str]:
    library = report.library
    # The text of a loaded library starts with that word, its code, already.
    text = library["text"] if library["code"] == LOADED else f"{library['code']}: {library['text']}"
    images = ", ".join(
        image["target"] + (" (PTX)" if image["kind"] == "ptx" else "") for image in library["images"]
    )
    return [
        _line("library", text),
        _line("architectures", images or "none"),
    ]


def _build_lines(report: Report) -> list[str]:
    if report.build_record is None:
        return [_line("build record", "none")]
    record = dict(report.build_record)
    record.pop("flags", None)
    if isinstance(record.get("source"), dict):
        record["source"] = {key: value for key, value in record["source"].items() if key != "files"}
    lines = [_line("build record", "(flags and files: --json)")]
    return lines + [f"  {key}: {json.dumps(value)}" for key, value in sorted(record.items())]


def _machine_lines(report: Report) -> list[str]:
    info, driver = report.torch, report.driver
    found = (
        f"{info['version']}, CUDA {info['cuda'] or 'none (CPU build)'}" if info["version"] else info["error"]
    )
    newest = f", runs CUDA up to {driver['cuda']}" if driver["cuda"] else ""
    lines = [_line("torch", found), _line("driver", (driver["version"] or "none") + newest)]
    if not report.gpus:
        return [*lines, _line("GPU", "none that torch can use")]
    return lines + [
        _line("GPU", f"{g.device}: {g.name}, compute capability {g.capability}") for g in report.gpus
    ]


def _choice_lines(report: Report) -> list[str]:
    lines = []
    for choice in report.choices:
        lines.append(_line("backend", f"{choice.device}: {choice.backend or 'none'}"))
        lines += [f"{'':<14}  not {r.backend}: {r.code}: {r.text}" for r in choice.refusals]
    return lines


def render(report: Report) -> str:
    """The report as text for people: what is wrong first, then the details."""
    problems = [f"PROBLEM: {problem}" for problem in report.problems] or ["no problems found"]
    lines = [
        *problems,
        "",
        _line("flash_kda", f"{_full_version(report)}, Python {report.python}"),
        _line("location", report.location),
        _line("owned by", ", ".join(report.owners) or "no installed distribution (a source tree)"),
        *_library_lines(report),
        *_build_lines(report),
        *_machine_lines(report),
        *_choice_lines(report),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 0 in any case, since a missing GPU or library is an answer, not a failure."""
    parser = argparse.ArgumentParser(prog="python -m flash_kda", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON (field 'schema' gives its version)")
    arguments = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else render(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
