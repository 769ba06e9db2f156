"""What is said beside a wheel of its origin, and each way in which it can be wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from verify_artifacts import BUILD_RECORD, EPOCH, ROOT, head

from ci import provenance, rebuild, repair, sbom
from ci.errors import CiError, MetadataError, ProvenanceError, ReproducibilityError
from ci.toolchain import lock_path

if TYPE_CHECKING:
    from handmade import MakeWheel

pytest_plugins = ["handmade"]
COMMIT = "a" * 40
SOURCE = {"commit": COMMIT, "dirty": False, "sha256": "1" * 64}


def wheel_of(make_wheel: MakeWheel, **source: object) -> Path:
    record = json.dumps({**BUILD_RECORD, "source": {**SOURCE, **source}})
    return make_wheel({"flash_kda/build_record.json": record})


def test_the_statement_names_the_wheel_its_sources_and_its_locks(make_wheel: MakeWheel) -> None:
    wheel = wheel_of(make_wheel)
    provenance.write(wheel)
    provenance.check(wheel)
    found = json.loads(provenance.place(wheel).read_text())
    assert (found["_type"], found["predicateType"]) == (provenance.STATEMENT, provenance.PREDICATE)
    assert found["subject"] == [{"name": wheel.name, "digest": {"sha256": provenance.sha256(wheel)}}]
    definition = found["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {
        "row": "cu130",
        "architectures": ["90a", "100a"],
        "platform": "x86_64",
    }
    digests = {item["name"]: item.get("digest") for item in definition["resolvedDependencies"]}
    assert digests == {
        "commit": {"gitCommit": COMMIT},
        "source files": {"sha256": "1" * 64},
        "ci/toolchain/13.0.lock": {"sha256": provenance.sha256(lock_path("13.0"))},
        "ci/requirements/build.txt": {"sha256": provenance.sha256(sbom.BUILD_LOCK)},
        "torch": None,
    }


def test_changes_beyond_the_commit_are_said(make_wheel: MakeWheel) -> None:
    dirty = provenance.statement(wheel_of(make_wheel, dirty=True))
    (commit, *_) = dirty["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert commit["annotations"] == {"dirty": True}
    unknown = provenance.statement(wheel_of(make_wheel, commit=None, dirty=None))
    assert "gitCommit" not in json.dumps(unknown)


def _dependency(index: int, digest: dict[str, str]) -> Callable[[dict[str, Any]], object]:
    return lambda found: found["predicate"]["buildDefinition"]["resolvedDependencies"][index].update(
        digest=digest
    )


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "subject of another wheel": (
        lambda found: found["subject"][0]["digest"].update(sha256="0" * 64),
        r"subject\[0\]\.digest\.sha256: expected .*, got \"0000",
    ),
    "another commit": (
        _dependency(0, {"gitCommit": "b" * 40}),
        r"resolvedDependencies\[0\]\.digest\.gitCommit",
    ),
    "another lock": (_dependency(2, {"sha256": "0" * 64}), r"resolvedDependencies\[2\]\.digest\.sha256"),
    "a dependency dropped": (
        lambda found: found["predicate"]["buildDefinition"]["resolvedDependencies"].pop(),
        r"resolvedDependencies: expected ",
    ),
    "other architectures": (
        lambda found: found["predicate"]["buildDefinition"]["externalParameters"].update(architectures=[]),
        r"externalParameters\.architectures: expected",
    ),
    "another builder": (
        lambda found: found["predicate"]["runDetails"].update(builder={"id": "x"}),
        r"builder\.id: expected",
    ),
    "another predicate": (lambda found: found.update(predicateType="x"), "predicateType: expected"),
    "a key added": (lambda found: found.update(extra=1), "extra: expected null, got 1"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_statement_is_refused(make_wheel: MakeWheel, edit: str) -> None:
    change, text = EDITS[edit]
    wheel = wheel_of(make_wheel)
    path = provenance.write(wheel)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ProvenanceError, match=text):
        provenance.check(wheel)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null", DEEP], ids=range(6))
def test_a_statement_that_is_none_is_refused(make_wheel: MakeWheel, text: str | None) -> None:
    wheel = wheel_of(make_wheel)
    if text is not None:
        provenance.place(wheel).write_text(text)
    with pytest.raises(ProvenanceError, match=r"expected an in-toto statement|the file: expected"):
        provenance.check(wheel)


def test_a_wheel_changed_after_its_statement_is_refused(make_wheel: MakeWheel) -> None:
    wheel = wheel_of(make_wheel)
    provenance.write(wheel)
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(ProvenanceError, match=r"subject\[0\]"):
        provenance.check(wheel)


@pytest.mark.parametrize("record", ["{", "[]", None, '{"version": 1}', DEEP], ids=range(5))
def test_a_wheel_without_a_record_that_can_be_read_is_refused(
    make_wheel: MakeWheel, record: str | None
) -> None:
    wheel = make_wheel({} if record is None else {"flash_kda/build_record.json": record})
    with pytest.raises(MetadataError, match=r"build.record"):
        provenance.statement(wheel)


# ---- rebuild -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"dirty": True}, f"got one made from commit {COMMIT} and changes to it"),
        ({"dirty": None}, "and changes to it"),
        ({"commit": None, "dirty": None}, "got one made from sources of an unknown commit"),
    ],
)
def test_a_wheel_of_uncommitted_sources_cannot_be_rebuilt(
    make_wheel: MakeWheel, source: dict[str, object], text: str
) -> None:
    with pytest.raises(ProvenanceError, match=text):
        rebuild.rebuild(wheel_of(make_wheel, **source))


def test_a_commit_that_is_not_there_is_named(make_wheel: MakeWheel) -> None:
    with pytest.raises(ProvenanceError, match=rf"checking out {COMMIT[:12]}[\s\S]*Next: git fetch"):
        rebuild.rebuild(wheel_of(make_wheel))


def test_the_recipe_is_that_of_the_record(make_wheel: MakeWheel) -> None:
    assert rebuild.recipe(wheel_of(make_wheel)) == rebuild.Recipe(COMMIT, "cu130", "90a,100a", "x86_64")
    record = json.dumps({**BUILD_RECORD, "source": SOURCE})
    other = make_wheel({"flash_kda/build_record.json": record}, tag="cp310-abi3-manylinux_2_28_aarch64")
    assert rebuild.recipe(other).platform == "aarch64"
    (parameters,) = [provenance.statement(other)["predicate"]["buildDefinition"]["externalParameters"]]
    assert parameters["platform"] == "aarch64"
    record = json.dumps({"source": SOURCE})
    with pytest.raises(ProvenanceError, match="does not say what was built"):
        rebuild.recipe(make_wheel({"flash_kda/build_record.json": record}))


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(CiError, match="expected a wheel with"):
        rebuild.rebuild(tmp_path / "x.whl")


def test_a_wheel_is_built_again_from_its_commit(tmp_path: Path) -> None:
    """From a clone, since the tree under test may hold changes: there the wheel's record is a clean one."""
    clone = tmp_path / "repository"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    words = [sys.executable, "-c", rebuild._BUILD, "cu130", "90a", str(tmp_path / "wheels"), "x86_64"]
    subprocess.run(words, check=True, cwd=clone)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert rebuild.rebuild(wheel, clone) == provenance.sha256(wheel)
    changed = tmp_path / wheel.name
    repair.normalise(wheel, changed, EPOCH, {"late.txt": b"x"})
    with pytest.raises(ReproducibilityError, match=r"dist-info/late\.txt: only in the first wheel"):
        rebuild.rebuild(changed, clone)


# ---- sdist -------------------------------------------------------------------------------------------------


def with_members(path: Path, extra: Mapping[str, bytes]) -> Path:
    """The sdist with `extra` added, or in the place of what it has."""
    with tarfile.open(path) as archive:
        held = {m.name: file.read() for m in archive if (file := archive.extractfile(m))}
        folders = [member for member in archive if member.isdir()]
    with tarfile.open(path, "w:gz") as archive:
        for folder in folders:
            archive.addfile(folder)
        for name, data in {**held, **extra}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_an_sdist_is_compared_with_what_its_commit_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_KDA_LOCAL_VERSION", "cu130")
    clone, commit = tmp_path / "repository", str(head()["commit"])
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-c", rebuild._SDIST, str(tmp_path / "made")], check=True, cwd=clone)
    (made,) = (tmp_path / "made").iterdir()
    assert "+" not in made.name
    top = made.name.removesuffix(".tar.gz")
    rebuild.check_sdist(made, commit)
    rebuild.check_sdist(with_members(made, {}), commit)  # other dates and owners
    other = with_members(made, {f"{top}/csrc/late.cu": b"x", f"{top}/PKG-INFO": b"Requires-Dist: evil\n"})
    with pytest.raises(ProvenanceError, match=rf"got other files: {top}/PKG-INFO, {top}/csrc/late\.cu\."):
        rebuild.check_sdist(other, commit)
    other.write_bytes(b"no tar")
    with pytest.raises(ProvenanceError, match=r"expected a tar\.gz, got"):
        rebuild.check_sdist(other, commit)
