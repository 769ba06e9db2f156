"""Runs cibuildwheel on one row, in the builder image.

``python -m ci.cibw [--cuda cu130] [--base IMAGE] [--out DIR]``.  Build, repair, verification and test are
written in pyproject.toml; here is the environment that reaches them.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

from ci import build as local
from ci import cache, containers, prepare, source, venv
from ci.containers import Frame
from ci.errors import BuildError, ConfigError, run_cli
from ci.matrix import CudaRow
from ci.process import run
from ci.toml import read_toml

# Of a build's environment these belong to the machine, and the container has its own.
_OF_THE_MACHINE = {"PATH", "HOME"}


def passed() -> tuple[str, ...]:
    """The variables that pyproject.toml lets through into the container."""
    return tuple(
        read_toml(source.ROOT / "pyproject.toml")["tool"]["cibuildwheel"]["linux"]["environment-pass"]
    )


def environment(row: CudaRow, names: tuple[str, ...]) -> dict[str, str]:
    """The variables of a local build of `row`, with the builder image's places for this machine's.

    ConfigError unless `names`, which reach the container, are exactly these: with one lost on the way
    something else would be built.
    """
    tools = local.Tools(venv.Venv(prepare.BUILD), prepare.CUDA, prepare.SYSROOT)
    made = local.environment(row, row.value, tools, local.Conditions())
    wanted = {name: value for name, value in made.items() if name not in _OF_THE_MACHINE}
    known = {*wanted, source.COMMIT}  # which is not set outside git
    if known != set(names):
        lost, strange = sorted(known - set(names)), sorted(set(names) - known)
        raise ConfigError(
            "pyproject.toml: tool.cibuildwheel.linux.environment-pass: expected what a build reads, "
            f"got it without {', '.join(lost) or 'nothing'} and with {', '.join(strange) or 'nothing'} "
            "besides.\n"
            "Next: edit that list"
        )
    return wanted


def build(frame: Frame, folder: Path, out: Path) -> Path:
    """Run cibuildwheel on the sources in `folder`, in the builder image of `frame`; returns the wheel."""
    tools = venv.locked("cibw")
    arguments = [f"--volume={mount}:{mount}:ro" for mount in frame.mounts]
    engine = f"{frame.engine}; disable_host_mount: true"
    machine = {
        name: value for name, value in os.environ.items() if not name.startswith(("CIBW_", "FLASH_KDA_"))
    }
    env = {
        **machine,
        **environment(frame.row, passed()),
        "CIBW_CONTAINER_ENGINE": f"{engine}; create_args: {' '.join(arguments)}" if arguments else engine,
        f"CIBW_MANYLINUX_{os.uname().machine.upper()}_IMAGE": frame.tag,
    }
    command: list[str | Path] = [tools.python, "-m", "cibuildwheel", "--platform", "linux"]
    command += ["--output-dir", out.resolve()]
    title = f"cibuildwheel: {frame.row.label} in {frame.tag}"
    log = cache.root() / "logs" / f"cibuildwheel-{frame.row.label}.log"
    hint = f"read {log}; docs/containers.md says what the engine needs"
    run(command, title=title, error=BuildError, hint=hint, cwd=folder, env=env, log=log)
    return containers.only(out)


def version() -> str:
    """The locked cibuildwheel's version."""
    paths = [str(venv.locked("cibw").site_packages())]
    return next(found.version for found in importlib.metadata.distributions(name="cibuildwheel", path=paths))


def main() -> int:
    """Command line; prints the wheel's path."""
    given = containers.parser("cibw", "Build a wheel with cibuildwheel.").parse_args()
    frame = containers.frame_of(given)
    with tempfile.TemporaryDirectory(prefix="flash-kda-cibw-") as scratch:
        folder = containers.context(Path(scratch, "context"))
        containers.make(frame, "builder", folder)
        print(containers.keep(build(frame, folder, Path(scratch, "wheel")), given.out))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
