"""The failure classes of the factory: one exception and one exit code each, kept in this file alone.

A message says what happened, what was expected against what was found, and the next command to run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence


class CiError(Exception):
    """Base of every failure the factory reports; ``exit_code`` is what the command returns."""

    exit_code = 1

    def __init__(self, message: str, details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.details = dict(details or {})

    def as_dict(self) -> dict[str, object]:
        """The error as plain data, for ``--json``: its class, exit code, message and details."""
        base = {"ok": False, "error": type(self).__name__, "exit_code": self.exit_code, "message": str(self)}
        return {**base, **self.details}


class ConfigError(CiError):
    """A value that a person or a file gave is wrong."""

    exit_code = 2


class ToolchainError(CiError):
    """The CUDA toolkit or another tool is missing, damaged or not the locked one."""

    exit_code = 3


class BuildError(CiError):
    """Compiling or linking failed."""

    exit_code = 4


class SassError(CiError):
    """An expected machine-code image is missing, or an unexpected one is there."""

    exit_code = 5


class ResourceError(CiError):
    """A kernel exceeds its budget of registers, stack or spills."""

    exit_code = 6


class InstructionError(CiError):
    """A kernel lacks an instruction it must use."""

    exit_code = 7


class PlatformError(CiError):
    """A library needs newer system symbols, or other libraries, than the wheel's tag allows."""

    exit_code = 8


class AbiError(CiError):
    """A library uses symbols outside the stable ABI."""

    exit_code = 9


class MetadataError(CiError):
    """A wheel's name, label, tags, RECORD or contents disagree."""

    exit_code = 10


class ReproducibilityError(CiError):
    """Two builds of the same source differ."""

    exit_code = 11


class TargetMismatchError(CiError):
    """The GPU at hand is not the one the tests are for."""

    exit_code = 12


class GpuTestError(CiError):
    """Tests on the GPU failed."""

    exit_code = 13


class ProvenanceError(CiError):
    """What a wheel says of its origin is missing, is not true, or cannot be followed."""

    exit_code = 15


class ReleaseError(CiError):
    """A wheel may not be published."""

    exit_code = 16


class FileError(CiError):
    """A file or folder cannot be read or written: it is missing, the disk is full, somebody else's."""

    exit_code = 17


class LintError(CiError):
    """A linter, formatter or type checker complained."""

    exit_code = 14


def missing_package(error: ModuleNotFoundError, locks: Sequence[str]) -> SystemExit:
    """The end of a command, to be raised where it imports the packages of ``ci/requirements``.

    Its message is a ToolchainError's; no exception of ours could be caught there, since a package's import
    runs before its ``__main__``.
    """
    files = " ".join(f"-r ci/requirements/{name}.txt" for name in locks)
    print(
        f"ToolchainError: {error}: expected the pinned packages of {', '.join(locks)}.\n"
        f"Next: use nox, or: python -m pip install --require-hashes {files}",
        file=sys.stderr,
    )
    return SystemExit(ToolchainError.exit_code)


_INTERRUPTED = 130  # what shells give for SIGINT


def run_cli(main: Callable[[], int], *, as_json: bool = False) -> int:
    """Run a command's `main`; turn a CiError into its message (or JSON on stdout) and its exit code.

    So is the system's refusal of a file, which any command can meet anywhere.
    """
    try:
        return main()
    except CiError as error:
        return _report(error, as_json)
    except OSError as error:
        return _report(_file_error(error), as_json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _report(error: CiError, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.as_dict(), sort_keys=True))
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return error.exit_code


def _file_error(error: OSError) -> FileError:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return FileError(
        f"{' and '.join(names) or 'a file'}: expected to read or write it, got: {error.strerror or error}.\n"
        "Next: check the name, its owner, and the room on the disk (df -h)"
    )
