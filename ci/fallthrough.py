"""Shows on a GPU that ``auto`` goes on to the next backend: with a wheel that has no image for the GPU.

``python -m ci.fallthrough --wheel FILE --cute-path DIR --fla-path DIR``. Standard library only, no network.
Wheel: ``nox -s build_wheels -- --cuda cu130 --archs`` and a target that the GPU does not run; the folders:
``pip install --target DIR "nvidia-cutlass-dsl[cu13]"``, and ``fla-core``. Three fresh processes: with both
packages, without the first, without either. In each, ``auto`` must take the first backend that is left and
compute what the oracle says, and a call that names ``cuda`` must be refused with our message.

``--capability 9.0`` asks for the decisions alone, for a GPU that need not be here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ci.errors import ConfigError, GpuTestError, run_cli
from ci.gpu_tests import WHEELS, Environment, install, is_inside, variables

PROBE = Path(__file__).with_name("fallthrough_probe.py")
RECORDS = WHEELS / "records" / "fallthrough"
BOUND = 1.5e-2  # relative Frobenius error; that of tests/gpu/test_fla_client.py
PINS = ("FLASH_KDA_BACKEND", "CUTE_DSL_ARCH")  # would decide in the place of auto
NEXT = "Next: read the record, and print(flash_kda.explain()) there"


@dataclass(frozen=True)
class Stage:
    """Folders on the path of one process, and the backend that ``auto`` must take there."""

    name: str
    paths: tuple[Path, ...]
    backend: str


def stages(cute: Path, fla: Path) -> tuple[Stage, ...]:
    """The three processes; ConfigError for a folder that does not hold what it should."""
    for option, folder, inside, package in (
        ("--cute-path", cute, "nvidia_cutlass_dsl", '"nvidia-cutlass-dsl[cu13]"'),
        ("--fla-path", fla, "fla/ops/kda", "fla-core"),
    ):
        if not (folder / inside).is_dir():
            raise ConfigError(
                f"{option} {folder}: expected a folder with {inside}.\n"
                f"Next: pip install --target {folder} {package}"
            )
    return (
        Stage("cutlass and fla", (cute, fla), "cute_dsl"),
        Stage("fla", (fla,), "fla"),
        Stage("neither", (), "reference"),
    )


def probe(
    environment: Environment, stage: Stage, capability: str | None, cwd: Path, timeout: int
) -> dict[str, Any]:
    """The answer of one process; GpuTestError when it gives none."""
    paths = [str(path.resolve()) for path in stage.paths]
    job = json.dumps({"paths": paths, "capability": capability})
    command = [str(environment.python), "-P", str(PROBE), job]
    env = {name: value for name, value in variables(environment).items() if name not in PINS}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise GpuTestError(f"{stage.name}: ran past {timeout} s.\nNext: give --timeout") from error
    if done.returncode != 0:
        raise GpuTestError(
            f"{stage.name}: the process ended with {done.returncode}:\n{done.stdout}{done.stderr}\n{NEXT}"
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def problems_of(stage: Stage, found: dict[str, Any], environment: Environment) -> list[str]:
    """What one answer has that it should not; nothing that was not there may pass."""
    said = []
    if not is_inside(found["file"], environment):
        said.append(f"flash_kda is {found['file']}, expected the wheel's")
    if found["backend"] != stage.backend:
        said.append(f"auto takes {found['backend']}, expected {stage.backend}: {found['verdicts']}")
    code = found["verdicts"]["cuda"]["code"]
    if code != "not_in_wheel":
        said.append(f"cuda says {code or 'yes'}, expected not_in_wheel: a wheel without an image for the GPU")
    if "cases" in found:
        said += _problems_of_the_run(stage, found)
    return [f"{stage.name}: {text}" for text in said]


def _problems_of_the_run(stage: Stage, found: dict[str, Any]) -> list[str]:
    said = []
    for case in found["cases"]:
        for name in ("out", "final_state"):
            if not case[name] <= BOUND:  # NaN too
                said.append(f"{case['case']}: {name} is off by {case[name]:.2e}, allowed {BOUND:.1e}")
    if not found["cases"]:
        said.append("no case ran")
    ran = {message.split()[1] for message in found["winners"]}
    if ran != {stage.backend}:
        said.append(f"the log names {sorted(ran)}, expected {stage.backend} alone")
    refused = found["cuda"]
    if refused["code"] != "not_in_wheel" or "FLASH_KDA_CUDA_ARCHS=" not in refused["text"]:
        said.append(f"backend='cuda' gave {refused['code']}: {refused['text']}; expected not_in_wheel")
    return said


def table(found: dict[str, dict[str, Any]]) -> str:
    """The answers as fixed-width text."""
    lines = [
        f"{'on the path':16s} {'auto takes':10s} {'cuda says':13s} {'worst out':>10s} {'worst state':>11s}"
    ]
    for name, answer in found.items():
        worst = [
            f"{max(case[key] for case in answer['cases']):.2e}" if answer.get("cases") else "-"
            for key in ("out", "final_state")
        ]
        code = answer["verdicts"]["cuda"]["code"] or "yes"
        lines.append(f"{name:16s} {answer['backend'] or '-':10s} {code:13s} {worst[0]:>10s} {worst[1]:>11s}")
    return "\n".join(lines)


def write_record(record: dict[str, Any], folder: Path) -> Path:
    """Write the record, by the wheel's sha256 and the GPU; a later run of the same pair replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = str(record["gpu"]).replace(" ", "_")
    path = folder / f"{record['wheel_sha256'][:16]}-{gpu}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def make_record(wheel: Path, found: dict[str, dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """What is written down; paths of this machine are left out."""
    first = next(iter(found.values()))
    kept = ("device", "backend", "verdicts", "cases", "winners", "cuda")
    return {
        "wheel": wheel.name,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "gpu": first["gpu"],
        "torch": first["torch"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "bound": BOUND,
        "stages": {name: {key: answer[key] for key in kept} for name, answer in found.items()},
        "problems": problems,
    }


def fallthrough(
    wheel: Path, every: tuple[Stage, ...], capability: str | None, records: Path, timeout: int
) -> dict[str, dict[str, Any]]:
    """The three answers, printed and recorded; GpuTestError when one is not as it should be."""
    with tempfile.TemporaryDirectory(prefix="flash-kda-fallthrough-") as scratch:
        environment = install(wheel, Path(scratch))
        found = {}
        for stage in every:
            print(f"with {stage.name} on the path ...", flush=True)
            found[stage.name] = probe(environment, stage, capability, Path(scratch), timeout)
        problems = [text for s in every for text in problems_of(s, found[s.name], environment)]
    print(table(found))
    if capability is None:
        print(f"record: {write_record(make_record(wheel, found, problems), records)}")
    else:
        print("decisions alone: nothing was computed, no record")
    if problems:
        raise GpuTestError("\n".join(problems) + f"\n{NEXT}")
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.fallthrough", description="Show that auto goes on to the next backend."
    )
    parser.add_argument("--wheel", type=Path, required=True, help="one without an image for the GPU")
    parser.add_argument("--cute-path", type=Path, required=True, help="folder that nvidia-cutlass-dsl is in")
    parser.add_argument("--fla-path", type=Path, required=True, help="folder that fla-core is in")
    parser.add_argument("--capability", help="decide for such a GPU, compute nothing (default: the GPU here)")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder for the record")
    parser.add_argument("--timeout", type=int, default=500, help="seconds for one process (default 500)")
    given = parser.parse_args()
    every = stages(given.cute_path, given.fla_path)
    fallthrough(given.wheel.resolve(), every, given.capability, given.records, given.timeout)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
