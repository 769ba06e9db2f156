"""How many compilers to run at once: from cores, memory and the number of architectures.

Standard library only: ``setup.py`` uses it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ci.errors import ConfigError

GIB = 1 << 30
# Room one compiler process gets.  Measured with CUDA 13.5 and GCC 12: 0.13 GiB for csrc/kda/fwd.cu (one
# architecture), 0.17 GiB for csrc/binding.cpp; the rest is for larger kernels.
COMPILE_GIB = 1.0
# Share of the memory that a build may plan with.
SHARE = 0.8


@dataclass(frozen=True)
class Machine:
    """Cores this process may use, and memory in GiB it can still get."""

    cores: int
    memory_gib: float


@dataclass(frozen=True)
class JobPlan:
    """``jobs`` source files at once, ``threads`` architectures of each, and the GiB that may take."""

    jobs: int
    threads: int
    memory_gib: float
    notices: tuple[str, ...] = ()


def plan_jobs(machine: Machine, archs: int, sources: int, environ: Mapping[str, str]) -> JobPlan:
    """Share `machine` out over `sources` .cu files of `archs` architectures each.

    MAX_JOBS and NVCC_THREADS in `environ` win; ConfigError when one is not a positive integer.
    """
    slots = max(1, min(machine.cores, int(SHARE * machine.memory_gib / COMPILE_GIB)))
    asked_jobs = _positive(environ, "MAX_JOBS")
    asked_threads = _positive(environ, "NVCC_THREADS")
    jobs = asked_jobs or max(1, min(sources, slots // (asked_threads or 1)))
    threads = asked_threads or max(1, min(archs, slots // jobs))
    need = jobs * min(threads, max(1, archs)) * COMPILE_GIB
    return JobPlan(jobs, threads, need, _notices(machine, need))


def _notices(machine: Machine, need: float) -> tuple[str, ...]:
    limit = SHARE * machine.memory_gib
    if need <= limit:
        return ()
    text = (
        f"{need:.1f} GiB may be needed, more than {SHARE:.0%} of the {machine.memory_gib:.1f} GiB there are"
    )
    return (f"{text}; set MAX_JOBS=1 NVCC_THREADS=1 if the compiler is killed.",)


def _positive(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{name}: expected a positive integer, got {text!r}.\nNext: unset {name}, or give a number"
        )
    return int(text)


# ---- the machine -------------------------------------------------------------------------------------------


def this_machine(root: Path = Path("/")) -> Machine:
    """What this process may use: CPU affinity and quota, available memory and cgroup limit (v1 and v2).

    `root` stands for the file system's root, for tests.
    """
    groups = [root / "sys/fs/cgroup" / path for path in _cgroup_paths(root)]
    quotas = [quota for group in groups if (quota := _cpu_quota(group)) is not None]
    rooms = [room for group in groups if (room := _cgroup_room(group)) is not None]
    cores = min([len(os.sched_getaffinity(0)), *(max(1, int(quota)) for quota in quotas)])
    return Machine(cores, min([_available(root), *rooms]) / GIB)


def _cgroup_paths(root: Path) -> list[str]:
    # Inside a container /proc/self/cgroup names the host's path while the mount shows the group itself, so
    # the mount's top is always looked at too.
    paths = ["", "memory", "cpu"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line + "::").split(":")[:3]
        parts = path.strip("/").split("/") if path.strip("/") else []
        for controller in controllers.split(",") if controllers else [""]:
            if controller in ("", "memory", "cpu"):
                paths += [
                    "/".join([p for p in [controller, *parts[:n]] if p]) for n in range(1, len(parts) + 1)
                ]
    return paths


def _cpu_quota(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()
    if not words:
        words = [*_read(group / "cpu.cfs_quota_us").split(), *_read(group / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _cgroup_room(group: Path) -> int | None:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
        if limit.isdecimal() and used.isdecimal():
            # The kernel gives inactive page cache back before it kills anything.
            return max(0, int(limit) - max(0, int(used) - _stat(group, "inactive_file")))
    return None


def _stat(group: Path, key: str) -> int:
    for line in _read(group / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in (key, f"total_{key}"):
            return int(words[1])
    return 0


def _available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return GIB


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
