"""Builds a wheel again from what it says of itself, and compares the bytes: ``python -m ci.rebuild WHEEL``.

The commit in its build record is checked out in a clone, whose own factory builds the same row and
architectures.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import matrix, reproduce, source
from ci.errors import BuildError, ConfigError, ProvenanceError, ReproducibilityError, run_cli
from ci.extension import record
from ci.platforms import of_wheel
from ci.process import CONSOLE, run
from ci.provenance import sha256
from ci.source import ROOT

# Run by the clone's own factory: the arguments are row, architectures, folder and platform.
_BUILD = "import pathlib, sys; from ci import build; _, row, archs, out, name = sys.argv; "
_BUILD += "build.build_row(row, archs, pathlib.Path(out), platform=name)"
_SDIST = "import pathlib, sys; from ci import sdist; sdist.build(pathlib.Path(sys.argv[1]))"
# Whole: of seven digits anybody makes a second commit, and git takes other words for branches and options.
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Recipe:
    """What it takes to build a wheel again."""

    commit: str
    row: str
    archs: str
    platform: str


def recipe(wheel: Path) -> Recipe:
    """That of `wheel`, by its build record; ProvenanceError when it was not made from a commit alone."""
    made = record.of_wheel(wheel)
    said: Any = made.get("source")
    said = said if isinstance(said, dict) else {}
    commit, dirty = said.get("commit"), said.get("dirty")
    if commit is None or dirty is not False:
        from_what = f"commit {commit} and changes to it" if commit else "sources of an unknown commit"
        raise ProvenanceError(
            f"{wheel.name}: expected a wheel made from a commit alone, got one made from {from_what}.\n"
            "Next: commit, then nox -s build_wheels"
        )
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
        raise ProvenanceError(
            f"{wheel.name}: source.commit: expected all hexadecimal digits of a commit, got {commit!r}.\n"
            "Next: build the wheel again, in a git checkout"
        )
    try:
        row = matrix.row_of_label(made["version"].partition("+")[2])
        return Recipe(commit, row, ",".join(made["architectures"]), of_wheel(wheel).name)
    except (LookupError, TypeError, AttributeError) as error:
        raise ProvenanceError(
            f"{wheel.name}: the build record does not say what was built: {error!r}.\n"
            "Next: build the wheel again"
        ) from error


def check_sources(wheel: Path, root: Path = ROOT) -> None:
    """ProvenanceError unless `wheel`, which passed verification, is of sources in the history at `root`.

    Verification compares the wheel's files with the digests in its build record: here those are compared with
    the commit's own, since whoever makes a wheel writes the record in it.
    """
    commit = recipe(wheel).commit
    if not source.in_history(commit, root):
        raise ProvenanceError(
            f"{wheel.name}: expected a wheel of a commit in this checkout's history, got one of {commit}.\n"
            "Next: git fetch --unshallow, or check out what was reviewed and built"
        )
    said, had = record.of_wheel(wheel)["source"]["files"], source.digests_at(commit, root)
    differing = sorted(name for name in {*said, *had} if said.get(name) != had.get(name))
    if differing:
        raise ProvenanceError(
            f"{wheel.name}: {', '.join(differing)}: expected the sources of {commit}, which it names, got "
            "others.\nNext: build the wheel again from a clean checkout"
        )


def rebuild(wheel: Path, root: Path = ROOT) -> str:
    """Build `wheel` again from the checkout at `root`; returns the sha256 that both wheels have.

    ReproducibilityError names each member that differs, ProvenanceError a commit that is not there.
    """
    plan = recipe(wheel)
    with tempfile.TemporaryDirectory(prefix="flash-kda-rebuild-") as scratch:
        clone, out = Path(scratch, "clone"), Path(scratch, "wheels")
        _check_out(plan.commit, root, clone)
        run(
            [sys.executable, "-c", _BUILD, plan.row, plan.archs, out, plan.platform],
            title=f"building {plan.row} for {plan.archs} at {plan.commit[:12]}",
            error=BuildError,
            hint=f"git checkout {plan.commit[:12]} && nox -s build_wheels -- --cuda {plan.row} "
            f"--platform {plan.platform}",
            cwd=clone,
        )
        (made,) = out.glob("*.whl")
        differences = reproduce.compare(wheel, made)
        if differences:
            listed = "\n".join(f"  {difference}" for difference in differences)
            raise ReproducibilityError(
                f"{wheel.name} against a build of {plan.commit[:12]}: expected the same bytes, got "
                f"{len(differences)} differences (the wheel's first):\n{listed}\n"
                "Next: compare cxx and linker of the two build records: no lock names the machine's g++"
            )
        return sha256(made)


def check_sdist(sdist: Path, commit: str, root: Path = ROOT) -> None:
    """ProvenanceError unless `sdist` holds what the factory of that commit packs: PyPI's users run it.

    The checkout at `root` has the commit.  Dates and owners in the archive are not compared.
    """
    with tempfile.TemporaryDirectory(prefix="flash-kda-sdist-") as scratch:
        clone, out = Path(scratch, "clone"), Path(scratch, "made")
        _check_out(commit, root, clone)
        title, hint = f"making the sdist of {commit[:12]}", f"git checkout {commit[:12]} && nox -s sdist"
        run([sys.executable, "-c", _SDIST, out], title=title, error=BuildError, hint=hint, cwd=clone)
        (made,) = out.glob("*.tar.gz")
        held, wanted = _packed(sdist), _packed(made)
        differing = sorted({name for name, *_ in (held - wanted) | (wanted - held)})
        if differing or sdist.name != made.name:
            raise ProvenanceError(
                f"{sdist.name}: expected {made.name} as commit {commit} makes it, got other files: "
                f"{', '.join(differing) or 'none'}.\nNext: nox -s sdist, at the commit of the wheels"
            )


def _packed(sdist: Path) -> Counter[tuple[str, bytes, str, bytes]]:
    """Name, kind, target and content of each member, and how often it is there."""
    try:
        with tarfile.open(sdist) as archive:
            handles = [(member, archive.extractfile(member)) for member in archive]
            return Counter((m.name, m.type, m.linkname, file.read() if file else b"") for m, file in handles)
    except (tarfile.TarError, KeyError, OSError, EOFError, zlib.error) as error:
        raise ProvenanceError(
            f"{sdist.name}: expected a tar.gz, got: {error}.\nNext: nox -s sdist"
        ) from error


def _check_out(commit: str, root: Path, clone: Path) -> None:
    git = ["git", "-c", f"safe.directory={root}", "-c", "advice.detachedHead=false"]
    hint = "git fetch --unshallow, or run in a checkout whose history has the commit"
    title = f"checking out {commit[:12]}"
    clone_command = [*git, "clone", "--quiet", "--no-checkout", str(root), str(clone)]
    run(clone_command, title=f"cloning {root.name}", error=ProvenanceError, hint=hint)
    run(
        [*git, "-C", str(clone), "checkout", "--quiet", commit], title=title, error=ProvenanceError, hint=hint
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.rebuild", description="Build a wheel again from its record, compare the bytes."
    )
    parser.add_argument("wheel", type=Path)
    given = parser.parse_args()
    if not given.wheel.is_file():
        raise ConfigError(f"{given.wheel}: no such file.\nNext: nox -s build_wheels, or name a wheel")
    CONSOLE.print(f"[green]same bytes[/green] {given.wheel.name}: sha256 {rebuild(given.wheel.resolve())}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
