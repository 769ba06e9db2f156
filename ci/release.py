"""Whether wheels may be published: ``python -m ci.release WHEEL ...``.

Each must pass verification, come from a commit alone, have its provenance beside it, and, for every
architecture in its library, a record in ``wheels/records`` of a pass of the GPU tests with exactly this file;
or ci/matrix.toml says of that architecture that its code was not run, as the wheel then does too.  An sdist
beside them, in ``wheels/sdist``, must hold what their commit makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ci import matrix, provenance, rebuild, source, wheels
from ci.errors import CiError, ReleaseError, run_cli
from ci.gpu_tests import SEAL, record_name, seal, verdict
from ci.process import CONSOLE

RECORDS = wheels.FOLDER / "records"


def check(
    wheel: Path,
    held: Iterable[str],
    table: matrix.Matrix,
    records: Path = RECORDS,
    root: Path = source.ROOT,
) -> dict[str, str]:
    """How far each architecture in `held` (``90a``), those of the wheel's images, was tried.

    `wheel` has passed verification; `root` is a checkout with its commit.  Raises ProvenanceError for what it
    says of its origin, and ReleaseError that lists each architecture that may not be published.
    """
    rebuild.check_sources(wheel, root)
    provenance.check(wheel)
    digest = provenance.sha256(wheel)
    tried = {name: _tried(name, digest, table, records) for name in held}
    refused = [f"sm{name}: {problem}" for name, (_, problem) in tried.items() if problem]
    if not tried or refused:
        listed = "\n".join(f"  {line}" for line in refused) or "  no architecture in it"
        raise ReleaseError(
            f"{wheel.name} (sha256 {digest}) may not be published:\n{listed}\n"
            "Next: nox -s gpu_tests -- --target TARGET --wheel FILE, and commit the record; or write "
            f"'{matrix.STATUSES[1]}' in ci/matrix.toml and build again"
        )
    return {name: said for name, (said, _) in tried.items()}


def _tried(name: str, digest: str, table: matrix.Matrix, records: Path) -> tuple[str, str | None]:
    """What can be said of one architecture, and what is against publishing it."""
    path = records / record_name(digest, f"sm{name}")
    if path.exists():
        problems = list(_problems(path, digest, f"sm{name}"))
        return f"passed ({path.name})", "; ".join(problems) or None
    info = table.archs[name]
    if not info.was_run:
        return info.status, None
    return info.status, f"expected a record {path.name} of a pass with this file, got none"


def _problems(path: Path, digest: str, target: str) -> Iterator[str]:
    """What is wrong with a record that should be of a pass of `target` with the file of that sha256."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        facts = {name: record[name] for name in ("wheel_sha256", "target", "verdict", SEAL)}
        counted = verdict({**record, "own_package": True})
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        yield f"{path.name}: expected a record of ci.gpu_tests, got {error!r}"
        return
    wanted = {"wheel_sha256": digest, "target": target, "verdict": "passed", SEAL: seal(record)}
    for name, value in wanted.items():
        if facts[name] != value:
            edited = " (the record was edited)" if name == SEAL else ""
            yield f"{path.name}: {name}: expected {value}, got {facts[name]}{edited}"
    if counted != "passed":
        yield f"{path.name}: expected the counts of a pass, got {record['counts']}: {counted}"


def _refuse_namesakes(paths: Sequence[Path]) -> None:
    """One name is one file: of two, an index would show both hashes beside the bytes of one."""
    counts = Counter(path.name for path in paths)
    twice = [str(path) for path in paths if counts[path.name] > 1]
    if twice:
        raise ReleaseError(
            f"expected each wheel once, got files of one name: {', '.join(twice)}.\nNext: name one of them"
        )


def check_all(paths: Sequence[Path], records: Path = RECORDS) -> dict[Path, dict[str, str]]:
    """Verify and `check` each wheel; the CiError has the words of all that were refused."""
    _refuse_namesakes(paths)
    table = matrix.load()
    tried: dict[Path, dict[str, str]] = {}
    failures: list[CiError] = []
    for wheel in paths:
        try:
            report = wheels.verify(wheel)
            held = {image.arch for item in report.facts.libraries for image in item.images}
            tried[wheel] = check(wheel, sorted(held), table, records)
        except CiError as problem:
            failures.append(problem)
    wheels.raise_all(failures)
    return tried


def check_sdists(paths: Iterable[Path], released: Iterable[Path], root: Path = source.ROOT) -> None:
    """ReleaseError or ProvenanceError unless each sdist is of the one commit of the `released` wheels."""
    commits = sorted({rebuild.recipe(wheel).commit for wheel in released})
    for path in paths:
        if len(commits) != 1:
            raise ReleaseError(
                f"{path.name}: expected wheels of one commit beside an sdist, got {', '.join(commits)}.\n"
                "Next: name the wheels of one release"
            )
        rebuild.check_sdist(path, commits[0], root)
        CONSOLE.print(f"[green]may be published[/green] {path.name}: of commit {commits[0]}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.release", description="Whether wheels may be published."
    )
    wheels.add_arguments(parser)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the GPU tests' records")
    given = parser.parse_args()
    wheels.check_python()
    released = check_all(given.wheel or wheels.built(given.folder), given.records)
    check_sdists([] if given.wheel else sorted((given.folder / "sdist").glob("*.tar.gz")), released)
    for wheel, tried in released.items():
        said = "; ".join(f"sm{name}: {what}" for name, what in tried.items())
        CONSOLE.print(f"[green]may be published[/green] {wheel.name}: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
