"""What a build would do, without doing it.

``python -m ci.plan --cuda 13.0 --archs 90a,100a --cores 2 --memory-gib 24 --json`` prints the architectures,
the nvcc flags, jobs and threads, or a refusal with its exit code.  Needs neither torch nor nvcc: what the
toolkit emits comes from ``ci/matrix.toml`` or ``--emittable``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ci import devices, matrix, resources
from ci.archs import arch
from ci.errors import ConfigError, run_cli
from ci.selection import selection_error, strict_from

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Plan:
    """A build decided but not begun; ``memory_gib`` is what the compilers may take together."""

    cuda: str
    archs: tuple[str, ...]
    gencode: tuple[str, ...]
    jobs: int
    threads: int
    cores: int
    memory_gib: float
    memory_available_gib: float
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Emittable:
    """The targets a toolkit emits, as data, and where that is known from."""

    targets: frozenset[arch.Target]
    label: str

    def __call__(self, target: arch.Target) -> bool:
        return target in self.targets


def emittable(cuda: str, listed: str | None) -> Emittable:
    """What CUDA `cuda` emits: `listed` (a list of targets) when given, else by ``ci/matrix.toml``."""
    if listed is None:
        return Emittable(matrix.load().emittable(cuda), f"nvcc {cuda} (by ci/matrix.toml)")
    choices, problems = arch.parse_list(listed)
    if problems:
        said = "; ".join(f"{problem.item}: {problem.text}" for problem in problems)
        raise ConfigError(f"--emittable: {said}")
    return Emittable(frozenset(choice.target for choice in choices), f"nvcc {cuda} (by --emittable)")


def make_plan(
    cuda: str,
    value: str | None,
    emit: Emittable,
    gpus: Sequence[arch.Capability] | None,
    machine: resources.Machine,
    sources: int,
    environ: Mapping[str, str],
    strict: bool = False,
    given_by: str = arch.ENV,
) -> Plan:
    """Decide a build.  `value` as FLASH_KDA_CUDA_ARCHS, or of the option `given_by`; `gpus` None: ask this
    machine.

    Raises ConfigError; for a refused architecture its details hold every problem with a stable code.
    """
    ask = devices.visible if gpus is None else lambda: list(gpus)
    try:
        chosen = arch.resolve(value, arch.KERNEL_TARGETS, emit, ask, strict, compiler=emit.label)
    except arch.ArchSelectionError as error:
        raise selection_error(error, given_by) from error
    jobs = resources.plan_jobs(machine, len(chosen.choices), sources, environ)
    return Plan(
        cuda=cuda,
        archs=chosen.names,
        gencode=tuple(arch.gencode_flags(chosen.choices)),
        jobs=jobs.jobs,
        threads=jobs.threads,
        cores=machine.cores,
        memory_gib=jobs.memory_gib,
        memory_available_gib=round(machine.memory_gib, 2),
        notices=chosen.notices + jobs.notices,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ci.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", required=True, help="CUDA version, for example 13.0")
    parser.add_argument(
        "--archs", help=f"'auto', 'all' or a list (default: {arch.ENV}, which defaults to auto)"
    )
    parser.add_argument("--emittable", help="targets that nvcc emits (default: what ci/matrix.toml records)")
    parser.add_argument(
        "--gpus", help="capabilities 'auto' is to see, such as 9.0,10.0 (default: this machine's)"
    )
    parser.add_argument("--cores", type=int, help="cores (default: this machine's)")
    parser.add_argument(
        "--memory-gib", type=float, help="memory to plan with (default: what is available here)"
    )
    parser.add_argument("--sources", type=int, help="number of .cu files (default: those under csrc)")
    parser.add_argument("--strict", action="store_true", help="refuse when 'all' would leave a target out")
    parser.add_argument("--json", action="store_true", help="print JSON, errors included")
    return parser.parse_args(argv)


def _machine(cores: int | None, memory_gib: float | None) -> resources.Machine:
    for name, given in (("--cores", cores), ("--memory-gib", memory_gib)):
        if given is not None and not 0 < given < math.inf:
            raise ConfigError(f"{name}: expected a positive number, got {given}.\nNext: leave {name} out")
    here = resources.this_machine()
    return resources.Machine(cores or here.cores, memory_gib or here.memory_gib)


def _gpus(text: str | None) -> list[arch.Capability] | None:
    if text is None:
        return None
    words = [word for word in text.replace(",", " ").split() if word]
    found = devices.parse_capabilities("\n".join(words))
    if len(found) != len(words):
        raise ConfigError(
            f"--gpus: expected capabilities such as 9.0,10.0, got {text!r}.\nNext: leave --gpus out"
        )
    return found


def _plan(given: argparse.Namespace) -> Plan:
    value = os.environ.get(arch.ENV) if given.archs is None else given.archs
    sources = len(list((ROOT / "csrc").rglob("*.cu"))) if given.sources is None else given.sources
    return make_plan(
        given.cuda,
        value,
        emittable(given.cuda, given.emittable),
        _gpus(given.gpus),
        _machine(given.cores, given.memory_gib),
        sources,
        os.environ,
        given.strict or strict_from(os.environ),
        arch.ENV if given.archs is None else "--archs",
    )


def _print(plan: Plan, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ok": True, **asdict(plan)}, sort_keys=True))
        return
    print(f"CUDA {plan.cuda}: {' '.join(plan.archs)}")
    print(f"nvcc {' '.join(plan.gencode)}")
    at_once = f"files at once: {plan.jobs}, architectures of each: {plan.threads}"
    print(f"{at_once}; up to {plan.memory_gib:.1f} GiB")
    for notice in plan.notices:
        print(f"note: {notice}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = _arguments(argv)

    def body() -> int:
        _print(_plan(given), given.json)
        return 0

    return run_cli(body, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
