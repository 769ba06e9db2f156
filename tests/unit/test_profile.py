"""profile_rows.py without a GPU: ncu's raw page, the result file, the table, and what stops it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytest.importorskip("tomllib", reason="the benchmark scripts need Python 3.11")
sys.path.insert(0, str(BENCHMARKS))

import _cases  # noqa: E402
import _ncu  # noqa: E402
import _worker  # noqa: E402
import profile_rows  # noqa: E402

PAGE = ROOT / "tests" / "fixtures" / "ncu" / "two_kernels.csv"
TEXT = PAGE.read_text(encoding="utf-8")


def kernels(text: str = TEXT) -> list[dict[str, Any]]:
    return [_ncu.kernel(row, 132) for row in _ncu.parse(text)]


def test_another_unit_of_time_is_refused() -> None:
    assert kernels(TEXT.replace('"nsecond"', '"ns"')) == kernels()
    with pytest.raises(ValueError, match="is in 'usecond', expected nanoseconds"):
        kernels(TEXT.replace('"nsecond"', '"usecond"'))


def test_the_figures_of_two_kernels() -> None:
    first, second = kernels()
    assert first["name"] == "kda_fwd_kernel" and second["name"] == "kda_fwd_order_kernel"
    assert first["grid"] == [132, 1, 1] and first["block"] == [384, 1, 1] and first["registers"] == 168
    assert first["us"] == 1234.567 and first["dynamic_smem"] == 229376
    assert (first["blocks"], first["sm_share"]) == (132, 100.0)
    assert (second["blocks"], second["threads"], second["sm_share"]) == (33, 1024, 25.0)
    assert (first["dram"], first["l2"], first["shared"], first["warps"]) == (41.5, 38.25, 62.004, 11.97)
    assert first["issue"] == 43.21, "a rate of one instruction a cycle is 100 %"


def test_a_missing_figure_is_null_and_named() -> None:
    first, second = kernels()
    assert first["tensor"] is None and first["missing"] == ["tensor"]
    assert second["dram"] is None and second["missing"] == ["tensor", "dram"]
    assert first["metrics"]["issue"] == "smsp__issue_active.avg.per_cycle_active"
    assert "tensor" not in first["metrics"] and "dram" not in second["metrics"]


def test_stalls_are_shares_of_the_warps_time() -> None:
    first, second = kernels()
    top = [("barrier", 37.5), ("short_scoreboard", 18.8), ("wait", 15.6), ("long_scoreboard", 12.5)]
    assert [(stall["reason"], stall["share"]) for stall in first["stalls"]] == top
    assert second["stalls"][0] == {"reason": "long_scoreboard", "share": 90.0}
    without = TEXT.replace("smsp__average_warps_issue_stalled_", "smsp__another_")
    assert kernels(without)[0]["stalls"] == [] and "stalls" in kernels(without)[0]["missing"]


def test_one_family_of_stalls_is_used() -> None:
    pct = "smsp__warp_issue_stalled_{}_per_warp_active.pct"
    ratio = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    row = {pct.format("wait"): "30", pct.format("sleeping"): "10"}
    assert [stall["share"] for stall in _ncu.stalls(row)] == [75.0, 25.0]
    row |= {ratio.format("barrier"): "2", ratio.format("barrier_not_issued"): "2"}
    assert _ncu.stalls(row) == [{"reason": "barrier", "share": 100.0}]


@pytest.mark.parametrize(
    ("text", "value"),
    [("8,250", 8250.0), ("0.4321", 0.4321), ("n/a", None), ("nan", None), ("inf", None), ("", None)],
)
def test_a_cell_as_a_number(text: str, value: float | None) -> None:
    assert _ncu.number(text) == value


def without_line(index: int) -> str:
    lines = TEXT.splitlines(keepends=True)
    return "".join(lines[:index] + lines[index + 1 :])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ncu said: nothing"),
        ("==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
        (TEXT[:-40], "cut off"),
        (TEXT[: TEXT.rindex(',"')], "has 26 cells of 27"),
        (TEXT[: TEXT.index("kda_fwd_kernel(")], "cut off"),
        (without_line(5), "no row of units"),
        (without_line(7), "1 kernels, expected 2"),
        ("".join(TEXT.splitlines(keepends=True)[:5]), "0 rows below"),
        ("".join(TEXT.splitlines(keepends=True)[4:6]), "0 kernels, expected at least one"),
    ],
)
def test_a_page_that_is_not_whole_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _ncu.parse(text)


def test_the_command() -> None:
    command = _ncu.command("ncu", Path("log"))
    assert command[0] == "ncu"
    text = " ".join(command)
    assert "--clock-control none --cache-control none --profile-from-start off" in text
    assert "--kernel-name regex:kda_fwd" in text and text.count("--section ") == 7
    assert "--page raw --csv --print-units base" in text and "--log-file log" in text


def test_only_the_second_call_is_profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(f"torch.cuda.profiler.{name}", lambda name=name: steps.append(name))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: steps.append("wait"))
    facts = SimpleNamespace(name="NVIDIA Test", multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: facts)
    machine = _worker.machine(torch.device("cuda"))
    assert machine == {"device": "NVIDIA Test", "sms": 132, "torch": torch.__version__}

    def call(inputs: Any) -> None:
        steps.append("call")
        inputs.out.fill_(1.0), inputs.final_state.fill_(1.0)

    monkeypatch.setattr(_worker, "load", lambda *_: call)
    case = _cases.make_case("c", 1, 1, 8, None, ())
    results = tmp_path / "results.json"
    job = {"device": "cpu", "profile": case.to_json(), "seed": 1, "require_under": None}
    (tmp_path / "job.json").write_text(json.dumps({**job, "results": str(results)}))
    assert _worker.main([str(tmp_path / "job.json")]) == 0
    assert steps == ["call", "wait", "start", "call", "wait", "stop"]
    assert json.loads(results.read_text())["kind"] == "machine"


FAKE_NCU = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "--version":
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
    sys.exit()
job = json.loads(pathlib.Path(sys.argv[-1]).read_text())
if job["profile"]["name"] == "t512_h32":
    print("target failed: no such thing")
    sys.exit(9)
machine = dict(kind="machine", device="NVIDIA Test", torch="2.11.0", sms=132)
pathlib.Path(job["results"]).write_text(json.dumps(machine))
log = pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1])
log.write_text(pathlib.Path({page!r}).read_text())
"""


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that answers as ncu, on a machine that seems to have a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    program = tmp_path / "ncu"
    program.write_text(FAKE_NCU.format(python=sys.executable, page=str(PAGE)))
    program.chmod(0o755)
    return program


def run(fake: Path, suite: str, out: Path) -> int:
    command = ["--suite", suite, "--ncu", str(fake), "--ours-path", str(ROOT), "--json", str(out)]
    return profile_rows.main(command)


def test_the_whole_command(fake_ncu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out.json"
    assert run(fake_ncu, "t8192_h8,varlen64x128_h32", out) == 0
    result = json.loads(out.read_text())
    assert result["device"] == "NVIDIA Test" and result["ncu"] == "2025.3.1.0" and result["sms"] == 132
    assert {"driver", "torch", "date", "commit", "wheel_sha256", "versions"} <= set(result)
    assert [(row["case"], row["lens"]) for row in result["rows"]] == [
        ("t8192_h8", None),
        ("varlen64x128_h32", "64x128"),
    ]
    assert [kernel["name"] for kernel in result["rows"][0]["kernels"]] == [
        "kda_fwd_kernel",
        "kda_fwd_order_kernel",
    ]
    assert result["metrics"]["tensor"] == [] and result["metrics"]["us"] == ["gpu__time_duration.sum"]
    assert str(tmp_path) not in out.read_text() and str(ROOT) not in out.read_text()
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "case kernel us SMs issue tensor shared L2 DRAM top stalls"
    stalls = "barrier 38, short scoreboard 19, wait 16, long scoreboard 12"
    assert " ".join(lines[0].split()) == f"t8192_h8 kda_fwd_kernel 1234.6 100 43 - 62 38 42 {stalls}"
    assert "MISSING dram of 2 of 4 kernels; looked for gpu__dram_throughput.avg" in "\n".join(lines)
    assert "MISSING tensor of 4 of 4 kernels; looked for sm__pipe_tensor_cycles" in "\n".join(lines)


def test_a_case_that_fails_is_named_and_the_rest_is_kept(
    fake_ncu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert run(fake_ncu, "t512_h32,t8192_h8", out) == 1
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["kernels"] == [] and len(rows[1]["kernels"]) == 2
    said = capsys.readouterr().out
    assert "t512_h32           not profiled" in said
    assert "PROBLEM t512_h32: exit code 9; end of its log:\n    target failed: no such thing" in said


def test_a_run_without_a_kernel_leaves_the_older_file(fake_ncu: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("older")
    assert run(fake_ncu, "t512_h32", out) == 1
    assert out.read_text() == "older"


@pytest.mark.parametrize(
    ("gpu", "arguments", "said"),
    [
        (False, [], "torch sees no GPU"),
        (True, ["--ncu", "no-such-ncu"], "no 'no-such-ncu' on the PATH"),
        (True, ["--suite", "accuracy"], "has no case to run"),
        (True, ["--suite", "nonsense"], "no case named nonsense"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    gpu: bool,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert profile_rows.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("profile_rows: ") and said in err
