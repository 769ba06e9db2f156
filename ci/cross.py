"""What wheels of another platform are linked with: its glibc, its CUDA runtime, stubs of torch's libraries.

The folder is a link sysroot like that of ``ci/sysroot.py``, and goes to ``setup.py`` the same way.  It comes
first among the linker's folders, and the linker passes over libraries of another machine: those of this one's
toolkit and torch are never taken.
"""

from __future__ import annotations

import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

from ci import cache, sysroot, torch_stubs
from ci.errors import ToolchainError
from ci.platforms import Platform
from ci.repair import PLATFORM
from ci.toml import read_toml
from ci.toolchain import runtime
from ci.venv import Venv

_LIBRARIES = ("libtorch.so", "libtorch_cpu.so")


def ensure(tools: Venv, target: Platform, toolkit: str) -> Path:
    """The sysroot for `target` and `toolkit`, made in the cache on first use.

    Raises ToolchainError when a step fails.
    """
    base, cudart = sysroot.ensure(tools, target), runtime.library(toolkit, target)
    key = cache.key(base.name, cudart.read_bytes(), tools.folder.name, *stable())
    folder = cache.root() / "sysroot" / f"cuda-{toolkit}-{target.name}-{key}"

    def fill(made: Path) -> None:
        unfinished = shutil.ignore_patterns(".complete")  # this folder is marked when it is done
        shutil.copytree(base, made, symlinks=True, dirs_exist_ok=True, ignore=unfinished)
        shutil.copyfile(cudart, made / "lib" / cudart.name)
        _add_torch(made / "lib", tools, target)

    return cache.make_once(folder, fill)


def stable() -> tuple[str, ...]:
    """Patterns of the names in torch's stable C shim, the only ones that a wheel may use."""
    return tuple(read_toml(PLATFORM)["torch"]["stable"])


def _add_torch(library: Path, tools: Venv, target: Platform) -> None:
    """Stubs of torch's libraries, with the shim as this machine's build of the same torch has it."""
    source = tools.site_packages() / "torch" / "lib" / "libtorch_cpu.so"
    names = {name for name in _exported(source) if any(fnmatchcase(name, item) for item in stable())}
    if not names:
        raise ToolchainError(
            f"{source}: expected exported names such as {', '.join(stable())}, got none.\n"
            f"Next: rm -r {tools.folder}, and run the command again"
        )
    for name in _LIBRARIES:
        torch_stubs.link(library / name, {}, names if name == "libtorch_cpu.so" else set(), target)


def _exported(library: Path) -> list[str]:
    command = ["nm", "-D", "--defined-only", "--format=posix", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"nm on {library} failed: {done.stderr.strip()}\nNext: apt-get install binutils")
    return [line.split()[0].partition("@")[0] for line in done.stdout.splitlines()]
