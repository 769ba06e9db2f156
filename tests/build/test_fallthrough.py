"""ci/fallthrough.py without a GPU: its processes decide for a made-up one, and what must not pass."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ci import fallthrough, fallthrough_probe
from ci.errors import ConfigError, GpuTestError
from ci.gpu_tests import Environment

ROOT = Path(__file__).resolve().parents[2]
ENUM = "class Arch:\n    sm_90a = (9, 0, 'a')\n"
PTXAS = "#!/bin/sh\necho \"'sm_90a'\"\n"
IMPORTED = "raise AssertionError('imported')"


def put(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


@pytest.fixture
def cute(tmp_path: Path) -> Path:
    """As pip leaves the DSL in a folder: the import name is below, found by way of a .pth file."""
    folder = tmp_path / "cute"
    put(folder / "nvidia_cutlass_dsl" / "packages" / "cutlass" / "__init__.py", IMPORTED)
    put(folder / "nvidia_cutlass_dsl" / "packages" / "cutlass" / "base_dsl" / "enums.py", ENUM)
    put(folder / "dsl.pth", "nvidia_cutlass_dsl/packages\n")
    metadata = "Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.8.1\n"
    put(folder / "nvidia_cutlass_dsl-4.8.1.dist-info" / "METADATA", metadata)
    return folder


@pytest.fixture
def fla(tmp_path: Path) -> Path:
    folder = tmp_path / "fla_path"
    put(folder / "fla" / "__init__.py", IMPORTED)
    put(folder / "fla" / "ops" / "kda" / "__init__.py", IMPORTED)
    put(folder / "triton" / "__init__.py", IMPORTED)
    put(folder / "triton" / "backends" / "nvidia" / "bin" / "ptxas", PTXAS, 0o755)
    return folder


@pytest.fixture
def environment() -> Environment:
    """The checkout, which has no compiled library, in the place of an installed wheel."""
    return Environment(Path(sys.executable), ROOT, {"PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1"})


Probe = Callable[[fallthrough.Stage], dict[str, Any]]


@pytest.fixture
def probed(environment: Environment, tmp_path: Path) -> Probe:
    return lambda stage: fallthrough.probe(environment, stage, "9.0", tmp_path, 120)


def test_auto_goes_on_as_packages_go(
    cute: Path, fla: Path, probed: Probe, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_KDA_BACKEND", "reference")  # would decide in the place of auto
    every = fallthrough.stages(cute, fla)
    found = {stage.name: probed(stage) for stage in every}
    assert [answer["backend"] for answer in found.values()] == ["cute_dsl", "fla", "reference"]
    codes = [{b: v["code"] for b, v in answer["verdicts"].items()} for answer in found.values()]
    assert [code["cute_dsl"] for code in codes] == ["", "no_package", "no_package"]
    assert [code["fla"] for code in codes] == ["", "", "no_package"]
    for stage in every:
        (problem,) = fallthrough.problems_of(stage, found[stage.name], environment)
        assert "cuda says missing_file, expected not_in_wheel" in problem  # the checkout is no wheel
    assert "cutlass and fla  cute_dsl" in fallthrough.table(found)


def test_folders_that_hold_something_else_are_refused(cute: Path, fla: Path) -> None:
    with pytest.raises(ConfigError, match=r'Next: pip install --target \S+ "nvidia-cutlass-dsl\[cu13\]"$'):
        fallthrough.stages(fla, fla)
    with pytest.raises(ConfigError, match=r"--fla-path[^$]*Next: pip install --target \S+ fla-core$"):
        fallthrough.stages(cute, cute)


def test_a_process_that_fails_is_an_error(probed: Probe, tmp_path: Path) -> None:
    put(tmp_path / "bad" / "bad.pth", "import sys; sys.exit(3)\n")
    with pytest.raises(GpuTestError, match="ended with 3"):
        probed(fallthrough.Stage("bad", (tmp_path / "bad",), "fla"))


STAGE = fallthrough.Stage("fla", (), "fla")
NOT_THERE = "this build holds machine code for 100a; rebuild with FLASH_KDA_CUDA_ARCHS=90a"


def answer(**changes: Any) -> dict[str, Any]:
    right = {"case": "2 x 5", "out": 4e-3, "final_state": 3e-3, "seconds": 1.0}
    good: dict[str, Any] = {
        "file": str(ROOT / "flash_kda" / "__init__.py"),
        "torch": "2.11.0",
        "gpu": "NVIDIA H200",
        "device": "cuda:0",
        "backend": "fla",
        "verdicts": {"cuda": {"code": "not_in_wheel", "text": NOT_THERE}},
        "cases": [right],
        "winners": ["backend fla runs on cuda:0"],
        "cuda": {"code": "not_in_wheel", "text": NOT_THERE},
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"file": "/elsewhere/flash_kda/__init__.py"}, "expected the wheel's"),
        ({"backend": "reference"}, "auto takes reference, expected fla"),
        ({"backend": None}, "auto takes None, expected fla"),
        ({"verdicts": {"cuda": {"code": "", "text": ""}}}, "cuda says yes, expected not_in_wheel"),
        ({"cases": []}, "no case ran"),
        ({"cases": [{"case": "x", "out": 0.02, "final_state": 0.0}]}, "x: out is off by 2.00e-02"),
        ({"cases": [{"case": "x", "out": 0.0, "final_state": float("nan")}]}, "x: final_state is off by nan"),
        ({"winners": []}, "the log names []"),
        ({"winners": ["backend cute_dsl runs on cuda:0"]}, "the log names ['cute_dsl']"),
        ({"cuda": {"code": "ran", "text": ""}}, "backend='cuda' gave ran"),
        ({"cuda": {"code": "KeyError", "text": "sm_107a"}}, "backend='cuda' gave KeyError: sm_107a"),
        ({"cuda": {"code": "not_in_wheel", "text": "no"}}, "backend='cuda' gave not_in_wheel: no"),
    ],
)
def test_what_is_wrong_is_named(environment: Environment, changes: dict[str, Any], says: str) -> None:
    assert fallthrough.problems_of(STAGE, answer(), environment) == []
    said = fallthrough.problems_of(STAGE, answer(**changes), environment)
    assert any(says in text for text in said), said


def test_the_run_prints_records_and_fails_where_one_stage_is_wrong(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheel = tmp_path / "flash_kda-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    answers = {"fla": answer(), "neither": answer()}
    monkeypatch.setattr(fallthrough, "install", lambda wheel, folder: environment)
    monkeypatch.setattr(fallthrough, "probe", lambda e, stage, *rest: answers[stage.name])
    every = (STAGE, fallthrough.Stage("neither", (), "reference"))
    with pytest.raises(GpuTestError, match="neither: auto takes fla, expected reference"):
        fallthrough.fallthrough(wheel, every, None, tmp_path / "records", 1)
    (file,) = (tmp_path / "records").iterdir()
    record = json.loads(file.read_text())
    assert record["gpu"] == "NVIDIA H200" and set(record["stages"]) == {"fla", "neither"}
    assert record["problems"] and str(ROOT) not in file.read_text()
    answers["neither"] = answer(backend="reference", winners=["backend reference runs on cuda:0"])
    fallthrough.fallthrough(wheel, every, None, tmp_path / "records", 1)
    assert json.loads(file.read_text())["problems"] == []
    assert "4.00e-03" in capsys.readouterr().out


def test_the_process_computes_what_the_oracle_says(caplog: pytest.LogCaptureFixture) -> None:
    """The part that needs a GPU, on the CPU, where auto means the reference."""
    winners, logger = fallthrough_probe.Winners(), logging.getLogger("flash_kda")
    logger.addHandler(winners)
    try:
        with caplog.at_level(logging.INFO, logger="flash_kda"):
            found = [
                fallthrough_probe.run_case(torch, "cpu", index)
                for index in range(len(fallthrough_probe.CASES))
            ]
    finally:
        logger.removeHandler(winners)
    assert all(case["out"] < 5e-3 and case["final_state"] < 1e-6 for case in found)
    refused = fallthrough_probe.refusal_of_cuda(torch, "cpu")
    assert refused["code"] == "no_device" and "backend='cuda'" in refused["text"]
