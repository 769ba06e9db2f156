"""The documentation is true: examples run, tables are fresh, every file and symbol it names exists."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ci import docs, matrix, source
from ci.errors import ConfigError, LintError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRACE = (ROOT / "docs" / "call_trace.md").read_text(encoding="utf-8")
STEP = re.compile(r"`((?:flash_kda|csrc)/[\w./]+)` `(\w+)`")


def defines(text: str, symbol: str) -> bool:
    """Whether a Python or C++ source defines or registers `symbol` (a mention in a comment is not enough)."""
    code = re.sub(r"(?m)(#(?!include|define|pragma|if|el|endif).*$|//.*$)", "", text)
    # clang-format puts the name of a long declaration on a line of its own.
    code = re.sub(r"(?<![;:{},\n])\n {4}(?! )", " ", code)
    name = re.escape(symbol)
    python = rf"(?m)^(?:async )?(?:def|class) {name}\b"
    cpp = rf"(?m)^(?:extern |template|static |struct |class |[\w:]+[ *&]+).*\b{name}\s*[({{]|^{name}\("
    return re.search(python, code) is not None or re.search(cpp, code) is not None


def steps() -> list[tuple[str, str]]:
    found = STEP.findall(TRACE)
    assert len(found) >= 10, "the trace names hardly anything: has its form changed?"
    return found


@pytest.mark.parametrize(("file", "symbol"), STEP.findall(TRACE))
def test_the_trace_names_what_exists(file: str, symbol: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"docs/call_trace.md names {file}, which does not exist"
    assert defines(path.read_text(encoding="utf-8"), symbol), f"{file} does not define {symbol}"


def test_the_trace_check_rejects_a_symbol_that_is_only_mentioned() -> None:
    text = "# def gone\n// int gone(int x) {\nint other(int x) { return 1; }\n"
    assert not defines(text, "gone")
    assert defines(text, "other")
    assert not defines("def forward():\n    fwd()\n", "fwd")


def call_on_cpu() -> list[tuple[str, str]]:
    """(file, function) of every Python function of flash_kda that one call on the CPU enters, in order."""
    import torch

    import flash_kda
    from flash_kda import _select

    x = torch.randn(1, 3, 1, 8).bfloat16()
    out = torch.empty_like(x)
    seen: list[tuple[str, str]] = []
    package = str(Path(flash_kda.__file__).parent)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            relative = "flash_kda" + file.removeprefix(package).replace("\\", "/")
            seen.append((relative, frame.f_code.co_name))

    _select.reset()
    sys.setprofile(watch)
    try:
        flash_kda.fwd(x, x, x, x, x[..., 0].contiguous(), 1.0, out, None, None, -5.0)
    finally:
        sys.setprofile(None)
    return seen


def test_a_call_takes_the_path_the_trace_describes() -> None:
    path = [step for step in steps() if step[0].endswith(".py")]
    backends = ("cuda", "cute_dsl", "fla")
    on_cuda = ["flash_kda/_library.py", "flash_kda/dsl.py", *(f"flash_kda/backends/{b}.py" for b in backends)]
    path = [step for step in path if step[0] not in on_cuda]
    calls = iter(call_on_cpu())
    for step in path:
        assert step in calls, f"after the steps before it, the call never entered {step[0]} {step[1]}"


def test_the_readme_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2, "README.md has not the two Python examples: a batch, and packed sequences"
    names: dict[str, Any] = {}
    for code in examples:
        exec(compile(code, "README.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    for line, shapes in zip(said, re.findall(r"print\(.*#(.*)", "".join(examples)), strict=True):
        assert re.findall(r"\[.*?\]", line) == re.findall(r"\[.*?\]", shapes)
    assert names["cu_seqlens"].tolist() == [0, 30, 30, 37, 50]
    assert torch.equal(names["o_row"][0], names["o"])


def test_the_first_commands_are_the_two() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^    (\S.*)$", text)
    assert commands[:2] == ["pip install nox && nox -s build_wheels", "nox -s tests"]


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.name)
def test_generated_tables_are_fresh(page: Path) -> None:
    assert docs.stale(page) is None, "run: python -m ci.docs"


def test_every_generated_table_stands_in_one_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in docs.PAGES)
    for name in docs.blocks():
        assert text.count(f"<!-- generated: {name} -->") == 1, name


def test_a_stale_table_is_seen() -> None:
    text = docs.README.read_text(encoding="utf-8")
    stale = text.replace("| GPUs |", "| GPU |", 1)
    assert stale != text
    assert docs.render(stale, docs.blocks()) == text


def test_every_nox_session_named_exists() -> None:
    sessions = set(re.findall(r"(?m)^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8")))
    for page in PAGES:
        for line in re.findall(r"nox -s ([\w ]+)", page.read_text(encoding="utf-8")):
            unknown = {word for word in line.split() if not word.startswith("-")} - sessions
            assert not unknown, f"{page.name}: no nox session {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    files = re.findall(
        r"(?:`|python |python -m pytest )((?:ci|docs|flash_kda|csrc|tests|benchmarks)/[\w./]+)", text
    )
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    kept = "benchmarks/results"
    results = (f"{kept}/{name}_h200.json" for name in ("prefill", "profile", "steps"))
    made = ("flash_kda/_C.abi3.so", *results)
    for file in files:
        assert file in made or (ROOT / file).exists(), f"{page.name} names {file}"


KERNELS = source.kernels(source.digests(docs.ROOT))


def record(folder: Path, target: str, verdict: str, kernels: str = KERNELS) -> None:
    found = {
        "target": target,
        "verdict": verdict,
        "device": "NVIDIA Test",
        "source": {"kernels_sha256": kernels},
    }
    (folder / f"{target}-{verdict}-{kernels[:4]}.json").write_text(json.dumps(found))


def test_run_on_hardware_needs_a_record(tmp_path: Path) -> None:
    info = matrix.ArchInfo("90a", docs.RUN)
    with pytest.raises(ConfigError, match="has no pass"):
        docs.status(info, tmp_path)
    record(tmp_path, "sm90a", "failed")
    record(tmp_path, "sm100a", "passed")
    with pytest.raises(ConfigError, match="has no pass"):
        docs.status(info, tmp_path)
    record(tmp_path, "sm90a", "passed", "0" * 64)
    assert docs.status(info, tmp_path) == "run on hardware (NVIDIA Test, kernels before a change)"
    record(tmp_path, "sm90a", "passed")
    assert docs.status(info, tmp_path) == "run on hardware (NVIDIA Test)"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff", "expected a JSON object, "),
        (b"{}", "expected target, verdict, device and "),
        (b'{"source": []}', "expected target, verdict, device and "),
    ],
)
def test_a_record_that_is_none_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"x\.json.*: {said}.*got .*\nNext: restore it"):
        docs.status(matrix.ArchInfo("90a", docs.RUN), tmp_path)


RESULT = {
    "device": "NVIDIA Test",
    "driver": "1.2",
    "torch": "2.11.0",
    "date": "2026-01-01T00:00Z",
    "commit": "abcdef0123456789",
    "copy_gbps": 4240.0,
    "versions": {"flash_kda": "0.1.0", "flashkda": "flashkda-1"},
    "rows": [
        {
            "batch": 1,
            "seqlen": 8192,
            "nheads": 96,
            "lens": None,
            "floor_ms": 0.25,
            "ours_ms": 0.5,
            "peers": {"flashkda": 1.0},
        },
        {
            "batch": 1,
            "seqlen": 48,
            "nheads": 2,
            "lens": "3x16",
            "floor_ms": 0.1,
            "ours_ms": None,
            "peers": {"fla": 2.0},
        },
    ],
    "accuracy_setup": {"batch": 4, "seqlen": 1024, "nheads": 4},
    "accuracy": [
        {"case": "keys", "ours": {"o": 0.004, "s": 0.003}, "flashkda": None, "fla": {"o": 0.1, "s": None}}
    ],
}


def test_result_tables(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(RESULT))
    times = docs.times_table(path)
    assert "4.24 TB/s" in times and "NVIDIA Test" in times
    assert "| 1 x 8192, 96 heads | 0.250 | 0.500 (2.00 x) | 1.000 (2.00 x) |  |" in times
    assert "| packed 3 x 16, 2 heads | 0.100 |  |  | 2.000 |" in times
    assert "![" not in times
    assert "A blank cell was not measured: FLA tunes itself" in times
    full = {**RESULT["rows"][0], "peers": {"flashkda": 1.0, "fla": 2.0}}
    path.write_text(json.dumps({**RESULT, "rows": [full]}))
    assert "blank" not in docs.times_table(path)
    path.write_text(json.dumps(RESULT))
    assert "| keys | 4.0e-03 / 3.0e-03 |  | 1.0e-01 / - |" in docs.errors_table(path)


@pytest.mark.parametrize(
    ("lens", "text"),
    [([5, 0, 7], "5 + 0 + 7"), ("4096x16", "4096 x 16"), ("random:256:1:512:64319", "256 of 1 to 512")],
)
def test_packed_lengths_in_words(lens: list[int] | str, text: str) -> None:
    assert docs.shape({"lens": lens, "nheads": 2}) == f"packed {text}, 2 heads"


def test_a_picture_beside_the_results_is_shown() -> None:
    assert docs.RESULTS.with_suffix(".png").is_file()
    assert "](benchmarks/results/prefill_h200.png)" in docs.times_table()


def test_a_run_without_accuracy_gives_no_errors(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**RESULT, "accuracy": [], "accuracy_setup": None}))
    assert docs.errors_table(path).startswith("No figures")


def test_no_figures_without_a_result_file() -> None:
    absent = docs.ROOT / "benchmarks" / "results" / "absent.json"
    for text in (docs.times_table(absent), docs.errors_table(absent)):
        assert text.startswith("No figures") and not re.search(r"\d\.\d", text)


def profiled(**changes: Any) -> dict[str, Any]:
    """A profile of one case with one kernel, and one that could not be profiled."""
    kernel = {"name": "kda_fwd_kernel", "us": 523.46, "blocks": 66, "sm_share": 50.0, "warps": 11.97}
    figures = {"issue": 43.2, "tensor": None, "shared": 62.0, "l2": 8.25, "dram": 0.0}
    found = [{"reason": "long_scoreboard", "share": 41.2}, {"reason": "wait", "share": 9.5}]
    rows = [
        {"batch": 1, "seqlen": 8192, "nheads": 8, "lens": None}
        | {"kernels": [{**kernel, **figures, "stalls": found}]},
        {"batch": 1, "seqlen": 48, "nheads": 2, "lens": "3x16", "kernels": []},
    ]
    about = {key: RESULT[key] for key in ("device", "driver", "torch", "date", "commit", "versions")}
    metrics = {"issue": ["sm__inst_issued.x"], "tensor": [], "shared": ["a", "b"], "l2": ["c"], "dram": ["d"]}
    return {**about, "ncu": "2025.3", "sms": 132, "metrics": metrics, "rows": rows, **changes}


def test_the_table_of_limits(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profiled()))
    intro, said, *lines = docs.profile_table(path).split("\n\n")
    assert "NVIDIA Test" in intro and "ncu 2025.3, commit `abcdef012345`" in intro and "132 SMs" in intro
    assert "issue: `sm__inst_issued.x`; tensor: not given by this ncu; shared: `a`, `b`" in said
    head, _, first, second = lines[0].splitlines()
    columns = "batch x tokens (D = 128) | kernel | us | blocks | warps | issue | tensor | shared | L2 | DRAM"
    assert head == f"| {columns} | top stalls |"
    cells = "`kda_fwd_kernel` | 523.5 | 66 (50) | 12.0 | 43 | - | 62 | 8.2 | 0 | long scoreboard 41, wait 9.5"
    assert first == f"| 1 x 8192, 8 heads | {cells} |"
    assert second.startswith("| packed 3 x 16, 2 heads | not profiled |")
    assert head.count("|") == first.count("|") == second.count("|")


def test_without_a_profile_there_is_the_command() -> None:
    said = docs.profile_table(docs.ROOT / "benchmarks" / "results" / "absent.json")
    assert said.startswith("No profile is on record: ") and not re.search(r"\d\.\d", said)
    assert "python benchmarks/profile_rows.py --suite h200 --json benchmarks/results/absent.json" in said


def test_a_stale_page_is_named_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("# T\n\n<!-- generated: profile -->\nold\n<!-- end -->\nrest\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "PAGES", (page,))
    monkeypatch.setattr(docs, "blocks", lambda: {"profile": lambda: "new\n"})
    monkeypatch.setattr(sys, "argv", ["ci.docs", "--check"])
    with pytest.raises(LintError, match=r"page\.md: a generated table differs"):
        docs.main()
    monkeypatch.setattr(sys, "argv", ["ci.docs"])
    assert docs.main() == 0
    assert page.read_text() == "# T\n\n<!-- generated: profile -->\nnew\n<!-- end -->\nrest\n"


def test_an_unknown_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no table"):
        docs.render("<!-- generated: nothing -->\n<!-- end -->", docs.blocks())
