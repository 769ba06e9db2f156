"""benchmarks/bench_host.py without a GPU: a dry run, and what it must call too much."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytest.importorskip("tomllib", reason="the benchmark scripts need Python 3.11")
sys.path.insert(0, str(BENCHMARKS))
import _host_worker  # noqa: E402
import bench_host  # noqa: E402
import torch  # noqa: E402


def test_a_dry_run_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host.json"
    bench_host.main(["--ours-path", str(ROOT), "--device", "cpu", "--tiny", "--json", str(file)])
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert row["case"] == "decode_h8" and all(
        row[f"{name}_us"] > 0 for name in ("raw", "named", "auto", "func")
    )
    assert row["named_over_us"] == row["named_us"] - row["raw_us"]
    assert result["import"]["new"] == [] and 0 < result["import"]["ours_ms"] < result["import"]["torch_ms"]
    assert result["device"] == "cpu (dry run)" and result["date"]
    # On a busy machine the import may take long; nothing else may be wrong.
    assert all("import" in problem for problem in result["problems"])
    assert "auto_over_us" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_host.main(["--ours-path", str(ROOT)]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def result(
    over: float | None = 3.0, ms: float = 20.0, device: str = "H200", new: tuple[str, ...] = ()
) -> Any:
    row = {"case": "a", "named_over_us": over, "auto_over_us": 3.0, "func_over_us": 9.0}
    return {"device": device, "rows": [row], "import": {"ours_ms": ms, "new": list(new)}}


def test_what_is_too_much() -> None:
    assert bench_host.too_much(result()) == [] == bench_host.too_much(result(over=None))
    assert bench_host.too_much(result(over=15.1)) == [
        "a: named takes 15.1 us more than the operator, at most 15 allowed"
    ]
    assert bench_host.too_much(result(over=float("nan")))
    assert bench_host.too_much(result(over=99.0, device="cpu (dry run)")) == []
    assert "50 allowed" in bench_host.too_much(result(ms=50.5))[0]
    assert "brings in triton" in bench_host.too_much(result(new=("triton",)))[0]


def test_a_package_that_does_not_import_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "flash_kda"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('broken')")
    assert bench_host.main(["--ours-path", str(tmp_path), "--device", "cpu", "--tiny"]) == 2
    assert "broken" in capsys.readouterr().err


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = _host_worker.host_us(calls, torch.device("cpu"), 2, 1)
    assert order == ["a", "b"] * 3 and set(times) == {"a", "b"}
