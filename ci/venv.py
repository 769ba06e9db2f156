"""Virtual environments in the cache, keyed by what they hold, so that a changed pin makes a new one."""

from __future__ import annotations

import platform
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from ci import cache, torch_stubs
from ci.errors import ToolchainError
from ci.process import run

REQUIREMENTS = Path(__file__).with_name("requirements")


@dataclass(frozen=True)
class Venv:
    """A virtual environment; ``folder`` is its root."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def bin(self) -> Path:
        """Where its commands are."""
        return self.folder / "bin"

    def site_packages(self) -> Path:
        """Where its packages are."""
        return next(self.folder.glob("lib/python3.*/site-packages"))

    def pip(self, *arguments: str | Path, title: str, hint: str) -> None:
        """``pip install`` into it, with whatever index and options the user has configured for pip."""
        command = [
            self.python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-input",
            *arguments,
        ]
        run(command, title=title, error=ToolchainError, hint=hint)


def create(folder: Path) -> Venv:
    """A new, empty environment of the running Python at `folder`."""
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(folder)
    except (OSError, SystemExit, Exception) as problem:
        # Debian ships venv without ensurepip; the import error names neither the package nor the cure.
        raise ToolchainError(
            f"cannot create a virtual environment at {folder}: {problem}.\n"
            f"Expected a Python with venv and pip, got {sys.executable}.\n"
            "Next: apt-get install python3-venv, or use another Python."
        ) from problem
    return Venv(folder)


def locked(*names: str, torch: str | None = None) -> Venv:
    """The cached environment holding each ``ci/requirements/<name>.txt`` and, without its dependencies, `torch`.

    The requirements are installed with ``--require-hashes``.  torch is pinned by version only: one version has
    a CPU build and CUDA builds whose files differ, and which of them is served depends on the user's index.
    A CUDA build is made importable by ``ci/torch_stubs.py``; it then sees no GPU.
    """
    locks = [REQUIREMENTS / f"{name}.txt" for name in names]
    version = platform.python_version()
    digest = cache.key(torch or "", version, *(lock.read_bytes() for lock in locks))
    folder = cache.root() / "env" / f"{'-'.join(names)}-py{version}-{digest}"
    return Venv(cache.make_once(folder, lambda path: _fill(path, locks, torch)))


def _fill(folder: Path, locks: list[Path], torch: str | None) -> None:
    made = create(folder)
    arguments = [word for lock in locks for word in ("-r", str(lock))]
    names = " ".join(lock.name for lock in locks)
    made.pip(
        "--require-hashes", *arguments, title=f"installing {names}", hint="check the network and pip's index"
    )
    if torch is not None:
        made.pip(
            "--no-deps", f"torch=={torch}", title=f"installing torch {torch} alone", hint=_torch_hint(torch)
        )
        torch_stubs.write(made.site_packages() / "torch" / "lib")


def _torch_hint(torch: str) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"if the index has no torch {torch} for Python {python}, run nox under a Python that has one "
        "(for example: python3.11 -m pip install nox && python3.11 -m nox -s build_wheels)"
    )
