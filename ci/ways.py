"""Builds one row every way there is and compares the bytes.

``python -m ci.ways [--cuda cu130] [--base IMAGE]``.  The local build, the one by docker/builder.Dockerfile
and the one by cibuildwheel in the image of that file must give the same wheel; wheels/records/containers says
that they did.  A row whose toolkit comes from the builder image has no local build.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ci import build, cibw, containers, images, matrix, source, wheels
from ci.containers import Frame
from ci.errors import ReproducibilityError, ToolchainError, run_cli
from ci.process import CONSOLE, run

RECORDS = wheels.FOLDER / "records" / "containers"


def every_way(frame: Frame, scratch: Path) -> dict[str, Path]:
    """The row's wheel, built each way."""
    folder, label = containers.context(scratch / "context"), frame.row.label
    made = {}
    if frame.row.toolkit_from == matrix.LOCK:
        made["local"] = build.build_row(label, None, scratch / "local")
    made[frame.engine] = containers.by_image(frame, folder, scratch / frame.engine)
    made["cibuildwheel"] = cibw.build(frame, folder, scratch / "cibuildwheel")
    return made


def compare(made: Mapping[str, Path]) -> dict[str, str]:
    """The sha256 of each; ReproducibilityError unless all are one, under one file name."""
    digests = {way: hashlib.sha256(path.read_bytes()).hexdigest() for way, path in made.items()}
    names = {path.name for path in made.values()}
    if len(set(digests.values())) != 1 or len(names) != 1:
        found = "".join(f"\n  {digests[way]}  {made[way]}" for way in made)
        raise ReproducibilityError(
            f"builds of one commit: expected the same bytes, got:{found}\n"
            "Next: python -m ci.reproduce --against FILE says which member and section differ"
        )
    return digests


def record(frame: Frame, name: str, digests: Mapping[str, str]) -> dict[str, object]:
    """What is written down of a comparison that held."""
    revision = source.revision()
    pinned = frame.base == images.load(matrix.load().project.plat).reference
    return {
        "wheel": name,
        "sha256": dict(digests),
        "row": frame.row.label,
        "architectures": list(frame.row.archs),
        "commit": revision.commit,
        "dirty": revision.dirty,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "base_image": frame.base,
        "base_image_digest": _asked(
            [frame.engine, "image", "inspect", "--format", "{{.Digest}}", frame.base]
        ),
        "base_image_is_the_pinned_one": pinned,
        "builder_cxx": _asked([frame.engine, "run", "--rm", frame.tag, "g++", "--version"]).splitlines()[0],
        "engine": _asked([frame.engine, "--version"]),
        "cibuildwheel": cibw.version(),
    }


def _asked(words: Sequence[str]) -> str:
    return run(words, title=" ".join(words[:3]), error=ToolchainError, hint="run it by hand").strip()


def main() -> int:
    """Command line; the wheel by the Dockerfile goes to ``--out``."""
    given = containers.parser(
        "ways", "Build a row locally, by the Dockerfile and by cibuildwheel; compare."
    ).parse_args()
    frame = containers.frame_of(given)
    with tempfile.TemporaryDirectory(prefix="flash-kda-ways-") as scratch:
        made = every_way(frame, Path(scratch))
        digests = compare(made)
        wheel = made[frame.engine]
        containers.keep(wheel, given.out)
        found = record(frame, wheel.name, digests)
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / f"{frame.row.label}.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    CONSOLE.print(f"[green]same bytes[/green] {', '.join(digests)}: sha256 {digests[frame.engine]}; {path}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
