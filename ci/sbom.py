"""The bill of materials inside a wheel (CycloneDX, in ``.dist-info/sboms``, PEP 770): what made its bytes.

Made from the wheel's build record and the locks alone, without a clock or a random number, so that two builds
of one commit agree on it, and ``ci.verify`` can make it again and compare.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ci.errors import ConfigError, MetadataError, ToolchainError, missing_package
from ci.sysroot import GLIBC
from ci.toolchain import FOLDER, Pin, image, lock_path, read_lock
from ci.venv import REQUIREMENTS

try:
    from cyclonedx.model import (
        ExternalReference,
        ExternalReferenceType,
        HashAlgorithm,
        HashType,
        Property,
        XsUri,
    )
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL
except ModuleNotFoundError as error:
    raise missing_package(error, ["ci", "verify"]) from error

MEMBER = "sboms/flash-kda.cdx.json"  # below .dist-info
BUILD_LOCK = REQUIREMENTS / "build.txt"
# Of the locked packages, the one whose code lies in the library itself; the others are tools.
_LINKED = "nvidia-cuda-runtime"
_NVCC, _ZIG = "nvidia-cuda-nvcc", "ziglang"
_SYSROOT = "-L{sysroot}/lib"  # among the link flags of a build record, when zig's stubs were linked with
# A pin of build.txt without a marker: those with one are for Pythons that build no wheel.
_PIN = re.compile(r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def build_pins(path: Path = BUILD_LOCK) -> tuple[Pin, ...]:
    """The packages of the build environment; ConfigError when the lock holds none."""
    found = _PIN.findall(path.read_text(encoding="utf-8"))
    if not found:
        raise ConfigError(f"{path}: expected pinned packages, got none.\nNext: git checkout {path.name}")
    return tuple(
        Pin(name, version, tuple(re.findall(r"sha256:(\w+)", hashes))) for name, version, hashes in found
    )


def make(record: Mapping[str, Any], epoch: int) -> str:
    """The JSON text for the wheel of that build record, dated `epoch` (seconds since 1970).

    Raises ToolchainError when the wheel was compiled by another nvcc than the locked one, and MetadataError
    when the record lacks something.
    """
    try:
        return _text(_bom(record, epoch))
    except (LookupError, TypeError, AttributeError) as error:
        raise MetadataError(
            f"the build record has no list of materials in it: {error!r}.\nNext: build the wheel again"
        ) from error


def _bom(record: Mapping[str, Any], epoch: int) -> Bom:
    wheel = _wheel(record)
    parts = [*_locked(record), *_unlocked(record)]
    bom = Bom(
        components=parts,
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(record, sort_keys=True)),
        metadata=BomMetaData(
            component=wheel,
            timestamp=datetime.fromtimestamp(epoch, timezone.utc),
            lifecycles=[PredefinedLifecycle(LifecyclePhase.BUILD)],
        ),
    )
    bom.register_dependency(wheel, parts)
    return bom


def _text(bom: Bom) -> str:
    plain = json.loads(JsonV1Dot6(bom).output_as_string())
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def _wheel(record: Mapping[str, Any]) -> Component:
    source = record["source"]
    facts = {
        "architectures": " ".join(record["architectures"]),
        "source:commit": source["commit"] or "unknown",
        "source:dirty": {True: "true", False: "false", None: "unknown"}[source["dirty"]],
        "source:sha256": source["sha256"],
    }
    return Component(
        name=record["name"],
        version=record["version"],
        type=ComponentType.LIBRARY,
        purl=PackageURL("pypi", name=record["name"], version=record["version"]),
        bom_ref="wheel",
        properties=[Property(name=f"flash-kda:{key}", value=value) for key, value in facts.items()],
    )


def _locked(record: Mapping[str, Any]) -> Iterator[Component]:
    """Each locked package, with the hash of every file that its lock allows."""
    yield from _toolkit(record["cuda"])
    for pin in build_pins():
        if pin.name != _ZIG or _SYSROOT in record["flags"]["link"]:
            yield _package(pin, "locked for the build environment")


def toolkit_lock(toolkit: str) -> Path:
    """The file that names the packages of a toolkit: its lock, or for the builder image ``image.toml``."""
    path = FOLDER / f"{toolkit}.lock"
    return path if path.is_file() else image.DATA


def _toolkit(cuda: Mapping[str, str]) -> Iterator[Component]:
    if toolkit_lock(cuda["toolkit"]) != image.DATA:
        pins = read_lock(lock_path(cuda["toolkit"]))
        _check_nvcc(cuda, next(pin.version for pin in pins if pin.name == _NVCC))
        yield from (_package(pin, "locked for the CUDA toolkit") for pin in pins)
        return
    wanted = image.packages(cuda["toolkit"])
    _check_nvcc(cuda, wanted.nvcc)
    for name, version in wanted.versions.items():
        yield Component(
            name=name,
            version=version,
            type=ComponentType.APPLICATION,
            scope=ComponentScope.EXCLUDED,
            description="of the CUDA toolkit in the builder image; dnf checked its signature",
            purl=PackageURL("rpm", "nvidia", name, version),
            bom_ref=f"pkg:{name}",
        )


def _check_nvcc(cuda: Mapping[str, str], locked: str) -> None:
    for program in ("nvcc", "ptxas"):
        if cuda[program] != locked:
            raise ToolchainError(
                f"{program} of CUDA {cuda['toolkit']}: expected {locked}, the locked one, "
                f"got {cuda[program]}.\nNext: nox -s build_wheels, which uses the locked toolkit"
            )


def _package(pin: Pin, description: str) -> Component:
    linked = pin.name == _LINKED
    return Component(
        name=pin.name,
        version=pin.version,
        type=ComponentType.LIBRARY if linked else ComponentType.APPLICATION,
        scope=ComponentScope.REQUIRED if linked else ComponentScope.EXCLUDED,
        description=f"{description}{'; linked in statically' if linked else ''}",
        purl=PackageURL("pypi", name=pin.name, version=pin.version),
        bom_ref=f"pkg:{pin.name}",
        # One a file: a lock serves several platforms, and a component's own hashes are those of one file.
        external_references=[_file(pin, digest) for digest in pin.hashes],
    )


def _file(pin: Pin, digest: str) -> ExternalReference:
    return ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"https://pypi.org/project/{pin.name}/{pin.version}/"),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )


def _unlocked(record: Mapping[str, Any]) -> Iterator[Component]:
    """What the build record names and no lock does with a hash."""
    yield _tool("nvcc", record["cuda"]["nvcc"], f"compiles the kernels; a program of {_NVCC}")
    yield _tool("ptxas", record["cuda"]["ptxas"], f"assembles the kernels; a program of {_NVCC}")
    yield _tool("g++", record["cxx"], "compiles the binding and the host side of the kernels, links")
    yield _tool("ld", record["linker"], "the linker that g++ starts")
    if _SYSROOT in record["flags"]["link"]:
        yield _tool("glibc", GLIBC, f"stubs made by {_ZIG}, linked with: they name the symbols' versions")
    torch = record["torch"]["built_with"]
    yield Component(
        name="torch",
        version=torch,
        type=ComponentType.LIBRARY,
        scope=ComponentScope.EXCLUDED,
        description="headers and libraries that were compiled and linked against; nothing of it is inside",
        purl=PackageURL("pypi", name="torch", version=torch),
        bom_ref="pkg:torch",
    )


def _tool(name: str, version: str, description: str) -> Component:
    return Component(
        name=name,
        version=version,
        type=ComponentType.APPLICATION,
        scope=ComponentScope.EXCLUDED,
        description=description,
        bom_ref=f"tool:{name}",
    )
