"""Writes an expectation file from an artifact, for a person to read, tighten and commit.

It states what is there, not what should be: nothing it prints was judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ci.verify.expectations import SCHEMA
from ci.verify.facts import Facts, Kernel, Library
from ci.verify.sass import count_opcodes

# Opcodes worth a promise when they are there: tensor cores, matrix and bulk copies, barriers, fast functions.
_NOTABLE = (
    "HMMA", "HGMMA", "UTCHMMA", "LDSM", "STSM", "LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG", "SYNCS",
    "USETMAXREG", "MUFU.EX2", "MUFU.RCP",
)  # fmt: skip
_FORBIDDEN = ("LDL", "STL", "CALL")
_Found = dict[str, dict[str, Kernel]]


def observe(facts: Facts) -> str:
    """TOML text of one ``kernels*.toml`` for each library of `facts` that has device code."""
    texts = [
        _library_text(library)
        for library in facts.libraries
        if any(image.kernels for image in library.images)
    ]
    return "\n".join(texts) if texts else "# no device code with kernels was found\n"


def _library_text(library: Library) -> str:
    found = _by_symbol(library)
    archs = sorted({image.arch for image in library.images if image.kind == "elf"}, key=_arch_order)
    functions = {name for image in library.images for name in image.functions}
    externals = {name for image in library.images for name in image.externals}
    lines = [
        "# Observed, to be reviewed: budgets are what is there now; lower or raise them on purpose.",
        f"schema = {SCHEMA}",
        f'library = "{library.path}"',
        f"functions = {_array(functions)}",
        f"externals = {_array(externals)}",
    ]
    for symbol, kernels in sorted(found.items()):
        lines += ["", *_group_lines(symbol, kernels, archs)]
    return "\n".join(lines) + "\n"


def _by_symbol(library: Library) -> _Found:
    found: _Found = {}
    for image in library.images:
        for kernel in image.kernels:
            found.setdefault(kernel.symbol, {})[image.arch] = kernel
    return found


def _group_lines(symbol: str, kernels: dict[str, Kernel], archs: Sequence[str]) -> list[str]:
    ordered = sorted(kernels, key=_arch_order)
    common, extra = _required(kernels)
    lines = [f"# {_demangle(symbol)}"] if symbol.startswith("_Z") else []
    lines += ["[[kernels]]", f"symbols = {_array([symbol])}"]
    lines.append('archs = "all"' if ordered == list(archs) else f"archs = {_array(ordered)}")
    lines += [f"require = {_array(common)}", f"forbid = {_array(_absent(kernels.values()))}"]
    lines += ["[kernels.require_on]", *(f"{arch} = {_array(extra[arch])}" for arch in ordered if extra[arch])]
    lines.append("[kernels.budget]")
    for arch in ordered:
        kernel = kernels[arch]
        numbers = f"registers = {kernel.registers}, stack = {kernel.stack}, local = {kernel.local}"
        lines.append(f"{arch} = {{ {numbers}, shared = {kernel.shared} }}")
    return lines


def _required(kernels: dict[str, Kernel]) -> tuple[list[str], dict[str, list[str]]]:
    present = {
        arch: {name for name in _NOTABLE if count_opcodes(kernel, name)} for arch, kernel in kernels.items()
    }
    common = set.intersection(*present.values())
    return _in_order(common), {arch: _in_order(names - common) for arch, names in present.items()}


def _absent(kernels: Iterable[Kernel]) -> list[str]:
    every = list(kernels)
    return [name for name in _FORBIDDEN if not any(count_opcodes(kernel, name) > 0 for kernel in every)]


def _in_order(names: Iterable[str]) -> list[str]:
    chosen = set(names)
    return [name for name in _NOTABLE if name in chosen]


def _arch_order(arch: str) -> tuple[int, str]:
    return int(arch.rstrip("af")), arch


def _array(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _demangle(symbol: str) -> str:
    from torch_abi_audit.demangle import demangle_symbol

    return demangle_symbol(symbol)
