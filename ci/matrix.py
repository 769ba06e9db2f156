"""Reads and checks ``ci/matrix.toml``: `load` returns frozen dataclasses or raises ConfigError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ci.archs import arch
from ci.errors import ConfigError
from ci.platforms import HOST, PLATFORMS
from ci.toml import Table, open_table

PATH = Path(__file__).with_name("matrix.toml")
LOCK, IMAGE = "lock", "image"  # where a row's toolkit comes from
STATUSES = ("run on hardware", "built, not run", "opt-in, not run")


@dataclass(frozen=True)
class Project:
    """What every row shares: torch to build with, oldest torch and Python served, platform tag."""

    torch_build: str
    torch_target: str
    python_tag: str
    plat: str

    @property
    def python(self) -> str:
        """The oldest Python served: ``3.10`` of ``cp310``."""
        return f"{self.python_tag[2]}.{self.python_tag[3:]}"

    @property
    def platform(self) -> str:
        """The last word of the platform tag, ``x86_64``."""
        return self.plat.split("_", 3)[3]


@dataclass(frozen=True)
class CudaRow:
    """One wheel: label (``cu130``), toolkit (``13.0``) and where that comes from, architectures, sorted."""

    label: str
    toolkit: str
    toolkit_from: str
    archs: tuple[str, ...]

    @property
    def value(self) -> str:
        """The row's architectures as a value of ``FLASH_KDA_CUDA_ARCHS``."""
        return ",".join(self.archs)

    def label_for(self, archs: str) -> str:
        """The local version of a wheel with `archs`: ``cu130`` with all of the row's, else
        ``cu130.sm90a``."""
        names = [choice.name for choice in arch.parse_list(archs)[0]]
        if names == list(self.archs):
            return self.label
        return ".".join([self.label, *(f"sm{name.lower().replace('+', '')}" for name in names)])


def row_of_label(label: str) -> str:
    """The row's part of a wheel's local version: ``cu130`` of ``cu130.sm90a``."""
    return label.partition(".")[0]


def archs_of_label(label: str) -> str | None:
    """The architectures in a wheel's local version: ``90a`` of ``cu130.sm90a``, None of ``cu130``."""
    words = label.split(".")[1:]
    return ",".join(re.sub("ptx$", "+PTX", word.removeprefix("sm")) for word in words) or None


@dataclass(frozen=True)
class Other:
    """A platform whose wheels are made on another machine: its tag and its rows."""

    plat: str
    rows: tuple[CudaRow, ...]


@dataclass(frozen=True)
class ArchInfo:
    """What is known of one architecture beyond the kernel table: how far it was tried."""

    name: str
    status: str

    @property
    def gpu_test(self) -> str:
        """Its name on the command line of the GPU tests, ``sm90a``."""
        return f"sm{self.name}"

    @property
    def was_run(self) -> bool:
        """Whether its code was run on the hardware it is for."""
        return self.status == STATUSES[0]


@dataclass(frozen=True)
class GpuRow:
    """A GPU of CI: the target it runs, the label of its runner, the torch versions to test beside."""

    target: str
    runner: str
    torch: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """The whole file; ``emits`` maps a toolkit to the targets it emits.

    ``project.plat`` and ``rows`` are those of the machine that builds; `on` gives those of another platform.
    """

    project: Project
    rows: tuple[CudaRow, ...]
    others: Mapping[str, Other]
    archs: Mapping[str, ArchInfo]
    test_python: tuple[str, ...]
    test_torch: tuple[str, ...]
    dsl: tuple[str, ...]
    emits: Mapping[str, frozenset[arch.Target]]
    gpus: tuple[GpuRow, ...]

    def on(self, platform: str) -> Matrix:
        """The same with the tag and rows of `platform` (``aarch64``); ConfigError naming those there are."""
        if platform == HOST:
            return self
        if platform not in self.others:
            names = ", ".join([HOST, *self.others])
            raise ConfigError(
                f"no platform {platform!r} in ci/matrix.toml; it has {names}.\nNext: name one of them"
            )
        other = self.others[platform]
        return replace(self, project=replace(self.project, plat=other.plat), rows=other.rows)

    @property
    def locked_rows(self) -> tuple[CudaRow, ...]:
        """The rows that any machine builds."""
        return tuple(row for row in self.rows if row.toolkit_from == LOCK)

    def cuda_row(self, label: str) -> CudaRow:
        """The row of that label; ConfigError naming the labels there are."""
        for row in self.rows:
            if row.label == label:
                return row
        labels = ", ".join(row.label for row in self.rows)
        raise ConfigError(
            f"no CUDA row {label!r} in ci/matrix.toml; it has {labels}.\nNext: name one of them"
        )

    def not_run(self, archs: Iterable[str]) -> list[str]:
        """Those of `archs` (``90a``, ``100f+PTX``) whose code was built and never run."""
        return [name for name in archs if not self.archs[name.partition("+")[0]].was_run]

    def emittable(self, toolkit: str) -> frozenset[arch.Target]:
        """Targets that toolkit emits; ConfigError naming the toolkits on record."""
        if toolkit not in self.emits:
            known = ", ".join(self.emits)
            raise ConfigError(
                f"CUDA {toolkit!r}: what its nvcc emits is not on record in ci/matrix.toml; it has {known}.\n"
                "Next: name one of them, or say what it emits: python -m ci.plan --emittable LIST"
            )
        return self.emits[toolkit]


def load(path: Path | None = None) -> Matrix:
    """Read the matrix (`path`: another file); ConfigError names the key, what it holds and takes."""
    source = path or PATH
    top = open_table(source)
    emits = _read_toolkits(top)
    project = _read_project(top)
    rows = _read_rows(top, emits)
    others = _read_others(top, rows, emits)
    archs = _read_archs(top, (*rows, *(row for other in others.values() for row in other.rows)))
    gpus = _read_gpus(top, archs)
    test = top.table("test")
    python = test.texts("python", r"3\.[0-9]+", "Python versions such as '3.10'")
    torch = test.texts("torch", r"[0-9]+\.[0-9]+\.[0-9]+", "torch versions such as '2.13.0'")
    test.done()
    dsl = _read_dsl(top)
    top.done()
    matrix = Matrix(project, rows, others, archs, python, torch, dsl, emits, gpus)
    _check_floors(source.name, matrix)
    return matrix


def _targets(reader: Table, key: str) -> tuple[arch.Target, ...]:
    names = reader.texts(key, r"[0-9]+[af]", "suffixed targets such as '90a'")
    try:
        targets = tuple(arch.parse_target(name) for name in names)
    except arch.ArchSelectionError as error:
        raise ConfigError(f"{reader.where}: '{key}': {error}") from error
    if list(targets) != sorted(targets):
        raise reader.fail(key, "targets in ascending order", list(names))
    return targets


def _read_toolkits(top: Table) -> dict[str, frozenset[arch.Target]]:
    table = top.table("toolkit")
    emits: dict[str, frozenset[arch.Target]] = {}
    for version in list(table.left):
        reader = table.table(version)
        emits[version] = frozenset(_targets(reader, "emits"))
        reader.done()
    return emits


def _read_project(top: Table) -> Project:
    reader = top.table("project")
    project = Project(
        torch_build=reader.text("torch_build", r"[0-9]+\.[0-9]+\.[0-9]+", "a torch version such as '2.13.0'"),
        torch_target=reader.text("torch_target", r"[0-9]+\.[0-9]+", "a torch version such as '2.10'"),
        python_tag=reader.text("python_tag", r"cp3[0-9]+", "a CPython tag such as 'cp310'"),
        plat=reader.text("plat", rf"manylinux_[0-9]+_[0-9]+_{HOST}", f"a manylinux tag of {HOST}"),
    )
    reader.done()
    return project


def dsl_lock(version: str) -> str:
    """Name of the lock of one version of the CuTe DSL, for ``ci.venv``."""
    return f"cute-{version}"


def _read_dsl(top: Table) -> tuple[str, ...]:
    reader = top.table("dsl")
    versions = reader.texts("versions", r"[0-9]+\.[0-9]+\.[0-9]+", "DSL versions such as '4.8.1'")
    reader.done()
    if list(versions) != sorted(set(versions), key=_version):
        raise reader.fail("versions", "versions without repeats, oldest first", list(versions))
    return versions


def _read_rows(top: Table, emits: Mapping[str, frozenset[arch.Target]]) -> tuple[CudaRow, ...]:
    rows = tuple(_read_row(table, emits) for table in top.tables("cuda"))
    if all(row.toolkit_from != LOCK for row in rows):
        raise top.fail("cuda", f"a row with toolkit_from = '{LOCK}'", [row.label for row in rows])
    labels = [row.label for row in rows]
    if len(set(labels)) != len(labels):
        raise top.fail("cuda", "labels without repeats", labels)
    return rows


def _read_row(reader: Table, emits: Mapping[str, frozenset[arch.Target]]) -> CudaRow:
    toolkit = reader.text("toolkit", r"[0-9]+\.[0-9]+", "a CUDA version such as '13.0'")
    label = reader.text("label", "cu" + toolkit.replace(".", ""), f"the label of CUDA {toolkit}")
    origin = reader.text("toolkit_from", f"{LOCK}|{IMAGE}", f"'{LOCK}' or '{IMAGE}'")
    if toolkit not in emits:
        raise reader.fail("toolkit", f"one of {', '.join(emits)} (or a new [toolkit] entry)", toolkit)
    archs = _read_row_archs(reader, "archs", toolkit, emits[toolkit])
    reader.done()
    return CudaRow(label, toolkit, origin, archs)


def _read_row_archs(reader: Table, key: str, toolkit: str, emits: frozenset[arch.Target]) -> tuple[str, ...]:
    supported = {row.target: row for row in arch.KERNEL_TARGETS}
    if reader.left.get(key) == "all":
        reader.take(key)
        targets = tuple(t for t, row in supported.items() if row.default_in_all and t in emits)
    else:
        targets = _targets(reader, key)
    for target in targets:
        if target not in supported:
            raise reader.fail(key, f"targets with kernels ({_names(supported)})", target.name)
        if target not in emits:
            raise reader.fail(key, f"targets CUDA {toolkit} emits ({_names(emits)})", target.name)
    return tuple(target.name for target in sorted(targets))


def _read_others(
    top: Table, rows: tuple[CudaRow, ...], emits: Mapping[str, frozenset[arch.Target]]
) -> dict[str, Other]:
    table = top.table("platform")
    known = [name for name in PLATFORMS if name != HOST]
    others = {}
    for name in list(table.left):
        if name not in known:
            raise table.fail(name, f"one of {', '.join(known)} (ci/platforms.py)", name)
        reader = table.table(name)
        plat = reader.text("plat", rf"manylinux_[0-9]+_[0-9]+_{name}", f"a manylinux tag of {name}")
        others[name] = Other(plat, _read_other_rows(reader, rows, emits))
        reader.done()
    return others


def _read_other_rows(
    reader: Table, rows: tuple[CudaRow, ...], emits: Mapping[str, frozenset[arch.Target]]
) -> tuple[CudaRow, ...]:
    """Rows as they are, but for their architectures; those that are not named are left out."""
    table = reader.table("archs")
    named = [row for row in rows if row.label in table.left]
    found = tuple(
        replace(row, archs=_read_row_archs(table, row.label, row.toolkit, emits[row.toolkit]))
        for row in named
    )
    table.done()
    if not found:
        raise reader.fail("archs", f"architectures for some of {', '.join(r.label for r in rows)}", {})
    return found


def _names(targets: Mapping[arch.Target, object] | frozenset[arch.Target]) -> str:
    return " ".join(target.name for target in sorted(targets))


def _read_archs(top: Table, rows: tuple[CudaRow, ...]) -> dict[str, ArchInfo]:
    table = top.table("arch")
    supported = [row.target.name for row in arch.KERNEL_TARGETS]
    if sorted(table.left) != sorted(supported):
        wanted = f"one table for each target with kernels ({' '.join(supported)})"
        raise top.fail("arch", wanted, " ".join(table.left))
    built = {name for row in rows for name in row.archs}
    infos = {}
    for name in supported:
        reader = table.table(name)
        status = reader.text("status", "|".join(STATUSES), f"one of {STATUSES}")
        infos[name] = ArchInfo(name, status)
        reader.done()
        if (status == STATUSES[2]) != (name not in built):
            raise reader.fail("status", f"'{STATUSES[2]}' exactly when no row builds it", status)
    return infos


def _read_gpus(top: Table, archs: Mapping[str, ArchInfo]) -> tuple[GpuRow, ...]:
    gpus = []
    for reader in top.tables("gpu"):
        target = reader.text("target", "|".join(archs), f"one of {', '.join(archs)}")
        runner = reader.text("runner", r"[A-Za-z0-9._-]+", "the label of a runner")
        torch = reader.texts("torch", r"[0-9]+\.[0-9]+\.[0-9]+", "torch versions such as '2.13.0'")
        reader.done()
        gpus.append(GpuRow(target, runner, torch))
    tested = [gpu.target for gpu in gpus]
    if len(set(tested)) != len(tested):
        raise top.fail("gpu", "targets without repeats", tested)
    # Nothing else would write the record that a release of such a wheel needs.
    missing = [name for name, info in archs.items() if info.was_run and name not in tested]
    if missing:
        raise top.fail("gpu", f"a table for each target that is '{STATUSES[0]}'", f"none for {missing}")
    return tuple(gpus)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _check_floors(where: str, matrix: Matrix) -> None:
    oldest = _version(matrix.project.python)
    target = _version(matrix.project.torch_target)
    for python in matrix.test_python:
        if _version(python) < oldest:
            raise ConfigError(f"{where}: test.python: {python} is older than project.python_tag allows.")
    on_gpus = [torch for gpu in matrix.gpus for torch in gpu.torch]
    for torch in (*matrix.test_torch, *on_gpus, matrix.project.torch_build):
        if _version(torch)[:2] < target:
            raise ConfigError(
                f"{where}: torch {torch} is older than project.torch_target {matrix.project.torch_target}."
            )
    if target not in [_version(torch)[:2] for torch in matrix.test_torch]:
        wanted = matrix.project.torch_target
        raise ConfigError(
            f"{where}: test.torch: expected a torch {wanted}.* (project.torch_target), got none."
        )
