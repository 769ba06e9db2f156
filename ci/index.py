"""A package index of released wheels as static files, one a CUDA row: ``python -m ci.index [WHEEL ...]``.

Pages are PEP 503 HTML (``index.html``) and PEP 691 JSON (``index.json``, for servers that can choose by the
Accept header), with the sha256 of each file and its METADATA beside it (PEP 658 and 714), so that a resolver
downloads no wheel that it does not install.

A wheel of one architecture lies in an index below its row's, ``cu130/sm90a``: by PEP 440 its version
``+cu130.sm90a`` is newer than ``+cu130``, and in one index everybody would get it.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import html
import json
import shutil
import sys
import tempfile
import urllib.parse
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import provenance, release, wheels
from ci.errors import ConfigError, ReleaseError, run_cli
from ci.extension import record
from ci.process import CONSOLE

PROJECT = "flash-kda"
FOLDER = wheels.FOLDER / "index"
_API = "1.1"
_MARK = '<meta name="generator" content="ci.index">'  # by which a folder that may be written anew is known
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="{api}">
{mark}
<title>{title}</title>
</head>
<body>
{lines}
</body>
</html>
"""


@dataclass(frozen=True)
class Entry:
    """One wheel as an index shows it; ``not_run`` are the architectures whose code never ran."""

    wheel: Path
    version: str
    requires_python: str
    metadata: bytes
    not_run: tuple[str, ...]

    @property
    def place(self) -> str:
        """The index it belongs to: ``cu130``, or ``cu130/sm90a``."""
        return self.version.partition("+")[2].replace(".", "/", 1)

    @property
    def note(self) -> str:
        """What is to be known of it before it is chosen; empty when every architecture was run."""
        names = ", ".join(f"sm{name}" for name in self.not_run)
        return f"built, not run: {names}" if names else ""


def read(wheel: Path) -> Entry:
    """What the index needs of a wheel that has been verified."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [item for item in archive.namelist() if item.endswith(".dist-info/METADATA")]
        metadata = archive.read(name)
    fields = email.parser.BytesParser().parsebytes(metadata)
    not_run = tuple(record.of_wheel(wheel)["built_not_run"])
    return Entry(wheel, fields["Version"], fields["Requires-Python"], metadata, not_run)


def write(paths: Iterable[Path], out: Path = FOLDER) -> list[str]:
    """Write the indexes of these wheels below `out` anew; returns their places, ``cu130``, ``cu130/sm90a``.

    ConfigError when `out` holds something else than an index, ReleaseError when a wheel in it has other bytes
    under the same name.  An index that is there stays whole until the new one is.
    """
    out = out.resolve()  # a link to where a server reads stays one
    entries = [read(path) for path in sorted(paths)]
    _check_out(out, entries)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch, "new")
        places = _write_places(entries, made)
        if out.exists():
            out.rename(Path(scratch, "old"))
        made.rename(out)
    return places


def _check_out(out: Path, entries: Iterable[Entry]) -> None:
    root = out / "index.html"
    if out.exists() and not (root.is_file() and _MARK in root.read_text("utf-8", "replace")):
        raise ConfigError(
            f"{out}: expected an index or no folder, got another one.\nNext: give another --out"
        )
    for entry in entries:
        known = out / entry.place / PROJECT / entry.wheel.name
        if known.is_file() and known.read_bytes() != entry.wheel.read_bytes():
            raise ReleaseError(
                f"{entry.wheel.name}: expected the bytes that {out} has under this name, got others: a "
                f"released file is never replaced.\nNext: raise the version; or rm -r {out}, if it was never "
                "published"
            )


def _write_places(entries: Iterable[Entry], folder: Path) -> list[str]:
    places: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        places[entry.place].append(entry)
    for place, held in places.items():
        _write_project(folder / place / PROJECT, held)
        _write_root(folder / place)
    links = [f'<a href="{place}/">{place}</a><br>' for place in sorted(places)]
    (folder / "index.html").write_text(_page("Indexes", links), encoding="utf-8")
    return sorted(places)


def _write_root(folder: Path) -> None:
    page = _page("Projects", [f'<a href="{PROJECT}/">{PROJECT}</a>'])
    (folder / "index.html").write_text(page, encoding="utf-8")
    _write_json(folder, {"projects": [{"name": PROJECT}]})


def _write_project(folder: Path, entries: Sequence[Entry]) -> None:
    folder.mkdir(parents=True)
    for entry in entries:
        shutil.copyfile(entry.wheel, folder / entry.wheel.name)
        (folder / f"{entry.wheel.name}.metadata").write_bytes(entry.metadata)
        statement = provenance.place(entry.wheel)
        shutil.copyfile(statement, folder / statement.name)
    page = _page(f"Links for {PROJECT}", [_link(entry) for entry in entries])
    (folder / "index.html").write_text(page, encoding="utf-8")
    versions = sorted({entry.version for entry in entries})
    files = [_file(entry) for entry in entries]
    _write_json(folder, {"name": PROJECT, "versions": versions, "files": files})


def _write_json(folder: Path, content: Mapping[str, object]) -> None:
    text = json.dumps({"meta": {"api-version": _API}, **content}, indent=1)
    (folder / "index.json").write_text(text + "\n", encoding="utf-8")


def _page(title: str, lines: Iterable[str]) -> str:
    return _PAGE.format(api=_API, mark=_MARK, title=html.escape(title), lines="\n".join(lines))


def _url(entry: Entry) -> str:
    return urllib.parse.quote(entry.wheel.name)  # a bare + is a space to some servers


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _link(entry: Entry) -> str:
    core = f"sha256={_digest(entry.metadata)}"
    attributes = {
        "href": f"{_url(entry)}#sha256={_digest(entry.wheel.read_bytes())}",
        "data-requires-python": entry.requires_python,
        "data-core-metadata": core,
        "data-dist-info-metadata": core,  # its name before PEP 714, for older installers
    }
    words = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    return f"<a {words}>{html.escape(entry.wheel.name)}</a> {html.escape(entry.note)}<br>"


def _file(entry: Entry) -> dict[str, object]:
    core = {"sha256": _digest(entry.metadata)}
    return {
        "filename": entry.wheel.name,
        "url": _url(entry),
        "hashes": {"sha256": _digest(entry.wheel.read_bytes())},
        "requires-python": entry.requires_python,
        "size": entry.wheel.stat().st_size,
        "core-metadata": core,
        "dist-info-metadata": core,
        "_note": entry.note,
    }


def main() -> int:
    """Command line: only wheels that may be published get into an index."""
    parser = argparse.ArgumentParser(prog="python -m ci.index", description="Index of released wheels.")
    wheels.add_arguments(parser)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder, written anew")
    given = parser.parse_args()
    wheels.check_python()
    released = release.check_all(given.wheel or wheels.built(given.folder))
    for place in write(released, given.out):
        CONSOLE.print(f"[green]{place}[/green] {given.out / place / PROJECT}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
