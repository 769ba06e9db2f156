"""The bill of materials inside a wheel, against the build record and the locks of this checkout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ci import sbom
from ci.errors import CiError
from ci.verify.facts import Wheel
from ci.verify.verdicts import Sheet

_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")


def check_sbom(sheet: Sheet, wheel: Wheel, record: Mapping[str, object]) -> None:
    """It names each locked package and tool, no other, and says of each what the lock and the record say.

    `record` has passed `check_form`.
    """
    file = wheel.filename
    try:
        wanted: dict[str, object] = json.loads(sbom.make(record, 0))
    except CiError as error:
        sheet.check(False, file, "materials by the build record", "those of this checkout's locks", error)
        return
    if not sheet.check(wheel.sbom is not None, file, sbom.MEMBER, "one JSON object", "none"):
        return
    found = dict(wheel.sbom or {})
    components, locked = _by_reference(found.pop("components", None)), _by_reference(wanted.pop("components"))
    sheet.same_set(file, "component in the SBOM", set(locked), set(components))
    for name in sorted(set(locked) & set(components)):
        _check_table(sheet, file, f"{name} in the SBOM", locked[name], components[name])
    date = _take_date(found)
    sheet.check(_DATE.fullmatch(date) is not None, file, "timestamp in the SBOM", "a date in UTC", date)
    _take_date(wanted)
    _check_table(sheet, file, "SBOM", wanted, found)


def _by_reference(components: object) -> dict[str, Mapping[str, object]]:
    """Components by their ``bom-ref``; one without, or given twice, gets a name that no lock has."""
    found: dict[str, Mapping[str, object]] = {}
    for item in components if isinstance(components, list) else []:
        name = str(item.get("bom-ref")) if isinstance(item, dict) else repr(item)[:80]
        found[f"{name} (again)" if name in found else name] = item if isinstance(item, dict) else {}
    return found


def _take_date(document: dict[str, object]) -> str:
    """Remove the timestamp and return it: the commit's time, which the wheel does not know."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        return "none"
    document["metadata"] = {key: value for key, value in metadata.items() if key != "timestamp"}
    return str(metadata.get("timestamp"))


def _check_table(
    sheet: Sheet, file: str, what: str, expected: Mapping[str, object], got: Mapping[str, object]
) -> None:
    for key in sorted({*expected, *got}):
        sheet.equal(file, f"{key} of {what}", _short(expected.get(key)), _short(got.get(key)))


def _short(value: object) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)
