"""Runs tests/gpu against a wheel on the GPU it was built for, and writes down what happened.

``python -m ci.gpu_tests --target sm90a [--wheel FILE]``.  Standard library only, no network: the machine with
the GPU needs nothing but Python, torch, numpy, pytest and fla-core (``--fla-path DIR`` where that is only
unpacked; ``--allow-missing-fla`` skips its tests).  The wheel goes, without dependencies, into a new
environment that sees those; the tests run from a copy outside the source tree, so that they cannot import it
by accident.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ci import cache, source
from ci.archs import arch
from ci.errors import ConfigError, GpuTestError, MetadataError, TargetMismatchError, run_cli

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "wheels"
PLUGIN = Path(__file__).with_name("gpu_plugin.py")
RESULT_ENV = "FLASH_KDA_GPU_TESTS_RESULT"
TESTS = "tests/gpu"
SEAL = "record_sha256"
_NEXT_TARGET = f"Next: nox -s gpu_tests -- --target sm{arch.KERNEL_TARGETS[0].target.name}"


@dataclass(frozen=True)
class Environment:
    """Where the wheel is installed: run `python` with `env` added, `folder` must hold ``flash_kda``."""

    python: Path
    folder: Path
    env: dict[str, str]


@dataclass(frozen=True)
class Probe:
    """What the clean environment has: versions, the GPU's name and compute capability (None: no GPU)."""

    torch: str
    torch_cuda: str | None
    python: str
    device: str | None
    capability: list[int] | None
    driver: str | None
    flash_kda: str
    location: str


def parse_target(text: str) -> arch.Target:
    """The target of ``sm90a``; ConfigError when it is not one with kernels."""
    try:
        target = arch.parse_target(text)
    except arch.ArchSelectionError as problem:
        raise ConfigError(f"--target: {problem}\n{_NEXT_TARGET}") from problem
    known = [row.target for row in arch.KERNEL_TARGETS]
    if target not in known:
        names = ", ".join(f"sm{row.name}" for row in known)
        raise ConfigError(f"--target {text}: expected one of {names}.\n{_NEXT_TARGET}")
    return target


def find_wheel(folder: Path = WHEELS) -> Path:
    """The newest wheel in `folder`; ConfigError when there is none."""
    wheels = sorted(folder.glob("flash_kda-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise ConfigError(f"no flash_kda wheel in {folder}.\nNext: nox -s build_wheels, or give --wheel FILE")
    return wheels[-1]


def held(wheel: Path, folder: Path) -> Path:
    """Where `install` keeps its copy: who builds again while the tests run does not change what is tested."""
    return folder / "wheel" / wheel.name


def install(wheel: Path, folder: Path) -> Environment:
    """Install `wheel` alone into a new environment below `folder` that sees the packages of the running
    Python."""
    if not wheel.is_file():
        raise ConfigError(f"--wheel {wheel}: no such file.\nNext: nox -s build_wheels")
    copy, home = held(wheel, folder), folder / "env"
    copy.parent.mkdir()
    shutil.copyfile(wheel, copy)
    site = home / "site"
    venv.EnvBuilder(system_site_packages=True, with_pip=False, symlinks=True).create(home)
    # pip of the running Python: the new environment has none, and may not be able to get one.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(site), str(copy)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise MetadataError(
            f"{wheel.name} cannot be installed:\n{done.stdout}{done.stderr}\nNext: nox -s verify_wheels"
        )
    # A virtual environment inside another sees the base's packages alone: those of the running one are added.
    paths = [str(site), *(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))]
    return Environment(
        home / "bin" / "python", site, {"PYTHONPATH": os.pathsep.join(paths), "PYTHONNOUSERSITE": "1"}
    )


def probe(environment: Environment, cwd: Path) -> Probe:
    """What ``python -m flash_kda`` says in `environment`; GpuTestError when it or torch cannot be imported or
    another flash_kda answers."""
    done = _python(environment, ["-m", "flash_kda", "--json"], cwd, capture=True)
    if done.returncode != 0:
        raise GpuTestError(
            f"the installed wheel cannot be imported: python -m flash_kda ended with "
            f"{ending(done.returncode)}:\n{done.stdout}{done.stderr}\nNext: nox -s verify_wheels -- WHEEL"
        )
    report = json.loads(done.stdout)
    if not is_inside(report["location"], environment):
        raise GpuTestError(
            f"flash_kda was imported from {report['location']}; expected {environment.folder}.\n"
            "Next: look for a .pth file that names another copy"
        )
    if report["torch"]["error"]:
        raise GpuTestError(f"torch: {report['torch']['error']}.\nNext: run with the Python that has torch")
    return read_report(report)


def ending(code: int) -> str:
    """A return code in words: a library that is cut short kills the process and nothing is printed."""
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def read_report(report: dict[str, Any]) -> Probe:
    """The facts of ``python -m flash_kda --json`` that a record holds; of several GPUs, the first's."""
    gpu = report["gpus"][0] if report["gpus"] else None
    return Probe(
        torch=report["torch"]["version"],
        torch_cuda=report["torch"]["cuda"],
        python=report["python"],
        device=gpu and gpu["name"],
        capability=gpu and [int(part) for part in gpu["capability"].split(".")],
        driver=report["driver"]["version"],
        flash_kda=report["version"],
        location=report["location"],
    )


def is_inside(file: str | None, environment: Environment) -> bool:
    """Whether `file`, where flash_kda was imported from, is the installed wheel's."""
    return file is not None and Path(file).resolve().is_relative_to(environment.folder.resolve())


def check_device(target: arch.Target, found: Probe) -> None:
    """TargetMismatchError unless the GPU is one that runs code for `target`."""
    wanted = f"a GPU of compute capability {target.major}.{target.minor} ({target.sm})"
    if found.capability is None:
        raise TargetMismatchError(
            f"no GPU: expected {wanted}, but torch {found.torch} sees none.\n"
            "Next: run on the machine that has one"
        )
    major, minor = found.capability
    if not arch.runs(target, (major, minor)):
        raise TargetMismatchError(
            f"another GPU: expected {wanted}, got {found.device} ({major}.{minor}).\n"
            f"Next: choose the target of this GPU, or another GPU with CUDA_VISIBLE_DEVICES"
        )


def run_tests(environment: Environment, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Run a copy of tests/gpu with pytest; returns the plugin's result and the command."""
    tests, result = folder / "tests", folder / "result.json"
    shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(PLUGIN, folder / "flash_kda_gpu_plugin.py")
    environment.env["PYTHONPATH"] += os.pathsep + str(folder)
    environment.env[RESULT_ENV] = str(result)
    arguments = ["-m", "pytest", "-p", "flash_kda_gpu_plugin", "-p", "no:cacheprovider"]
    config = ROOT / "pyproject.toml"
    if config.is_file():
        shutil.copyfile(config, folder / "pyproject.toml")
    arguments += ["-ra", TESTS, *extra]
    code = _python(environment, arguments, folder, capture=False).returncode
    if not result.is_file():
        raise GpuTestError(f"pytest ended with code {code} and left no result.\nNext: read its output above")
    found: dict[str, Any] = json.loads(result.read_text())
    own = is_inside(found["flash_kda_file"], environment)
    return {**found, "exit_code": code, "own_package": own, "command": without_paths(["python", *arguments])}


def without_paths(words: list[str]) -> str:
    """The command with DIR for absolute paths, which are of that machine alone."""
    return shlex.join(re.sub(r"^(--[\w-]+=)?/.*", r"\1DIR", word) for word in words)


def read_source(environment: Environment) -> dict[str, Any]:
    """What the installed wheel was built from: commit, whether that was all of it, one sha256 over the
    code and one over the kernels; MetadataError when its build record does not say."""
    path = environment.folder / "flash_kda" / "build_record.json"
    try:
        found = json.loads(path.read_bytes())["source"]
        kept = {name: found[name] for name in ("commit", "dirty", "sha256")}
        return {**kept, "kernels_sha256": source.kernels(found["files"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MetadataError(
            f"{path.name}: expected the sources of the wheel, got {error!r}.\nNext: nox -s verify_wheels"
        ) from error


def _python(
    environment: Environment, arguments: list[str], cwd: Path, *, capture: bool
) -> subprocess.CompletedProcess[str]:
    command = [str(environment.python), *arguments]
    env = variables(environment)
    return subprocess.run(command, check=False, cwd=cwd, env=env, text=True, capture_output=capture)


def variables(environment: Environment) -> dict[str, str]:
    """The variables of a process in `environment`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**inherited, **environment.env}


def make_record(
    wheel: Path, target: arch.Target, found: Probe, built_from: dict[str, Any], result: dict[str, Any]
) -> dict[str, Any]:
    """What is written down: the wheel, its source, the device, the software, the counts and the verdict."""
    device = {name: value for name, value in asdict(found).items() if name != "location"}
    return {
        "wheel": wheel.name,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "source": built_from,
        "target": f"sm{target.name}",
        **device,
        "pytest": result["pytest"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": result["command"],
        "counts": result["counts"],
        "skip_reasons": result["skip_reasons"],
        "exit_code": result["exit_code"],
        "verdict": verdict(result),
    }


def verdict(result: dict[str, Any]) -> str:
    """``passed``, ``failed``, ``nothing ran`` (all skipped, or none found) or ``another flash_kda was
    tested``."""
    counts: dict[str, int] = result["counts"]
    if counts["failed"] or counts["errors"] or result["exit_code"] not in (0, 5):
        return "failed"
    if not counts["passed"]:
        return "nothing ran"
    return "passed" if result["own_package"] else "another flash_kda was tested"


def record_name(wheel_sha256: str, target: str) -> str:
    """The file of the record of that wheel and target."""
    return f"{wheel_sha256[:16]}-{target}.json"


def seal(record: dict[str, Any]) -> str:
    """sha256 over all that a record says: a release is refused when it is not the one in the record."""
    said = {name: value for name, value in record.items() if name != SEAL}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_record(record: dict[str, Any], folder: Path) -> Path:
    """Write `record` with its seal; a later run of the same wheel and target replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / record_name(record["wheel_sha256"], record["target"])
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps({**record, SEAL: seal(record)}, indent=2) + "\n")
    return part.replace(path)


def gpu_tests(target: arch.Target, wheel: Path, records: Path, extra: list[str]) -> dict[str, Any]:
    """Install, probe, refuse another device, test, record; GpuTestError when not every test that ran
    passed.  When `extra` narrows the run to some of the tests there is no record: it would say too much."""
    cache.check_folder(records, "--records")  # before the minutes that the tests take
    with tempfile.TemporaryDirectory(prefix="flash-kda-gpu-") as scratch:
        folder = Path(scratch)
        environment = install(wheel, folder)
        found = probe(environment, folder)
        check_device(target, found)
        built_from = read_source(environment)
        print(f"{wheel.name} on {found.device}, torch {found.torch}, Python {found.python}", flush=True)
        result = run_tests(environment, folder, extra)
        record = make_record(held(wheel, folder), target, found, built_from, result)
        if result["narrowed"]:
            kept = "no record: the arguments leave tests out"
        else:
            kept = f"record: {write_record(record, records)}"
        print(kept, flush=True)
    if record["verdict"] != "passed":
        raise GpuTestError(
            f"{record['verdict']}: {record['counts']}.\nExpected only passes.\n"
            f"Next: read the output above ({kept})"
        )
    return record


def main() -> int:
    """Command line; what it does not know goes to pytest."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.gpu_tests", description="Run tests/gpu against a wheel."
    )
    parser.add_argument("--target", required=True, help="the GPU's target, for example sm90a")
    parser.add_argument("--wheel", type=Path, help="default: the newest in wheels/")
    parser.add_argument("--records", type=Path, default=WHEELS / "records", help="folder for the record")
    given, extra = parser.parse_known_args()
    target = parse_target(given.target)
    gpu_tests(target, (given.wheel or find_wheel()).resolve(), given.records, extra)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
