"""Facts of the wheel as an archive: name, METADATA, WHEEL, RECORD, licences, build record."""

from __future__ import annotations

import email.parser
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from email.message import Message
from pathlib import Path, PurePosixPath

from installer.records import parse_record_file
from installer.sources import WheelFile
from packaging.metadata import ExceptionGroup, RawMetadata, parse_email
from packaging.metadata import Metadata as CoreMetadata
from packaging.tags import parse_tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ci.errors import MetadataError
from ci.verify.facts import Metadata, Wheel

BUILD_RECORD = "build_record.json"
_VERSION_FILE = "_version.py"
_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


def read_wheel(path: Path) -> Wheel:
    """Read the archive's facts; MetadataError when it is no wheel at all (bad zip, bad name, no dist-info).

    What other checkers say of it (`content_problems`, `platform`) is left empty.
    """
    name, version, tags = _parse_filename(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
            dist_info = _dist_info(members, path)
            wheel_file = _headers(archive, f"{dist_info}/WHEEL", path)
            return Wheel(
                filename=path.name,
                size=path.stat().st_size,
                name=name,
                version=version,
                tags=tags,
                wheel_tags=_expand(wheel_file.get_all("Tag", [])),
                root_is_purelib=_boolean(wheel_file.get("Root-Is-Purelib")),
                dist_info=dist_info,
                members=members,
                metadata=_metadata(_read(archive, f"{dist_info}/METADATA", path)),
                module_version=_module_version(archive, members),
                record_problems=tuple(_record_problems(archive, dist_info)),
                content_problems=(),
                build_record=_build_record(archive, members),
                platform=None,
            )
    except zipfile.BadZipFile as error:
        raise MetadataError(f"{path.name}: expected a zip archive, got: {error}. Build it again.") from error


def _parse_filename(path: Path) -> tuple[str, str, tuple[str, ...]]:
    try:
        _, _, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise MetadataError(
            f"{path.name}: expected NAME-VERSION-PYTHON-ABI-PLATFORM.whl, got: {error}"
        ) from error
    name, version = path.name.split("-")[:2]
    return name, version, tuple(sorted(str(tag) for tag in tags))


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, int]:
    names = [item.filename for item in archive.infolist() if not item.is_dir()]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise MetadataError(
            f"{path.name}: expected each file once, got {', '.join(repeated)} more than once."
        )
    return {item.filename: item.file_size for item in archive.infolist() if not item.is_dir()}


def _dist_info(members: Mapping[str, int], path: Path) -> str:
    folders = sorted({PurePosixPath(name).parts[0] for name in members})
    found = [folder for folder in folders if folder.endswith(".dist-info")]
    if len(found) != 1:
        raise MetadataError(f"{path.name}: expected one .dist-info folder, got {found or 'none'}.")
    return found[0]


def _read(archive: zipfile.ZipFile, member: str, path: Path) -> bytes:
    try:
        return archive.read(member)
    except KeyError:
        raise MetadataError(f"{path.name}: expected the file {member}, got none.") from None


def _headers(archive: zipfile.ZipFile, member: str, path: Path) -> Message:
    text = _read(archive, member, path).decode("utf-8", "replace")
    return email.parser.Parser().parsestr(text)


def _expand(tags: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(str(tag) for text in tags for tag in parse_tag(text)))


def _boolean(text: str | None) -> bool | None:
    return {"true": True, "false": False}.get((text or "").strip().lower())


def _metadata(raw_bytes: bytes) -> Metadata:
    raw, unparsed = parse_email(raw_bytes)
    return Metadata(
        name=raw.get("name", ""),
        version=raw.get("version", ""),
        requires_python=raw.get("requires_python", ""),
        requires_dist=tuple(raw.get("requires_dist", [])),
        license_expression=raw.get("license_expression", ""),
        license_files=tuple(raw.get("license_files", [])),
        invalid=tuple(_invalid_fields(raw)) + tuple(f"unknown field {name}" for name in sorted(unparsed)),
    )


def _invalid_fields(raw: RawMetadata) -> list[str]:
    try:
        CoreMetadata.from_raw(raw, validate=True)
    except ExceptionGroup as group:
        return [str(error) for error in group.exceptions]
    return []


def _module_version(archive: zipfile.ZipFile, members: Mapping[str, int]) -> str | None:
    names = [name for name in members if PurePosixPath(name).name == _VERSION_FILE]
    match = _VERSION.search(archive.read(names[0]).decode("utf-8")) if len(names) == 1 else None
    return match.group(1) if match else None


def _record_problems(archive: zipfile.ZipFile, dist_info: str) -> list[str]:
    name = f"{dist_info}/RECORD"
    if name not in archive.namelist():
        return [f"{name} is missing"]
    rows = parse_record_file(archive.read(name).decode("utf-8").splitlines())
    present = set(archive.namelist())
    # installer checks every file against RECORD, but not that RECORD names only files that exist.
    ghosts = sorted(path for path, _, _ in rows if path not in present)
    return [f"RECORD lists {path}, which is not in the wheel" for path in ghosts] + _installer_problems(
        archive
    )


def _installer_problems(archive: zipfile.ZipFile) -> list[str]:
    try:
        WheelFile(archive).validate_record()
    except Exception as error:  # the library's own error class is private; it carries `issues`
        issues = getattr(error, "issues", None)
        if not isinstance(issues, list):
            raise
        return [re.sub(r"^In \S*, ", "", str(issue)) for issue in issues]
    return []


def _build_record(archive: zipfile.ZipFile, members: Mapping[str, int]) -> dict[str, object] | None:
    names = [name for name in members if PurePosixPath(name).name == BUILD_RECORD]
    if len(names) != 1:
        return None
    try:
        record = json.loads(archive.read(names[0]))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
