"""What a wheel must be, read from ``wheels/expectations/*.toml``; ConfigError names the file and the key.

``kernels*.toml``: one library each, with its kernel entries, their budgets and instructions.
``platform.toml``: what a library may need of the system and of torch.  ``wheel.toml``: what the archive says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from ci.errors import ConfigError
from ci.toml import Table, open_table

FOLDER = Path(__file__).resolve().parents[2] / "wheels" / "expectations"
SCHEMA = 1
SIZE_FILE = "size.toml"
EVERY_ARCH = "all"


@dataclass(frozen=True)
class Budget:
    """Limits of one kernel on one architecture: registers a thread; stack, local, static shared bytes."""

    registers: int
    stack: int
    local: int
    shared: int


@dataclass(frozen=True)
class KernelGroup:
    """Kernel entries (mangled names) with the same limits; `archs` None means each architecture of the wheel.

    `budget` has an entry for each architecture, or ``all`` for those without one of their own.  `require` and
    `forbid` are opcodes: ``HMMA`` stands for itself and all ``HMMA.*``; ``LDGSTS|UBLKCP`` for either;
    `require_on` adds some for one architecture.
    """

    symbols: tuple[str, ...]
    archs: tuple[str, ...] | None
    budget: Mapping[str, Budget]
    require: tuple[str, ...]
    require_on: Mapping[str, tuple[str, ...]]
    forbid: tuple[str, ...]


@dataclass(frozen=True)
class LibraryExpectation:
    """One library: `path` in the wheel, its kernels, device functions and external symbols it may have."""

    path: str
    groups: tuple[KernelGroup, ...]
    functions: tuple[str, ...]
    externals: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class PlatformExpectation:
    """``platform.toml``; `floor` maps a platform tag to the highest version of each symbol family."""

    floor: Mapping[str, Mapping[str, str]]
    needed_required: tuple[str, ...]
    needed_allowed: tuple[str, ...]
    needed_from_torch: tuple[str, ...]
    sections_forbidden: tuple[str, ...]
    exported: tuple[str, ...]
    undefined: tuple[str, ...]
    torch_stable: tuple[str, ...]
    torch_weak_only: tuple[str, ...]
    python_undefined: tuple[str, ...]


@dataclass(frozen=True)
class WheelExpectation:
    """``wheel.toml``."""

    name: str
    metadata_name: str
    packages: tuple[str, ...]
    dist_info: tuple[str, ...]
    build_record: str
    license_expression: str
    license_files: tuple[str, ...]
    max_bytes: int


@dataclass(frozen=True)
class SizeBudget:
    """Bytes of a row's wheel and library; `code` maps a kernel to its instructions' bytes by architecture."""

    wheel: int
    library: int
    code: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Sizes:
    """``size.toml``: what each row's wheel took when it was written, and by how many percent it may grow."""

    growth: int
    rows: Mapping[str, SizeBudget]


@dataclass(frozen=True)
class Expectations:
    """The whole folder."""

    libraries: tuple[LibraryExpectation, ...]
    platform: PlatformExpectation
    wheel: WheelExpectation
    sizes: Sizes


def load(folder: Path | None = None) -> Expectations:
    """Read `folder` (default: the repository's own)."""
    place = folder or FOLDER
    kernels = sorted(place.glob("kernels*.toml"))
    if not kernels:
        raise ConfigError(
            f"{place}: expected kernels*.toml, got none. Run: python -m ci.verify observe LIBRARY"
        )
    libraries = tuple(load_library(path) for path in kernels)
    platform, wheel = _load_platform(place / "platform.toml"), _load_wheel(place / "wheel.toml")
    return Expectations(libraries, platform, wheel, load_sizes(place / SIZE_FILE))


def _open(path: Path) -> Table:
    table = open_table(path)
    schema = table.number("schema")
    if schema != SCHEMA:
        raise ConfigError(f"{path.name}: expected schema = {SCHEMA}, got {schema}.")
    return table


def load_library(path: Path) -> LibraryExpectation:
    """Read one ``kernels*.toml``."""
    top = _open(path)
    groups = tuple(_read_group(table) for table in top.tables("kernels"))
    result = LibraryExpectation(
        path=top.text("library"),
        groups=groups,
        functions=top.names("functions"),
        externals=top.names("externals"),
        source=path.name,
    )
    top.done()
    symbols = [symbol for group in groups for symbol in group.symbols]
    if not symbols or len(set(symbols)) != len(symbols):
        raise ConfigError(f"{path.name}: expected at least one kernel and each once, got {symbols}.")
    return result


def _read_group(table: Table) -> KernelGroup:
    archs = table.take("archs")
    if archs != EVERY_ARCH and not (isinstance(archs, list) and all(isinstance(a, str) for a in archs)):
        raise table.fail("archs", '"all" or a list such as ["90a"]', archs)
    budget = table.table("budget")
    require_on = table.table("require_on") if "require_on" in table.left else Table(table.where, {})
    group = KernelGroup(
        symbols=table.names("symbols"),
        archs=None if archs == EVERY_ARCH else tuple(archs),
        budget={name: _read_budget(budget.table(name)) for name in list(budget.left)},
        require=table.names("require"),
        require_on={name: require_on.names(name) for name in list(require_on.left)},
        forbid=table.names("forbid"),
    )
    table.done()
    return group


def _read_budget(table: Table) -> Budget:
    budget = Budget(**{item.name: table.number(item.name) for item in fields(Budget)})
    table.done()
    return budget


def _load_platform(path: Path) -> PlatformExpectation:
    top = _open(path)
    floors = top.table("floor")
    tables = {tag: floors.table(tag) for tag in list(floors.left)}
    needed, sections, symbols = top.table("needed"), top.table("sections"), top.table("symbols")
    torch, python = top.table("torch"), top.table("python")
    result = PlatformExpectation(
        floor={tag: {key: table.text(key) for key in list(table.left)} for tag, table in tables.items()},
        needed_required=needed.names("required"),
        needed_allowed=needed.names("allowed"),
        needed_from_torch=needed.names("from_torch"),
        sections_forbidden=sections.names("forbidden"),
        exported=symbols.names("exported"),
        undefined=symbols.names("undefined"),
        torch_stable=torch.names("stable"),
        torch_weak_only=torch.names("weak_only"),
        python_undefined=python.names("undefined"),
    )
    for table in (top, needed, sections, symbols, torch, python):
        table.done()
    return result


def _load_wheel(path: Path) -> WheelExpectation:
    top = _open(path)
    result = WheelExpectation(
        name=top.text("name"),
        metadata_name=top.text("metadata_name"),
        packages=top.names("packages"),
        dist_info=top.names("dist_info"),
        build_record=top.text("build_record"),
        license_expression=top.text("license_expression"),
        license_files=top.names("license_files"),
        max_bytes=top.number("max_bytes"),
    )
    top.done()
    return result


def load_sizes(path: Path) -> Sizes:
    """Read ``size.toml``."""
    top = _open(path)
    growth, rows = top.number("growth"), top.table("row")
    sizes = {label: _read_size(rows.table(label)) for label in list(rows.left)}
    top.done()
    return Sizes(growth, sizes)


def _read_size(table: Table) -> SizeBudget:
    wheel, library, code = table.number("wheel"), table.number("library"), table.table("code")
    table.done()
    kernels = {name: code.table(name) for name in list(code.left)}
    numbers = {name: {arch: row.number(arch) for arch in list(row.left)} for name, row in kernels.items()}
    return SizeBudget(wheel, library, numbers)
