"""The benchmark scripts without a GPU: shapes, floors, joining of results, and dry runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import venv
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytest.importorskip("tomllib", reason="the benchmark scripts need Python 3.11")
sys.path.insert(0, str(BENCHMARKS))

import _cases  # noqa: E402
import _impls  # noqa: E402
import _kernels  # noqa: E402
import _peers  # noqa: E402
import _plot  # noqa: E402
import _report  # noqa: E402
import _run  # noqa: E402
import _words  # noqa: E402
import bench_prefill  # noqa: E402


def test_floor_bytes_of_a_known_shape() -> None:
    """1 x 8192 x 96: 1282 bytes a token and head, two fp32 states of 64 KiB a head."""
    case = _cases.make_case("x", 96, 1, 8192, None, ())
    assert case.bytes_moved == 8192 * 96 * 1282 + 2 * 96 * 65536
    assert case.flops == 8192 * 96 * 98304


def test_every_case_of_the_file_loads() -> None:
    cases = _cases.load_cases()
    assert len({case.name for case in cases}) == len(cases) >= 16
    by_name = {case.name: case for case in cases}
    assert by_name["varlen256_h32"].seqlen == 64319
    assert by_name["varlen256_h32"].lens is not None and len(by_name["varlen256_h32"].lens) == 256
    assert all(case.lens is None or sum(case.lens) == case.seqlen for case in cases)
    assert [case.name for case in cases if "fla" in case.peers] == [
        "t8192_h96",
        "varlen6_h96",
        "varlen8x1024_h96",
        "t8192_h64",
    ]
    lines = _cases.load_accuracy()
    assert len(lines) == 16 and len({line.label for line in lines}) == 16


def test_lengths_as_text() -> None:
    assert _cases.parse_lens("3x16") == (16, 16, 16)
    assert _cases.parse_lens("5,0,7") == (5, 0, 7)
    assert _cases.parse_lens("random:9:1:5:20") == _cases.parse_lens("random:9:1:5:20")
    assert sum(_cases.parse_lens("random:9:1:5:20")) == 20


@pytest.mark.parametrize(
    "text", ["", "a", "3x", "1,,2", "random:2:1:5:99", "-1", "99999999999x0", "random:1:0:99999999999:5"]
)
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        _cases.parse_lens(text)


def test_unknown_case_is_refused() -> None:
    with pytest.raises(
        ValueError, match="no case named nonsense; known: peers, accuracy, all, h200, t8192_h96"
    ):
        _cases.select(("t8192_h96", "nonsense"), _cases.load_cases())


def test_suites_and_names_of_cases() -> None:
    every = tuple(case.name for case in _cases.load_cases())
    assert _cases.choose_suite("peers") == _cases.Suite(every, False)
    assert _cases.choose_suite("all") == _cases.choose_suite("h200") == _cases.Suite(every, True)
    assert _cases.choose_suite("accuracy") == _cases.Suite((), True)
    assert _cases.choose_suite("t512_h32,t8192_h8") == _cases.Suite(("t512_h32", "t8192_h8"), False)


def test_a_shape_and_a_suite_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_prefill.main(["--seqlen", "8", "--suite", "peers"]) == 2
    assert "not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--varlen", "999999999999x9"], "expected at most 16777216"),
        (["--varlen", "99999999999999,1"], "bytes; expected at most"),
        (["--seqlen", "8", "--batch", "99999999999999"], "bytes; expected at most"),
        (["--seqlen", "8", "--batch", "0"], "must be >= 1, got 0, 8, 96"),
    ],
)
def test_sizes_that_cannot_be_run_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_prefill.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err


def stub_run(monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]]) -> None:
    """bench_prefill.py with one case of ours, whose process leaves these lines."""
    facts = dict.fromkeys(("driver", "date", "commit", "wheel_sha256", "accuracy_setup"))
    monkeypatch.setattr(bench_prefill, "gather_facts", lambda run, wheel: {**facts, "versions": {}})
    monkeypatch.setattr(bench_prefill, "run_all", lambda run: ({"ours": lines}, []))


def prefill(*arguments: str) -> int:
    return bench_prefill.main(["--seqlen", "8", "--nheads", "1", "--device", "cpu", *arguments])


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
def test_a_file_that_cannot_be_written_is_said_before_the_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_run(monkeypatch, [])
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "folder.png", tmp_path / "file" / "x.png"):
        assert prefill(option, str(path)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and f"{path} cannot be written: " in err


def test_trying_a_file_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("empty", "null", "new"):
        _run.check_writable(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "null"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_full_disk_takes_one_file_and_not_the_tables(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_run(monkeypatch, [timed("b1_t8_h1", 0.5)])
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # a link: what goes wrong here is not to remove the device
    other = {"--json": "--csv", "--csv": "--json"}[option]
    assert prefill(other, str(tmp_path / "new" / "other"), option, str(full)) == 1
    out = capsys.readouterr().out
    assert "b1_t8_h1" in out and out.endswith(f"PROBLEM {full} is not written: No space left on device\n")
    assert (tmp_path / "new" / "other").stat().st_size > 0


def test_what_is_no_number_is_null_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_run(monkeypatch, [timed("b1_t8_h1", 0.5, spread=math.inf)])  # and no copy rate: the floor is NaN
    out = tmp_path / "out.json"
    assert prefill("--json", str(out), "--plot", str(out.with_suffix(".png"))) == 0
    assert "NaN" not in out.read_text() and "Infinity" not in out.read_text()
    result = json.loads(out.read_text())
    assert result["rows"][0]["floor_ms"] is None and result["rows"][0]["ours_ms"] == 0.5
    assert described(out.with_suffix(".png"))["Description"] == _plot.digest(result)


def test_a_run_that_measured_nothing_leaves_the_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_run(monkeypatch, [{"kind": "error", "what": "c", "error": "gone"}])
    files = [tmp_path / name for name in ("a.json", "a.csv", "a.png")]
    for file in files:
        file.write_text("older")
    options = zip(("--json", "--csv", "--plot"), map(str, files), strict=True)
    assert prefill(*(word for pair in options for word in pair)) == 1
    assert [file.read_text() for file in files] == ["older"] * 3
    assert "nothing of ours was measured: no file is written" in capsys.readouterr().out


def test_missing_peers_are_named_with_the_commands_that_bring_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_peers.importlib.util, "find_spec", lambda name: None)
    assert bench_prefill.main(["--suite", "h200", "--peers", "flashkda,fla"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "its import name is flash_kda too" in first
    assert "pip install --no-deps --target DIR tokenspeed-flashkda==0.0.1.post20260728; " in first
    assert first.endswith("give --flashkda-path DIR")
    assert "pip install fla-core==" in second and second.endswith("or give --fla-path DIR")


def test_fla_may_be_the_installed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_peers.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"{name}.py"))
    monkeypatch.setattr(_peers.importlib.metadata, "version", lambda package: "9.9")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    paths = _peers.choose("flashkda,fla", {"flashkda": tmp_path, "fla": None})
    assert paths == {"flashkda": tmp_path.resolve(), "fla": None}
    assert _peers.version(paths["fla"]) == "fla_core-9.9"
    run = bench_prefill.Run(tmp_path, "cpu", 1, [], [], paths, None, 9)
    assert _run.folder_of("fla", run) is None
    assert "PYTHONPATH" not in _run.environment("fla", run)
    assert _run.environment("flashkda", run)["PYTHONPATH"] == str(tmp_path.resolve())


def test_peers_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    nowhere = {"flashkda": tmp_path / "gone", "fla": None}
    with pytest.raises(ValueError, match=r"no peer is called 'fal'; known: flashkda, fla"):
        _peers.choose("fal", nowhere)
    with pytest.raises(ValueError, match="no folder"):
        _peers.choose("", nowhere)


def timed(case: str, ms: float, **changes: Any) -> dict[str, Any]:
    line = {"kind": "time", "case": case, "ms": ms, "spread": 0.01, "host_us": 9.0, "calls": 30}
    return {**line, "checksum": 5, "o_rms": 1.0, "s_rms": 2.0, **changes}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (text, f"expected an object with a kind, got {text}")
        for text in ("[]", "{}", "3", '[["kind", "time"]]')
    ]
    + [('{"kind": "ti', "Unterminated string")],
)
def test_a_line_that_is_no_result_is_an_error_among_them(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.jsonl"
    file.write_text(json.dumps(timed("c", 0.5)) + f"\n{text}\n")
    lines = _report.read_lines(file)
    assert len(_report.of_kind(lines, "time")) == 1
    (problem,) = _report.errors({"ours": lines})
    assert problem.startswith(f"ours: a line of results: cannot be read: {said}")


def test_rows_join_what_the_processes_measured() -> None:
    case = _cases.make_case("c", 96, 1, 8192, None, ("flashkda", "fla"))
    lines = {"ours": [timed("c", 0.5)], "flashkda": [timed("c", 1.5)], "fla": []}
    row = _report.build_row(case, lines, 4000.0)
    assert row["ours_ms"] == 0.5 and row["peers"] == {"flashkda": 1.5}
    assert math.isclose(row["floor_ms"], case.bytes_moved / 4e12 * 1e3)
    assert math.isclose(row["over_floor"], 0.5 / row["floor_ms"])
    assert math.isclose(row["gbps"], case.bytes_moved / 0.5e-3 / 1e9)
    assert math.isclose(row["tflops"], case.flops / 0.5e-3 / 1e12)
    assert _report.build_row(case, {}, 4000.0)["ours_ms"] is None


@pytest.mark.parametrize("change", [{"checksum": 6}, {"o_rms": 1.1}, {"s_rms": 1.9}])
def test_processes_that_computed_other_things_are_reported(change: dict[str, Any]) -> None:
    case = _cases.make_case("c", 1, 1, 8, None, ("flashkda",))
    same = {"ours": [timed("c", 1.0)], "flashkda": [timed("c", 1.0)]}
    assert _report.disagreements([case], same) == []
    other = {"ours": [timed("c", 1.0)], "flashkda": [timed("c", 1.0, **change)]}
    assert len(_report.disagreements([case], other)) == 1


def test_a_line_on_which_a_peer_is_better_is_marked() -> None:
    ours, better, broken = {"o": 4e-3, "s": 3e-3}, {"o": 3.7e-3, "s": 3e-3}, {"o": math.nan, "s": math.inf}
    assert not _report.worse_than_peer({"ours": ours, "fla": ours, "flashkda": broken})
    assert _report.worse_than_peer({"ours": ours, "fla": better})
    assert _report.worse_than_peer({"ours": broken, "fla": better})
    assert _report.worse_than_peer({"ours": None, "fla": better})


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("chunk_kda_kernel", "chunk_kda_kernel"),
        ("void ns::recur<128, true>(ns::Params, float*)", "ns::recur<128, true>"),
        ("(anonymous namespace)::fill(int (*)(int))", "(anonymous namespace)::fill"),
        ("f<g<1>>::operator()(int)", "f<g<1>>::operator()"),
        ("Memset (Device)", "Memset"),
        (f"void a::b<c<{'x' * 200}>, decltype(d->e)>::k<int>(int)", "a::b<...>::k<...>"),
    ],
)
def test_kernel_names_fit_a_table(raw: str, name: str) -> None:
    assert _words.kernel_name(raw) == name


def event(name: str, start: float, us: float, device: str = "CUDA", **more: Any) -> SimpleNamespace:
    """What merge reads of a profiler's event."""
    span = SimpleNamespace(start=start, elapsed_us=lambda: us)
    return SimpleNamespace(
        name=name, time_range=span, device_type=getattr(_kernels.DeviceType, device), **more
    )


EVENTS = [
    event("void second<1>(int)", 30.0, 5.0),
    event("first", 10.0, 1.25),
    event("first", 20.0, 1.5),
    event("cudaLaunchKernel", 5.0, 9.0, "CPU"),
    event("a range", 0.0, 99.0, is_user_annotation=True),
]
MERGED = [
    {"name": "first", "count": 2, "us": 2.75},
    {"name": "second<1>", "count": 1, "us": 5.0},
]


def test_kernels_are_merged_in_the_order_of_their_launch() -> None:
    assert _kernels.merge(EVENTS) == MERGED
    assert _kernels.merge([]) == []


@pytest.mark.parametrize(("seen", "kernels"), [(EVENTS, MERGED), (None, [])])
def test_one_call_is_profiled_after_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch, seen: Any, kernels: list[dict[str, Any]]
) -> None:
    steps: list[str] = []

    @contextmanager
    def profile(activities: Any) -> Any:
        steps.append("on")
        yield SimpleNamespace(events=lambda: seen)
        steps.append("off")

    monkeypatch.setattr(_kernels, "profile", profile)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: steps.append("wait"))
    assert _kernels.kernels_of(lambda: steps.append("call")) == kernels
    assert steps == ["call", "wait", "on", "call", "wait", "off"]


def test_the_table_of_kernels() -> None:
    case = _cases.make_case("c", 1, 1, 8, None, ("flashkda", "fla"))
    lines = {
        "ours": [{"kind": "kernels", "case": "c", "kernels": MERGED}],
        "flashkda": [{"kind": "kernels", "case": "c", "kernels": []}],
        "fla": [{"kind": "error", "what": "c, kernels", "error": "no"}],
    }
    row = _report.build_row(case, lines, 4000.0)
    assert row["kernels"] == {"ours": MERGED, "flashkda": []}
    _, *said = _report.kernel_table({"device": "NVIDIA Test", "rows": [row]}).splitlines()
    assert [line.split() for line in said] == [
        ["c", "ours", "2", "2.8", "first"],
        ["c", "ours", "1", "5.0", "second<1>"],
        ["c", "flashkda", "-", "-", "none", "seen", "by", "the", "profiler"],
    ]
    assert "none (cpu)" in _report.kernel_table({"device": "cpu (dry run)", "rows": [row]})


RESULTS = BENCHMARKS / "results" / "prefill_h200.json"


def plotted(**changes: Any) -> dict[str, Any]:
    """A result file of two rows."""
    rows = [
        {"batch": 1, "seqlen": 8, "nheads": 2, "lens": None, "floor_ms": 0.1, "ours_ms": 0.2, "peers": {}},
        {"batch": 1, "seqlen": 48, "nheads": 2, "lens": "3x16", "floor_ms": math.nan, "ours_ms": None}
        | {"peers": {"fla": 2.0}},
    ]
    about = {"device": "NVIDIA Test", "driver": "1.2", "torch": "2.11.0", "date": "2026-01-01T00:00Z"}
    return {**about, "versions": {"flash_kda": "0.1.0", "fla": "fla_core-1"}, "rows": rows, **changes}


def test_what_a_picture_holds() -> None:
    picture = _plot.prepare(plotted())
    assert picture.labels == ["1 x 8, 2 heads", "packed 3 x 16, 2 heads"]
    assert picture.points == {"floor": ([0], [0.1]), "ours": ([0], [0.2]), "fla": ([1], [2.0])}
    for text in ("NVIDIA Test", "driver 1.2", "torch 2.11.0", "2026-01-01", "flash_kda 0.1.0", "fla_core-1"):
        assert text in picture.title
    with pytest.raises(ValueError, match="no times"):
        _plot.prepare(plotted(rows=[]))


def described(path: Path) -> dict[str, str]:
    """The texts in a PNG."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        return dict(image.text)


def test_a_picture_is_drawn_from_a_result_file(tmp_path: Path) -> None:
    source = tmp_path / "result.json"
    source.write_text(json.dumps(plotted()))
    targets = [tmp_path / "new" / "a.png", tmp_path / "b.png"]
    for target in targets:
        assert bench_prefill.main(["--plot-from", str(source), "--plot", str(target)]) == 0
    first, second = (target.read_bytes() for target in targets)
    assert first == second and len(first) > 5000
    digest = _plot.digest(_plot.load_result(source))
    assert described(targets[0]) == {"Description": digest}
    assert digest != _plot.digest(plotted(date="2026-01-02T00:00Z"))


def test_the_kept_picture_is_of_the_kept_results() -> None:
    kept = RESULTS.with_suffix(".png")
    advice = f"run: python benchmarks/bench_prefill.py --plot-from {RESULTS} --plot {kept}"
    assert described(kept)["Description"] == _plot.digest(_plot.load_result(RESULTS)), advice


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot-from", "gone.json", "--plot", "a.png"], "gone.json cannot be read"),
        (["--plot-from", str(BENCHMARKS / "cases.toml"), "--plot", "a.png"], "cannot be read"),
        (["--plot-from", "rows: [{}]", "--plot", "a.png"], "is no result: KeyError"),
        (["--plot-from", "rows: 5", "--plot", "a.png"], "is no result: TypeError"),
        (["--plot-from", str(RESULTS)], "give --plot FILE.png"),
        (["--plot-from", str(RESULTS), "--plot", "a.svg"], "ends in .png"),
    ],
)
def test_a_picture_that_cannot_be_made(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("[{}]", "5"):
        (tmp_path / f"rows: {text}").write_text(f'{{"rows": {text}}}')
    assert bench_prefill.main(arguments) == 2
    assert said in capsys.readouterr().err


def without(modules: tuple[str, ...], script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of benchmarks/ where these modules cannot be imported."""
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv = [{script!r}, *{arguments!r}]\n"
        f"runpy.run_path({str(BENCHMARKS / script)!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("script", ["bench_prefill.py", "bench_plan.py", "bench_steps.py", "profile_rows.py"])
def test_help_needs_no_torch(script: str) -> None:
    done = without(("torch", "numpy"), script, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {script}"), done.stderr


def test_a_picture_needs_no_torch_and_a_run_says_that_it_does(tmp_path: Path) -> None:
    picture = ("--plot-from", str(RESULTS), "--plot", str(tmp_path / "a.png"))
    done = without(("torch",), "bench_prefill.py", *picture)
    assert done.returncode == 0 and (tmp_path / "a.png").is_file(), done.stderr
    done = without(("torch",), "bench_prefill.py", "--seqlen", "8", "--device", "cpu", "--tiny")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("bench_prefill: a run needs torch (")


def test_matplotlib_is_missed_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench_prefill.main(["--suite", "h200", "--plot", "a.png"]) == 2
    said = capsys.readouterr().err
    assert "pip install -r ci/requirements/plot.in" in said and "--plot-from" in said


FAKE = """
import torch
from oracle import kda_reference
def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, bound, initial_state, final_state, cu_seqlens):
    o, s = kda_reference(q, k, v, g, beta, scale, A_log, dt_bias, bound, initial_state, cu_seqlens)
    out.copy_(o), final_state.copy_({state})
"""


def fake_peer(folder: Path, state: str) -> Path:
    """A package named flash_kda, as tokenspeed-flashkda's is, that computes with the oracle."""
    (folder / "flash_kda").mkdir(parents=True)
    (folder / "flash_kda" / "__init__.py").write_text(FAKE.format(state=state))
    (folder / "oracle.py").write_text((ROOT / "flash_kda" / "reference.py").read_text())
    return folder


def dry_run(peer: Path, out: Path, suite: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, str(BENCHMARKS / "bench_prefill.py"), "--device", "cpu", "--tiny"]
    command += ["--suite", suite, "--peers", "flashkda", "--plot", str(out.with_suffix(".png"))]
    command += ["--ours-path", str(ROOT), "--flashkda-path", str(peer), "--json", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # tensors this small only lose time to threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_the_whole_command_in_a_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, result, text = dry_run(fake_peer(tmp_path / "peer", "s"), out, "h200")
    assert code == 0, text
    assert text.count("none (cpu)") == 2 * 16
    sizes = ["t8192_h96          1 x 24, 2 heads", "relative error     2 draws of 40 tokens, 1 heads"]
    for said in ("DRY RUN on the CPU", "DRY RUN with shrunk sizes", *sizes, "case, times in ms"):
        assert said in text
    assert described(out.with_suffix(".png"))["Description"] == _plot.digest(result)
    wanted = {"device", "driver", "torch", "date", "commit", "wheel_sha256", "copy_gbps", "rows", "accuracy"}
    assert wanted <= set(result)
    for row in result["rows"]:
        assert {"case", "batch", "seqlen", "nheads", "lens", "floor_ms", "ours_ms", "peers"} <= set(row)
        assert row["ours_ms"] > 0 and row["peers"]["flashkda"] > 0
        assert row["kernels"] == {"ours": [], "flashkda": []}
    assert len(result["accuracy"]) == 16
    assert str(ROOT) not in json.dumps(result) and str(tmp_path) not in json.dumps(result)
    for line in result["accuracy"]:
        assert 0 < line["ours"]["o"] < 5e-3 and line["flashkda"]["s"] < 1e-6


def test_a_run_that_is_no_dry_run_says_nothing_of_one() -> None:
    args = bench_prefill.parse_args(["--seqlen", "8"])
    assert _run.dry_run_lines(args, {"rows": [{"case": "c"}]}) == []


def test_each_process_runs_the_package_of_its_folder(tmp_path: Path) -> None:
    run = bench_prefill.Run(tmp_path, "cpu", 1, [], [], {"flashkda": tmp_path}, ROOT, 9)
    assert _run.folder_of("ours", run) == ROOT and _run.folder_of("flashkda", run) == tmp_path
    _impls.load("ours", "cpu", ROOT)
    for name in ("ours", "flashkda"):
        with pytest.raises(RuntimeError, match="expected a module under"):
            _impls.load(name, "cpu", tmp_path)


def test_a_process_is_ended_at_its_limit_with_what_it_started(tmp_path: Path) -> None:
    run = _run.Run(tmp_path, "cpu", 1, [], [], {}, ROOT, 9)
    pid = tmp_path / "pid"
    shell = ["sh", "-c", f"sleep 60 & echo $! > {pid}; cat $2; wait"]
    process = _run.spawn("_worker.py", "slow", "ours", {}, run, shell)
    (problem,) = _run.wait(process, "slow", run, 0.5)
    assert problem.startswith("slow: ran past 0 s; end of its log:\n")
    assert json.loads((tmp_path / "slow.job.json").read_text())["require_under"] == str(ROOT)
    child = Path("/proc") / pid.read_text().strip() / "stat"
    deadline = time.monotonic() + 10  # it was killed, but is not ours to wait for
    while child.exists() and child.read_text().split()[2] not in "ZX":
        assert time.monotonic() < deadline, "what the process started goes on"
        time.sleep(0.01)


def test_a_run_is_credited_to_no_commit_but_the_wheels_own() -> None:
    assert _run.source_commit({}) is None
    assert _run.source_commit({"source": {"commit": None, "dirty": None}}) is None
    assert _run.source_commit({"source": {"commit": "abc", "dirty": False}}) == "abc"
    assert _run.source_commit({"source": {"commit": "abc", "dirty": True}}) == "abc+dirty"


def test_a_wheel_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill("--ours-path", str(ROOT), "--wheel", str(tmp_path / "nofile.whl")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "nofile.whl cannot be read: No such file" in err


def test_facts_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "flash_kda"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "build_record.json").write_text("{")
    run = bench_prefill.Run(tmp_path, "cpu", 1, [], [], {}, tmp_path, 9)
    with pytest.raises(ValueError, match="JSONDecodeError"):
        _run.installed_facts(run)
    (broken / "build_record.json").write_text('{"source": {}}')
    assert _run.installed_facts(run)["record"] == {"source": {}}


def test_without_a_gpu_there_is_one_line_and_no_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_prefill.main(["--seqlen", "8", "--ours-path", str(ROOT)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("bench_prefill: torch sees no GPU: ")


def test_without_flash_kda_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = ["--seqlen", "8", "--device", "cpu", "--tiny"]
    assert bench_prefill.main(command) == 2
    advice = "pip install a wheel, or give --ours-path ."
    assert capsys.readouterr() == ("", f"bench_prefill: flash_kda is not installed: {advice}\n")
    assert bench_prefill.main([*command, "--ours-path", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench_prefill: flash_kda is not in {tmp_path}: {advice}\n"


def test_generated_lengths_are_kept_as_their_text() -> None:
    for lens, kept in (("8x1024", "8x1024"), ("random:9:1:5:20", "random:9:1:5:20"), ("5,0,7", [5, 0, 7])):
        case = _cases.make_case("c", 1, 1, 0, lens, ())
        assert _cases.Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        row = _report.build_row(case, {}, 4000.0)
        assert row["lens"] == kept


def test_a_peer_that_computes_something_else_is_a_problem(tmp_path: Path) -> None:
    code, result, _ = dry_run(fake_peer(tmp_path / "peer", "1.5 * s"), tmp_path / "out.json", "t512_h32")
    assert code == 1
    assert any("s_rms differs" in problem for problem in result["problems"])
