"""benchmarks/bench_plan.py without a GPU: a made-up one is measured, and its costs have to come out."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
HEADER = (ROOT / "csrc" / "kda" / "fwd_plan.h").read_text(encoding="utf-8")

pytest.importorskip("tomllib", reason="the benchmark scripts need Python 3.11")
sys.path.insert(0, str(BENCHMARKS))

import _plan  # noqa: E402
import _plan_worker  # noqa: E402
import bench_plan  # noqa: E402

H200 = 132
COSTS = {
    "whole": 1.1,
    "half": 0.7,
    "quarter": 0.5,
    "state": 0.6,
    "scan_step": 2.0,
    "uncut": 9.0,
    "cut": 24.0,
}
FACTS = {"driver": "1", "date": "2026-01-01T00:00Z", "commit": None, "wheel_sha256": None, "versions": {}}


def test_sizes_are_the_headers() -> None:
    assert (_plan.size("kChunk"), _plan.size("kScanParts"), _plan.min_segment()) == (16, 8, 256)
    with pytest.raises(ValueError, match="defines no kChunk"):
        _plan.read_constant(HEADER.replace("int kChunk", "int kChunks"), "kChunk")


# ---- a GPU of known costs ----


def spans(point: _plan.Point, costs: dict[str, float], start: float = 0.0) -> list[_plan.Span]:
    """One call. Later kernels start while the one before still runs, as they do."""
    if point.segment_tokens == 0:
        end = start + costs["uncut"] + point.chunks * costs[point.what]
        return [_plan.Span(_plan.KERNELS[point.what], start, end)]
    each = costs["cut"] / 3
    state = start + each + point.chunks * costs["state"]
    scan = state + each + point.segments * costs["scan_step"]
    output = scan + each + point.chunks * costs["whole"]
    return [
        _plan.Span(_plan.STATE, start, state),
        _plan.Span(_plan.SCAN, start + 1.0, scan),
        _plan.Span("kda_fwd_kernel", state + 1.0, output),
    ]


def many(point: _plan.Point, costs: dict[str, float], noise: float = 0.0) -> list[_plan.Span]:
    rng, found, start = random.Random(3), [], 0.0
    for _ in range(12):
        drawn = {name: cost * (1 + noise * rng.uniform(-1, 1)) for name, cost in costs.items()}
        found += spans(point, drawn, start)
        start = found[-1].end + 10.0
    return found


def measured(costs: dict[str, float], noise: float = 0.0) -> list[dict[str, Any]]:
    return [_plan.point_times(point, many(point, costs, noise), 2) for point in _plan.points(H200)]


def lines(costs: dict[str, float]) -> list[dict[str, Any]]:
    machine = {"kind": "machine", "device": "NVIDIA H200", "torch": "2", "sms": H200}
    return [machine, *({"kind": "point", **row} for row in measured(costs))]


# ---- what is run ----


@pytest.mark.parametrize("sms", [78, 114, H200, 148, 188])
def test_all_blocks_of_a_point_run_at_once(sms: int) -> None:
    for point in _plan.points(sms):
        if point.segment_tokens == 0:
            assert {"whole": 1, "half": 2, "quarter": 4}[point.what] * point.heads <= sms
            assert point.tokens % 16 == 0 and point.segments == 1
            continue
        assert point.segment_tokens % 16 == 0 and point.segment_tokens >= 256
        assert point.tokens == point.segments * point.segment_tokens and point.segments > 2
        assert _plan.size("kScanParts") * point.heads <= sms
        if point.what == "state":
            assert point.heads * (point.segments - 1) <= sms // 2 < point.heads * point.segments


def test_the_heads_on_an_h200() -> None:
    heads = {point.what: point.heads for point in _plan.points(H200)}
    assert heads == {"whole": 96, "half": 64, "quarter": 32, "state": 8, "scan": 8}
    for what in heads:
        assert len({point.tokens for point in _plan.points(H200) if point.what == what}) >= 3


def test_the_alternatives_of_a_sweep() -> None:
    assert _plan.alternatives(2048) == [0, 512, 256]
    assert _plan.alternatives(8192) == [0, 2048, 1024, 512, 256]
    assert _plan.alternatives(8200) == [0, 2064, 1040, 528, 272]


# ---- spans ----


def test_calls_and_the_time_that_is_a_kernels_own() -> None:
    point = next(p for p in _plan.points(H200) if p.what == "state")
    calls = _plan.calls_of(reversed(many(point, COSTS)))
    assert len(calls) == 12 and all(len(call) == 3 for call in calls)
    state, scan, output = _plan.own_times(calls[0])
    assert math.isclose(state, 8.0 + 0.6 * point.chunks)
    assert math.isclose(scan, 8.0 + 2.0 * point.segments)
    assert math.isclose(output, 8.0 + 1.1 * point.chunks)


def test_a_gap_between_kernels_belongs_to_neither() -> None:
    call = [_plan.Span("kda_fwd_order_kernel", 0.0, 2.0), _plan.Span("kda_fwd_kernel", 5.0, 9.0)]
    assert _plan.own_times(call) == [2.0, 4.0]


def test_kernels_without_an_output_pass_are_refused() -> None:
    with pytest.raises(ValueError, match="without an output pass"):
        _plan.calls_of([_plan.Span(_plan.STATE, 0.0, 1.0)])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["kda_fwd_half_kernel"], "ran kda_fwd_half_kernel; expected kda_fwd_kernel"),
        ([_plan.STATE, _plan.SCAN, "kda_fwd_kernel"], "expected kda_fwd_kernel"),
        ([], "or none"),
    ],
)
def test_a_point_that_ran_other_kernels_is_refused(names: list[str], said: str) -> None:
    point = _plan.Point("whole", 96, 0, 1, 1024)
    seen = [_plan.Span(name, float(index), index + 0.5) for index, name in enumerate(names)]
    with pytest.raises(ValueError, match=said):
        _plan.point_times(point, seen, 0)


def test_segments_that_were_not_made_are_refused() -> None:
    point = _plan.Point("state", 8, 512, 9, 9 * 512)
    with pytest.raises(ValueError, match="expected kda_fwd_state_kernel, kda_fwd_scan_kernel"):
        _plan.point_times(point, [_plan.Span("kda_fwd_quarter_kernel", 0.0, 1.0)], 0)


# ---- fit ----


def test_a_line_is_found() -> None:
    line = _plan.fit([(x, 8.0 + 0.65 * x) for x in (64, 256, 512)])
    assert math.isclose(line.slope, 0.65) and math.isclose(line.intercept, 8.0) and line.residual < 1e-12


def test_short_times_hold_the_intercept() -> None:
    """Long times that are 2 % off move it by half a microsecond; with equal weights, by five."""
    line = _plan.fit([(64, 72.0), (256, 264.0 * 1.02), (512, 520.0 * 0.98)])
    assert abs(line.intercept - 8.0) < 1.0
    assert 0.01 < line.residual < 0.03


@pytest.mark.parametrize(
    "samples", [[], [(1, 2.0)], [(1, 2.0), (1, 3.0)], [(1, 0.0), (2, 1.0)], [(1, math.nan), (2, 1.0)]]
)
def test_what_has_no_line_is_refused(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="no line through"):
        _plan.fit(samples)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_costs_come_out(noise: float) -> None:
    costs, fitted = _plan.costs_of(measured(COSTS, noise))
    assert set(costs) == set(_plan.COSTS)
    assert {name for name in costs if abs(costs[name] / COSTS[name] - 1) > max(4 * noise, 1e-9)} <= {"cut"}
    assert abs(costs["cut"] - COSTS["cut"]) < 100 * noise + 1e-6
    assert max(line.residual for line in fitted.values()) < 0.05


@pytest.mark.parametrize("name", _plan.COSTS)
def test_one_cost_that_changed_is_the_one_that_is_named(name: str) -> None:
    changed = {**COSTS, name: COSTS[name] * 1.3}
    costs, fitted = _plan.costs_of(measured(changed))
    problems = _plan.problems_of(_plan.compare(COSTS, costs), fitted)
    assert len(problems) == 1 and problems[0].startswith(f"{name}: measured")


# ---- comparison ----


@pytest.mark.parametrize(
    ("factor", "off"),
    [(1.0, False), (1.24, False), (0.76, False), (1.26, True), (0.74, True), (math.nan, True)],
)
def test_a_quarter_is_the_limit(factor: float, off: bool) -> None:
    rows = _plan.compare(COSTS, {**COSTS, "half": COSTS["half"] * factor})
    assert {row["cost"] for row in rows if row["off"]} == ({"half"} if off else set())


def test_what_was_not_measured_is_a_problem() -> None:
    costs, fitted = _plan.costs_of([row for row in measured(COSTS) if row["what"] != "scan"])
    said = _plan.problems_of(_plan.compare(COSTS, costs), fitted)
    assert said == ["scan_step: not measured", "cut: not measured"]
    assert _plan.costs_of([]) == ({}, {})


def test_one_slow_call_does_not_make_the_cut() -> None:
    rows = measured(COSTS)
    next(row for row in rows if row["what"] == "state")["call_us"] += 50.0
    assert math.isclose(_plan.costs_of(rows)[0]["cut"], COSTS["cut"])


def test_the_start_of_a_cut_calls_kernels_is_not_of_an_uncut_one() -> None:
    costs, _ = _plan.costs_of([row for row in measured(COSTS) if row["what"] in ("whole", "state", "scan")])
    assert math.isclose(costs["uncut"], COSTS["uncut"])


def test_times_that_are_no_line_are_a_problem() -> None:
    rows = measured(COSTS)
    rows[1]["us"]["kda_fwd_kernel"] *= 1.5
    costs, fitted = _plan.costs_of(rows)
    assert any("off a line" in text for text in _plan.problems_of(_plan.compare(COSTS, costs), fitted))


def test_the_headers_constants_are_read() -> None:
    found = _plan.read_costs(HEADER)
    assert tuple(found) == _plan.COSTS and all(value > 0 for value in found.values())


@pytest.mark.parametrize(
    "text", ["", "struct FwdCosts { double whole = 1; };", HEADER.replace("uncut =", "a =")]
)
def test_a_header_with_other_constants_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected whole, half"):
        _plan.read_costs(text)


@pytest.mark.parametrize("value", ["0", "1e2", "20 + 5", "-3"])
def test_a_constant_that_is_no_positive_decimal_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="cut of FwdCosts: expected positive decimal"):
        _plan.read_costs(HEADER.replace("cut = 25", f"cut = {value}"))


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), (HEADER.replace("kScanParts = 8", "kScanParts = n"), "defines no kScanParts")],
)
def test_a_header_that_cannot_be_read_is_one_line(
    text: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    header = tmp_path / "fwd_plan.h"
    if text is not None:
        header.write_text(text)
    stub_run(monkeypatch, lines(COSTS))
    for module in (_plan, bench_plan):
        monkeypatch.setattr(module, "HEADER", header)
    _plan.size.cache_clear()
    try:
        assert bench_plan.main([]) == 2
    finally:
        _plan.size.cache_clear()
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_one_time_that_is_none_costs_its_line_alone() -> None:
    rows = lines(COSTS)
    next(row for row in rows if row.get("what") == "half")["us"]["kda_fwd_half_kernel"] = math.nan
    result = _plan.build_result(rows, COSTS, FACTS, [])
    assert result["points"] and "half: not measured" in result["problems"]
    assert not [text for text in result["problems"] if text.startswith(("whole", "state", "scan"))]


def test_nothing_measured_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    out.write_text("older")
    stub_run(monkeypatch, [])
    assert bench_plan.main(["--json", str(out)]) == 1
    assert out.read_text() == "older" and "is not written" in capsys.readouterr().out
    assert bench_plan.main(["--json", str(tmp_path)]) == 2
    assert "cannot be written: Is a directory" in capsys.readouterr().err


def sweep(**ms: float) -> list[dict[str, Any]]:
    """Lines of 8 heads and 2048 tokens: the choice, no cuts, two alternatives."""
    kinds = {"chosen": (None, 8), "never": (0, 1), "four": (512, 4), "eight": (256, 8)}
    return [
        {
            "heads": 8,
            "tokens": 2048,
            "segment_tokens": kinds[name][0],
            "segments": kinds[name][1],
            "ms": value,
        }
        for name, value in ms.items()
    ]


def test_a_choice_beside_the_best() -> None:
    (row,) = _plan.judge_sweep(sweep(chosen=0.3, never=0.5, four=0.2, eight=0.4))
    assert (row["chosen_segments"], row["best_segments"], row["best_ms"]) == (8, 4, 0.2)
    assert math.isclose(row["ratio"], 1.5) and len(row["times"]) == 4
    (row,) = _plan.judge_sweep(sweep(chosen=0.1, never=0.5, four=0.2, eight=0.4))
    assert row["ratio"] == 1.0
    assert _plan.judge_sweep(sweep(chosen=0.3, never=0.5)) == []


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan])
def test_a_size_with_a_time_that_is_none_is_left_out_and_said(ms: float) -> None:
    timed = [{"kind": "sweep", **line} for line in sweep(chosen=0.3, never=0.5, four=ms, eight=0.4)]
    result = _plan.build_result([*lines(COSTS), *timed], COSTS, FACTS, [])
    assert result["sweep"] == [] and result["worst"] is None and len(result["points"]) == 16
    assert result["problems"] == [f"sweep: 8 heads, 2048 tokens: {ms} ms; expected a positive time"]


# ---- the command ----


def test_the_result_and_its_tables() -> None:
    timed = [{"kind": "sweep", **line} for line in sweep(chosen=0.3, never=0.5, four=0.2, eight=0.4)]
    result = _plan.build_result([*lines(COSTS), *timed], COSTS, FACTS, [])
    result = json.loads(json.dumps(result))
    assert result["problems"] == [] and result["device"] == "NVIDIA H200" and result["sms"] == H200
    assert {"driver", "torch", "date", "commit", "wheel_sha256", "versions"} <= set(result)
    assert {(row["tokens"], row["heads"]) for row in result["points"]} >= {(1024, 96), (8192, 32), (4608, 8)}
    assert len(result["cuts"]) == 4 and all(math.isclose(cut, 24.0) for cut in result["cuts"])
    assert math.isclose(result["worst"], 1.5)
    table = _plan.cost_table(result).splitlines()
    assert table[1].split() == ["whole", "1.100", "1.100", "1.00"]
    assert [line.split()[0] for line in table[1:]] == list(_plan.COSTS)
    assert _plan.sweep_table(result).splitlines()[-1] == "worst: 1.500 x the best (8 heads, 2048 tokens)"


def test_a_run_that_ended_early_still_has_a_table() -> None:
    error = {"kind": "error", "what": "costs", "error": "RuntimeError: gone"}
    result = _plan.build_result([*lines(COSTS)[:4], error], COSTS, FACTS, ["plan: ran past 400 s"])
    assert result["problems"][:2] == ["plan: ran past 400 s", "costs: RuntimeError: gone"]
    assert "half: not measured" in result["problems"]
    half = _plan.cost_table(result).splitlines()[2]
    assert half.split() == ["half", "0.700", "-", "-", "!"]
    nothing = _plan.build_result([], COSTS, FACTS, ["plan: exit code 1"])
    assert len(nothing["problems"]) == 1 + len(_plan.COSTS) and nothing["worst"] is None


class MadeUp:
    """Stands for the GPU: calls are (heads, tokens, segment_tokens), and spans follow from them."""

    def __init__(self) -> None:
        self.put: list[dict[str, Any]] = []

    def calls(self, inputs: Sequence[tuple[int, int]], segment_tokens: int | None) -> list[Any]:
        return [(*one, segment_tokens) for one in inputs]

    def spans_of(self, calls: Sequence[Any], count: int) -> list[_plan.Span]:
        wanted = calls[0]
        (point,) = [p for p in _plan.points(H200) if (p.heads, p.tokens, p.segment_tokens) == wanted]
        return [span for index in range(count) for span in spans(point, COSTS, 1e4 * index)]


def test_the_workers_points_and_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, put = MadeUp(), []
    sink: Any = SimpleNamespace(put=lambda kind, **data: put.append({"kind": kind, **data}))
    caller: Any = gpu
    properties = SimpleNamespace(multi_processor_count=H200)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr(_plan_worker, "make_inputs", lambda heads, tokens, *_: [(heads, tokens)])
    monkeypatch.setattr(_plan_worker, "spans_of", gpu.spans_of)
    monkeypatch.setattr(_plan_worker, "segments_of", lambda call, heads: 1)
    timing = SimpleNamespace(ms=0.5, spread=0.01)
    monkeypatch.setattr(_plan_worker, "measure_cuda", lambda calls, budget_s: timing)
    device: Any = None
    _plan_worker.do_sweep(caller, device, 1, sink)
    _plan_worker.do_points(caller, device, 1, sink)
    result = _plan.build_result(put, COSTS, FACTS, [])
    assert result["problems"] == [] and result["worst"] == 1.0
    assert len(result["sweep"]) == 24 and len(result["points"]) == 16
    assert {row["calls"] for row in result["points"]} == {_plan_worker.REPEATS}


def test_spans_are_of_this_projects_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.autograd import DeviceType

    def event(name: str, start: float, end: float, where: Any = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=where, time_range=SimpleNamespace(start=start, end=end))

    done: list[str] = []
    seen = [
        event("kda_fwd_scan_kernel(flash_kda::FwdParams)", 3.0, 5.0),
        event("kda_fwd_state_kernel(flash_kda::FwdParams)", 2.0, 4.0),
        event("spin_kernel(long)", 0.0, 2.0),
        event("flash_kda::fwd", 0.0, 9.0, DeviceType.CPU),
    ]

    @contextmanager
    def profile(activities: Any) -> Iterator[Any]:
        done.append("profile")
        yield SimpleNamespace(events=lambda: seen)

    monkeypatch.setattr(_plan_worker, "profile", profile)
    monkeypatch.setattr(_plan_worker, "sleep", lambda seconds: done.append("sleep"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    calls: Any = [lambda: done.append("a"), lambda: done.append("b")]
    assert _plan_worker.spans_of(calls, 3) == [
        _plan.Span("kda_fwd_state_kernel", 2.0, 4.0),
        _plan.Span("kda_fwd_scan_kernel", 3.0, 5.0),
    ]
    assert done == ["a", "b", "profile", "sleep", "a", "b", "a"]


def test_segments_are_counted_by_their_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"requested_bytes.all.current": 1000, "requested_bytes.all.peak": 1000}
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_stats", lambda: held)
    for segments, taken in ((1, 0), (9, 9 * 8 * 131072)):

        def call(taken: int = taken) -> None:
            held["requested_bytes.all.peak"] = 1000 + taken

        assert _plan_worker.segments_of(call, 8) == segments


def stub_run(monkeypatch: pytest.MonkeyPatch, found: list[dict[str, Any]]) -> None:
    """The command with a GPU, whose process leaves these lines."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(bench_plan, "gather_facts", lambda args, run: FACTS)
    monkeypatch.setattr(bench_plan, "spawn", lambda *_: None)
    monkeypatch.setattr(bench_plan, "wait", lambda *_: [])
    monkeypatch.setattr(bench_plan, "read_lines", lambda path: found)


def test_the_exit_code_says_whether_the_header_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    header = _plan.read_costs(HEADER)
    out = tmp_path / "deep" / "plan.json"
    stub_run(monkeypatch, lines(header))
    assert bench_plan.main(["--json", str(out)]) == 0
    assert json.loads(out.read_text())["problems"] == []
    stub_run(monkeypatch, lines({**header, "state": 1.5 * header["state"]}))
    assert bench_plan.main(["--json", str(out)]) == 1
    assert "PROBLEM state: measured" in capsys.readouterr().out
    assert json.loads(out.read_text())["problems"] != []


def test_without_a_gpu_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_plan.main(["--ours-path", str(ROOT)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("bench_plan: torch sees no GPU: ")
