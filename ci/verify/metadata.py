"""Verdicts on the archive: all it says of itself agrees, with the images too; and its size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ci import platforms
from ci.errors import MetadataError
from ci.matrix import CudaRow, archs_of_label, row_of_label
from ci.source import ROOT
from ci.toml import read_toml
from ci.verify.build_record import check_files, check_form
from ci.verify.facts import Library, Wheel
from ci.verify.materials import check_sbom
from ci.verify.request import Request, label_of
from ci.verify.verdicts import Sheet, Verdict, listing, show

_HINT = "Change the source of the value (setup.py, pyproject.toml, ci/matrix.toml) and build again."
_ABI = "abi3"
_INSTRUCTION_BYTES = 16  # of each one, on every architecture with kernels
_WHEEL_VERSION = "1.0"  # installers refuse a higher first number and warn of a higher second one
_RECORD_SCHEMA = 1  # of build_record.json, written by ci/extension/record.py


def check_metadata(libraries: Iterable[Library], wheel: Wheel, request: Request) -> Verdict:
    """What the file name, METADATA, WHEEL, RECORD, build record and images say is one and the same."""
    sheet = Sheet("metadata", MetadataError, _HINT)
    _check_names(sheet, wheel, request)
    _check_tags(sheet, wheel, request)
    _check_fields(sheet, wheel, request)
    _check_files(sheet, wheel, request)
    _check_build(sheet, wheel, tuple(libraries), request)
    return sheet.verdict()


def _check_names(sheet: Sheet, wheel: Wheel, request: Request) -> None:
    file, expected = wheel.filename, request.wheel
    sheet.equal(file, "name in the file name", expected.name, wheel.name)
    sheet.equal(file, "Name in METADATA", expected.metadata_name, wheel.metadata.name)
    same = canonicalize_name(wheel.name) == canonicalize_name(wheel.metadata.name)
    sheet.check(same, file, "Name in METADATA against the file name", wheel.name, show(wheel.metadata.name))
    sheet.equal(file, "Version in METADATA against the file name", wheel.version, wheel.metadata.version)
    sheet.equal(file, ".dist-info folder", f"{wheel.name}-{wheel.version}.dist-info", wheel.dist_info)
    sheet.equal(file, "__version__ in the package", wheel.version.partition("+")[0], wheel.module_version)
    if request.row is not None:
        sheet.equal(file, "label in the file name", request.row.label, row_of_label(label_of(wheel.version)))
    if narrowed := archs_of_label(label_of(wheel.version)):
        held = [f"{name}+PTX" if name in request.ptx else name for name in request.archs]
        sheet.same_set(file, "architecture in the label", held, narrowed.split(","))


def _check_tags(sheet: Sheet, wheel: Wheel, request: Request) -> None:
    sheet.same_set(wheel.filename, "Tag in WHEEL", wheel.tags, wheel.wheel_tags)
    wanted = {f"{request.project.python_tag}-{_ABI}"}
    got = {"-".join(tag.split("-")[:2]) for tag in wheel.tags}
    sheet.same_set(wheel.filename, "Python and ABI tag", wanted, got)
    sheet.equal(wheel.filename, "Root-Is-Purelib in WHEEL", False, wheel.root_is_purelib)
    sheet.equal(wheel.filename, "Wheel-Version in WHEEL", _WHEEL_VERSION, wheel.wheel_version)


def _check_fields(sheet: Sheet, wheel: Wheel, request: Request) -> None:
    file, metadata = wheel.filename, wheel.metadata
    sheet.check(not metadata.invalid, file, "METADATA", "valid fields", listing(metadata.invalid))
    sheet.equal(file, "Requires-Python", f">={request.project.python}", metadata.requires_python)
    torch = f">={request.project.torch_target}"
    sheet.equal(file, "Requires-Dist of torch", torch, _torch_bound(metadata.requires_dist))
    sheet.same_set(file, "Requires-Dist", _wanted(), set(map(_normal, metadata.requires_dist)))
    sheet.equal(file, "License-Expression", request.wheel.license_expression, metadata.license_expression)
    sheet.same_set(file, "License-File", request.wheel.license_files, metadata.license_files)


def _wanted() -> set[str]:
    """What pyproject.toml requires, extras too, in METADATA's words."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"].items()
    optional = [f'{text}; extra == "{extra}"' for extra, texts in extras for text in texts]
    return set(map(_normal, [*project["dependencies"], *optional]))


def _normal(text: str) -> str:
    try:
        return str(Requirement(text))
    except InvalidRequirement:
        return text


def _torch_bound(requirements: Iterable[str]) -> str:
    bounds = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == "torch" and requirement.marker is None:
            bounds.append(str(requirement.specifier) or "any version")
    return listing(bounds)


def _check_files(sheet: Sheet, wheel: Wheel, request: Request) -> None:
    file = wheel.filename
    for name in request.wheel.license_files:
        member = f"{wheel.dist_info}/licenses/{name}"
        sheet.check(wheel.members.get(member, 0) > 0, file, "licence text", member, "none, or an empty file")
    sheet.check(
        not wheel.record_problems,
        file,
        "RECORD",
        "every file, with its hash",
        "; ".join(wheel.record_problems),
    )
    content = wheel.content_problems
    sheet.check(not content, file, "check-wheel-contents", "no findings", "; ".join(content))
    homes = {*request.wheel.packages, wheel.dist_info}
    outside = [name for name in wheel.members if PurePosixPath(name).parts[0] not in homes]
    sheet.check(not outside, file, "file outside the package", listing(homes), listing(outside))
    sheet.same_set(file, "name in top_level.txt", request.wheel.packages, wheel.top_level)


def _check_build(sheet: Sheet, wheel: Wheel, libraries: tuple[Library, ...], request: Request) -> None:
    file, record = wheel.filename, wheel.build_record
    if (
        not sheet.check(record is not None, file, "build_record.json", "one JSON object", "none")
        or not record
    ):
        return
    if check_form(sheet, file, record):
        check_files(sheet, wheel, record, request)
        check_sbom(sheet, wheel, record)
    sheet.equal(file, "schema of the build record", _RECORD_SCHEMA, record.get("schema"))
    sheet.equal(file, "name in the build record", request.wheel.metadata_name, record.get("name"))
    sheet.equal(file, "version in the build record", wheel.version, record.get("version"))
    project = request.project
    sheet.equal(file, "Python in the build record", f"{project.python_tag}-{_ABI}", record.get("python"))
    sheet.equal(
        file, "torch target in the build record", project.torch_target, _within(record, "torch", "target")
    )
    _check_architectures(sheet, file, libraries, _texts(record, "architectures"))
    untried = [name for name in _texts(record, "architectures") if name.partition("+")[0] in request.not_run]
    said = _texts(record, "built_not_run")
    sheet.same_set(file, "architecture built and not run in the build record", untried, said)
    toolkit = _within(record, "cuda", "toolkit")
    found = {toolkit for library in libraries for toolkit in library.toolkits}
    sheet.same_set(file, "toolkit in the images against the build record", {str(toolkit)}, found)
    label = f"cu{str(toolkit).replace('.', '')}"
    named = row_of_label(label_of(wheel.version))
    sheet.equal(file, "label against the toolkit of the build record", label, named)
    if request.row is not None:
        sheet.equal(file, "toolkit in the build record against the row", request.row.toolkit, toolkit)


def _within(record: Mapping[str, object], table: str, key: str) -> object:
    inner = record.get(table)
    return inner.get(key) if isinstance(inner, dict) else None


def _texts(record: Mapping[str, object], key: str) -> list[str]:
    found = record.get(key)
    return [str(item) for item in found] if isinstance(found, list) else []


def _check_architectures(sheet: Sheet, file: str, libraries: Iterable[Library], names: list[str]) -> None:
    images = [image for library in libraries for image in library.images]
    targets = {name.partition("+")[0] for name in names}
    machine_code = {image.arch for image in images if image.kind == "elf"}
    sheet.same_set(file, "architecture in the images against the build record", targets, machine_code)
    with_ptx = {name.partition("+")[0] for name in names if name.upper().endswith("+PTX")}
    ptx = {image.arch for image in images if image.kind == "ptx"}
    sheet.same_set(file, "PTX in the images against the build record", with_ptx, ptx)


def code_bytes(libraries: Iterable[Library]) -> dict[str, dict[str, int]]:
    """Bytes of the instructions of each kernel, by architecture."""
    found: dict[str, dict[str, int]] = {}
    for image in (image for library in libraries for image in library.images if image.kind == "elf"):
        for kernel in image.kernels:
            row = found.setdefault(kernel.symbol, {})
            row[image.arch] = row.get(image.arch, 0) + _INSTRUCTION_BYTES * sum(kernel.opcodes.values())
    return found


def check_size(libraries: Iterable[Library], wheel: Wheel, request: Request) -> Verdict:
    """The wheel file, and with a row its library and each kernel, stay within their budgets (bytes)."""
    hint = "Find what grew: nox -s diff -- OLD NEW; when it is meant: nox -s size -- --write"
    sheet, held = Sheet("size", MetadataError, hint), tuple(libraries)
    limit = request.wheel.max_bytes
    sheet.check(wheel.size <= limit, wheel.filename, "size over budget", f"at most {limit} bytes", wheel.size)
    if request.row is not None:
        _check_ledger(sheet, held, wheel, request, request.row)
    return sheet.verdict()


def _check_ledger(
    sheet: Sheet, libraries: tuple[Library, ...], wheel: Wheel, request: Request, row: CudaRow
) -> None:
    file = wheel.filename
    name = platforms.line(row.label, platforms.of_wheel(Path(file)).name)
    ledger = request.sizes.rows.get(name)
    if not sheet.check(ledger is not None, file, "line in size.toml", name, "none") or ledger is None:
        return

    def within(what: str, budget: int | None, size: int) -> None:
        limit = (budget or 0) * (100 + request.sizes.growth) // 100
        sheet.check(size <= limit, file, f"{what} over budget", f"at most {limit} bytes", size)

    if request.archs == row.archs:
        within("wheel", ledger.wheel, wheel.size)
        within("library", ledger.library, sum(library.size for library in libraries))
    for kernel, sizes in code_bytes(libraries).items():
        for name, size in sizes.items():
            if name in row.archs:  # no wheel of a row has the others: they are built on request
                within(f"{kernel} for sm_{name}", ledger.code.get(kernel, {}).get(name), size)
