"""Makes ready, inside the builder image, what builds of one row need: ``python -m ci.prepare --cuda cu130``.

Everything lands at the places of `PLACES`, which cibuildwheel's environment names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ci import build, matrix, venv
from ci.errors import run_cli
from ci.toolchain import image

ROOT = Path("/opt/flash_kda")
# What a build is given by path: toolkit, link stubs, its environment's packages and programs, the checks'.
NAMES = ("cuda", "sysroot", "build-packages", "build-programs", "check-packages")
CUDA, SYSROOT, BUILD, PROGRAMS, CHECKS = (ROOT / name for name in NAMES)


def prepare(row: matrix.CudaRow) -> None:
    """Install toolkit, build environment, link sysroot and the environment of the checks; link them."""
    if row.toolkit_from == matrix.IMAGE:
        image.install(row.toolkit)
    tools = build.tools_for(row)
    places = {
        CUDA: tools.cuda_home,
        SYSROOT: tools.sysroot,
        BUILD: tools.python.site_packages(),
        PROGRAMS: tools.python.bin,
        CHECKS: venv.checks().site_packages(),
    }
    for link, target in places.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.prepare", description="Fill the builder image.")
    parser.add_argument("--cuda", required=True, metavar="LABEL", help="row of ci/matrix.toml")
    prepare(matrix.load().cuda_row(parser.parse_args().cuda))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
