"""Facts of the wheel as an archive: name, METADATA, WHEEL, RECORD, licences, build record, SBOM."""

from __future__ import annotations

import csv
import email.parser
import hashlib
import json
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from installer.records import InvalidRecordEntry, RecordEntry, parse_record_file
from installer.sources import WheelFile
from packaging.metadata import ExceptionGroup, RawMetadata, parse_email
from packaging.metadata import Metadata as CoreMetadata
from packaging.tags import parse_tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ci import sbom
from ci.errors import MetadataError
from ci.verify.facts import Metadata, Wheel

BUILD_RECORD = "build_record.json"
_VERSION_FILE = "_version.py"
_MOST_BYTES = 2**28  # unpacked: a hundred times what is in a wheel, and no burden on a memory
_LOCAL, _END = 30, 22  # bytes of a member's header before its name, and of the zip's last record
_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


def read_wheel(path: Path) -> Wheel:
    """Read the archive's facts; MetadataError when it is no wheel that can be judged.

    That is: a bad zip, name, member or ``.dist-info`` folder, or a WHEEL, METADATA or RECORD that cannot be
    read, on which installers and the other checkers fail in ways of their own.  What those checkers say
    (`content_problems`, `platform`) is left empty.
    """
    name, version, tags = _parse_filename(path)
    contents = members(path)
    dist_info = _dist_info(contents, path)
    wheel_file = email.parser.Parser().parsestr(_text(contents, f"{dist_info}/WHEEL", path))
    _text(contents, f"{dist_info}/METADATA", path)
    return Wheel(
        filename=path.name,
        size=path.stat().st_size,
        name=name,
        version=version,
        tags=tags,
        wheel_tags=_expand(wheel_file.get_all("Tag", [])),
        wheel_version=wheel_file.get("Wheel-Version"),
        root_is_purelib=_boolean(wheel_file.get("Root-Is-Purelib")),
        dist_info=dist_info,
        members={member: len(data) for member, data in contents.items()},
        digests={member: hashlib.sha256(data).hexdigest() for member, data in contents.items()},
        top_level=tuple(contents.get(f"{dist_info}/top_level.txt", b"").decode("utf-8", "replace").split()),
        metadata=_metadata(contents[f"{dist_info}/METADATA"]),
        module_version=_module_version(contents),
        record_problems=tuple(_record_problems(contents, dist_info, path)),
        content_problems=(),
        build_record=_json(contents, BUILD_RECORD),
        sbom=_json(contents, PurePosixPath(sbom.MEMBER).name),
        platform=None,
    )


def _parse_filename(path: Path) -> tuple[str, str, tuple[str, ...]]:
    try:
        _, _, build, tags = parse_wheel_filename(path.name)
        if build:  # installers prefer it to the wheel of that version without one
            raise InvalidWheelFilename("a build number after the version")
    except InvalidWheelFilename as error:
        raise MetadataError(
            f"{path.name}: expected NAME-VERSION-PYTHON-ABI-PLATFORM.whl, got: {error}"
        ) from error
    name, version = path.name.split("-")[:2]
    return name, version, tuple(sorted(str(tag) for tag in tags))


def members(path: Path) -> dict[str, bytes]:
    """Every file in the archive; MetadataError for what no installer could unpack."""
    try:
        with zipfile.ZipFile(path) as archive:
            items = [item for item in archive.infolist() if not item.is_dir()]
            _refuse_names([item.filename for item in items], path)
            _refuse_kinds(items, path)
            _refuse_gaps(archive, path)
            return {item.filename: archive.read(item) for item in items}
    # zipfile: RuntimeError for an encrypted file, NotImplementedError for an unknown compression, OSError,
    # ValueError and struct.error for offsets outside the file.
    except (
        zipfile.BadZipFile,
        RuntimeError,
        OSError,
        ValueError,
        EOFError,
        zlib.error,
        struct.error,
    ) as error:
        raise MetadataError(
            f"{path.name}: expected a zip archive that can be unpacked, got: {error}. Build it again."
        ) from error


def _refuse_names(names: Sequence[str], path: Path) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise MetadataError(
            f"{path.name}: expected each file once, got {', '.join(repeated)} more than once."
        )
    outside = [name for name in names if PurePosixPath(name).is_absolute() or ".." in name.split("/")]
    if outside:
        raise MetadataError(f"{path.name}: expected names below the wheel's own folders, got {outside}.")


def _refuse_kinds(items: Sequence[zipfile.ZipInfo], path: Path) -> None:
    links = [item.filename for item in items if stat.S_ISLNK(item.external_attr >> 16)]
    if links:
        raise MetadataError(f"{path.name}: expected regular files, got symbolic links {links}.")
    unpacked = sum(item.file_size for item in items)
    if unpacked > _MOST_BYTES:
        raise MetadataError(f"{path.name}: expected at most {_MOST_BYTES} bytes unpacked, got {unpacked}.")


def _refuse_gaps(archive: zipfile.ZipFile, path: Path) -> None:
    """MetadataError unless the members lie one after the other, and the directory of the zip after them.

    Trap: who unpacks while downloading goes from member to member and has not seen the directory.  A member
    that only one of the two has is installed by some and judged by none (uv: CVE-2025-54368).
    """
    data, at = path.read_bytes(), 0
    for item in sorted(archive.infolist(), key=lambda item: item.header_offset):
        if item.header_offset != at:
            break
        lengths = data[at + _LOCAL - 4 : at + _LOCAL]  # of name and extra field
        at += _LOCAL + sum(struct.unpack("<HH", lengths)) + item.compress_size
    if at != archive.start_dir or data[-_END:][:4] != b"PK\5\6":
        raise MetadataError(
            f"{path.name}: expected members without gaps, then their directory, got bytes that no member "
            f"has at offset {at}. Build it again."
        )


def _dist_info(contents: Mapping[str, bytes], path: Path) -> str:
    folders = sorted({PurePosixPath(name).parts[0] for name in contents})
    found = [folder for folder in folders if folder.endswith(".dist-info")]
    if len(found) != 1:
        raise MetadataError(f"{path.name}: expected one .dist-info folder, got {found or 'none'}.")
    return found[0]


def _text(contents: Mapping[str, bytes], member: str, path: Path) -> str:
    if member not in contents:
        raise MetadataError(f"{path.name}: expected the file {member}, got none. Build it again.")
    try:
        return contents[member].decode("utf-8")
    except UnicodeDecodeError as error:
        raise MetadataError(
            f"{path.name}: {member}: expected UTF-8 text, got: {error}. Build it again."
        ) from error


def _expand(tags: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(name for text in tags for name in _expand_one(text)))


def _expand_one(text: str) -> list[str]:
    try:
        return [str(tag) for tag in parse_tag(text)]
    except ValueError:  # not three parts: kept as it is, to be compared with the file name's tags
        return [text]


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


def _module_version(contents: Mapping[str, bytes]) -> str | None:
    found = [data for name, data in contents.items() if PurePosixPath(name).name == _VERSION_FILE]
    match = _VERSION.search(found[0].decode("utf-8", "replace")) if len(found) == 1 else None
    return match.group(1) if match else None


def _record_problems(contents: Mapping[str, bytes], dist_info: str, path: Path) -> list[str]:
    name = f"{dist_info}/RECORD"
    lines = _text(contents, name, path).splitlines()
    try:
        rows = [(entry[0], RecordEntry.from_elements(*entry)) for entry in parse_record_file(lines)]
    except (InvalidRecordEntry, ValueError, csv.Error) as error:
        raise MetadataError(
            f"{path.name}: {name}: expected lines of PATH,HASH,SIZE, got: {error}. Build it again."
        ) from error
    # installer checks every file against RECORD, but not that RECORD names only files that exist.
    ghosts = sorted(listed for listed, _ in rows if listed not in contents)
    return [f"RECORD lists {ghost}, which is not in the wheel" for ghost in ghosts] + _installer_problems(
        path
    )


def _installer_problems(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            WheelFile(archive).validate_record()
    except Exception as error:  # the library's own error class is private; it carries `issues`
        issues = getattr(error, "issues", None)
        if not isinstance(issues, list):
            raise
        return [re.sub(r"^In \S*, ", "", str(issue)) for issue in issues]
    return []


def _json(contents: Mapping[str, bytes], file: str) -> dict[str, object] | None:
    """The JSON object in the one member of that name."""
    found = [data for name, data in contents.items() if PurePosixPath(name).name == file]
    if len(found) != 1:
        return None
    try:
        value = json.loads(found[0])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
