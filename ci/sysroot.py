"""A link sysroot with the glibc-2.28 surface, so that any newer Linux builds manylinux_2_28 wheels.

Layout: ``lib/`` (stub libraries and a ``libc.so`` linker script) and ``compat.o`` (see ``compat.cc``).  The
path goes to ``setup.py`` as ``FLASH_KDA_LINK_SYSROOT``: link with ``-L<sysroot>/lib`` first and
``<sysroot>/compat.o``. The stubs come from the zig compiler, which is used for nothing else: its C++ library
and its headers do not go together with nvcc and libtorch.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ci import cache
from ci.errors import ToolchainError
from ci.platforms import HOST, PLATFORMS, Platform
from ci.process import run
from ci.venv import Venv

GLIBC = "2.28"
COMPAT = Path(__file__).with_name("compat.cc")
STANDARD = "-std=c++20"
_PLAIN_NAMES = ("m", "dl", "pthread", "rt", "util", "resolv")
_SCRIPT = "OUTPUT_FORMAT({elf})\nGROUP ( {libc} {static} AS_NEEDED ( {loader} ) )\n"


def ensure(tools: Venv, target: Platform = PLATFORMS[HOST]) -> Path:
    """The sysroot in the cache, made on first use with the ziglang of `tools` and the g++ for `target`.

    Raises ToolchainError when g++ is missing or a step fails.
    """
    parts = (compiler_version(target), _zig_version(tools), _SCRIPT, STANDARD, target.gnu)
    name = f"glibc-{GLIBC}-{target.name}-{cache.key(COMPAT.read_bytes(), *parts)}"
    return cache.make_once(cache.root() / "sysroot" / name, lambda folder: _fill(folder, tools, target))


def compiler_version(target: Platform = PLATFORMS[HOST]) -> str:
    """First line of ``g++ --version``; ToolchainError when there is no g++."""
    try:
        shown = subprocess.run([target.cxx, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise ToolchainError(
            f"{target.cxx} cannot be run: {problem}.\nExpected a C++ compiler for {target.name} on PATH.\n"
            f"Next: apt-get install {target.package}"
        ) from problem
    return shown.stdout.splitlines()[0]


def _zig_version(tools: Venv) -> str:
    found = sorted(path.name for path in tools.site_packages().glob("ziglang-*.dist-info"))
    if not found:
        raise ToolchainError(
            f"{tools.folder} has no ziglang package; expected the one ci/requirements/build.txt pins.\n"
            "Next: delete that folder and run the command again"
        )
    return found[0]


def _fill(folder: Path, tools: Venv, target: Platform) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    library = folder / "lib"
    library.mkdir()
    for stub in _make_stubs(scratch, tools, target).glob("*.so*"):
        shutil.copyfile(stub, library / stub.name)
    _add_plain_names(library)
    _write_libc_script(library, target)
    _compile_compat(folder, target)
    shutil.rmtree(scratch)


def _make_stubs(scratch: Path, tools: Venv, target: Platform) -> Path:
    source = scratch / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    zig_cache = str(scratch / "zig")
    env = {"ZIG_GLOBAL_CACHE_DIR": zig_cache, "ZIG_LOCAL_CACHE_DIR": zig_cache, "PATH": "/usr/bin:/bin"}
    command = [str(tools.python), "-m", "ziglang", "cc", "-target", f"{target.gnu}.{GLIBC}", str(source)]
    command += ["-o", str(scratch / "empty"), "-lpthread", "-ldl", "-lrt", "-lm"]
    title, hint = f"making glibc {GLIBC} link stubs", "run the command above by hand"
    run(command, title=title, error=ToolchainError, hint=hint, env=env, cwd=scratch)
    found = list(Path(zig_cache).rglob("libc.so.6"))
    if len(found) != 1:
        raise ToolchainError(
            f"zig left {len(found)} files named libc.so.6 under {zig_cache}; expected one.\n"
            "Next: check the ziglang version in ci/requirements/build.txt"
        )
    return found[0].parent


def _add_plain_names(library: Path) -> None:
    for name in _PLAIN_NAMES:
        versioned = sorted(library.glob(f"lib{name}.so.*"))
        if not versioned:
            raise ToolchainError(
                f"zig made no stub of lib{name} in {library}.\n"
                "Next: check the ziglang version in ci/requirements/build.txt"
            )
        (library / f"lib{name}.so").symlink_to(versioned[0].name)


def _write_libc_script(library: Path, target: Platform) -> None:
    """``libc.so`` as a script, as glibc itself has it: without libc_nonshared.a a library that calls
    ``atexit`` links and then fails to load."""
    shown = subprocess.run(
        [target.cxx, "-print-file-name=libc_nonshared.a"], capture_output=True, text=True, check=True
    )
    static = Path(shown.stdout.strip())
    if not static.is_absolute():
        raise ToolchainError(
            f"{target.cxx} finds no libc_nonshared.a.\nNext: apt-get install {target.package}"
        )
    # zig calls the loader's stub libld.so.2; libcudart_static takes __tls_get_addr from it.
    places = {"libc": library / "libc.so.6", "static": static.resolve(), "loader": library / "libld.so.2"}
    (library / "libc.so").write_text(_SCRIPT.format(elf=target.elf, **places))


def _compile_compat(folder: Path, target: Platform) -> None:
    # Named relative to its folder and without debug information, so that the object holds no path.
    command = [target.cxx, "-O2", "-g0", "-fPIC", "-fvisibility=hidden", STANDARD, "-c", COMPAT.name]
    command += ["-o", str(folder / "compat.o")]
    run(
        command,
        title="compiling the compat object",
        error=ToolchainError,
        hint=f"apt-get install {target.package}",
        cwd=COMPAT.parent,
    )
