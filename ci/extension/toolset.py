"""What a build stands on: the CUDA toolkit, the C++ compiler, torch's headers and link stubs, ninja."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ci.errors import ToolchainError
from ci.nvcc import Nvcc, find_cuda_home, open_nvcc, tool_version


@dataclass(frozen=True)
class Toolset:
    """Paths and versions of everything a build runs or reads; ``sysroot`` is None for a plain link."""

    cuda_home: Path
    nvcc: Nvcc
    ptxas_version: str
    cxx: tuple[str, ...]
    cxx_version: str
    linker_version: str
    torch: Path
    torch_version: str
    ninja: Path
    sysroot: Path | None

    @property
    def cuda_lib(self) -> Path:
        """The toolkit's library folder: ``lib64`` in NVIDIA's installers, ``lib`` in the wheels."""
        for name in ("lib64", "lib"):
            if (self.cuda_home / name / "libcudart_static.a").is_file():
                return self.cuda_home / name
        raise ToolchainError(
            f"libcudart_static.a: expected in {self.cuda_home}/lib64 or lib, found in neither.\n"
            "Next: install the rest of the toolkit, or export CUDA_HOME=$(python -m ci.toolchain ensure 13.0)"
        )


def find(environ: Mapping[str, str] = os.environ) -> Toolset:
    """Find every tool; ToolchainError naming the first that is missing and how to get it."""
    home = find_cuda_home(environ)
    cxx = tuple(shlex.split(environ.get("CXX") or "g++"))
    torch, torch_version = _torch()
    toolset = Toolset(
        cuda_home=home,
        nvcc=open_nvcc(home / "bin" / "nvcc", _ccbin(cxx)),
        ptxas_version=tool_version(home / "bin" / "ptxas"),
        cxx=cxx,
        cxx_version=_cxx_version(cxx),
        linker_version=_linker_version(cxx),
        torch=torch,
        torch_version=torch_version,
        ninja=_ninja(),
        sysroot=_sysroot(environ),
    )
    toolset.cuda_lib  # noqa: B018  (raises now rather than after compiling)
    return toolset


def _ccbin(cxx: tuple[str, ...]) -> str:
    """nvcc's host compiler: one word, the ``g++`` of ``ccache g++ -m64``."""
    return [word for word in cxx if not word.startswith("-")][-1]


def _torch() -> tuple[Path, str]:
    # Found, not imported: a CUDA build of torch without its nvidia-* wheels cannot be imported, and its
    # headers and libraries are all a build needs.
    spec = importlib.util.find_spec("torch")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    for place in places:
        if (Path(place) / "include/torch/csrc/stable/library.h").is_file():
            return Path(place), importlib.metadata.version("torch")
    found = f"{places[0]} has no include/torch/csrc/stable/library.h" if places else "no torch"
    raise ToolchainError(
        f"torch's headers: expected a torch >= 2.10 in the environment of the build, found {found}.\n"
        "Next: pip install torch, then pip install --no-build-isolation -v ."
    )


def _cxx_version(cxx: tuple[str, ...]) -> str:
    return _first_line("the C++ compiler", [*cxx, "--version"])


def _linker_version(cxx: tuple[str, ...]) -> str:
    """What the linker that g++ starts says of itself."""
    program = _first_line("the C++ compiler", [*cxx, "-print-prog-name=ld"])
    return _first_line("the linker", [program, "--version"])


def _first_line(what: str, command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolchainError(
            f"{what} {command[0]!r} does not start: {error}\nNext: install g++, or set CXX"
        ) from error
    if done.returncode != 0 or not done.stdout.strip():
        raise ToolchainError(
            f"{shlex.join(command)} failed: {done.stderr.strip()}\nNext: install g++, or set CXX"
        )
    return done.stdout.splitlines()[0].strip()


def _ninja() -> Path:
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
    else:
        found = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if found is None:
        raise ToolchainError(
            "ninja: expected the Python package or the program, found neither.\nNext: pip install ninja"
        )
    return Path(found)


def _sysroot(environ: Mapping[str, str]) -> Path | None:
    text = environ.get("FLASH_KDA_LINK_SYSROOT")
    if not text:
        return None
    path = Path(text)
    if not (path / "lib").is_dir() or not list(path.glob("*.o")):
        raise ToolchainError(
            f"FLASH_KDA_LINK_SYSROOT={text!r}: expected a folder with lib/ and an object file.\n"
            "Next: unset it for a plain link"
        )
    return path
