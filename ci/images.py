"""The images that builds start from: ``docker/images.toml``, one digest for each platform.

The digests are those that the locked cibuildwheel pins, whose wheel pip installs by hash: no registry is
asked, and nobody copies a digest by hand.
"""

from __future__ import annotations

import configparser
import re
from dataclasses import dataclass
from pathlib import Path

from ci.errors import ConfigError
from ci.toml import open_table
from ci.venv import Venv

PATH = Path(__file__).resolve().parent.parent / "docker" / "images.toml"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64")
_PINS = "cibuildwheel/resources/pinned_docker_images.cfg"
_PIN = re.compile(r"(?P<name>\S+)@(?P<digest>sha256:[0-9a-f]{64})\s+#\s*(?P<tag>\S+)")
_HEADER = "# Written by 'nox -s update' from the pins of the locked cibuildwheel; do not edit.\n"


@dataclass(frozen=True)
class Image:
    """One image: its name, the digest that is used, and the tag that had it, for people."""

    name: str
    tag: str
    digest: str

    @property
    def reference(self) -> str:
        """What a container engine is given."""
        return f"{self.name}@{self.digest}"


def load(platform: str, path: Path = PATH) -> Image:
    """The image of `platform` (``manylinux_2_28_x86_64``); ConfigError when the file has no digest of it."""
    table = open_table(path).table(platform)
    image = Image(
        name=table.text("name", r"[^\s@:]+", "an image without tag and digest"),
        tag=table.text("tag", r"[0-9]{4}\.[0-9]{2}\.[0-9]{2}-[0-9]+", "a tag such as 2026.10.26-1"),
        digest=table.text("digest", r"sha256:[0-9a-f]{64}", "sha256: and 64 hexadecimal digits"),
    )
    table.done()
    return image


def pinned(text: str, platform: str) -> Image:
    """The image of `platform` by the text of cibuildwheel's pins; ConfigError when it has another form."""
    policy, _, machine = platform.rpartition("_2_28_")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        value = parser.get(machine, f"{policy}_2_28", fallback="nothing")
    except configparser.Error as error:
        value = str(error)
    match = _PIN.fullmatch(value)
    if match is None:
        raise ConfigError(
            f"{_PINS}: [{machine}] {policy}_2_28: expected NAME@sha256:DIGEST  # TAG, got {value!r}.\n"
            "Next: read that file of the new cibuildwheel, and adapt ci/images.py"
        )
    return Image(match["name"], match["tag"], match["digest"])


def update(tools: Venv, path: Path = PATH) -> None:
    """Write the file anew from the pins of the cibuildwheel in `tools`."""
    text = (tools.site_packages() / _PINS).read_text(encoding="utf-8")
    path.write_text(_HEADER + "".join(_table(platform, pinned(text, platform)) for platform in PLATFORMS))


def _table(platform: str, image: Image) -> str:
    return f'\n[{platform}]\nname = "{image.name}"\ntag = "{image.tag}"\ndigest = "{image.digest}"\n'
