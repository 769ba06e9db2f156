"""Compiler and linker arguments, the same for every folder, Python and job count they are used from.

Nothing is taken from sysconfig, CFLAGS or LDFLAGS: the flags a Python was built with would end up in the
wheel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ci.archs import arch
from ci.extension.toolset import Toolset

# g++ and nvcc make up symbol names from this instead of the clock and the process id.
_SEED = "flash_kda"
# GCC writes a system header's path with links resolved when that is shorter, past -ffile-prefix-map's reach.
_HOST = (
    "-fPIC",
    "-g0",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-canonical-system-headers",
)


def torch_target_macro(version: str) -> str:
    """TORCH_TARGET_VERSION for torch `version` (``"2.10"``): major and minor in the two highest bytes."""
    major, minor = (int(part) for part in version.split("."))
    return f"0x{(major << 56) | (minor << 48):016x}"


def cxx_flags(toolset: Toolset, version: str, torch_target: str, archs: Sequence[str]) -> list[str]:
    """Arguments for ``binding.cpp``: stable ABI of torch `torch_target`, the version, the architectures."""
    return [
        "-std=c++20",
        "-O3",
        *_HOST,
        f"-frandom-seed={_SEED}",
        # __FILE__ in torch's error macros holds the path of the header; our own sources have relative paths.
        f"-ffile-prefix-map={toolset.torch}=torch",
        f"-ffile-prefix-map={toolset.cuda_home}=cuda",
        "-Wall",
        "-Wextra",
        "-DUSE_CUDA",
        f"-DTORCH_TARGET_VERSION={torch_target_macro(torch_target)}",
        f"-DFLASH_KDA_CUDA_ARCHS_BUILT={','.join(archs)}",
        f"-DFLASH_KDA_VERSION={version}",
        "-isystem",
        str(toolset.torch / "include"),
        "-isystem",
        str(toolset.cuda_home / "include"),
    ]


def nvcc_flags(toolset: Toolset, choices: Sequence[arch.Choice]) -> list[str]:
    """Arguments for every .cu file.

    No -lineinfo and no --use_fast_math: the first records the folder, the second changes results.  The caller
    adds --keep with a folder of its own: without stable names for nvcc's intermediate files two runs of one
    command differ.
    """
    # nvcc breaks an -Xcompiler argument with a space apart, so no path that a user chose belongs here.
    host = [*_HOST, f"-ffile-prefix-map={toolset.cuda_home}=cuda"]
    return [
        "-std=c++17",
        "-O3",
        *toolset.nvcc.command[1:],
        *[word for flag in host for word in ("-Xcompiler", flag)],
        "--frandom-seed",
        _SEED,
        "-Xfatbin",
        "-compress-all",
        "-Xptxas=-v",  # one word: ccache 4.14 takes a -v by itself for its own matter
        *arch.gencode_flags(choices),
    ]


def link_flags(toolset: Toolset, exports: Path) -> list[str]:
    """Arguments after the objects.

    torch's two libraries stay NEEDED although their symbols are found without (or the .so does not load
    outside a process that has them), libcudart is inside, libstdc++ and libgcc_s are shared (a static
    libgcc_eh aborts at the first C++ exception), no RPATH.
    """
    sysroot = [f"-L{toolset.sysroot / 'lib'}"] if toolset.sysroot else []
    compat = [str(path) for path in sorted(toolset.sysroot.glob("*.o"))] if toolset.sysroot else []
    return [
        *compat,
        *sysroot,
        f"-L{toolset.cuda_lib}",
        f"-L{toolset.torch / 'lib'}",
        "-lcudart_static",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-Wl,--as-needed",
        "-lpthread",
        "-ldl",
        "-lrt",
        f"-Wl,--version-script={exports}",
        "-Wl,--build-id=none",
        "-Wl,-z,defs",
        "-Wl,-z,relro,-z,now",
        "-s",
    ]


def portable(flags: Sequence[str], toolset: Toolset, root: Path) -> list[str]:
    """`flags` with this machine's folders replaced by names, for the build record."""
    names = [(toolset.torch, "{torch}"), (toolset.cuda_home, "{cuda}"), (root, "{root}")]
    names += [(toolset.sysroot, "{sysroot}")] if toolset.sysroot else []
    out = list(flags)
    for path, name in sorted(names, key=lambda pair: -len(str(pair[0]))):
        out = [flag.replace(str(path), name) for flag in out]
    return out
