"""Virtual environments in the cache, keyed by what they hold, so that a changed pin makes a new one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ci import cache, matrix, torch_stubs
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


def create(folder: Path, python: Path) -> Venv:
    """A new environment of the interpreter `python` at `folder`, holding pip alone."""
    # Debian ships venv without ensurepip, and the error then names no package to install.
    hint = "apt-get install python3-venv, or use another Python"
    command: list[str | Path] = [python, "-m", "venv", "--clear", folder]
    run(command, title=f"creating {folder.name}", error=ToolchainError, hint=hint)
    return Venv(folder)


def locked(*names: str, torch: str | None = None, python: Path | None = None) -> Venv:
    """The cached environment holding each ``ci/requirements/<name>.txt`` and, without its dependencies,
    `torch`.

    The requirements are installed with ``--require-hashes``.  torch is pinned by version only: one version
    has a CPU build and CUDA builds whose files differ, and which of them is served depends on the user's
    index. A CUDA build is made importable by ``ci/torch_stubs.py``; it then sees no GPU.  `python` defaults
    to the running interpreter.
    """
    locks = [REQUIREMENTS / f"{name}.txt" for name in names]
    interpreter = python or Path(sys.executable)
    version = _version(interpreter)
    digest = cache.key(torch or "", version, *(lock.read_bytes() for lock in locks))
    folder = cache.root() / "env" / f"{'-'.join(names)}-py{version}-{digest}"
    return Venv(cache.make_once(folder, lambda path: _fill(path, locks, torch, interpreter)))


def checks(python: Path | None = None, torch: str | None = None) -> Venv:
    """What tests and linters run in: one environment, for torch (default: the build's) is most of it."""
    version = torch or matrix.load().project.torch_build
    return locked("tests", "lint", "ci", "verify", "plot", torch=version, python=python)


def _version(interpreter: Path) -> str:
    code = "import platform; print(platform.python_version())"
    done = subprocess.run([interpreter, "-c", code], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolchainError(f"{interpreter} does not run: {done.stderr.strip()}\nNext: name another Python")
    return done.stdout.strip()


def _fill(folder: Path, locks: list[Path], torch: str | None, interpreter: Path) -> None:
    made = create(folder, interpreter)
    arguments = [word for lock in locks for word in ("-r", str(lock))]
    names = " ".join(lock.name for lock in locks)
    made.pip(
        "--require-hashes", *arguments, title=f"installing {names}", hint="check the network and pip's index"
    )
    if torch is not None:
        made.pip(
            "--no-deps",
            f"torch=={torch}",
            title=f"installing torch {torch} alone",
            hint=_torch_hint(torch, made),
        )
        torch_stubs.write(made.site_packages() / "torch" / "lib")


def _torch_hint(torch: str, made: Venv) -> str:
    return (
        f"if the index has no torch {torch} for this Python ({_version(made.python)}), "
        "run nox under one it has: python3.11 -m pip install nox && python3.11 -m nox -s build_wheels"
    )
