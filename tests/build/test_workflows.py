"""The workflows: pinned, without rights they do not need, and without logic of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci import actions, gpu_matrix, jobs, lint, matrix, wheel_matrix
from ci.errors import ConfigError
from ci.lint import ROOT

WORKFLOWS = actions.workflows()
FIXTURES = ROOT / "tests" / "fixtures" / "workflows"
BIN = Path(sys.executable).parent
PIN = actions.Pin("0" * 39 + "a", "v1.2.3")
GOOD = f"      - uses: a/b@{PIN.commit} # v1.2.3\n"


def texts() -> list[pytest.param]:
    return [pytest.param(text, id=path.stem) for path, text in WORKFLOWS.items()]


def jobs_of(text: str) -> list[str]:
    return re.split(r"(?m)^  (?=[a-z]+:$)", text.partition("\njobs:\n")[2])[1:]


def test_the_four_workflows_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["gpu", "pull-request", "release", "wheels"]


@pytest.mark.parametrize("text", texts())
def test_each_action_is_at_its_pinned_commit(text: str) -> None:
    assert list(actions.problems(text, actions.load())) == []
    assert text.count("uses:") == len(re.findall(r"uses: [\w/-]+@[0-9a-f]{40} # v[0-9.]+\n", text)) > 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (GOOD.replace("a # v", "b # v"), "expected 0.*a # v1.2.3, got 0.*b"),
        (GOOD.replace("v1.2.3", "v1.2.4"), "got .* # v1.2.4"),
        ("      - uses: a/b@v1\n", "got v1 # None"),
        ("    uses: a/other@main # v1.2.3\n", "a/other: expected an action of"),
        ('      - "uses": a/other@main\n', "expected uses: NAME@COMMIT"),
        ("      - { uses: a/other@main }\n", "expected uses: NAME@COMMIT"),
        ("      - uses : a/other@main\n", "expected uses: NAME@COMMIT"),
        ("      - uses: docker://alpine\n", "expected uses: NAME@COMMIT"),
        ("      - uses: ./.github/actions/x\n", "expected uses: NAME@COMMIT"),
        ("      - uses:\n          a/other@main\n", "expected uses: NAME@COMMIT"),
        ('      - {"uses":"a/other@main"}\n', "expected uses: NAME@COMMIT"),
    ],
)
def test_an_action_elsewhere_is_refused(line: str, said: str, tmp_path: Path) -> None:
    name = ".github/workflows/x.yml"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("jobs:\n" + GOOD + line)
    (finding,) = lint.loose_actions(tmp_path, [name], {"a/b": PIN})
    assert finding.line == 3 and re.search(said, finding.text)


def test_a_pin_that_nobody_uses_is_refused(tmp_path: Path) -> None:
    (finding,) = lint.loose_actions(tmp_path, [], {"a/b": PIN})
    assert "no workflow uses it" in finding.text


@pytest.mark.parametrize(
    "text",
    ["<<<<<<< HEAD\n", '["a/b"]\nversion = "v1"\n', '["a/b"]\ncommit = "v1"\nversion = "v1"\n', "a = 1\n"],
)
def test_pins_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "actions.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"actions\.toml: "):
        actions.load(tmp_path / "actions.toml")


def test_the_pins_come_from_others_workflows() -> None:
    other = "    - uses: c/d@main # v1\n    - uses: e/f@v2\n"
    assert actions.pinned([GOOD, other + GOOD]) == {"a/b": PIN}
    assert actions.rewrite("- uses: a/b@x # x\n", {"a/b": PIN}) == GOOD.strip() + "\n"
    with pytest.raises(ConfigError, match="a/b: expected one commit"):
        actions.pinned([GOOD, GOOD.replace("v1.2.3", "v1.2.4")])


@pytest.mark.parametrize("text", texts())
def test_nothing_is_allowed_that_no_job_asked_for(text: str) -> None:
    assert "\npermissions: {}\n" in text and "\nconcurrency:\n" in text
    for job in jobs_of(text):
        assert "permissions:\n      " in job and "timeout-minutes: " in job
        assert job.count("actions/checkout@") == job.count("persist-credentials: false")
    assert "pull_request_target" not in text and "secrets." not in text


def test_only_what_signs_or_publishes_may_ask_for_an_identity() -> None:
    found = {
        job.partition(":")[0] for text in WORKFLOWS.values() for job in jobs_of(text) if "id-token" in job
    }
    assert found == {"attest", "pypi"}
    assert not any("run:" in job for text in WORKFLOWS.values() for job in jobs_of(text) if "id-token" in job)


@pytest.mark.parametrize("text", texts())
def test_each_step_is_one_call_of_the_factory(text: str) -> None:
    commands = re.findall(r"(?m)^ *(?:- )?run: (.+)$", text)
    assert len(commands) == len(re.findall(r"\brun: ", text)) > 0
    allowed = r"nox -s \w+( -- [\w $\"-]+)?|(\.venv/bin/)?python -m (pip install|venv|ci\.)[^;|&`(]+"
    assert [command for command in commands if not re.fullmatch(allowed, command)] == []
    assert not any("${{" in command for command in commands)


def test_the_sessions_that_workflows_call_exist() -> None:
    called = {name for text in WORKFLOWS.values() for name in re.findall(r"nox -s (\w+)", text)}
    defined = set(re.findall(r"(?m)^def (\w+)\(session", (ROOT / "noxfile.py").read_text()))
    assert called <= defined and {"lint", "tests", "cibw", "release_check", "gpu_matrix"} <= called


def test_what_asks_for_every_python_finds_them() -> None:
    asking = {
        job.partition(":")[0]: set(re.findall(r"(?m)^            (3\.\d+)$", job))
        for text in WORKFLOWS.values()
        for job in jobs_of(text)
        if re.search(r"nox -s (import_matrix|index_check)$", job, re.MULTILINE)
    }
    pythons = set(matrix.load().test_python)
    assert asking == {"build": pythons, "check": pythons}


def test_a_release_builds_nothing_and_replaces_nothing() -> None:
    text = WORKFLOWS[actions.WORKFLOWS / "release.yml"]
    assert "skip-existing: false" in text and "run-id: ${{ inputs.run }}" in text
    assert not re.search(r"nox -s (build_wheels|cibw|containers|sdist)", text)
    assert "needs: [check]" in next(job for job in jobs_of(text) if job.startswith("pypi:"))


def test_what_is_published_is_what_the_gate_saw() -> None:
    """The number of a run is typed: its artifacts may be anybody's."""
    check, pypi = jobs_of(WORKFLOWS[actions.WORKFLOWS / "release.yml"])
    assert "run-id:" not in pypi and "actions: read" not in pypi and "name: checked-sdist\n" in pypi
    loaded = check.partition("nox -s release_check -- --folder made\n")[0]
    assert re.findall(r"download-artifact[^\0]*?path: (\S+)", loaded) == ["made", "made/sdist"]
    assert "download-artifact" not in check.removeprefix(loaded)
    assert "nox -s index -- --folder made\n" in check and "path: made/sdist/*.tar.gz\n" in check
    assert check.index("nox -s index_check") > check.rindex("upload-artifact")  # it runs the wheels' code


# ---- linters ----


def complaints(*words: str) -> tuple[int, str]:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def commands(path: Path) -> dict[str, list[str]]:
    """What lint runs, on one file that lies elsewhere."""
    made = lint.tool_commands(lint.Venv(BIN.parent), [".github/workflows/x.yml"], fix=False)
    return {title: [*made[title][:-1], str(path)] for title in ("actionlint", "zizmor")}


def test_zizmor_refuses_an_injection() -> None:
    code, said = complaints(*commands(FIXTURES / "injection.yml")["zizmor"])
    assert code != 0 and "template-injection" in said and "artipacked" in said


def test_actionlint_refuses_a_wrong_expression() -> None:
    code, said = complaints(*commands(FIXTURES / "wrong_expression.yml")["actionlint"])
    assert code != 0 and "timeout-minute" in said and "rows" in said


def test_both_run_on_every_workflow() -> None:
    made = lint.tool_commands(lint.Venv(BIN.parent), lint.tracked(), fix=False)
    for title in ("actionlint", "zizmor"):
        assert [word for word in made[title] if word.endswith(".yml")] == [
            path.relative_to(ROOT).as_posix() for path in WORKFLOWS
        ]


# ---- jobs ----


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, *words: str
) -> str:
    monkeypatch.setattr("sys.argv", [program, *words])
    assert {"wheel_matrix": wheel_matrix, "gpu_matrix": gpu_matrix}[program].main() == 0
    return capsys.readouterr().out


def test_there_is_a_job_for_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = run_main(monkeypatch, capsys, "wheel_matrix", "--json")
    assert json.loads(line) == {"include": [{"cuda": row.label} for row in matrix.load().rows]}
    monkeypatch.setenv(jobs.OUTPUT, str(tmp_path / "output"))
    assert run_main(monkeypatch, capsys, "wheel_matrix", "--github") == ""
    assert (tmp_path / "output").read_text() == f"matrix={line}"


def test_what_the_gpu_jobs_name_is_what_the_workflow_reads() -> None:
    (job, *_) = gpu_matrix.tests(matrix.load())
    text = WORKFLOWS[actions.WORKFLOWS / "gpu.yml"]
    assert set(re.findall(r"{ matrix\.(\w+)", text)) == set(job)


def test_outside_of_a_workflow_there_is_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(jobs.OUTPUT, raising=False)
    monkeypatch.setattr("sys.argv", ["x", "--github"])
    with pytest.raises(ConfigError, match="expected the variable GITHUB_OUTPUT"):
        jobs.main("x", "x", [{"a": "b"}])


def test_no_job_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--json"])
    with pytest.raises(ConfigError, match="expected at least one job"):
        jobs.main("x", "x", [])
