"""``python -m ci.plan`` as a black box, and the sharing out of cores and memory."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci import plan, resources
from ci.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = plan.main([*words, "--json"])
    out = capsys.readouterr()
    return code, json.loads(out.out), out.err


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASH_KDA_CUDA_ARCHS", "FLASH_KDA_CUDA_ARCHS_STRICT", "MAX_JOBS", "NVCC_THREADS"):
        monkeypatch.delenv(name, raising=False)


SMALL = ("--cores", "2", "--memory-gib", "24")


def test_the_documented_call(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "--cuda", "13.0", "--archs", "90a,100a", *SMALL)
    assert code == 0
    assert said["ok"] is True
    assert said["archs"] == ["90a", "100a"]
    assert said["gencode"] == [
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        "-gencode",
        "arch=compute_100a,code=sm_100a",
    ]
    assert said["jobs"] * said["threads"] <= 2


def test_a_refusal_names_the_option_or_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said, _ = run(capsys, "--cuda", "13.0", "--archs", "junk", *SMALL)
    assert said["message"].startswith("--archs='junk'")
    monkeypatch.setenv("FLASH_KDA_CUDA_ARCHS", "junk")
    _, said, _ = run(capsys, "--cuda", "13.0", *SMALL)
    assert said["message"].startswith("FLASH_KDA_CUDA_ARCHS='junk'")


def test_emittable_replaces_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "--cuda", "99.0", "--archs", "all", "--emittable", "100a,90a", *SMALL)
    assert (code, said["archs"]) == (0, ["90a", "100a"])
    assert any("103a left out" in notice for notice in said["notices"])


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (("--cuda", "13.0", "--archs", ""), ["blank"]),
        (("--cuda", "13.0", "--archs", "90a,foo"), ["syntax"]),
        (("--cuda", "13.0", "--archs", "80a"), ["unknown"]),
        (("--cuda", "13.0", "--archs", "107a"), ["not_emittable"]),
        (("--cuda", "13.0", "--archs", "all", "--strict"), ["not_emittable"]),
        (("--cuda", "13.0", "--archs", "auto", "--gpus", ""), ["no_device"]),
        (("--cuda", "13.0", "--archs", "auto", "--gpus", "8.9"), ["no_kernel"]),
        (("--cuda", "13.0", "--archs", "90a", "--emittable", "100a"), ["not_emittable"]),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], codes: list[str]) -> None:
    code, said, err = run(capsys, *words, *SMALL)
    assert (code, said["exit_code"], said["error"], said["ok"]) == (2, 2, "ConfigError", False)
    assert said["codes"] == codes
    assert said["message"] in err


@pytest.mark.parametrize(
    "words",
    [
        ("--cuda", "11.8", "--archs", "90a"),
        ("--cuda", "13.0", "--archs", "90a", "--cores", "0"),
        ("--cuda", "13.0", "--archs", "90a", "--memory-gib", "-1"),
        ("--cuda", "13.0", "--archs", "90a", "--memory-gib", "inf"),
        ("--cuda", "13.0", "--archs", "90a", "--memory-gib", "nan"),
        ("--cuda", "13.0", "--archs", "auto", "--gpus", "nine"),
        ("--cuda", "13.0", "--archs", "auto", "--gpus", "\u00b2.\u2070"),
        ("--cuda", "13.0", "--archs", "90a", "--emittable", "everything"),
    ],
)
def test_wrong_arguments_are_typed(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, said, _ = run(capsys, *words)
    assert (code, said["error"]) == (2, "ConfigError")


def test_variables_are_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_KDA_CUDA_ARCHS", "120a")
    monkeypatch.setenv("MAX_JOBS", "5")
    monkeypatch.setenv("NVCC_THREADS", "3")
    _, said, _ = run(capsys, "--cuda", "13.0", *SMALL)
    assert (said["archs"], said["jobs"], said["threads"]) == (["120a"], 5, 3)
    monkeypatch.setenv("FLASH_KDA_CUDA_ARCHS", " ")
    assert run(capsys, "--cuda", "13.0", *SMALL)[0] == 2


def test_needs_neither_torch_nor_nvcc(tmp_path: Path) -> None:
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvcc").chmod(0o755)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": str(tmp_path), "CUDA_HOME": "/nowhere"}
    command = [sys.executable, "-m", "ci.plan", "--cuda", "13.0", "--archs", "90a", *SMALL, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("cores", "memory", "archs", "sources"),
    list(itertools.product([1, 2, 8, 64, 192], [0.5, 2, 4, 24, 512], [1, 4, 7], [1, 3, 40])),
)
def test_never_beyond_cores_or_memory(cores: int, memory: float, archs: int, sources: int) -> None:
    found = resources.plan_jobs(resources.Machine(cores, memory), archs, sources, {})
    assert 1 <= found.jobs <= sources
    assert 1 <= found.threads <= archs
    assert found.jobs * found.threads <= cores
    assert found.memory_gib <= 0.8 * memory or (found.jobs == found.threads == 1 and found.notices)


def test_more_of_each_gives_more_at_once() -> None:
    def at_once(cores: int, memory: float, archs: int) -> int:
        found = resources.plan_jobs(resources.Machine(cores, memory), archs, 2, {})
        return found.jobs * found.threads

    assert at_once(1, 64, 4) < at_once(4, 64, 4) < at_once(8, 64, 4)
    assert at_once(8, 2, 4) < at_once(8, 4, 4) < at_once(8, 64, 4)
    assert at_once(64, 64, 1) < at_once(64, 64, 4)


def test_variables_win_over_the_machine() -> None:
    small = resources.Machine(2, 4)
    assert resources.plan_jobs(small, 4, 1, {"MAX_JOBS": "16"}).jobs == 16
    assert resources.plan_jobs(small, 4, 1, {"NVCC_THREADS": "8"}).threads == 8
    over = resources.plan_jobs(small, 4, 8, {"MAX_JOBS": "16", "NVCC_THREADS": "4"})
    assert "64.0 GiB may be needed" in over.notices[0]


@pytest.mark.parametrize("value", ["", "0", "-1", "two", "1.5"])
def test_wrong_job_counts(value: str) -> None:
    for name in ("MAX_JOBS", "NVCC_THREADS"):
        with pytest.raises(ConfigError, match=f"{name}: expected a positive integer"):
            resources.plan_jobs(resources.Machine(2, 24), 4, 1, {name: value})


def _files(root: Path, files: dict[str, str]) -> resources.Machine:
    for name, text in {"proc/meminfo": "MemTotal: 1 kB\nMemAvailable: 16777216 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return resources.this_machine(root)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, 16),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "1"}, 16),
        ({"sys/fs/cgroup/memory.max": str(4 * GIB), "sys/fs/cgroup/memory.current": str(GIB)}, 3),
        (
            {
                "sys/fs/cgroup/memory.max": str(4 * GIB),
                "sys/fs/cgroup/memory.current": str(3 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "0::/user/build\n",
                "sys/fs/cgroup/user/memory.max": str(2 * GIB),
                "sys/fs/cgroup/user/memory.current": "0",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(8 * GIB),
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "0",
            },
            8,
        ),
    ],
)
def test_memory_of_the_machine_and_of_its_control_group(
    tmp_path: Path, files: dict[str, str], memory: float
) -> None:
    assert _files(tmp_path, files).memory_gib == memory


def test_cpu_quota(tmp_path: Path) -> None:
    here = len(os.sched_getaffinity(0))
    assert _files(tmp_path, {}).cores == here
    assert _files(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000"}).cores == here
    assert _files(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000"}).cores == 1


def test_this_machine_is_sane() -> None:
    here = resources.this_machine()
    assert here.cores >= 1
    assert 0 < here.memory_gib < 1 << 14
