"""One row of the matrix from sources to a verified wheel: ``python -m ci.build [--cuda cu130] [--archs
90a] [--platform aarch64]``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci import (
    cache,
    cross,
    import_check,
    matrix,
    plan,
    provenance,
    resources,
    source,
    sysroot,
    toolchain,
    venv,
    wheels,
)
from ci.errors import BuildError, run_cli
from ci.extension import compiler_cache
from ci.matrix import CudaRow
from ci.platforms import HOST, PLATFORMS, Platform, check_tools
from ci.process import CONSOLE, run
from ci.repair import repair
from ci.selection import check_archs
from ci.toolchain import image


@dataclass(frozen=True)
class Conditions:
    """What may differ between two builds of one source without changing the wheel.

    ``jobs`` and ``threads``: None leaves them to the plan.  ``aged`` seconds are taken off the sources' file
    dates.  ``compiler_cache`` is the folder of ccache, None compiles all.
    """

    jobs: int | None = None
    threads: int | None = None
    umask: int = 0o022
    timezone: str = "UTC"
    locale: str = "C.UTF-8"
    hash_seed: str = "0"
    aged: int = 0
    compiler_cache: Path | None = None


@dataclass(frozen=True)
class Tools:
    """What a build stands on: Python environment, CUDA toolkit, link sysroot, what the wheel runs on."""

    python: venv.Venv
    cuda_home: Path
    sysroot: Path
    target: Platform = PLATFORMS[HOST]


def tools_for(row: CudaRow, platform: str = HOST) -> Tools:
    """Everything a build of `row` needs, downloaded or made on first use."""
    locked, target = row.toolkit_from == matrix.LOCK, PLATFORMS[platform]
    check_tools(target)
    home = toolchain.ensure(row.toolkit) if locked else image.find(row)
    python = venv.locked("build", torch=matrix.load().project.torch_build)
    links = sysroot.ensure(python) if target.native else cross.ensure(python, target, row.toolkit)
    return Tools(python, home, links, target)


def environment(row: CudaRow, archs: str, tools: Tools, conditions: Conditions) -> dict[str, str]:
    """The whole environment of the build: nothing of the caller's but the way to its compilers.

    Every variable that ``setup.py`` reads is set here, so that none is lost on the way and none leaks in.
    """
    work, revision = _plan(row, archs), source.revision()
    return {
        "PATH": f"{tools.python.bin}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "HOME": os.environ.get("HOME", "/"),
        "LANG": conditions.locale,
        "TZ": conditions.timezone,
        "PYTHONHASHSEED": conditions.hash_seed,
        "PYTHONNOUSERSITE": "1",
        "CXX": tools.target.cxx,
        "CUDA_HOME": str(tools.cuda_home),
        "FLASH_KDA_CUDA_ARCHS": archs,
        "FLASH_KDA_CUDA_ARCHS_STRICT": "1",
        "FLASH_KDA_LOCAL_VERSION": row.label_for(archs),
        "FLASH_KDA_LINK_SYSROOT": str(tools.sysroot),
        "FLASH_KDA_SKIP_CUDA_BUILD": "0",
        **_compiler_cache(conditions.compiler_cache),
        **({source.COMMIT: revision.label} if revision.label else {}),
        "MAX_JOBS": str(conditions.jobs or work.jobs),
        "NVCC_THREADS": str(conditions.threads or work.threads),
        source.EPOCH: str(revision.epoch),
        # What Python calls the machine: setuptools tags the wheel with it.
        **({} if tools.target.native else {"_PYTHON_HOST_PLATFORM": f"linux-{tools.target.name}"}),
    }


def _compiler_cache(folder: Path | None) -> dict[str, str]:
    """Whether to compile through ccache, the locked one unless the caller named another."""
    if folder is None:
        return {compiler_cache.ENV: ""}
    named = os.environ.get(compiler_cache.ENV, "")
    program = str(venv.locked("cache").bin / "ccache") if named in ("", "0", "1") else named
    return {compiler_cache.ENV: program, compiler_cache.FOLDER_ENV: str(folder)}


def as_asked() -> Conditions:
    """The conditions of a build by command: FLASH_KDA_COMPILER_CACHE, where it is set, decides on ccache."""
    asked = os.environ.get(compiler_cache.ENV, "") not in ("", "0")
    return Conditions(compiler_cache=cache.root() / "ccache" if asked else None)


def _plan(row: CudaRow, archs: str) -> plan.Plan:
    """Jobs and threads for this machine; the caller's MAX_JOBS and NVCC_THREADS win."""
    sources = sum(name.endswith(".cu") for name in source.files())
    emit = plan.emittable(row.toolkit, None)
    return plan.make_plan(row.toolkit, archs, emit, [], resources.this_machine(), sources, os.environ)


def build_row(
    label: str,
    archs: str | None = None,
    out: Path = wheels.FOLDER,
    *,
    work: Path | None = None,
    conditions: Conditions | None = None,
    platform: str = HOST,
) -> Path:
    """Build, repair and return the wheel of the row `label`, put into `out`; it is not verified here.

    `archs` narrows the row (``90a`` or ``90a,100a``); `work` is the folder to build in (default: a temporary
    one). Raises ConfigError, ToolchainError, BuildError or PlatformError.
    """
    row = matrix.load().on(platform).cuda_row(label)
    check_archs(archs)
    cache.check_folder(out, "--out")
    tools = tools_for(row, platform)
    with tempfile.TemporaryDirectory(prefix="flash-kda-build-") as scratch:
        folder = work or Path(scratch)
        raw = compile_wheel(
            row, row.value if archs is None else archs, tools, folder, conditions or Conditions()
        )
        return repair(raw, out, tools.python, source.revision().epoch)


def compile_wheel(row: CudaRow, archs: str, tools: Tools, folder: Path, conditions: Conditions) -> Path:
    """Copy the sources to `folder` and let setuptools make the wheel there; BuildError shows what failed."""
    sources = source.copy(folder / "source")
    _age(sources, conditions.aged)
    dist = folder / "dist"
    command: list[str | Path] = [
        tools.python.python,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    command += ["--no-cache-dir", "--disable-pip-version-check", "-w", dist, "."]
    log = cache.root() / "logs" / f"build-{row.label}-{tools.target.name}.log"
    run(
        command,
        title=f"building {row.label} for {archs}",
        error=BuildError,
        hint=f"read {log}, then: nox -s build_wheels -- --platform {tools.target.name} --cuda {row.label} "
        f"--archs {archs.split(',')[0]}",
        cwd=sources,
        env=environment(row, archs, tools, conditions),
        log=log,
        umask=conditions.umask,
    )
    return _only_wheel(dist, log)


def _age(folder: Path, seconds: int) -> None:
    if seconds:
        for path in folder.rglob("*"):
            stamp = path.stat().st_mtime - seconds
            os.utime(path, (stamp, stamp))


def _only_wheel(dist: Path, log: Path) -> Path:
    found = sorted(dist.glob("*.whl"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise BuildError(
            f"the build succeeded but left {names} in {dist}; expected one wheel.\nNext: read {log}"
        )
    return found[0]


def main() -> int:
    """Command line: build and verify each row asked for."""
    parser = argparse.ArgumentParser(prog="python -m ci.build", description="Build and verify wheels.")
    parser.add_argument(
        "--cuda",
        action="append",
        metavar="LABEL",
        help="row of ci/matrix.toml (default: every row with a locked toolkit)",
    )
    parser.add_argument("--platform", default=HOST, metavar="NAME", help=f"such as aarch64 (default: {HOST})")
    lists = parser.add_mutually_exclusive_group()
    lists.add_argument("--archs", help="narrow the architectures, as a comma list")
    lists.add_argument("--slim", action="store_true", help="a wheel of each single architecture of the row")
    parser.add_argument(
        "--out", type=Path, help="folder for the wheels (default: wheels/, that of the platform in it)"
    )
    given = parser.parse_args()
    wheels.check_python()
    check_archs(given.archs)
    table = matrix.load().on(given.platform)
    out = given.out or (wheels.FOLDER if given.platform == HOST else wheels.FOLDER / given.platform)
    for row in [table.cuda_row(label) for label in given.cuda] if given.cuda else table.locked_rows:
        for archs in row.archs if given.slim else [given.archs]:
            wheel = release(row.label, archs, out, given.platform)
            CONSOLE.print(f"[green]{wheel}[/green] {wheel.stat().st_size / 1e6:.2f} MB")
    if given.cuda is None and given.platform == HOST:
        _tell_others(table)
    return 0


def _tell_others(table: matrix.Matrix) -> None:
    """What the matrix has besides, and the command that builds it."""
    for row in table.rows:
        if row not in table.locked_rows:
            print(
                f"Not built: {row.label}, whose toolkit is in the builder image.\n"
                f"Next: python -m ci.containers --cuda {row.label}"
            )
    for name, other in table.others.items():
        labels = ", ".join(row.label for row in other.rows)
        print(
            f"Not built: {labels} for {name}.\n"
            f"Next: apt-get install {PLATFORMS[name].package} && nox -s build_wheels -- --platform {name}"
        )


def release(label: str, archs: str | None, out: Path, platform: str = HOST) -> Path:
    """Build the row `label` and put its wheel into `out` once it is verified and was imported, with its
    provenance beside it.

    One of another platform cannot be imported here: a line names the command that emulates it.  A wheel that
    fails stays in ``out/unverified``, to be looked at; the CiError says why.
    """
    wheel = build_row(label, archs, out / "unverified", conditions=as_asked(), platform=platform)
    wheels.verify(wheel, archs, out / "reports")
    if PLATFORMS[platform].native:
        import_check.check(wheel)
    else:
        print(f"Not imported: {wheel.name} is for {platform}.\nNext: nox -s import_{platform}")
    done = wheel.replace(out / wheel.name)
    provenance.write(done)
    if not any(wheel.parent.iterdir()):
        wheel.parent.rmdir()
    return done


if __name__ == "__main__":
    sys.exit(run_cli(main))
