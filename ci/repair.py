"""From the wheel setuptools makes to the one that is shipped: platform tag judged and set, zip made
canonical.

``python -m ci.repair WHEEL --out FOLDER``.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ci import matrix, sbom
from ci.errors import ConfigError, MetadataError, PlatformError, run_cli
from ci.extension import record
from ci.platforms import of_wheel
from ci.process import run
from ci.toml import read_toml
from ci.venv import Venv, locked

# Read as data: the code that checks it needs packages that a repair does without.
PLATFORM = Path(__file__).resolve().parent.parent / "wheels" / "expectations" / "platform.toml"
# auditwheel goes by the wheel's own platform, but for the values that it takes for --plat: those of the
# machine it runs on, so it is told another one.
_AUDITWHEEL = (
    "import platform, runpy; platform.machine = lambda: {!r}; "
    "runpy.run_module('auditwheel', run_name='__main__')"
)
_ZIP_EPOCH = 315532800  # 1980-01-01: the earliest date a zip can hold


def excludes() -> tuple[str, ...]:
    """Names of the libraries that stay outside wheels: torch's, which the program that loads it has."""
    return tuple(read_toml(PLATFORM)["needed"]["from_torch"])


def repair(wheel: Path, out: Path, tools: Venv, epoch: int) -> Path:
    """Check that `wheel` keeps to the matrix's tag for its platform, set the tag, add the bill of materials,
    write the canonical zip to `out`.

    `epoch` (seconds since 1970) dates every file in it.  Raises PlatformError when the wheel needs newer
    symbols or other libraries than the tag allows, or when auditwheel leaves no wheel behind.
    """
    plat = matrix.load().on(of_wheel(wheel).name).project.plat
    with tempfile.TemporaryDirectory(prefix="flash-kda-repair-") as scratch:
        _audit(wheel, Path(scratch), tools, plat, epoch)
        repaired = _only_wheel(Path(scratch), wheel, plat)
        _refuse_grafts(repaired)
        materials = {sbom.MEMBER: sbom.make(record.of_wheel(repaired), epoch).encode()}
        out.mkdir(parents=True, exist_ok=True)
        return normalise(repaired, out / repaired.name, epoch, materials)


def _audit(wheel: Path, scratch: Path, tools: Venv, plat: str, epoch: int) -> None:
    program = _AUDITWHEEL.format(of_wheel(wheel).name)
    command: list[str | Path] = [tools.python, "-c", program, "repair", "--plat", plat, "--only-plat"]
    for name in excludes():
        command += ["--exclude", name]
    command += ["-w", scratch, wheel]
    path = f"{tools.bin}:{os.environ.get('PATH', '/usr/bin:/bin')}"  # auditwheel looks patchelf up on PATH
    env = {"PATH": path, "SOURCE_DATE_EPOCH": str(epoch), "LANG": "C.UTF-8"}
    hint = "python -m ci.verify WHEEL --json shows which symbols and libraries are too new"
    run(command, title=f"repairing {wheel.name}", error=PlatformError, hint=hint, env=env)


def _only_wheel(folder: Path, wheel: Path, plat: str) -> Path:
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1 or not found[0].stem.endswith(f"-{plat}"):
        names = ", ".join(path.name for path in found) or "nothing"
        raise PlatformError(
            f"auditwheel repair of {wheel.name}: expected one wheel tagged {plat}, got {names}.\n"
            "Next: check that the wheel holds a compiled library (python -m zipfile -l WHEEL)"
        )
    return found[0]


def _refuse_grafts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        grafted = sorted(name for name in archive.namelist() if name.split("/")[0].endswith(".libs"))
    if grafted:
        raise PlatformError(
            f"{wheel.name}: libraries were copied in: {', '.join(grafted)}; expected none.\n"
            "Next: link them statically, or name them in wheels/expectations/platform.toml"
        )


def normalise(wheel: Path, target: Path, epoch: int, about: Mapping[str, bytes] | None = None) -> Path:
    """Write `wheel` again to `target` with sorted members, one date, fixed modes and a fresh RECORD; `about`
    are files to add below ``.dist-info``.

    The same members give the same bytes, whatever the umask, clock and file order they were packed under.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    listing = _record_name(wheel, members)
    members |= {f"{listing.removesuffix('RECORD')}{name}": data for name, data in (about or {}).items()}
    members[listing] = _record(members, listing)
    # RECORD goes last, as the wheel specification asks: a reader that streams has then seen all it lists.
    names = [*sorted(name for name in members if name != listing), listing]
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            archive.writestr(_member(name, epoch), members[name], compresslevel=9)
    return target


def _record_name(wheel: Path, members: Iterable[str]) -> str:
    found = [name for name in members if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    if len(found) != 1:
        raise MetadataError(
            f"{wheel.name}: expected one .dist-info/RECORD, got {found}.\nNext: build the wheel again"
        )
    return found[0]


def _record(members: Mapping[str, bytes], listing: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name in sorted(members):
        if name != listing:
            digest = base64.urlsafe_b64encode(hashlib.sha256(members[name]).digest()).rstrip(b"=").decode()
            writer.writerow([name, f"sha256={digest}", len(members[name])])
    writer.writerow([listing, "", ""])
    return text.getvalue().encode()


def _member(name: str, epoch: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, time.gmtime(max(epoch, _ZIP_EPOCH))[:6])
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3  # Unix, or the modes below mean nothing
    mode = 0o755 if ".so" in name.rsplit("/", 1)[-1] else 0o644
    info.external_attr = (0o100000 | mode) << 16
    return info


def epoch_from_environment() -> int:
    """``SOURCE_DATE_EPOCH`` as a number; ConfigError when it is missing or is none."""
    value = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not value.isdigit():
        raise ConfigError(
            f"SOURCE_DATE_EPOCH: expected seconds since 1970, got {value!r}.\n"
            "Next: export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)"
        )
    return int(value)


def main() -> int:
    """Command line; prints the path of the repaired wheel."""
    parser = argparse.ArgumentParser(prog="python -m ci.repair", description="Set a wheel's platform tag.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the repaired wheel")
    given = parser.parse_args()
    tools = locked("build", torch=matrix.load().project.torch_build)
    print(repair(given.wheel, given.out, tools, epoch_from_environment()))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
