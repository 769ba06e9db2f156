"""The gate before a release: each wheel that may not be published, and the one that may."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from verify_artifacts import BUILD_RECORD, ROOT, head

from ci import gpu_matrix, gpu_tests, matrix, provenance, rebuild, release, wheels
from ci.errors import CiError, MetadataError, ProvenanceError, ReleaseError

if TYPE_CHECKING:
    from handmade import MakeWheel

pytest_plugins = ["handmade"]
TABLE = matrix.load()
RUN, NOT_RUN = "90a", "100a"
assert TABLE.archs[RUN].was_run and not TABLE.archs[NOT_RUN].was_run


@pytest.fixture
def wheel(make_wheel: MakeWheel) -> Path:
    """A wheel of a commit, with its provenance; what it holds is told to `release.check`."""
    return of_source(make_wheel)


def of_source(make_wheel: MakeWheel, **source: object) -> Path:
    made_from = {**head(), **source}
    made = make_wheel({"flash_kda/build_record.json": json.dumps({**BUILD_RECORD, "source": made_from})})
    provenance.write(made)
    return made


def record(wheel: Path, folder: Path, name: str = RUN, **changes: object) -> Path:
    """The record that the GPU tests leave after a pass, or after what `changes` say."""
    said: dict[str, Any] = {
        "wheel": wheel.name,
        "wheel_sha256": provenance.sha256(wheel),
        "target": f"sm{name}",
        "device": "NVIDIA H200",
        "counts": {"passed": 354, "failed": 0, "errors": 0},
        "exit_code": 0,
        "verdict": "passed",
    }
    return gpu_tests.write_record({**said, **changes}, folder)


def test_a_wheel_that_passed_may_be_published(wheel: Path, tmp_path: Path) -> None:
    path = record(wheel, tmp_path)
    tried = release.check(wheel, [RUN, NOT_RUN], TABLE, tmp_path)
    assert tried == {RUN: f"passed ({path.name})", NOT_RUN: "built, not run"}


def test_an_architecture_without_a_record_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=rf"sm{RUN}: expected a record \w+-sm{RUN}\.json .* got none"):
        release.check(wheel, [RUN, NOT_RUN], TABLE, tmp_path)
    with pytest.raises(ReleaseError, match="no architecture in it"):
        release.check(wheel, [], TABLE, tmp_path)


def test_a_record_of_another_wheel_counts_for_nothing(
    wheel: Path, make_wheel: MakeWheel, tmp_path: Path
) -> None:
    other = make_wheel({"flash_kda/x.py": ""}, folder="other")
    path = record(other, tmp_path)
    with pytest.raises(ReleaseError, match="got none"):
        release.check(wheel, [RUN], TABLE, tmp_path)
    path.rename(tmp_path / gpu_tests.record_name(provenance.sha256(wheel), f"sm{RUN}"))
    with pytest.raises(ReleaseError, match=rf"wheel_sha256: expected .*, got {provenance.sha256(other)}"):
        release.check(wheel, [RUN], TABLE, tmp_path)


def test_a_record_of_another_target_counts_for_nothing(wheel: Path, tmp_path: Path) -> None:
    path = record(wheel, tmp_path, NOT_RUN)
    path.rename(tmp_path / gpu_tests.record_name(provenance.sha256(wheel), f"sm{RUN}"))
    with pytest.raises(ReleaseError, match=f"target: expected sm{RUN}, got sm{NOT_RUN}"):
        release.check(wheel, [RUN], TABLE, tmp_path)


@pytest.mark.parametrize("verdict", ["failed", "nothing ran", "another flash_kda was tested"])
@pytest.mark.parametrize("name", [RUN, NOT_RUN])
def test_a_record_of_no_pass_is_refused(wheel: Path, tmp_path: Path, name: str, verdict: str) -> None:
    record(wheel, tmp_path, name, verdict=verdict)
    with pytest.raises(ReleaseError, match=f"sm{name}: .*verdict: expected passed, got {verdict}"):
        release.check(wheel, [name], TABLE, tmp_path)


@pytest.mark.parametrize(
    "edit", [{"verdict": "passed"}, {"counts": {"passed": 355, "failed": 0, "errors": 0}}, {"x": 1}]
)
def test_an_edited_record_is_refused(wheel: Path, tmp_path: Path, edit: Mapping[str, object]) -> None:
    path = record(wheel, tmp_path, verdict="failed" if "verdict" in edit else "passed")
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(ReleaseError, match=r"record_sha256: expected .* \(the record was edited\)"):
        release.check(wheel, [RUN], TABLE, tmp_path)


@pytest.mark.parametrize(
    "said",
    [
        {"counts": {"passed": 0, "failed": 0, "errors": 0}},
        {"counts": {"passed": 354, "failed": 1, "errors": 0}},
        {"counts": {"passed": 354, "failed": 0, "errors": 1}},
        {"exit_code": 1},
    ],
)
def test_a_pass_whose_counts_say_otherwise_is_refused(
    wheel: Path, tmp_path: Path, said: Mapping[str, object]
) -> None:
    record(wheel, tmp_path, **said)
    with pytest.raises(ReleaseError, match=r"expected the counts of a pass, got .*(failed|nothing ran)"):
        release.check(wheel, [RUN], TABLE, tmp_path)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", DEEP], ids=range(6))
def test_a_record_that_is_none_is_refused(wheel: Path, tmp_path: Path, text: str) -> None:
    record(wheel, tmp_path).write_text(text)
    with pytest.raises(ReleaseError, match=r"expected a record of ci\.gpu_tests, got "):
        release.check(wheel, [RUN], TABLE, tmp_path)


@pytest.mark.parametrize("source", [{"dirty": True}, {"commit": None, "dirty": None}])
def test_a_wheel_of_uncommitted_sources_is_refused(
    make_wheel: MakeWheel, tmp_path: Path, source: Mapping[str, object]
) -> None:
    made = of_source(make_wheel, **source)
    record(made, tmp_path)
    with pytest.raises(ProvenanceError, match="expected a wheel made from a commit alone"):
        release.check(made, [RUN], TABLE, tmp_path)


@pytest.mark.parametrize("commit", ["HEAD", "a" * 7, f"{'a' * 40}^{{}}", "--all", 1, ["a"]])
def test_a_commit_that_git_could_take_for_another_is_refused(
    make_wheel: MakeWheel, tmp_path: Path, commit: object
) -> None:
    made = of_source(make_wheel, commit=commit)
    record(made, tmp_path)
    with pytest.raises(ProvenanceError, match=r"source\.commit: expected all hexadecimal digits of a commit"):
        release.check(made, [RUN], TABLE, tmp_path)


def test_a_commit_outside_of_the_history_is_refused(make_wheel: MakeWheel, tmp_path: Path) -> None:
    made = of_source(make_wheel, commit="a" * 40)
    record(made, tmp_path)
    with pytest.raises(ProvenanceError, match=r"expected a wheel of a commit in this checkout's history"):
        release.check(made, [RUN], TABLE, tmp_path)


@pytest.mark.parametrize("name", ["flash_kda/__init__.py", "csrc/late.cu"])
def test_sources_that_the_commit_does_not_have_are_refused(
    make_wheel: MakeWheel, tmp_path: Path, name: str
) -> None:
    files = head()["files"]
    assert isinstance(files, dict)
    made = of_source(make_wheel, files={**files, name: "0" * 64})
    record(made, tmp_path)
    with pytest.raises(ProvenanceError, match=f"{name}: expected the sources of [0-9a-f]{{40}}, which it na"):
        release.check(made, [RUN], TABLE, tmp_path)


def test_a_wheel_without_provenance_is_refused(wheel: Path, tmp_path: Path) -> None:
    record(wheel, tmp_path)
    provenance.place(wheel).unlink()
    with pytest.raises(ProvenanceError, match="expected an in-toto statement"):
        release.check(wheel, [RUN], TABLE, tmp_path)


def test_a_wheel_that_fails_verification_is_refused_and_all_are_told(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(path: Path) -> None:
        raise MetadataError(f"{path.name} is bad")

    monkeypatch.setattr(wheels, "verify", verify)
    with pytest.raises(CiError, match=r"one\.whl is bad\ntwo\.whl is bad"):
        release.check_all([Path("one.whl"), Path("two.whl")], tmp_path)


def test_two_files_of_one_name_are_refused(wheel: Path, make_wheel: MakeWheel, tmp_path: Path) -> None:
    """An index has room for one of them, and would show the hash of both."""
    other = make_wheel({"flash_kda/x.py": ""}, folder="other")
    assert other.name == wheel.name
    for pair in ([wheel, other], [wheel, wheel]):
        with pytest.raises(ReleaseError, match="expected each wheel once, got files of one name: /"):
            release.check_all(pair, tmp_path)


def test_an_sdist_is_of_the_commit_of_the_wheels(
    wheel: Path, make_wheel: MakeWheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[Path, str]] = []
    monkeypatch.setattr(rebuild, "check_sdist", lambda path, commit, _root: asked.append((path, commit)))
    release.check_sdists([tmp_path / "x.tar.gz"], [wheel])
    assert asked == [(tmp_path / "x.tar.gz", head()["commit"])]
    said = json.dumps({**BUILD_RECORD, "source": {"commit": "a" * 40, "dirty": False}})
    other = make_wheel({"flash_kda/build_record.json": said}, folder="other")
    release.check_sdists([], [wheel, other])
    with pytest.raises(ReleaseError, match=r"expected wheels of one commit beside an sdist, got .*aaaa"):
        release.check_sdists([tmp_path / "x.tar.gz"], [wheel, other])


# ---- the matrix of CI --------------------------------------------------------------------------------------


def test_the_jobs_are_those_of_the_gpus_that_a_wheel_has_code_for() -> None:
    found = gpu_matrix.tests(TABLE)
    hopper = next(gpu for gpu in TABLE.gpus if gpu.target == RUN)
    expected = [(row.label, torch) for row in TABLE.rows if RUN in row.archs for torch in hopper.torch]
    assert [(job["cuda"], job["torch"]) for job in found if job["target"] == f"sm{RUN}"] == expected
    for job in found:
        gpu_tests.parse_target(job["target"])


def test_the_matrix_is_one_line_of_json() -> None:
    command = [sys.executable, "-m", "ci.gpu_matrix", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert json.loads(line) == {"include": gpu_matrix.tests(TABLE)}
