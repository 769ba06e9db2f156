"""Which sources a build gets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ci import source
from ci.errors import ConfigError


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("setup.py", "flash_kda/__init__.py", "csrc/kda/fwd.cu", "tests/test_x.py", ".gitignore"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("*.so\n" if name == ".gitignore" else "1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first", "--date=2026-01-02T03:04:05Z")
    return root


def test_the_copy_holds_tracked_and_new_files_of_the_shipped_folders(checkout: Path, tmp_path: Path) -> None:
    (checkout / "csrc/new.cuh").write_text("new\n")
    (checkout / "flash_kda/_C.abi3.so").write_text("a leftover\n")
    copied = source.copy(tmp_path / "copy", checkout)
    names = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert names == {"setup.py", "flash_kda/__init__.py", "csrc/kda/fwd.cu", "csrc/new.cuh"}


def test_the_copy_holds_the_text_on_disk_and_not_a_deleted_file(checkout: Path, tmp_path: Path) -> None:
    (checkout / "csrc/kda/fwd.cu").write_text("changed\n")
    (checkout / "setup.py").unlink()
    copied = source.copy(tmp_path / "copy", checkout)
    assert (copied / "csrc/kda/fwd.cu").read_text() == "changed\n"
    assert not (copied / "setup.py").exists()


def test_this_repository_ignores_what_a_build_in_place_leaves() -> None:
    left = ["flash_kda/_C.abi3.so", "flash_kda/build_record.json"]
    command = ["git", "-c", f"safe.directory={source.ROOT}", "check-ignore", *left]
    done = subprocess.run(command, check=False, cwd=source.ROOT, capture_output=True, text=True)
    assert done.stdout.split() == left


def test_an_existing_target_is_refused(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a new folder"):
        source.copy(tmp_path, checkout)


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds none of"):
        source.files(tmp_path)


def test_outside_git_leftovers_stay_behind_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers = (
        "csrc/a.o",
        "flash_kda/__pycache__/a.pyc",
        "flash_kda/_C.abi3.so",
        "flash_kda/build_record.json",
    )
    for name in ("setup.py", "csrc/a.cu", *leftovers):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert source.files(tmp_path) == ["csrc/a.cu", "setup.py"]
    monkeypatch.setenv(source.EPOCH, "")
    monkeypatch.setenv(source.COMMIT, "")
    assert source.revision(tmp_path) == source.Revision(None, False, source.FALLBACK_EPOCH)


def test_dirty_means_a_shipped_file_changed(checkout: Path) -> None:
    clean = source.revision(checkout)
    assert clean.commit is not None and len(clean.commit) == 40 and not clean.dirty
    (checkout / "tests/test_x.py").write_text("2\n")
    assert not source.revision(checkout).dirty
    (checkout / "csrc/kda/fwd.cu").write_text("2\n")
    assert source.revision(checkout).dirty


def test_a_repository_without_a_commit_is_refused(checkout: Path) -> None:
    git(checkout, "checkout", "-q", "--orphan", "empty")
    with pytest.raises(ConfigError, match="git rev-parse failed"):
        source.revision(checkout)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, source.Revision(None, False, source.FALLBACK_EPOCH)),
        ({source.COMMIT: "", source.EPOCH: ""}, source.Revision(None, False, source.FALLBACK_EPOCH)),
        (
            {source.COMMIT: "0123456789", source.EPOCH: "1700000000"},
            source.Revision("0123456789", False, 1700000000),
        ),
        ({source.COMMIT: "0123456789+dirty", source.EPOCH: "5"}, source.Revision("0123456789", True, 5)),
    ],
)
def test_outside_git_the_environment_is_believed(environ: dict[str, str], told: source.Revision) -> None:
    assert source.told(environ) == told
    assert told.label == environ.get(source.COMMIT, "")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({source.COMMIT: "HEAD"}, "expected <sha> or <sha>"),
        ({source.COMMIT: "0123456789+more"}, "expected <sha> or <sha>"),
        ({source.EPOCH: "yesterday"}, "expected seconds since 1970"),
        ({source.EPOCH: "-1"}, "expected seconds since 1970"),
    ],
)
def test_what_is_no_commit_and_no_time_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        source.told(environ)
