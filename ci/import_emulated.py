"""Uses aarch64 wheels on this machine: ``python -m ci.import_emulated [--torch 2.10.0] [FILE ...]``.

qemu runs a Python that apt fetches, checks and leaves uninstalled, beside a torch for that machine, and asks
of a wheel what ``ci/import_check.py`` asks.  Needs Debian (or a derivative), no root.  A run in which every
wheel passed leaves a record in ``wheels/records/import``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import cache, matrix, torch_stubs, wheels
from ci.errors import AbiError, MetadataError, ToolchainError, run_cli
from ci.import_check import PROBE, RECORDS, identity, write_record
from ci.platforms import PLATFORMS, Platform
from ci.process import CONSOLE, run
from ci.venv import REQUIREMENTS

_PACKAGES = ("python3", "libstdc++6")
_LOCK = REQUIREMENTS / "tests.txt"


@dataclass(frozen=True)
class Machine:
    """An emulated machine: its qemu, the folder its programs lie in, its Python (``3.11``)."""

    target: Platform
    root: Path
    version: str
    qemu: str

    def command(self, *words: str | Path) -> list[str | Path]:
        """Run its Python with `words`."""
        return [self.target.emulator, "-L", self.root, self.root / "usr" / "bin" / "python3", *words]


def machine(target: Platform) -> Machine:
    """The machine in the cache, fetched on first use; ToolchainError naming a program that is missing."""
    for program, package in ((target.emulator, "qemu-user-static"), ("apt-get", "apt"), ("dpkg-deb", "dpkg")):
        if shutil.which(program) is None:
            raise ToolchainError(
                f"{program}: expected the program on PATH, got none.\n"
                f"Next, on Debian: apt-get install {package}"
            )
    root = cache.root() / "emulated" / f"{target.name}-{cache.key(*_PACKAGES)}"
    bare = Machine(target, cache.make_once(root, lambda folder: _unpack(folder, target)), "", "")
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    hint = f"rm -r {root}, and run the command again"
    title = f"asking for the {target.name} Python's version"
    version = run(bare.command("-I", "-c", code), title=title, error=ToolchainError, hint=hint).split()[-1]
    shown = run([target.emulator, "--version"], title="asking for qemu's", error=ToolchainError, hint=hint)
    return Machine(target, root, version, shown.splitlines()[0])


def _unpack(folder: Path, target: Platform) -> None:
    """Let apt fetch the packages and all they depend on, as if nothing were installed; unpack them."""
    with tempfile.TemporaryDirectory(prefix="flash-kda-apt-") as scratch:
        place = Path(scratch)
        for name in ("lists/partial", "cache/archives/partial"):
            (place / name).mkdir(parents=True)
        (place / "status").touch()
        options = {
            "APT::Architecture": target.debian,
            "APT::Architectures": target.debian,
            "APT::Sandbox::User": "",
            "Dir::State": str(place),
            "Dir::State::status": str(place / "status"),
            "Dir::Cache": str(place / "cache"),
        }
        command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
        fetch = ["install", "-y", "--no-install-recommends", "--download-only", *_PACKAGES]
        title, hint = f"fetching Debian's Python for {target.name}", "check apt's sources and the network"
        for words in (["update"], fetch):
            run([*command, *words], title=f"{title}: {words[0]}", error=ToolchainError, hint=hint)
        packages = sorted((place / "cache" / "archives").glob("*.deb"))
        for package in packages:
            words = ["dpkg-deb", "-x", str(package), str(folder)]
            run(words, title=f"unpacking {package.name}", error=ToolchainError, hint=hint)


def _pip(machine: Machine, *words: str | Path) -> list[str | Path]:
    arch, python = machine.target.name, machine.version
    tags = [f"--platform=manylinux_2_{minor}_{arch}" for minor in range(28, 16, -1)]
    common = ["--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:"]
    return [sys.executable, "-m", "pip", "install", *common, *tags, f"--python-version={python}", *words]


def packages(machine: Machine, torch: str) -> Path:
    """A folder with `torch` for the machine and what it imports, in the cache."""
    name = f"{machine.target.name}-py{machine.version}-torch-{torch}-{cache.key(_LOCK.read_bytes())}"

    def fill(folder: Path) -> None:
        hint = f"if the index has no such file for {machine.target.name}: --torch VERSION"
        locked = _pip(machine, "--require-hashes", "-r", _LOCK, "--target", folder)
        alone = _pip(machine, f"torch=={torch}", "--target", folder)
        title = f"for {machine.target.name}"
        run(locked, title=f"installing {_LOCK.name} {title}", error=ToolchainError, hint=hint)
        run(alone, title=f"installing torch {torch} alone {title}", error=ToolchainError, hint=hint)
        # A CUDA build wants libraries that are not there.
        torch_stubs.write(folder / "torch" / "lib", machine.target)

    return cache.make_once(cache.root() / "emulated" / name, fill)


def check(wheel: Path, machine: Machine, beside: Path) -> str:
    """Install `wheel` into a folder, run ``import_probe.py`` on it; returns the probe's line.

    Raises MetadataError when pip refuses the wheel for that machine, AbiError when it does not load or does
    not answer.
    """
    with tempfile.TemporaryDirectory(prefix="flash-kda-import-") as scratch:
        site = Path(scratch, "site")
        install = _pip(machine, "--no-index", "--target", site, wheel)
        run(install, title=f"installing {wheel.name}", error=MetadataError, hint="nox -s verify_wheels")
        env = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": scratch,
            "PYTHONPATH": f"{site}:{beside}",
            "PYTHONNOUSERSITE": "1",
        }
        title, hint = f"using {wheel.name} under qemu", "the last line above names what failed"
        command = machine.command(PROBE, site)
        said = run(command, title=title, error=AbiError, hint=hint, cwd=Path(scratch), env=env)
    return said.splitlines()[-1]


def make_record(machine: Machine, torch: str, passed: Sequence[tuple[Path, str]]) -> dict[str, object]:
    """What was shown, of which wheels: pairs of a wheel and the probe's line."""
    return {
        "target": machine.target.name,
        "emulator": machine.qemu,
        "python": machine.version,
        "torch": torch,
        "wheels": [{**identity(wheel), "said": said} for wheel, said in passed],
    }


def main() -> int:
    """Command line."""
    table = matrix.load()
    oldest = min(table.test_torch, key=lambda version: [int(part) for part in version.split(".")])
    parser = argparse.ArgumentParser(
        prog="python -m ci.import_emulated", description="Import aarch64 wheels under qemu."
    )
    parser.add_argument("wheel", type=Path, nargs="*", help="default: all in wheels/aarch64")
    parser.add_argument("--torch", default=oldest, help=f"default: {oldest}")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder for the record")
    given = parser.parse_args()
    target = PLATFORMS["aarch64"]
    found = given.wheel or wheels.built(wheels.FOLDER / target.name)
    emulated = machine(target)
    beside = packages(emulated, given.torch)
    passed = [(wheel, check(wheel.resolve(), emulated, beside)) for wheel in found]
    said_of_all = make_record(emulated, given.torch, passed)
    record = write_record(given.records / f"{target.name}.json", said_of_all)
    for _, said in passed:
        CONSOLE.print(f"[green]{said}[/green]")
    print(f"record: {record}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
