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
from ci.process import run
from ci.venv import Venv

GLIBC = "2.28"
COMPAT = Path(__file__).with_name("compat.cc")
STANDARD = "-std=c++20"
_PLAIN_NAMES = ("m", "dl", "pthread", "rt", "util", "resolv")
_SCRIPT = "OUTPUT_FORMAT(elf64-x86-64)\nGROUP ( {libc} {static} AS_NEEDED ( {loader} ) )\n"


def ensure(tools: Venv) -> Path:
    """The sysroot in the cache, made on first use with the ziglang of `tools` and the machine's g++.

    Raises ToolchainError when g++ is missing or a step fails.
    """
    compiler = compiler_version()
    name = f"glibc-{GLIBC}-{cache.key(COMPAT.read_bytes(), compiler, _zig_version(tools), _SCRIPT, STANDARD)}"
    return cache.make_once(cache.root() / "sysroot" / name, lambda folder: _fill(folder, tools))


def compiler_version() -> str:
    """First line of ``g++ --version``; ToolchainError when there is no g++."""
    try:
        shown = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise ToolchainError(
            f"g++ cannot be run: {problem}.\nExpected a host compiler on PATH.\nNext: apt-get install g++"
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


def _fill(folder: Path, tools: Venv) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    library = folder / "lib"
    library.mkdir()
    for stub in _make_stubs(scratch, tools).glob("*.so*"):
        shutil.copyfile(stub, library / stub.name)
    _add_plain_names(library)
    _write_libc_script(library)
    _compile_compat(folder)
    shutil.rmtree(scratch)


def _make_stubs(scratch: Path, tools: Venv) -> Path:
    source = scratch / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    zig_cache = str(scratch / "zig")
    env = {"ZIG_GLOBAL_CACHE_DIR": zig_cache, "ZIG_LOCAL_CACHE_DIR": zig_cache, "PATH": "/usr/bin:/bin"}
    command = [str(tools.python), "-m", "ziglang", "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", str(source)]
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


def _write_libc_script(library: Path) -> None:
    """``libc.so`` as a script, as glibc itself has it: without libc_nonshared.a a library that calls
    ``atexit`` links and then fails to load."""
    shown = subprocess.run(
        ["g++", "-print-file-name=libc_nonshared.a"], capture_output=True, text=True, check=True
    )
    static = Path(shown.stdout.strip())
    if not static.is_absolute():
        raise ToolchainError("g++ finds no libc_nonshared.a.\nNext: apt-get install libc6-dev")
    # zig calls the loader's stub libld.so.2; libcudart_static takes __tls_get_addr from it.
    places = {"libc": library / "libc.so.6", "static": static.resolve(), "loader": library / "libld.so.2"}
    (library / "libc.so").write_text(_SCRIPT.format(**places))


def _compile_compat(folder: Path) -> None:
    # Named relative to its folder and without debug information, so that the object holds no path.
    command = ["g++", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", STANDARD, "-c", COMPAT.name]
    command += ["-o", str(folder / "compat.o")]
    run(
        command,
        title="compiling the compat object",
        error=ToolchainError,
        hint="apt-get install g++",
        cwd=COMPAT.parent,
    )
