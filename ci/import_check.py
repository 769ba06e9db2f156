"""Installs wheels beside a torch without a GPU and uses them.

``python -m ci.import_check [--python 3.12] [--torch 2.10.0] [FILE ...]``; without either, every Python of the
matrix beside the build's torch, and the first Python beside each other torch of the matrix.

Shows that one wheel serves another Python, that it loads without CUDA, that the reference backend answers,
and that an error thrown in C++ arrives as a Python exception (a library with its own copy of libgcc aborts
there instead).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ci import matrix, wheels
from ci.errors import AbiError, ConfigError, MetadataError, run_cli
from ci.extension import record
from ci.process import CONSOLE, run
from ci.venv import Venv, checks

PROBE = Path(__file__).with_name("import_probe.py")
RECORDS = wheels.FOLDER / "records" / "import"


def interpreter(given: str) -> Path:
    """The Python meant by ``3.12`` or a path; ConfigError when there is none."""
    found = given if os.sep in given else shutil.which(f"python{given}")
    if found is None or not Path(found).expanduser().is_file():
        raise ConfigError(
            f"--python {given}: no such interpreter.\nNext: install it, or give the path of one"
        )
    return Path(found).expanduser()


def combinations(pythons: list[str], torch: str | None, table: matrix.Matrix) -> list[tuple[str, str]]:
    """Pairs of Python and torch to import under; `pythons` empty and `torch` None mean the matrix's."""
    chosen, build = pythons or list(table.test_python), table.project.torch_build
    if torch or pythons:
        return [(python, torch or build) for python in chosen]
    others = [other for other in table.test_torch if other != build]
    return [(python, build) for python in chosen] + [(chosen[0], other) for other in others]


def check(wheel: Path, python: Path | None = None, torch: str | None = None) -> None:
    """Install `wheel` alone into a folder and `use` it.

    Raises MetadataError when pip refuses the wheel and AbiError when it does not load or does not answer.
    """
    tools = checks(python, torch)
    with tempfile.TemporaryDirectory(prefix="flash-kda-import-") as scratch:
        site = Path(scratch, "site")
        _install(wheel, site, tools)
        used = use(site, tools, wheel.name)
    CONSOLE.print(f"[green]{used}[/green]")


def use(site: Path, tools: Venv, name: str) -> str:
    """Run ``import_probe.py`` on the package in the folder `site`; returns its line, raises AbiError."""
    return run_beside(site, tools, [PROBE, site], f"using {name}").splitlines()[-1]


def run_beside(site: Path, tools: Venv, words: Sequence[str | Path], title: str) -> str:
    """What the Python of `tools` prints for `words`, with the folder `site` before its packages.

    Raises AbiError when it ends with another exit code than 0.
    """
    hint = "the last line above names what failed; python -m ci.verify WHEEL shows what the library needs"
    with tempfile.TemporaryDirectory(prefix="flash-kda-home-") as home:
        env = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": home,
            "PYTHONPATH": str(site),
            "PYTHONNOUSERSITE": "1",
        }
        return run([tools.python, *words], title=title, error=AbiError, hint=hint, cwd=Path(home), env=env)


def identity(wheel: Path) -> dict[str, object]:
    """What a record says of a wheel that was used: name, digest and sources."""
    source = record.of_wheel(wheel)["source"]
    kept = {key: source[key] for key in ("commit", "dirty", "sha256")}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return {"wheel": wheel.name, "wheel_sha256": digest, "source": kept}


def write_record(path: Path, said: Mapping[str, object]) -> Path:
    """Keep what a run showed, in which everything passed, with its date."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"verdict": "passed", "date": now, **said}, indent=2) + "\n", encoding="utf-8")
    return path


def _install(wheel: Path, site: Path, tools: Venv) -> None:
    command: list[str | Path] = [
        tools.python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
    ]
    command += ["--target", site, wheel]
    run(command, title=f"installing {wheel.name}", error=MetadataError, hint="nox -s verify_wheels")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.import_check", description="Import wheels without a GPU."
    )
    parser.add_argument("wheel", type=Path, nargs="*", help="default: all in wheels/")
    parser.add_argument(
        "--python",
        action="append",
        help="version such as 3.12, or the path of an interpreter (default: the matrix's)",
    )
    parser.add_argument("--torch", help="version such as 2.10.0 (default: the matrix's)")
    given = parser.parse_args()
    pairs = combinations(given.python or [], given.torch, matrix.load())
    for python, torch in [(interpreter(python), torch) for python, torch in pairs]:
        for wheel in given.wheel or wheels.built():
            check(wheel.resolve(), python, torch)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
