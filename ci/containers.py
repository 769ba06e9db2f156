"""Images, and a row's wheel built in one.

``python -m ci.containers [--cuda cu130] [--base IMAGE] [--out DIR]``.  docker/builder.Dockerfile is the image
and the wheel, docker/gpu-test.Dockerfile what tests a wheel on a GPU.  They start from the digest in
docker/images.toml; ``--base`` names another image.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci import cache, images, matrix, provenance, source, wheels
from ci.errors import BuildError, ConfigError, run_cli
from ci.process import run

ENGINES = ("podman", "docker")
# What the images read beside the sources of a wheel: expectations to verify by, tests to run on a GPU.
_BESIDE = ("docker", "tests", "wheels/expectations")


@dataclass(frozen=True)
class Frame:
    """How images of a row are made: engine, base image, folders of the host that steps see (for pip)."""

    row: matrix.CudaRow
    engine: str
    base: str
    mounts: tuple[Path, ...] = ()

    @property
    def tag(self) -> str:
        """The builder image's name here."""
        return f"localhost/flash-kda-builder:{self.row.label}"


def context(folder: Path) -> Path:
    """What the images are built from, in a folder of its own: no leftovers and .git, one date for all."""
    source.copy(folder)
    for name in _BESIDE:
        leftovers = shutil.ignore_patterns("__pycache__", ".pytest_cache")
        shutil.copytree(source.ROOT / name, folder / name, ignore=leftovers)
    epoch = source.revision().epoch
    for path in folder.rglob("*"):
        os.utime(path, (epoch, epoch))
    return folder


def variables(frame: Frame) -> dict[str, str]:
    """The arguments of the Dockerfiles."""
    revision = source.revision()
    return {
        "BASE_IMAGE": frame.base,
        "CUDA": frame.row.label,
        source.COMMIT: revision.label,
        source.EPOCH: str(revision.epoch),
    }


def command(frame: Frame, target: str, folder: Path, out: Path | None = None) -> list[str | Path]:
    """What builds `target` from the context `folder`; `out` takes the files of the target wheel."""
    if frame.engine == "docker":
        words: list[str | Path] = ["docker", "buildx", "bake", "--file", folder / "docker/docker-bake.hcl"]
        words += ["--set", f"{target}.output=type=local,dest={out}"] if out else []
        return [*words, target]
    name = "gpu-test" if target == "gpu-test" else "builder"
    words = ["podman", "build", "--file", folder / f"docker/{name}.Dockerfile"]
    words += ["--target", target] if name == "builder" else []
    words += ["--output", f"type=local,dest={out}"] if out else ["--tag", image_of(frame, target)]
    for mount in frame.mounts:
        words += ["--volume", f"{mount}:{mount}:ro"]
    for key, value in variables(frame).items():
        words += ["--build-arg", f"{key}={value}"]
    return [*words, folder]


def image_of(frame: Frame, target: str) -> str:
    """The name of a target's image."""
    return frame.tag.replace("flash-kda-builder", f"flash-kda-{target}")


def make(frame: Frame, target: str, folder: Path, out: Path | None = None) -> None:
    """Build `target`; BuildError shows what failed."""
    env = {**os.environ, **variables(frame), "CONTEXT": str(folder)}
    title = f"{frame.engine}: {target} of {frame.row.label} on {frame.base}"
    log = cache.root() / "logs" / f"{target}-{frame.row.label}.log"
    hint = f"read {log}; docs/containers.md says what the engine needs, and what goes without a registry"
    run(command(frame, target, folder, out), title=title, error=BuildError, hint=hint, env=env, log=log)


def by_image(frame: Frame, folder: Path, out: Path) -> Path:
    """The wheel that the Dockerfile makes, verified there."""
    make(frame, "builder", folder)
    make(frame, "wheel", folder, out)
    return only(out)


def only(folder: Path) -> Path:
    """The one wheel in `folder`; BuildError when there is none, or another."""
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise BuildError(
            f"{folder}: expected one wheel, got {', '.join(path.name for path in found) or 'none'}.\n"
            "Next: read the output above"
        )
    return found[0]


def base_image(given: str | None) -> str:
    """The pinned image, or the one asked for, which is said."""
    pinned = images.load(matrix.load().project.plat).reference
    if given is None or given == pinned:
        return pinned
    print(f"base image: {given}, not the pinned {pinned}: what comes out is no release", flush=True)
    return given


def parser(name: str, text: str) -> argparse.ArgumentParser:
    """The command line of ``ci.<name>`` with what all that run containers take."""
    made = argparse.ArgumentParser(prog=f"python -m ci.{name}", description=text)
    first = matrix.load().rows[0].label
    made.add_argument(
        "--cuda", default=first, metavar="LABEL", help=f"row of ci/matrix.toml (default: {first})"
    )
    made.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help=f"default: {ENGINES[0]}")
    made.add_argument("--base", metavar="IMAGE", help="another base image than that of docker/images.toml")
    made.add_argument(
        "--mount",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="a file or folder of this machine that steps see in its place, such as /etc/pip.conf (podman)",
    )
    made.add_argument(
        "--out", type=Path, default=wheels.FOLDER, help="folder for the wheel (default: wheels/)"
    )
    return made


def frame_of(given: argparse.Namespace) -> Frame:
    """What the command line asks for; ConfigError where the engine is missing or cannot do it."""
    if shutil.which(given.engine) is None:
        raise ConfigError(f"--engine {given.engine}: no such program.\nNext: apt-get install {given.engine}")
    if given.mount and given.engine == "docker":
        raise ConfigError("--mount: docker buildx has no mounts of the host.\nNext: --engine podman")
    for path in given.mount:
        if not path.is_absolute() or not path.exists():
            raise ConfigError(f"--mount {path}: expected an absolute path that exists.\nNext: leave it out")
    cache.check_folder(given.out, "--out")
    row = matrix.load().cuda_row(given.cuda)
    return Frame(row, given.engine, base_image(given.base), tuple(given.mount))


def keep(wheel: Path, out: Path) -> Path:
    """Copy `wheel` into the folder `out`, with its provenance beside it."""
    out.mkdir(parents=True, exist_ok=True)
    kept = Path(shutil.copyfile(wheel, out / wheel.name))
    provenance.write(kept)
    return kept


def gpu_image(frame: Frame, wheel: Path, scratch: Path) -> str:
    """Make the image that tests `wheel` on a GPU; returns its name."""
    folder = context(scratch / "context")
    shutil.copyfile(wheel, folder / "wheels" / wheel.name)
    make(frame, "gpu-test", folder)
    return image_of(frame, "gpu-test")


def main() -> int:
    """Command line; prints the wheel's path, or the image's name."""
    words = parser("containers", "Build a wheel in the builder image, or the image that tests one on a GPU.")
    words.add_argument(
        "--gpu-test", type=Path, metavar="WHEEL", help="make the image that tests WHEEL, no wheel"
    )
    given = words.parse_args()
    if given.gpu_test is not None and not given.gpu_test.is_file():
        raise ConfigError(f"--gpu-test {given.gpu_test}: no such file.\nNext: nox -s build_wheels")
    frame = frame_of(given)
    with tempfile.TemporaryDirectory(prefix="flash-kda-containers-") as scratch:
        if given.gpu_test is not None:
            print(gpu_image(frame, given.gpu_test, Path(scratch)))
        else:
            folder = context(Path(scratch, "context"))
            print(keep(by_image(frame, folder, Path(scratch, "wheel")), given.out))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
