"""What wheels run on, by the last word of their tag, and the GNU tools that make them on x86-64."""

from __future__ import annotations

import platform as machine
import shutil
from dataclasses import dataclass
from pathlib import Path

from ci.errors import ToolchainError

HOST = "x86_64"


@dataclass(frozen=True)
class Platform:
    """`name` as in a wheel's tag, `gnu` as in a compiler's name, `debian` as in Debian's packages.

    `elf` is what the linker calls its files, `returns` the assembly of a function that returns the number put
    into it.
    """

    name: str
    gnu: str
    debian: str
    elf: str
    returns: str

    @property
    def native(self) -> bool:
        """Whether its programs run where wheels are built."""
        return self.name == HOST

    @property
    def cxx(self) -> str:
        """The C++ compiler."""
        return "g++" if self.native else f"{self.gnu}-g++"

    @property
    def emulator(self) -> str:
        """qemu's program that runs one of its programs here."""
        return f"qemu-{self.name}-static"

    @property
    def package(self) -> str:
        """Debian's package with the C++ compiler."""
        return self.cxx if self.native else f"g++-{self.gnu}"


PLATFORMS = {
    item.name: item
    for item in (
        Platform(HOST, "x86_64-linux-gnu", "amd64", "elf64-x86-64", "movl ${}, %eax\nret\n"),
        Platform("aarch64", "aarch64-linux-gnu", "arm64", "elf64-littleaarch64", "mov w0, #{}\nret\n"),
    )
}


def of_wheel(path: Path) -> Platform:
    """The platform in the name of a wheel; the host for a name without one that is known."""
    found = [item for item in PLATFORMS.values() if path.stem.endswith(f"_{item.name}")]
    return found[0] if path.suffix == ".whl" and found else PLATFORMS[HOST]


def line(label: str, platform: str) -> str:
    """What the row `label` is called among those of every platform: ``cu130``, ``cu130-aarch64``."""
    return label if platform == HOST else f"{label}-{platform}"


def check_tools(target: Platform) -> None:
    """ToolchainError, before anything is downloaded, where wheels of `target` cannot be compiled."""
    here = machine.machine()
    if here != HOST:
        raise ToolchainError(
            f"wheels, those of {target.name} too, are built on {HOST}; this machine is {here}.\n"
            "Next: build there, or from source for this machine: pip install -v --no-build-isolation ."
        )
    if shutil.which(target.cxx) is None:
        raise ToolchainError(
            f"{target.cxx} cannot be run: expected a C++ compiler for {target.name} on PATH, got none.\n"
            f"Next: apt-get install {target.package}"
        )
