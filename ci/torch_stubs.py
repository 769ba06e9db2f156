"""Lets a CUDA build of torch be imported, by tests and import checks, without the CUDA libraries it needs.

The index most people have serves a CUDA build of torch, and ``import torch`` then fails unless some 2.5 GB of
nvidia-* wheels lie beside it (seen with 2.13.0: ``libcudnn.so.9: cannot open shared object file``).  Tests
without a GPU run nothing of theirs, so each missing library becomes an empty one that defines the symbols
torch's libraries look up, with their versions; every function returns 35, the runtime's "insufficient driver"
code.

``python -m ci.torch_stubs FOLDER``: FOLDER is ``torch/lib`` of an environment that sees no GPU.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ci.errors import ToolchainError, missing_package, run_cli
from ci.platforms import HOST, PLATFORMS, Platform

try:
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
    from elftools.elf.sections import SymbolTableSection
except ModuleNotFoundError as error:
    raise missing_package(error, ["ci", "verify"]) from error

GLIBC = ("libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux")
SYSTEM = (*GLIBC, "libstdc++.so", "libgcc_s.so")
INSUFFICIENT_DRIVER = 35


@dataclass
class Wanted:
    """What libraries need from others: symbol names by (library, version), and those without a version."""

    libraries: set[str] = field(default_factory=set)
    versioned: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    loose: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)


def read(folder: Path) -> Wanted:
    """What the shared libraries of `folder` need, libraries that are there or the system's left out."""
    wanted = Wanted()
    paths = sorted(folder.glob("*.so*"))
    for path in paths:
        with path.open("rb") as handle:
            _read_library(ELFFile(handle), wanted)
    present = {path.name for path in paths}
    wanted.libraries = {name for name in wanted.libraries - present if not name.startswith(SYSTEM)}
    wanted.loose -= wanted.defined
    return wanted


def _read_library(elf: ELFFile, wanted: Wanted) -> None:
    dynamic = elf.get_section_by_name(".dynamic")
    symbols = elf.get_section_by_name(".dynsym")
    if not isinstance(dynamic, DynamicSection) or not isinstance(symbols, SymbolTableSection):
        return
    wanted.libraries.update(str(vars(tag)["needed"]) for tag in dynamic.iter_tags("DT_NEEDED"))
    origins = dict(_version_origins(elf))
    indices = elf.get_section_by_name(".gnu.version")
    for number, symbol in enumerate(symbols.iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF":
            wanted.defined.add(symbol.name)
            continue
        index = indices.get_symbol(number)["ndx"] if isinstance(indices, GNUVerSymSection) else None
        if index in origins:
            wanted.versioned[origins[index]].add(symbol.name)
        elif symbol["st_info"]["bind"] == "STB_GLOBAL" and symbol.name:
            wanted.loose.add(symbol.name)


def _version_origins(elf: ELFFile) -> Iterator[tuple[int, tuple[str, str]]]:
    """Pairs of a symbol-version index and the (library, version) it stands for."""
    section = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(section, GNUVerNeedSection):
        return
    for library, versions in section.iter_versions():
        for version in versions:
            yield version["vna_other"], (str(library.name), str(version.name))


def write(folder: Path, target: Platform = PLATFORMS[HOST]) -> list[str]:
    """Put a stub of each missing library into `folder`, which is of `target`; returns their names."""
    wanted = read(folder)
    names = sorted(wanted.libraries)
    for position, name in enumerate(names):
        # An unversioned symbol does not say which library has it; lookup is global, so any one will do.
        loose = wanted.loose if position == 0 else set()
        versions = {version: have for (library, version), have in wanted.versioned.items() if library == name}
        link(folder / name, versions, loose, target)
    return names


def link(
    path: Path, versioned: Mapping[str, set[str]], loose: set[str], target: Platform = PLATFORMS[HOST]
) -> None:
    """Make a library of `target` at `path` that defines the names of `versioned`, by version, and `loose`."""
    symbols = sorted(loose.union(*versioned.values()))
    code = [f".globl {name}\n.type {name},@function\n{name}:" for name in symbols]
    body = target.returns.format(INSUFFICIENT_DRIVER)
    nodes = [f"{version} {{ {'; '.join(sorted(names))}; }};" for version, names in versioned.items()]
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.s"), Path(scratch, "stub.map")
        source.write_text("\n".join([".text", *code, body, '.section .note.GNU-stack,"",@progbits', ""]))
        script.write_text("\n".join(nodes) + "\n")
        command = [
            target.cxx,
            "-shared",
            "-nostdlib",
            f"-Wl,-soname,{path.name}",
            "-o",
            str(path),
            str(source),
        ]
        command += [f"-Wl,--version-script,{script}"] if nodes else []
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolchainError(
            f"linking the stub {path.name} failed:\n{done.stderr}\nNext: apt-get install {target.package}"
        )


def main() -> int:
    """Command line; prints what it made."""
    made = write(Path(sys.argv[1]))
    print("stubs: " + (" ".join(made) or "none needed"))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
