"""Verification of a built wheel or library: facts are gathered, each concern judges them, a report is made.

``python -m ci.verify WHEEL_OR_SO [--expect 90a,100a] [--row cu130] [--platform aarch64] [--json]
[--cuobjdump PATH]``
"""

from __future__ import annotations

from pathlib import Path

from ci import matrix as matrix_module
from ci.errors import ConfigError, missing_package
from ci.platforms import of_wheel
from ci.verify import expectations as expectations_module

try:
    from ci.verify.abi import check_abi
    from ci.verify.build_record import warnings
    from ci.verify.facts import Facts
    from ci.verify.floor import check_platform
    from ci.verify.gather import gather_facts
    from ci.verify.metadata import check_metadata, check_size
    from ci.verify.report import Report
    from ci.verify.request import Request, make_request
    from ci.verify.sass import check_contract, check_instructions, check_resources
except ModuleNotFoundError as error:
    raise missing_package(error, ["ci", "verify"]) from error

__all__ = ["Report", "judge", "verify_wheel"]


def verify_wheel(
    path: Path,
    *,
    expect: str | None = None,
    row: str | None = None,
    platform: str | None = None,
    cuobjdump: Path | None = None,
    expectations: Path | None = None,
    matrix: Path | None = None,
) -> Report:
    """Verify a wheel, or a shared library given alone (then without the checks of the archive).

    `expect` is a list of architectures such as ``90a,100f+PTX`` (default: the row's), `row` a label of
    ``ci/matrix.toml`` (default: the one in the wheel's name), `platform` what it runs on (default: by the
    wheel's name, the building machine's for a library), `cuobjdump` the program (default: that of the row's
    locked toolkit), `expectations` and `matrix` other files, for tests.

    Returns the report whatever it says; ``Report.raise_on_failure`` raises the CiError of the first failure.
    Raises ConfigError, ToolchainError or MetadataError when the artifact could not be judged at all.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: expected a wheel or a shared library, got no such file.")
    table = matrix_module.load(matrix).on(platform or of_wheel(path).name)
    request = make_request(path, expectations_module.load(expectations), table, expect, row)
    tool = cuobjdump or default_cuobjdump(table, request.row)
    return judge(gather_facts(path, tool, request.project.python), request)


def judge(facts: Facts, request: Request) -> Report:
    """The report on facts already gathered; pure."""
    verdicts = [
        check_contract(facts.libraries, request),
        check_resources(facts.libraries, request),
        check_instructions(facts.libraries, request),
        check_platform(facts.libraries, facts.wheel, request),
        check_abi(facts.libraries, request),
    ]
    if facts.wheel is not None:
        verdicts += [
            check_metadata(facts.libraries, facts.wheel, request),
            check_size(facts.libraries, facts.wheel, request),
        ]
    row = request.row.label if request.row else None
    notes = warnings(facts.wheel.build_record) if facts.wheel else ()
    return Report(facts, request.archs, request.ptx, row, tuple(verdicts), notes)


def default_cuobjdump(table: matrix_module.Matrix, row: matrix_module.CudaRow | None) -> Path:
    """cuobjdump of the row's locked toolkit, or of the newest where it has none; installed on first use."""
    from ci import toolchain

    chosen = row if row in table.locked_rows else table.locked_rows[-1]
    return toolchain.ensure(chosen.toolkit) / "bin" / "cuobjdump"
