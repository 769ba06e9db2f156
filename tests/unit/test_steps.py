"""bench_steps.py without a GPU, the steps it serves, and the table that joins both."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ci import docs, steps
from ci.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytest.importorskip("tomllib", reason="the benchmark scripts need Python 3.11")
sys.path.insert(0, str(BENCHMARKS))

import _cases  # noqa: E402
import bench_steps  # noqa: E402

OLD, NEW = "a" * 40, "b" * 40


# ---- wheels ----


def record(commit: str | None, dirty: bool = False) -> str:
    return json.dumps({"source": {"commit": commit, "dirty": dirty}})


def fake_wheel(path: Path, built: str | None, init: str | None = None) -> Path:
    """The checkout's package without a library, as a wheel; `built` is its build record."""
    package = ROOT / "flash_kda"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(package.rglob("*.py")):
            archive.write(file, file.relative_to(ROOT).as_posix())
        metadata = "Metadata-Version: 2.1\nName: flash-kda\nVersion: 1.2.3\n"
        archive.writestr("flash_kda-1.2.3.dist-info/METADATA", metadata)
        if built is not None:
            archive.writestr("flash_kda/build_record.json", built)
    if init is not None:
        replace_init(path, init)
    return path


def replace_init(path: Path, init: str) -> None:
    """Give the wheel's package another __init__.py."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**held, "flash_kda/__init__.py": init.encode()}.items():
            archive.writestr(name, data)


def dry_run(out: Path, *wheels: Path, suite: str = "t512_h32,varlen64x128_h32") -> int:
    command = ["--suite", suite, "--device", "cpu", "--tiny", "--json", str(out)]
    return bench_steps.main([*map(str, wheels), *command])


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tensors this small only lose time to threads


def test_two_wheels_in_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out.json"
    wheels = fake_wheel(tmp_path / "x.whl", record(OLD)), fake_wheel(tmp_path / "y.whl", record(NEW, True))
    assert dry_run(out, *wheels) == 0
    result = json.loads(out.read_text())
    assert {"device", "driver", "torch", "date", "wheels", "rows", "problems"} == set(result)
    assert result["device"] == "cpu (dry run)" and result["problems"] == []
    assert [wheel["commit"] for wheel in result["wheels"]] == [OLD, NEW + "+dirty"]
    assert {wheel["version"] for wheel in result["wheels"]} == {"1.2.3"}
    assert len({wheel["sha256"] for wheel in result["wheels"]}) == 2
    assert [row["case"] for row in result["rows"]] == ["t512_h32", "varlen64x128_h32"]
    for row in result["rows"]:
        assert len(row["ms"]) == 2 and min(*row["ms"], row["again_ms"]) > 0
    assert str(tmp_path) not in out.read_text() and str(ROOT) not in out.read_text()
    said = capsys.readouterr()
    assert said.out.startswith("DRY RUN on the CPU")
    assert "  varlen64x128_h32   packed 5 + 5 + 5 + 5, 2 heads\n" in said.out
    assert said.out.splitlines()[5].split() == ["ms", "aaaaaaaaaa", "bbbbbbbbbb+", "again", "noise"]
    order = ["running 1-aaaaaaaaaa ...", "running 2-bbbbbbbbbb ...", "running 1-aaaaaaaaaa-again ..."]
    assert said.err.splitlines() == order


def test_a_wheel_that_fails_is_a_problem_and_the_rest_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    good = fake_wheel(tmp_path / "good.whl", record(OLD))
    broken = fake_wheel(tmp_path / "broken.whl", record(NEW), "raise RuntimeError('no such symbol')\n")
    text = tmp_path / "text.whl"
    text.write_text("not a zip")
    assert dry_run(out, text, good, broken, suite="t512_h32") == 1
    result = json.loads(out.read_text())
    assert [wheel["commit"] for wheel in result["wheels"]] == [OLD, NEW]
    first, second = result["rows"][0]["ms"]
    assert first > 0 and second is None and result["rows"][0]["again_ms"] > 0
    said = capsys.readouterr().out
    assert "PROBLEM text.whl: cannot be unpacked, expected a wheel: File is not a zip file\n" in said
    assert "PROBLEM 3-bbbbbbbbbb: exit code 1; end of its log:" in said and "no such symbol" in said


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (None, "holds no flash_kda/build_record.json that can be read, expected a wheel of this project; "),
        (record(None), "its build record names no commit, so no step is its own; next: "),
        ("{", "holds no flash_kda/build_record.json that can be read"),
    ],
)
def test_a_wheel_of_nobody_is_refused_and_the_older_file_stays(
    built: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text("older")
    assert dry_run(out, fake_wheel(tmp_path / "x.whl", built)) == 1
    assert out.read_text() == "older"
    printed = capsys.readouterr().out
    assert f"PROBLEM x.whl: {said}" in printed and printed.startswith("nothing was timed: ")


@pytest.mark.parametrize("built", ["[]", "null", '{"source": "x"}', '{"source": {"commit": 5}}'])
def test_a_record_that_no_build_writes_is_a_problem(
    built: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(tmp_path / "out.json", fake_wheel(tmp_path / "x.whl", built)) == 1
    said = capsys.readouterr().out
    assert "PROBLEM x.whl: build_record.json: source is " in said and "reinstall" in said


@pytest.mark.parametrize(
    ("offset", "value", "said"), [(6, 1, "is encrypted"), (8, 99, "compression method is not supported")]
)
def test_a_wheel_that_python_cannot_unpack_leaves_the_one_beside_it(
    offset: int, value: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, locked = tmp_path / "out.json", fake_wheel(tmp_path / "locked.whl", record(NEW))
    data = bytearray(locked.read_bytes())
    for start, more in ((b"PK\3\4", 0), (b"PK\1\2", 2)):  # both headers of the first file
        data[data.index(start) + offset + more] = value
    locked.write_bytes(data)
    assert dry_run(out, locked, fake_wheel(tmp_path / "good.whl", record(OLD)), suite="t512_h32") == 1
    assert [wheel["commit"] for wheel in json.loads(out.read_text())["wheels"]] == [OLD]
    printed = capsys.readouterr().out
    assert "PROBLEM locked.whl: cannot be unpacked, expected a wheel: " in printed and said in printed


def test_a_line_that_was_cut_short_is_an_error_among_the_others(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"kind": "time", "case": "a", "ms": 1.0}\n{"kind": "ti')
    first, second = bench_steps.read_lines(path)
    assert first["ms"] == 1.0 and second["kind"] == "error" and "cannot be read" in second["error"]


def test_no_such_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path / "out.json", tmp_path / "gone.whl") == 1
    said = capsys.readouterr().out
    assert "PROBLEM gone.whl: cannot be unpacked, expected a wheel: No such file or directory\n" in said
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "torch sees no GPU: "),
        (["--suite", "accuracy"], "has no case to run"),
        (["--suite", "nonsense"], "no case named nonsense"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench_steps.main(["x.whl", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("bench_steps: ") and said in err


# ---- the result file ----


def lines(ms: float, **changes: Any) -> list[dict[str, Any]]:
    line = {"kind": "time", "case": "c", "ms": ms, "checksum": 5, "o_rms": 1.0, "s_rms": 2.0, **changes}
    return [{"kind": "machine", "device": "NVIDIA Test", "torch": "2.11.0"}, line]


def wheel(tag: str, commit: str) -> bench_steps.Wheel:
    facts = {
        "driver": "1",
        "date": "d",
        "commit": commit,
        "wheel_sha256": "e",
        "versions": {"flash_kda": "0"},
    }
    return bench_steps.Wheel(tag, Path(tag), facts)


def built(second: list[dict[str, Any]], again: list[dict[str, Any]]) -> dict[str, Any]:
    case = _cases.make_case("c", 8, 1, 8192, None, ())
    results = {"1": lines(2.0), "2": second, "1-again": again}
    return bench_steps.build([case], [wheel("1", OLD), wheel("2", NEW)], results, ["early"])


def test_times_are_merged_by_case() -> None:
    result = built(lines(1.0), lines(2.1))
    assert (result["device"], result["torch"], result["driver"]) == ("NVIDIA Test", "2.11.0", "1")
    assert result["wheels"][1] == {"commit": NEW, "sha256": "e", "version": "0"}
    assert result["rows"][0] | {"ms": [2.0, 1.0], "again_ms": 2.1} == result["rows"][0]
    assert result["problems"] == ["early"]
    _, line = bench_steps.step_table(result).splitlines()
    assert line.split() == ["c", "2.000", "1.000", "2.100", "1.050"]


def test_what_is_missing_is_none_and_said() -> None:
    error = {"kind": "error", "what": "c", "error": "RuntimeError: x"}
    result = built([error], [])
    assert result["rows"][0]["ms"] == [2.0, None] and result["rows"][0]["again_ms"] is None
    assert result["problems"] == ["early", "2: c: RuntimeError: x"]
    assert bench_steps.step_table(result).splitlines()[1].split() == ["c", "2.000", "-", "-", "-"]


def test_a_wheel_that_computes_something_else_is_a_problem() -> None:
    problem = built(lines(1.0, o_rms=1.5), lines(2.1))["problems"][1]
    assert problem.startswith("c: o_rms differs by more than 2 %: 1 1, 2 1.5")


# ---- the steps ----


def history() -> list[str] | None:
    """Every commit up to HEAD, oldest first; None outside git or where only a part of the history is."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*command, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if shallow.stdout.strip() != "false":
        return None
    listed = [*command, "rev-list", "--reverse", "--topo-order", "HEAD"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()


def test_every_step_is_a_commit_of_the_history_in_its_order() -> None:
    listed, commits = steps.load(), history()
    assert len({step.commit[:10] for step in listed}) == len(listed) >= 6
    if commits is not None:
        found = [[i for i, full in enumerate(commits) if full.startswith(step.commit)] for step in listed]
        assert all(len(hits) == 1 for hits in found), list(zip(listed, found, strict=True))
        assert found == sorted(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('commit = "3f8c260"', "'commit': expected ten to forty digits"),
        ('commit = "3f8c260662"\nname = "a|b"', "'name': expected a line without"),
        ('commit = "3f8c260662"\nname = "<!-- end -->"', "'name': expected a line without"),
        ('commit = "3f8c260662"\nname = "a\\u0085b"', "'name': expected a line without"),
        ('commit = "3f8c260662"\nname = "a"', "key 'expected' is missing"),
        ('commit = "3f8c260662"\nname = "a"\nexpected = "b"', "key 'why' is missing"),
        (
            'commit = "3f8c260662"\nname = "a"\nexpected = "b"\nwhy = "c"\nbrought = "d"',
            "unknown key 'brought'",
        ),
    ],
)
def test_steps_that_cannot_stand_in_the_table_are_refused(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.toml"
    path.write_text(f"[[step]]\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        steps.load(path)


def test_the_tables_cases_are_of_the_suite() -> None:
    assert [case.name for case in _cases.select(steps.CASES, _cases.load_cases())] == list(steps.CASES)
    assert set(steps.CASES) <= set(_cases.choose_suite("h200").cases)


@pytest.mark.parametrize(
    ("ms", "cells"),
    [
        ([4.0, 2.0, 1.0], ["4.000 ms", "0.50 x", "0.50 x, 1.000 ms"]),
        ([4.0, None, 1.0], ["4.000 ms", "-", "1.000 ms"]),
        ([None, 2.0, 1.0, None], ["-", "-", "0.50 x", "-"]),
        ([4.0], ["4.000 ms"]),
    ],
)
def test_what_a_case_gained(ms: list[float | None], cells: list[str]) -> None:
    assert steps.brought(ms) == cells


# ---- the table ----


def result_file(folder: Path, commits: list[str], cases: tuple[str, ...] = steps.CASES) -> Path:
    rows = [
        {"case": name, "batch": 1, "seqlen": 8192, "nheads": 8, "lens": None, "again_ms": 8.08}
        | {"ms": [8.0 / 2**index for index in range(len(commits))]}
        for name in cases
    ]
    about = {"device": "NVIDIA Test", "driver": "1.2", "torch": "2.11.0", "date": "2026-01-01T00:00Z"}
    wheels = [{"commit": commit, "sha256": "e", "version": "0"} for commit in commits]
    path = folder / "result.json"
    path.write_text(json.dumps({**about, "wheels": wheels, "rows": rows, "problems": []}))
    return path


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.toml"
    entries = ((OLD[:10], "first", "nothing", "first"), (NEW[:10], "second", "half", "so"))
    path.write_text(
        "".join(
            f'[[step]]\ncommit = "{c}"\nname = "{n}"\nexpected = "{e}"\nwhy = "{w}"\n'
            for c, n, e, w in entries
        )
    )
    return path


def test_the_table_joins_wheels_by_commit(tmp_path: Path, two_steps: Path) -> None:
    text = docs.steps_table(result_file(tmp_path, ["c" * 40, OLD, NEW]), two_steps)
    assert text.startswith(
        "NVIDIA Test, driver 1.2, torch 2.11.0, 2026-01-01T00:00Z; all wheels in one run. "
    )
    assert "took 1.010 to 1.010 of its first times" in text
    head, _, first, second = text.split("\n\n")[-1].splitlines()
    assert head.startswith("| step | expected | 1 x 8192, 8 heads | ")
    assert first == f"| first (`{OLD[:10]}`) | nothing |" + " 4.000 ms |" * 6 + " first |"
    assert second == f"| second (`{NEW[:10]}`) | half |" + " 0.50 x, 2.000 ms |" * 6 + " so |"


def test_changed_sources_are_no_step(tmp_path: Path, two_steps: Path) -> None:
    text = docs.steps_table(result_file(tmp_path, [OLD, NEW + "+dirty"]), two_steps)
    assert text.splitlines()[-1].endswith("| half |" + " - |" * 6 + " so |")


def test_a_run_that_left_a_case_out_is_refused(tmp_path: Path, two_steps: Path) -> None:
    path = result_file(tmp_path, [OLD, NEW], steps.CASES[1:])
    with pytest.raises(ConfigError, match=r"result\.json has no case t8192_h96; expected .*\nNext: run "):
        docs.steps_table(path, two_steps)


@pytest.mark.parametrize("text", ["[]", "{}", '{"rows": 5}', '{"rows": [{}], "wheels": []}', "{"])
def test_a_file_that_is_no_result_is_named(text: str, tmp_path: Path, two_steps: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read.*\nNext: restore it"):
        docs.written("steps", lambda: docs.steps_table(path, two_steps))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[8.0, 4.0]", "[8.0]", "expected 2 ms and again_ms, each positive or null, got .8.0. and 8.08"),
        ("[8.0, 4.0]", '[8.0, "4"]', "expected 2 ms and again_ms"),
        ("[8.0, 4.0]", "[8.0, 0]", "expected 2 ms and again_ms"),
        ("8.08", "NaN", "expected a JSON object, got the number NaN"),
    ],
)
def test_a_row_without_its_times_is_refused(
    old: str, new: str, said: str, tmp_path: Path, two_steps: Path
) -> None:
    path = result_file(tmp_path, [OLD, NEW])
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=rf"result\.json.*: {said}.*\nNext: "):
        docs.steps_table(path, two_steps)


def test_a_run_without_a_second_time_says_so() -> None:
    assert "did not run twice" in steps.noise([{"ms": [1.0], "again_ms": None}])


def test_without_times_there_are_the_steps_and_the_command(two_steps: Path) -> None:
    said = docs.steps_table(docs.ROOT / "benchmarks" / "results" / "absent.json", two_steps)
    assert said.startswith("No times are on record: `benchmarks/results/absent.json` is not in this tree. ")
    command = "python benchmarks/bench_steps.py WHEEL [WHEEL ...] --suite h200 --json"
    assert f"\n    {command} benchmarks/results/absent.json\n" in said
    assert said.endswith(f"| first (`{OLD[:10]}`) | nothing |\n| second (`{NEW[:10]}`) | half |\n")
