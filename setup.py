"""Builds the flash-kda wheel and sdist.

Metadata and sdist need neither torch, nvcc, git, a GPU nor the network.  Variables read: FLASH_KDA_CUDA_ARCHS
('auto', 'all' or a list such as 90a,100a), FLASH_KDA_CUDA_ARCHS_STRICT, FLASH_KDA_LOCAL_VERSION,
FLASH_KDA_SKIP_CUDA_BUILD, FLASH_KDA_LINK_SYSROOT, FLASH_KDA_SOURCE_COMMIT, FLASH_KDA_COMPILER_CACHE,
MAX_JOBS, NVCC_THREADS, CUDA_HOME, CXX. The work is in ci/extension.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 front end does not put the source folder on the path

from ci import matrix  # noqa: E402
from ci.archs import arch  # noqa: E402
from ci.errors import CiError, ConfigError  # noqa: E402
from ci.extension import command, toolset  # noqa: E402
from ci.selection import flag  # noqa: E402

SUPPORTED_CUDA_ARCHS: tuple[str, ...] = tuple(row.target.name for row in arch.KERNEL_TARGETS)
_SKIPPED = """\
flash_kda: FLASH_KDA_SKIP_CUDA_BUILD is set: no CUDA kernels are built.
flash_kda: the result runs the reference backend only, on any machine, slowly."""


def get_arch_flags() -> list[str]:
    """nvcc's -gencode arguments for FLASH_KDA_CUDA_ARCHS and the nvcc that would be used.

    Raises ConfigError or ToolchainError with what is wrong, what there is and what to do.
    """
    command.check_value()
    return arch.gencode_flags(command.choose(toolset.find()).choices)


def get_version() -> str:
    """The version in flash_kda/_version.py, with FLASH_KDA_LOCAL_VERSION (such as cu130) as its label."""
    text = (ROOT / "flash_kda" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([0-9][^"+]*)"$', text, re.MULTILINE)
    if match is None:
        raise ConfigError('flash_kda/_version.py: expected a line __version__ = "X.Y.Z", found none.')
    label = os.environ.get("FLASH_KDA_LOCAL_VERSION")
    if label is None:
        return match[1]
    if re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label) is None:
        raise ConfigError(
            f"FLASH_KDA_LOCAL_VERSION: expected letters, digits and dots such as cu130, got {label!r}.\n"
            "Next: unset FLASH_KDA_LOCAL_VERSION, or give a label"
        )
    return f"{match[1]}+{label}"


def get_extensions() -> list[Extension]:
    """The one extension, its sources sorted; none when FLASH_KDA_SKIP_CUDA_BUILD is set."""
    if flag(os.environ, "FLASH_KDA_SKIP_CUDA_BUILD"):
        print(_SKIPPED, file=sys.stderr)
        return []
    found = [path for pattern in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(pattern)]
    sources = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return [Extension("flash_kda._C", sources, py_limited_api=True)]


def main() -> None:
    """Hand over to setuptools."""
    extensions = get_extensions()
    tag = matrix.load().project.python_tag
    setup(
        version=get_version(),
        ext_modules=extensions,
        cmdclass={"build_ext": command.BuildKda},
        options={"bdist_wheel": {"py_limited_api": tag}} if extensions else {},
    )


if __name__ == "__main__":
    try:
        main()
    except CiError as error:
        sys.exit(f"{type(error).__name__}: {error}")
