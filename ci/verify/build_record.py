"""The build record inside a wheel: its form, and the package's files against the digests it holds.

It is written by ci/extension/record.py.  Whoever writes it anew can make it agree with anything: this finds
files lost, added or changed after the build, not a forger; for that, compare the wheel's own sha256.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ci import source
from ci.verify.facts import Wheel
from ci.verify.request import Request
from ci.verify.verdicts import Sheet

_Check: TypeAlias = Callable[[object], bool]
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_text, value))


def _optional(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _commit(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{7,64}", value) is not None


def _files(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_sha256, value.values()))


# Every key there is, dots for tables, and what its value must look like.
_FORM: dict[str, tuple[str, _Check]] = {
    "schema": ("a number", lambda value: type(value) is int),
    "name": ("a text", _text),
    "version": ("a text", _text),
    "python": ("a text", _text),
    "cxx": ("a text", _text),
    "linker": ("a text", _text),
    "architectures": ("a list of texts", _texts),
    "built_not_run": ("a list of texts, perhaps empty", lambda value: value == [] or _texts(value)),
    "cuda.toolkit": ("a text", _text),
    "cuda.nvcc": ("a text", _text),
    "cuda.ptxas": ("a text", _text),
    "torch.built_with": ("a text", _text),
    "torch.target": ("a text", _text),
    "flags.cxx": ("a list of texts", _texts),
    "flags.nvcc": ("a list of texts", _texts),
    "flags.link": ("a list of texts", _texts),
    "tools.setuptools": ("a text or null", _optional(_text)),
    "tools.ninja": ("a text or null", _optional(_text)),
    "source.sha256": ("64 hexadecimal digits", _sha256),
    "source.files": ("a sha256 for each file", _files),
    "source.commit": ("a commit or null", _optional(_commit)),
    "source.dirty": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
}
_TABLES = {key.partition(".")[0] for key in _FORM if "." in key}


def check_form(sheet: Sheet, file: str, record: Mapping[str, object]) -> bool:
    """Every key is there, none besides, each value of its kind; whether all that holds."""
    flat = _flatten(record)
    sheet.same_set(file, "key in the build record", set(_FORM), set(flat))
    fine = set(flat) == set(_FORM)
    for key in sorted(set(_FORM) & set(flat)):
        expected, good = _FORM[key]
        what = f"{key} in the build record"
        fine = sheet.check(good(flat[key]), file, what, expected, repr(flat[key])[:80]) and fine
    return fine


def _flatten(record: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in record.items():
        if key in _TABLES and isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def check_files(sheet: Sheet, wheel: Wheel, record: Mapping[str, object], request: Request) -> None:
    """The wheel holds exactly the package that was built, the expected libraries and the usual metadata.

    `record` has passed `check_form`.
    """
    file, recorded = wheel.filename, files_of(record)
    total = source.combined(recorded)
    sheet.equal(file, "source.sha256 in the build record against its files", total, _within(record, "sha256"))
    homes = tuple(f"{package}/" for package in request.wheel.packages)
    package = {name: digest for name, digest in recorded.items() if name.startswith(homes)}
    made = [item.path for item in request.libraries] + [request.wheel.build_record]
    about = [f"{wheel.dist_info}/{name}" for name in request.wheel.dist_info]
    licences = [f"{wheel.dist_info}/licenses/{name}" for name in request.wheel.license_files]
    sheet.same_set(file, "file", {*package, *made, *about, *licences}, wheel.members)
    for name in sorted(set(package) & set(wheel.digests)):
        what = f"{name}: sha256 against the build record"
        sheet.equal(file, what, package[name], wheel.digests[name])


def files_of(record: Mapping[str, object]) -> dict[str, str]:
    """The digests of the sources, by name; empty when the record has none."""
    files = _within(record, "files")
    return {str(name): str(digest) for name, digest in files.items()} if isinstance(files, dict) else {}


def _within(record: Mapping[str, object], key: str) -> object:
    inner = record.get("source")
    return inner.get(key) if isinstance(inner, dict) else None


def warnings(record: Mapping[str, object] | None) -> tuple[str, ...]:
    """What is no fault of the wheel, but must be known before it is published.

    Sources that differ from their commit are no failure: a change is built and verified before it is
    committed, by this same command.
    """
    if record is None:
        return ()
    if _within(record, "commit") is None:
        return ("made from sources of an unknown commit: not to be published",)
    if _within(record, "dirty") is not False:
        return (
            f"made from sources that differ from commit {_within(record, 'commit')}: not to be published",
        )
    return ()
