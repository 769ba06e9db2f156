"""The actions that the workflows use, each at one commit: ``.github/actions.toml``.

The commits are those that the sdist of the locked cibuildwheel pins in its own workflows.  The sdist's hash
is in the lock, so that no tag is asked for and no commit copied by hand.
"""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ci.errors import ConfigError, ToolchainError
from ci.process import run
from ci.toml import Table, open_table
from ci.venv import REQUIREMENTS, Venv

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / ".github" / "actions.toml"
WORKFLOWS = ROOT / ".github" / "workflows"
_FROM = "cibuildwheel"
_USES = re.compile(
    r"(?m)^(?P<head>\s*(?:- )?uses: *)(?P<name>[^@\s]+)@(?P<commit>\S+)(?:\s+# *(?P<version>\S+))?.*$"
)
# The same key however YAML lets it be written, with an action, a container or a folder of the repository.
_ANY_USES = re.compile(r"""(?m)^[^#\n]*?\buses["']?\s*:""")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HEADER = """\
# Written by 'nox -s update' from the workflows in the sdist of {source}; do not edit.
"""


@dataclass(frozen=True)
class Pin:
    """One action's commit, and the version that it had, for people."""

    commit: str
    version: str


def pinned(texts: Iterable[str]) -> dict[str, Pin]:
    """What workflows pin by commit with a version beside it; ConfigError when one action has two commits."""
    found: dict[str, Pin] = {}
    for match in (match for text in texts for match in _USES.finditer(text)):
        if _COMMIT.fullmatch(match["commit"]) and match["version"]:
            pin = Pin(match["commit"], match["version"])
            if found.setdefault(match["name"], pin) != pin:
                raise ConfigError(
                    f"{match['name']}: expected one commit, got {found[match['name']]} and {pin}."
                )
    return found


def used(texts: Iterable[str]) -> list[str]:
    """The actions of other repositories that workflows use, sorted."""
    return sorted({match["name"] for text in texts for match in _USES.finditer(text)})


def load(path: Path = PATH) -> dict[str, Pin]:
    """The pins on file; ConfigError for one that is none."""
    top = open_table(path)
    return {name: _pin(top.table(name)) for name in list(top.left)}


def _pin(table: Table) -> Pin:
    pin = Pin(table.text("commit", _COMMIT.pattern, "40 hexadecimal digits"), table.text("version"))
    table.done()
    return pin


def problems(text: str, pins: Mapping[str, Pin]) -> Iterator[tuple[int, str]]:
    """Line and complaint for each ``uses:`` that is not as the pins say, or not written as they are."""
    known = {match.start("name"): match for match in _USES.finditer(text)}
    lines = {text.count("\n", 0, place) for place in known}
    for match in _ANY_USES.finditer(text):
        if (line := text.count("\n", 0, match.end())) not in lines:
            yield line + 1, "expected uses: NAME@COMMIT # VERSION on a line of its own"
    for match in known.values():
        line = text.count("\n", 0, match.start("name")) + 1
        got = f"{match['commit']} # {match['version']}"
        pin = pins.get(match["name"])
        if pin is None:
            yield line, f"{match['name']}: expected an action of .github/actions.toml; run: nox -s update"
        elif got != f"{pin.commit} # {pin.version}":
            yield (
                line,
                f"{match['name']}: expected {pin.commit} # {pin.version}, got {got}; run: nox -s update",
            )


def rewrite(text: str, pins: Mapping[str, Pin]) -> str:
    """The workflow with each action at its pin."""

    def line(match: re.Match[str]) -> str:
        pin = pins[match["name"]]
        return f"{match['head']}{match['name']}@{pin.commit} # {pin.version}"

    return _USES.sub(line, text)


def workflows() -> dict[Path, str]:
    """Each workflow's text."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(WORKFLOWS.glob("*.yml"))}


def update(tools: Venv) -> None:
    """Write the pins anew, and the workflows with them; `tools` must hold cibuildwheel's build backend."""
    ours = workflows()
    source, texts = _sdist(tools)
    theirs = pinned(texts)
    missing = [name for name in used(ours.values()) if name not in theirs]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: expected among the actions of {source}, which has {', '.join(theirs)}.\n"
            "Next: use one of those"
        )
    pins = {name: theirs[name] for name in used(ours.values())}
    tables = [
        f'\n["{name}"]\ncommit = "{pin.commit}"\nversion = "{pin.version}"\n' for name, pin in pins.items()
    ]
    PATH.write_text(_HEADER.format(source=source) + "".join(tables), encoding="utf-8")
    for path, text in ours.items():
        path.write_text(rewrite(text, pins), encoding="utf-8")


def _sdist(tools: Venv) -> tuple[str, list[str]]:
    """Name of the locked sdist, and its workflows."""
    lock = (REQUIREMENTS / "cibw.txt").read_text(encoding="utf-8")
    entry = re.search(rf"(?m)^{_FROM}==.*(?:\n    --hash=.*)+", lock)
    if entry is None:
        raise ConfigError(
            f"ci/requirements/cibw.txt: expected {_FROM} with hashes, found none.\nNext: nox -s update"
        )
    with tempfile.TemporaryDirectory(prefix="flash-kda-actions-") as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(entry[0].rstrip("\\ ") + "\n", encoding="utf-8")
        command: list[str | Path] = [tools.python, "-m", "pip", "download", "--require-hashes", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary", _FROM, "--dest", scratch, "-r", wanted]
        hint = "check the network and pip's index"
        run(command, title=f"fetching the sdist of {_FROM}", error=ToolchainError, hint=hint)
        (path,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(path) as archive:
            return path.name, list(_texts(archive))


def _texts(archive: tarfile.TarFile) -> Iterator[str]:
    for member in archive:
        handle = archive.extractfile(member) if "/.github/workflows/" in member.name else None
        if handle is not None:
            yield handle.read().decode()
