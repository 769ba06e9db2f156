"""Asks the nvcc that a build will use: its version, what it can emit, whether its parts fit together.

Standard library only: ``setup.py`` uses it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.archs import arch
from ci.errors import ToolchainError

# An appended -gencode is merged into whatever nvcc is asked for, so probes and builds run without these.
FOREIGN_FLAGS = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
_REFUSED = "Unsupported gpu architecture"
_answers: dict[tuple[str, int, str], bool] = {}


def clean_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the environment without the variables that add flags to every nvcc call."""
    source = os.environ if environ is None else environ
    return {key: value for key, value in source.items() if key not in FOREIGN_FLAGS}


def find_cuda_home(environ: Mapping[str, str] | None = None) -> Path:
    """The toolkit to build with: CUDA_HOME, CUDA_PATH, the nvcc on PATH, /usr/local/cuda; in that order.

    Raises ToolchainError saying what was looked at and how to get a toolkit without root.
    """
    source = os.environ if environ is None else environ
    candidates = [
        ("CUDA_HOME", source.get("CUDA_HOME")),
        ("CUDA_PATH", source.get("CUDA_PATH")),
        ("nvcc on PATH", _home_of_nvcc_on_path(source)),
        ("default", "/usr/local/cuda"),
    ]
    tried = []
    for label, folder in candidates:
        if folder and (Path(folder) / "bin" / "nvcc").is_file():
            return Path(folder)
        tried.append(f"{label}={folder or 'unset'}")
        if folder and label.startswith("CUDA_"):
            break  # a folder named on purpose is not replaced by another one
    raise ToolchainError(
        f"no CUDA toolkit: expected bin/nvcc below one of {', '.join(tried)}.\n"
        "Next: set CUDA_HOME, or in a source checkout: export CUDA_HOME=$(python -m ci.toolchain ensure 13.0)"
    )


def _home_of_nvcc_on_path(environ: Mapping[str, str]) -> str | None:
    # The program on PATH may be a link or a script in another place (/usr/local/bin/nvcc, ccache): nvcc
    # itself says where it lives.
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is None:
        return None
    done = _run([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"])
    here = re.search(r"^#\$ _HERE_=(.+)$", done.stderr, re.MULTILINE)
    return str(Path(here[1]).parent) if here else str(Path(nvcc).resolve().parent.parent)


@dataclass(frozen=True)
class Nvcc:
    """One nvcc: its path, version (``"13.0.88"``) and host compiler (None: its own choice)."""

    path: Path
    version: str
    ccbin: str | None = None

    @property
    def command(self) -> list[str]:
        """The program and its host compiler; probes use the compiler the build will use."""
        return [str(self.path), *(["-ccbin", self.ccbin] if self.ccbin else [])]

    @property
    def toolkit(self) -> str:
        """CUDA version, for example ``13.0``."""
        return ".".join(self.version.split(".")[:2])

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"nvcc {self.toolkit} ({self.path})"

    def emits(self, target: arch.Target) -> bool:
        """Whether it can emit `target`, by a dry run; ProbeError when it cannot answer.

        Remembered per (real path, modification time, target).
        """
        real = self.path.resolve()
        key = (str(real), real.stat().st_mtime_ns, target.name)
        if key not in _answers:
            _answers[key] = _dry_run(self, target)
        return _answers[key]

    def compile_check(self, choices: Sequence[arch.Choice]) -> dict[arch.Choice, str]:
        """Compile an empty kernel for `choices`; what nvcc said of each that failed.

        A dry run does not start ptxas, and a ptxas of another version fails only here.  One call for all of
        them is the common case (2 s for five); only after a failure is each tried alone.
        """
        if self._compile_empty(choices) is None:
            return {}
        alone = {choice: self._compile_empty([choice]) for choice in choices}
        return {choice: said for choice, said in alone.items() if said is not None}

    def _compile_empty(self, choices: Sequence[arch.Choice]) -> str | None:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch, "empty.cu")
            source.write_text("__global__ void empty() {}\n", encoding="utf-8")
            command = [*self.command, *arch.gencode_flags(choices), "--threads", "0"]
            done = _run([*command, "-c", str(source), "-o", f"{scratch}/empty.o"])
        return None if done.returncode == 0 else (done.stderr + done.stdout).strip()


def open_nvcc(path: Path, ccbin: str | None = None) -> Nvcc:
    """Ask an nvcc its version; ToolchainError when it does not run."""
    return Nvcc(path, tool_version(path), ccbin)


def tool_version(path: Path) -> str:
    """The ``13.0.88`` of a CUDA program's ``--version``; ToolchainError when it does not run."""
    try:
        done = _run([str(path), "--version"])
    except OSError as error:
        raise ToolchainError(
            f"{path} does not start: {error}\nNext: set CUDA_HOME to a working toolkit"
        ) from error
    match = re.search(r"\bV([0-9]+(?:\.[0-9]+)+)", done.stdout)
    if done.returncode != 0 or match is None:
        said = (done.stdout + done.stderr).strip()
        raise ToolchainError(
            f"{path} --version: expected V<version>, got {said!r}.\nNext: set CUDA_HOME to a working toolkit"
        )
    return match[1]


def _dry_run(nvcc: Nvcc, target: arch.Target) -> bool:
    # One candidate a call: with several, nvcc names only the first bad one.
    command = [*nvcc.command, "--dryrun", *arch.gencode_flags([target])]
    try:
        done = _run([*command, "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"])
    except OSError as error:
        raise arch.ProbeError(f"{nvcc.path} does not start: {error}") from error
    if done.returncode == 0:
        return True
    if _REFUSED in done.stderr:
        return False
    raise arch.ProbeError(f"{nvcc.path} failed while asked about {target.name}: {done.stderr.strip()}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
