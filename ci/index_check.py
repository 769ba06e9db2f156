"""Installs from the index as its users do: ``python -m ci.index_check [--python 3.12] [--index DIR]``.

This machine serves the folder; pip and uv install from each index in it under each Python of the matrix,
beside the build's torch. What came is used as by ``ci/import_check.py``, and ``python -m flash_kda`` must
find no problem.  A run in which all passed leaves a record in ``wheels/records/import``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ci import import_check, index, matrix, venv
from ci.errors import AbiError, ConfigError, MetadataError, run_cli
from ci.process import CONSOLE, run
from ci.venv import Venv

INSTALLERS = ("pip", "uv")
SOUND = "no problems found"  # how python -m flash_kda begins where it has none to tell of


class Quiet(SimpleHTTPRequestHandler):
    """A static server that does not print what it is asked."""

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path, handler: type[SimpleHTTPRequestHandler] = Quiet) -> Iterator[str]:
    """The address of `folder`, served on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def environment(scratch: Path) -> dict[str, str]:
    """This one, less what points installers elsewhere or has them take what is there already."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    own = {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "UV_CACHE_DIR": str(scratch / "uv-cache")}
    return {**kept, **own}


def command(installer: str, python: Path, url: str, site: Path) -> list[str | Path]:
    """Install the project alone from the index at `url` into the folder `site`."""
    if installer == "pip":
        words: list[str | Path] = [python, "-m", "pip", "install", "--no-cache-dir"]
        words += ["--disable-pip-version-check"]
    else:
        words = [venv.locked("update").bin / "uv", "pip", "install", "--no-config", "--python", python]
    return [*words, "--no-deps", "--index-url", url, "--target", site, index.PROJECT]


def places(folder: Path) -> list[str]:
    """The indexes below `folder`, as addresses relative to it; ConfigError when there is none."""
    found = sorted(path.parent.parent for path in folder.glob(f"**/{index.PROJECT}/index.json"))
    if not found:
        raise ConfigError(f"{folder}: expected an index, got none.\nNext: nox -s index")
    return [str(path.relative_to(folder)) for path in found]


def check(installer: str, tools: Venv, url: str) -> str:
    """Install with one installer from one index and use what came; returns the probe's line.

    Raises MetadataError when nothing can be installed, AbiError when it does not load or does not answer, or
    when ``python -m flash_kda`` sees a problem.
    """
    with tempfile.TemporaryDirectory(prefix="flash-kda-index-") as scratch:
        folder, site = Path(scratch), Path(scratch, "site")
        words = command(installer, tools.python, url, site)
        title, env = f"{installer} install from {url}", environment(folder)
        run(words, title=title, error=MetadataError, hint="nox -s index", cwd=folder, env=env)
        used = import_check.use(site, tools, f"what {installer} installed")
        report = import_check.run_beside(site, tools, ["-m", "flash_kda"], "python -m flash_kda")
    if SOUND not in report.splitlines():
        raise AbiError(f"python -m flash_kda: expected {SOUND!r}, got:\n{report}\nNext: nox -s index")
    return used


def check_all(pythons: Sequence[str], folder: Path) -> Iterator[dict[str, str]]:
    """`check` with each installer, under each Python, from each index below `folder`; what was said."""
    found = places(folder)
    with served(folder) as url:
        for python in pythons:
            tools = venv.checks(import_check.interpreter(python))
            for place in found:
                for installer in INSTALLERS:
                    said = check(installer, tools, f"{url}/{place}")
                    CONSOLE.print(f"[green]{installer} {place}: {said}[/green]")
                    yield {"index": place, "installer": installer, "said": said}


def write_record(folder: Path, passed: Sequence[Mapping[str, str]], records: Path) -> Path:
    """Keep what passed, and of which wheels."""
    wheels = sorted(folder.glob(f"**/{index.PROJECT}/*.whl"))
    return import_check.write_record(
        records / "index.json",
        {"wheels": [import_check.identity(wheel) for wheel in wheels], "installed": [*passed]},
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.index_check", description="Install from the index.")
    parser.add_argument(
        "--index", type=Path, default=index.FOLDER, metavar="DIR", help="default: wheels/index"
    )
    parser.add_argument(
        "--python",
        action="append",
        help="version such as 3.12, or the path of an interpreter (default: the matrix's)",
    )
    parser.add_argument("--records", type=Path, default=import_check.RECORDS, help="folder for the record")
    given = parser.parse_args()
    passed = list(check_all(given.python or matrix.load().test_python, given.index))
    print(f"record: {write_record(given.index, passed, given.records)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
