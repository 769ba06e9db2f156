"""``python -m flash_kda``: what is installed, what it holds, which backend would run and why.

With ``--wheel FILE`` of a wheel that is not installed; with ``--device-capability 10.7`` on a GPU that is not
here.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import _report
from ._library import LOADED
from ._report import SCHEMA, BackendChoice, Report, collect
from ._wheel import WheelError, WheelReport, judge
from .arch import Capability, parse_capability
from .dispatch import AUTO, ENV, DeviceFacts

NOT_WRITTEN = 1  # exit code
BAD_FILE = 2  # exit code, the one of argparse for a bad argument


def _line(label: str, value: Any) -> str:
    return f"{label:<14}{value}"


def _full_version(report: Report) -> str:
    """The version with the local label of the build (``+cu130``), which only its record knows."""
    recorded = (report.build_record or {}).get("version")
    if isinstance(recorded, str) and recorded.startswith(report.version + "+"):
        return recorded
    return report.version


def _images_line(images: Iterable[dict[str, str]]) -> str:
    names = (image["target"] + (" (PTX)" if image["kind"] == "ptx" else "") for image in images)
    return _line("architectures", ", ".join(names) or "none")


def _library_lines(report: Report) -> list[str]:
    library = report.library
    # The text of a loaded library starts with that word, its code, already.
    text = library["text"] if library["code"] == LOADED else f"{library['code']}: {library['text']}"
    return [_line("library", text), _images_line(library["images"])]


def _build_lines(build_record: dict[str, Any] | None) -> list[str]:
    if build_record is None:
        return [_line("build record", "none")]
    record = dict(build_record)
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


def _choice_lines(choices: Iterable[BackendChoice]) -> list[str]:
    lines = []
    for choice in choices:
        asked = "" if choice.asked == AUTO else f" ({ENV}={choice.asked})"
        lines.append(_line("backend", f"{choice.device}: {choice.backend or 'none'}{asked}"))
        lines += [_line("", f"  {verdict}") for verdict in choice.trace]
    return lines


def _problem_lines(problems: Sequence[str]) -> list[str]:
    return [f"PROBLEM: {problem}" for problem in problems] or ["no problems found"]


def render(report: Report) -> str:
    """The report as text for people: what is wrong first, then the details."""
    lines = [
        *_problem_lines(report.problems),
        "",
        _line("flash_kda", f"{_full_version(report)}, Python {report.python}"),
        _line("location", report.location),
        _line("owned by", ", ".join(report.owners) or "no installed distribution (a source tree)"),
        *_library_lines(report),
        *_build_lines(report.build_record),
        *_machine_lines(report),
        *_choice_lines(report.choices),
    ]
    return "\n".join(lines)


def render_wheel(report: WheelReport) -> str:
    """The report on a wheel as text for people."""
    lines = [
        *_problem_lines(report.problems),
        "",
        _line("wheel", report.wheel),
        _images_line(report.images),
        *_build_lines(report.build_record),
        *_choice_lines(report.choices),
    ]
    if not report.choices:
        lines.append(_line("backend", "no GPU that torch can use; name one, as --device-capability 9.0"))
    return "\n".join(lines)


def _hypothetical(capability: Capability) -> DeviceFacts:
    return DeviceFacts("cuda", None, capability)


def _on_hypothetical(capability: Capability) -> BackendChoice:
    """The decision on a GPU that need not be here, with what is installed."""
    torch, _ = _report.import_torch()
    (choice,) = _report.choices([_hypothetical(capability)], _report.library_facts(torch))
    return choice


def _on_wheel(path: Path, capability: Capability | None) -> WheelReport:
    torch, _ = _report.import_torch()
    gpus, _ = _report.torch_gpus(torch)
    devices = [_report.device_of(gpu) for gpu in gpus]
    if capability is not None:
        devices = [_hypothetical(capability)]
    return judge(path, devices, torch is not None)


def _capability(text: str) -> Capability:
    try:
        return parse_capability(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_kda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON (field 'schema' gives its version)")
    parser.add_argument(
        "--device-capability",
        type=_capability,
        metavar="X.Y",
        help="decide for an NVIDIA GPU of this compute capability, here or not",
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="judge this wheel, not what is installed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. 0 whatever it says, since a missing GPU or library is an answer, not a failure; 1
    where not all of it could be written; 2 for a bad argument or a file that is no wheel of this package."""
    arguments = _parser().parse_args(argv)
    try:
        data, text = _answer(arguments.wheel, arguments.device_capability)
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_FILE
    return _write(json.dumps(data, indent=2) if arguments.json else text)


def _write(text: str) -> int:
    """Prints to a reader that may have left (``| head -1``), a full disk, or a terminal of few characters."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except OSError as error:
        # Python writes what is still buffered when it ends, and that failure would be a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: the report could not be written: {error}", file=sys.stderr)
        return NOT_WRITTEN
    return 0


def _answer(wheel: Path | None, capability: Capability | None) -> tuple[dict[str, Any], str]:
    """The report that was asked for, as plain data and as text."""
    if wheel is not None:
        judged = _on_wheel(wheel, capability)
        return judged.as_dict(), render_wheel(judged)
    if capability is not None:
        choice = _on_hypothetical(capability)
        return {"schema": SCHEMA, "choices": [asdict(choice)]}, "\n".join(_choice_lines([choice]))
    report = collect()
    return report.as_dict(), render(report)


if __name__ == "__main__":
    raise SystemExit(main())
