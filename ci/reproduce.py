"""Builds one row under different conditions and compares the bytes.

``python -m ci.reproduce [--cuda LABEL] [--archs LIST] [--platform NAME] [--against WHEEL] [--record DIR]``.

The first two builds differ in folder, job and thread count, umask, time zone, locale, hash seed, file dates
and clock, and the second one compiles through an empty compiler cache; a third one takes all from there.  The
wheels must not differ.  ``--against FILE`` compares with a wheel somebody else built instead of the first.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from ci import build, cache, matrix, source, venv
from ci.errors import ConfigError, ReproducibilityError, missing_package, run_cli
from ci.platforms import HOST
from ci.process import CONSOLE

try:
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile
except ModuleNotFoundError as error:
    raise missing_package(error, ["ci", "verify"]) from error

FIRST = build.Conditions(jobs=1, threads=1)
SECOND = build.Conditions(
    jobs=2, threads=2, umask=0o077, timezone="Pacific/Auckland", locale="C", hash_seed="4321", aged=40_000_000
)


@dataclass(frozen=True)
class Difference:
    """One place where two wheels differ: the member and, inside a library, the ELF section."""

    member: str
    what: str

    def __str__(self) -> str:
        return f"{self.member}: {self.what}"


def compare(first: Path, second: Path) -> list[Difference]:
    """Every place where two wheels differ; empty exactly when the files are the same bytes."""
    if first.read_bytes() == second.read_bytes():
        return []
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as two:
        found = [*_names(first, second), *_members(one, two)]
    # RECORD differs with whatever it lists.
    causes = [difference for difference in found if not difference.member.endswith(".dist-info/RECORD")]
    return (
        causes or found or [Difference("zip", "same members, other container bytes (compression or layout)")]
    )


def _names(first: Path, second: Path) -> Iterator[Difference]:
    if first.name != second.name:
        yield Difference("file name", f"{first.name} against {second.name}")


def _members(one: zipfile.ZipFile, two: zipfile.ZipFile) -> Iterator[Difference]:
    left = {info.filename: info for info in one.infolist()}
    right = {info.filename: info for info in two.infolist()}
    for name in sorted(left.keys() ^ right.keys()):
        yield Difference(name, f"only in the {'first' if name in left else 'second'} wheel")
    for name in sorted(left.keys() & right.keys()):
        a, b = one.read(name), two.read(name)
        if a != b:
            yield from _contents(name, a, b)
        if left[name].date_time != right[name].date_time:
            yield Difference(name, f"date {left[name].date_time} against {right[name].date_time}")
        if left[name].external_attr != right[name].external_attr:
            modes = f"{left[name].external_attr >> 16:o} against {right[name].external_attr >> 16:o}"
            yield Difference(name, f"mode {modes}")


def _contents(name: str, a: bytes, b: bytes) -> Iterator[Difference]:
    try:
        one, two = sections(a), sections(b)
    except ELFError:
        yield Difference(name, first_difference(a, b))
        return
    differing = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
    for key in differing:
        yield Difference(name, f"section {key}: {first_difference(one.get(key, b''), two.get(key, b''))}")
    if not differing:
        yield Difference(name, f"outside the sections (headers): {first_difference(a, b)}")


def sections(data: bytes) -> dict[str, bytes]:
    """Contents of the sections of an ELF file by name; raises ELFError when it is none."""
    elf = ELFFile(io.BytesIO(data))
    return {section.name or "(unnamed)": section.data() for section in elf.iter_sections()}


def first_difference(a: bytes, b: bytes) -> str:
    """Where and how two byte strings first differ, in a line."""
    sizes = f"{len(a)} against {len(b)} bytes, " if len(a) != len(b) else ""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    context = slice(max(0, at - 16), at + 32)
    return f"{sizes}first at offset {at}: {a[context]!r} against {b[context]!r}"


def reproduce(label: str, archs: str | None, against: Path | None, platform: str = HOST) -> dict[str, object]:
    """Build (or take `against`), build through an empty compiler cache, build from that cache, and compare.

    Returns the common sha256 and the seconds of each build.  Raises ReproducibilityError naming each wheel
    member and ELF section that differs.
    """
    with tempfile.TemporaryDirectory(prefix="flash-kda-") as scratch:
        store = Path(scratch, "ccache")
        folders = {"plain": "one", "cold": "two/a-folder-further-down", "warm": "three"}
        conditions = {"plain": FIRST, "cold": replace(SECOND, compiler_cache=store)}
        # ccache's key has nvcc's threads and the locale in it, and nothing else that differs.
        conditions["warm"] = replace(
            FIRST, threads=SECOND.threads, locale=SECOND.locale, compiler_cache=store
        )
        made: dict[str, Path] = {}
        seconds: dict[str, dict[str, float]] = {}
        for name, folder in folders.items():
            wall, cpu = time.monotonic(), _cpu()
            taken = against if name == "plain" else None
            made[name] = taken or _built(label, archs, Path(scratch, folder), conditions[name], platform)
            seconds[name] = {"wall": round(time.monotonic() - wall, 1), "cpu": round(_cpu() - cpu, 1)}
        for name in ("cold", "warm"):
            _refuse_differences(label, made["plain"], made[name])
        _refuse_unused(store)
        return {"sha256": hashlib.sha256(made["warm"].read_bytes()).hexdigest(), "seconds": seconds}


def _cpu() -> float:
    """Processor time of the programs run so far; unlike the clock, other work on the machine hardly adds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _refuse_differences(label: str, first: Path, second: Path) -> None:
    differences = compare(first, second)
    if differences:
        kept = "\n".join(f"  {difference}" for difference in differences)
        raise ReproducibilityError(
            f"two builds of {label}: expected the same bytes, got {len(differences)} differences:\n"
            f"{kept}\n"
            "Next: look for a path, a date or an unsorted list in what the section holds"
        )


def _refuse_unused(store: Path) -> None:
    """ReproducibilityError unless each object was compiled once, and taken from the cache once."""
    program = venv.locked("cache").bin / "ccache"
    command = [str(program), "--dir", str(store), "--print-stats"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    counts = dict(line.split("\t") for line in done.stdout.splitlines())
    hits = int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"])
    objects = sum(name.startswith("csrc/") and name.endswith((".cpp", ".cu")) for name in source.files())
    if not objects or (hits, int(counts["cache_miss"])) != (objects, objects):
        raise ReproducibilityError(
            f"the compiler cache: expected {objects} objects compiled once and taken once, got {hits} "
            f"hits and {counts['cache_miss']} misses.\nNext: read ccache's counts: {' '.join(command)}"
        )


def _built(label: str, archs: str | None, folder: Path, conditions: build.Conditions, platform: str) -> Path:
    folder.mkdir(parents=True)
    out = folder / "wheels"
    return build.build_row(label, archs, out, work=folder, conditions=conditions, platform=platform)


def record(label: str, found: Mapping[str, object]) -> dict[str, object]:
    """What is written down of builds that were the same bytes."""
    revision = source.revision()
    return {
        "row": label,
        **found,
        "commit": revision.commit,
        "dirty": revision.dirty,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "cores": os.cpu_count(),
    }


def main() -> int:
    """Command line."""
    first = matrix.load().locked_rows[0].label
    parser = argparse.ArgumentParser(
        prog="python -m ci.reproduce", description="Build twice, compare the bytes."
    )
    parser.add_argument("--cuda", action="append", metavar="LABEL", help=f"row, or 'all' (default: {first})")
    parser.add_argument("--archs", help="narrow the architectures, as a comma list")
    parser.add_argument("--platform", default=HOST, metavar="NAME", help=f"such as aarch64 (default: {HOST})")
    parser.add_argument("--against", type=Path, metavar="WHEEL", help="compare one build with this wheel")
    parser.add_argument("--record", type=Path, metavar="DIR", help="leave a record of each row there")
    given = parser.parse_args()
    if given.against is not None and not given.against.is_file():
        raise ConfigError(f"--against {given.against}: no such file.\nNext: nox -s build_wheels")
    if given.record is not None:
        cache.check_folder(given.record, "--record")
    rows = [row.label for row in matrix.load().on(given.platform).locked_rows]
    labels = given.cuda or [first]
    for label in rows if labels == ["all"] else labels:
        found = reproduce(label, given.archs, given.against, given.platform)
        CONSOLE.print(f"[green]same bytes[/green] {label}: {found}")
        if given.record:
            given.record.mkdir(parents=True, exist_ok=True)
            text = json.dumps(record(label, found), indent=2)
            (given.record / f"{label}.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
