"""Makes a base image without a registry, to try the containers where none can be reached.

``python -m ci.stand_in``: Debian 12 by debootstrap, as root, with the Python at the place where manylinux
images have theirs.  It has another libc and compiler than the pinned image: docs/containers.md says what a
build on it shows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ci.errors import ToolchainError, run_cli
from ci.process import run

NAME = "localhost/flash-kda-stand-in:bookworm"
_PACKAGES = "ca-certificates,debianutils,g++,git,python3,python3-venv"
_PYTHON = "opt/python/cp311-cp311"
_CIBUILDWHEEL_PYTHON = "opt/python/cp39-cp39/bin/python"  # cibuildwheel runs this one to look around
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


def make(scratch: Path) -> str:
    """Build the root file system in `scratch` and import it into podman; returns the image's name."""
    root, archive = scratch / "root", scratch / "root.tar"
    words: list[str | Path] = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root]
    _run(words, "debootstrap of Debian 12", "run as root, after: apt-get install debootstrap podman")
    _run(
        ["chroot", root, "python3", "-m", "venv", f"/{_PYTHON}"],
        "making the image's Python",
        "read the output",
    )
    link = root / _CIBUILDWHEEL_PYTHON
    link.parent.mkdir(parents=True)
    link.symlink_to(f"/{_PYTHON}/bin/python")
    if Path("/", _CERTIFICATES).is_file():  # a network that signs with a certificate of its own
        shutil.copyfile(Path("/", _CERTIFICATES), root / _CERTIFICATES)
    shutil.rmtree(root / "var/cache/apt")
    _run(["tar", "-C", root, "-cf", archive, "."], "packing it", "look for space: df -h")
    _run(["podman", "import", archive, NAME], "importing it into podman", "see docs/containers.md")
    return NAME


def _run(words: list[str | Path], title: str, hint: str) -> None:
    env = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    run(words, title=title, error=ToolchainError, hint=hint, env=env)


def main() -> int:
    """Command line; prints the image's name."""
    argparse.ArgumentParser(
        prog="python -m ci.stand_in", description="Make a base image by debootstrap."
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="flash-kda-stand-in-") as scratch:
        print(make(Path(scratch)))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
