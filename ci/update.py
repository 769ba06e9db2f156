"""Refreshes the locks in ``ci/requirements`` from the ``.in`` files, and the digests of images and the
commits of actions that come with the locked cibuildwheel: ``python -m ci.update [NAME ...]``.

The versions of the CuTe DSL in ``ci/matrix.toml`` have a lock each and no ``.in`` file.
One resolution serves every Python from the oldest of the matrix on, with the hash of each file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from ci import actions, images, matrix, venv
from ci.errors import ConfigError, ToolchainError, run_cli
from ci.process import run


def write_dsl_inputs(versions: tuple[str, ...], folder: Path) -> None:
    """The ``.in`` file of each version of the DSL. cu13: a compiler that knows every architecture; without
    it, CUDA 12.9's."""
    for version in versions:
        (folder / f"{matrix.dsl_lock(version)}.in").write_text(f"nvidia-cutlass-dsl[cu13]=={version}\n")


def inputs(names: list[str], *folders: Path) -> list[Path]:
    """The ``.in`` files of `names` (default: all); ConfigError naming those there are."""
    every = {path.stem: path for folder in folders for path in sorted(folder.glob("*.in"))}
    unknown = sorted(set(names) - set(every))
    if unknown:
        raise ConfigError(f"no ci/requirements/{unknown[0]}.in; expected one of {', '.join(every)}.")
    return [every[name] for name in names or every]


def refresh(source: Path, tools: venv.Venv, oldest: str) -> None:
    """Write the lock of one ``.in`` file."""
    lock = venv.REQUIREMENTS / f"{source.stem}.txt"
    command = [str(tools.bin / "uv"), "pip", "compile", "--universal", "--generate-hashes", "--upgrade"]
    command += ["--python-version", oldest, source.name, "-o", str(lock)]
    title, hint = f"locking {source.name}", "read which two requirements disagree, and change one"
    env = {**os.environ, "UV_CUSTOM_COMPILE_COMMAND": "nox -s update"}
    run(command, title=title, error=ToolchainError, hint=hint, cwd=source.parent, env=env)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.update", description="Refresh the locks of ci/requirements."
    )
    parser.add_argument("name", nargs="*", help="for example build (default: all)")
    given = parser.parse_args()
    loaded, tools = matrix.load(), venv.locked("update")
    with tempfile.TemporaryDirectory(prefix="flash-kda-locks-") as scratch:
        write_dsl_inputs(loaded.dsl, Path(scratch))
        for source in inputs(given.name, venv.REQUIREMENTS, Path(scratch)):
            refresh(source, tools, loaded.project.python)
    images.update(venv.locked("cibw"))
    actions.update(venv.locked("update"))  # by the new lock
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
