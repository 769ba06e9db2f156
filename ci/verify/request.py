"""What this run expects: the expectation files narrowed to one artifact, its architectures and its row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ci.archs import arch
from ci.errors import ConfigError, MetadataError
from ci.matrix import CudaRow, Matrix, Project, archs_of_label, row_of_label
from ci.verify.expectations import (
    Expectations,
    LibraryExpectation,
    PlatformExpectation,
    Sizes,
    WheelExpectation,
)


@dataclass(frozen=True)
class Request:
    """`archs` must be there as machine code, `ptx` as PTX, nothing else; `row` is None when unknown.

    `not_run` are the architectures whose code never ran on hardware, by the matrix.
    """

    archs: tuple[str, ...]
    ptx: tuple[str, ...]
    not_run: frozenset[str]
    row: CudaRow | None
    project: Project
    libraries: tuple[LibraryExpectation, ...]
    platform: PlatformExpectation
    wheel: WheelExpectation
    sizes: Sizes


def make_request(
    path: Path, expectations: Expectations, matrix: Matrix, expect: str | None, row: str | None
) -> Request:
    """Resolve what is expected of `path`.

    `expect` is a list such as ``90a,100f+PTX``, by default the architectures in the wheel's local label, or
    the row's; `row` is by default the one that the label names.  ConfigError or MetadataError when neither is
    known.
    """
    is_wheel = path.suffix == ".whl"
    cuda_row = matrix.cuda_row(row) if row else _row_of_label(path, matrix, expect) if is_wheel else None
    expect = expect or (archs_of_label(_label(path)) if is_wheel else None)
    if expect is not None:
        archs, ptx = _parse(expect)
    elif cuda_row is not None:
        archs, ptx = _parse(cuda_row.value)
    else:
        raise ConfigError(
            f"{path.name}: which architectures are expected? Give --expect 90a,100a or --row LABEL."
        )
    libraries = expectations.libraries if is_wheel else (_library_of(path, expectations),)
    return Request(
        archs,
        ptx,
        frozenset(matrix.not_run(matrix.archs)),
        cuda_row,
        matrix.project,
        libraries,
        expectations.platform,
        expectations.wheel,
        expectations.sizes,
    )


def _parse(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    choices, problems = arch.parse_list(text)
    if problems or not choices:
        reasons = "; ".join(f"{problem.item}: {problem.text}" for problem in problems) or "the list is empty"
        raise ConfigError(f"--expect {text!r}: {reasons} Write for example --expect 90a,100a.")
    return (
        tuple(choice.target.name for choice in choices),
        tuple(choice.target.name for choice in choices if choice.ptx),
    )


def label_of(version: str) -> str:
    """The local label of a version: ``cu130`` of ``0.1.0+cu130``, empty without one."""
    return version.partition("+")[2]


def _label(path: Path) -> str:
    parts = path.name.split("-")
    return label_of(parts[1]) if len(parts) > 1 else ""


def _row_of_label(path: Path, matrix: Matrix, expect: str | None) -> CudaRow | None:
    label = _label(path)
    for row in matrix.rows:
        if row.label == row_of_label(label):
            return row
    if expect is not None:
        return None
    labels = ", ".join(row.label for row in matrix.rows)
    raise MetadataError(
        f"{path.name}: label: expected one of {labels} (ci/matrix.toml) after '+', got {label or 'none'}. "
        "Build with FLASH_KDA_LOCAL_VERSION set, or name what is expected: --row LABEL or --expect LIST."
    )


def _library_of(path: Path, expectations: Expectations) -> LibraryExpectation:
    same = [item for item in expectations.libraries if Path(item.path).name == path.name]
    if not same and len(expectations.libraries) == 1:
        same = list(expectations.libraries)
    if len(same) != 1:
        known = ", ".join(item.path for item in expectations.libraries)
        raise ConfigError(
            f"{path.name}: expected a library with the name of one in wheels/expectations ({known})."
        )
    # The facts of a library given alone carry its file name, not a place in a wheel.
    return replace(same[0], path=path.name)
