"""The ``build_ext`` of this project.

Not a subclass of torch's BuildExtension, for four reasons seen with torch 2.13: it refuses an nvcc whose CUDA
major version differs from torch's (the stable ABI does not care), its ninja file passes absolute paths and
sysconfig's flags, it links torch_python and c10, and it needs a torch that can be imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools.command.build_ext import build_ext

from ci import matrix, resources
from ci.archs import arch
from ci.errors import BuildError, CiError, ToolchainError
from ci.extension import compiler_cache, flags, ninja_file, record, toolset
from ci.nvcc import clean_environment
from ci.selection import precheck, select, selection_error

EXPORTS = "csrc/exports.map"
_LOCAL_NAMES = re.compile(rb"_INTERNAL_[0-9a-f]+|_GLOBAL__N__[0-9a-f]+")


def choose(tools: toolset.Toolset) -> arch.Resolution:
    """Architectures for this environment and nvcc; ConfigError or ToolchainError."""
    try:
        return select(os.environ, tools.nvcc)
    except arch.ArchSelectionError as error:
        raise selection_error(error) from error
    except arch.ProbeError as error:
        raise ToolchainError(f"{error}\nNext: install g++, or set CUDA_HOME to a working toolkit") from error


def check_value() -> None:
    """Refuse a FLASH_KDA_CUDA_ARCHS that no nvcc could serve, before any tool is looked for."""
    try:
        precheck(os.environ.get(arch.ENV))
    except arch.ArchSelectionError as error:
        raise selection_error(error) from error


def local_names(keep: Path) -> list[str]:
    """Sources below `keep` whose PTX has names that hold a hash of the folder.

    Seen with nvcc 13.0 for all device code in an anonymous namespace, and for static device variables and
    functions (not kernels) in a named one.
    """
    guilty = {path.parent for path in keep.rglob("*.ptx") if _LOCAL_NAMES.search(path.read_bytes())}
    return sorted(folder.relative_to(keep).as_posix().removesuffix(".o.keep") for folder in guilty)


class BuildKda(build_ext):
    """Compiles the sources with g++ and nvcc, links with g++, writes the build record beside the library."""

    def run(self) -> None:
        """Build; a failure of ours ends the build with its message instead of a traceback."""
        try:
            check_value()
            super().run()
        except CiError as error:
            raise SystemExit(f"\n{type(error).__name__}: {error}") from error

    def build_extension(self, ext: Any) -> None:
        """Build one extension (there is one)."""
        root = Path.cwd()
        made_from = record.sources(root)
        tools = toolset.find()
        chosen = choose(tools)
        target = Path(self.get_ext_fullpath(ext.name))
        table = matrix.load()
        version = self.distribution.get_version()
        ext.extra_compile_args = {  # the shape torch's CUDAExtension gives it
            "cxx": flags.cxx_flags(tools, version, table.project.torch_target, chosen.names),
            "nvcc": flags.nvcc_flags(tools, chosen.choices),
        }
        ext.extra_link_args = flags.link_flags(tools, Path(EXPORTS))
        self._compile(ext, tools, chosen, target)
        words = {**ext.extra_compile_args, "link": ext.extra_link_args}
        shown = {name: flags.portable(value, tools, root) for name, value in words.items()}
        made = record.make(version, tools, chosen.names, shown, table, made_from)
        record.write(target.with_name("build_record.json"), made)

    def _compile(self, ext: Any, tools: toolset.Toolset, chosen: arch.Resolution, target: Path) -> None:
        cuda_sources = sum(source.endswith(".cu") for source in ext.sources)
        plan = resources.plan_jobs(resources.this_machine(), len(chosen.choices), cuda_sources, os.environ)
        for notice in chosen.notices + plan.notices:
            print(f"flash_kda: note: {notice}", file=sys.stderr)
        print(f"flash_kda: {tools.nvcc.label} for {' '.join(chosen.names)}")
        print(f"flash_kda: files at once: {plan.jobs}, architectures of each: {plan.threads}")
        folder = Path(self.build_temp, "flash_kda")
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        arguments = ext.extra_compile_args
        commands = ninja_file.Commands(arguments["cxx"], arguments["nvcc"], ext.extra_link_args, plan.threads)
        cache = compiler_cache.find(os.environ)
        text = ninja_file.write(
            tools, commands, ext.sources, folder.as_posix(), target.as_posix(), EXPORTS, cache
        )
        script = folder / "build.ninja"
        script.write_text(text, encoding="utf-8")
        more = compiler_cache.configure(tools, folder, _LOCAL_NAMES.pattern.decode()) if cache else {}
        run_ninja(tools.ninja, script, plan.jobs, more)

    def copy_extensions_to_source(self) -> None:
        """For an editable install: the record goes where the library goes."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name)))
            self.copy_file(str(built.with_name("build_record.json")), str(Path(*ext.name.split(".")[:-1])))


def run_ninja(ninja: Path, script: Path, jobs: int, more: Mapping[str, str]) -> None:
    """Run the ninja file, `more` variables set; BuildError when a compiler or the linker fails (its words are
    on the screen), or device code has names that no release may have."""
    command = [str(ninja), "-f", str(script), "-j", str(jobs), "-v"]
    sys.stdout.flush()
    done = subprocess.run(command, check=False, env={**clean_environment(), **more})
    refuse_local_names(script.parent)
    if done.returncode != 0:
        raise BuildError(
            f"compiling failed: expected ninja to exit with 0, got {done.returncode}; "
            "the first FAILED above says why.\n"
            f"Next: {' '.join(command)}"
        )


def refuse_local_names(folder: Path) -> None:
    """BuildError when device code has names that depend on the source's folder: two builds would differ."""
    sources = local_names(folder)
    if sources:
        raise BuildError(
            f"{', '.join(sources)}: device code with internal linkage: its names hold a hash of the folder "
            "it was compiled in, so the library would differ from folder to folder.\n"
            "Next: take anonymous namespaces off device code, and 'static' off device code in a namespace"
        )
