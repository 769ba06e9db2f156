"""What is said of a wheel beside it, in ``FILE.whl.intoto.json``: from which sources and locks it was made.

An in-toto Statement v1 with a SLSA Provenance v1 predicate, unsigned: whoever publishes the wheel signs it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ci import matrix, sbom
from ci.errors import MetadataError, ProvenanceError
from ci.extension import record
from ci.platforms import of_wheel
from ci.source import ROOT

SUFFIX = ".intoto.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# What the two mean is in docs/releasing.md.
BUILD_TYPE = "urn:flash-kda:build:1"
BUILDER = "urn:flash-kda:ci.build"


def place(wheel: Path) -> Path:
    """Where the statement on `wheel` lies."""
    return wheel.with_name(wheel.name + SUFFIX)


def sha256(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def statement(wheel: Path) -> dict[str, Any]:
    """The statement on `wheel`, by its own build record and the locks of this checkout."""
    made = record.of_wheel(wheel)
    try:
        parameters = {
            "row": matrix.row_of_label(made["version"].partition("+")[2]),
            "architectures": list(made["architectures"]),
            "platform": of_wheel(wheel).name,
        }
        dependencies = list(_dependencies(made))
    except (LookupError, TypeError, AttributeError) as error:
        raise MetadataError(
            f"{wheel.name}: the build record does not say what it was made from: {error!r}.\n"
            "Next: build the wheel again"
        ) from error
    return {
        "_type": STATEMENT,
        "subject": [{"name": wheel.name, "digest": {"sha256": sha256(wheel)}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": parameters,
                "resolvedDependencies": dependencies,
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def _dependencies(made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    source = made["source"]
    if source["commit"] is not None:
        commit = {"gitCommit": source["commit"]}
        yield {"name": "commit", "digest": commit, "annotations": {"dirty": source["dirty"]}}
    yield {"name": "source files", "digest": {"sha256": source["sha256"]}}
    for lock in (sbom.toolkit_lock(made["cuda"]["toolkit"]), sbom.BUILD_LOCK):
        yield {"name": lock.relative_to(ROOT).as_posix(), "digest": {"sha256": sha256(lock)}}
    yield {"name": "torch", "uri": f"pkg:pypi/torch@{made['torch']['built_with']}"}


def write(wheel: Path) -> Path:
    """Write the statement beside `wheel`."""
    path = place(wheel)
    path.write_text(json.dumps(statement(wheel), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def check(wheel: Path) -> None:
    """ProvenanceError unless the statement beside `wheel` is there and says what it must."""
    path = place(wheel)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ProvenanceError(
            f"{path.name}: expected an in-toto statement beside the wheel, got: {error}.\n"
            "Next: nox -s build_wheels, which writes it"
        ) from error
    differences = list(_differences("", statement(wheel), found))
    if differences:
        raise ProvenanceError(
            f"{path.name}: {'; '.join(differences)}.\n"
            "Next: check out the commit the wheel was made from, or build the wheel again"
        )


def _differences(where: str, expected: object, got: object) -> Iterator[str]:
    """Each place where two JSON values differ, by its keys."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted({*expected, *got}):
            yield from _differences(f"{where}.{key}".lstrip("."), expected.get(key), got.get(key))
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, pair in enumerate(zip(expected, got, strict=True)):
            yield from _differences(f"{where}[{index}]", *pair)
    elif expected != got:
        yield f"{where or 'the file'}: expected {json.dumps(expected)}, got {json.dumps(got)}"
