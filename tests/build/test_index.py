"""The index: pip and uv install from it, the whole wheel by default, and refuse a file that is another."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version
from verify_artifacts import BUILD_RECORD, TAG, head

from ci import import_check, index, index_check, matrix, provenance, venv, wheels
from ci.errors import AbiError, ConfigError, ReleaseError

if TYPE_CHECKING:
    from handmade import MakeWheel

pytest_plugins = ["handmade"]
JSON = "application/vnd.pypi.simple.v1+json"
LABELS = ("cu130", "cu130.sm90a", "cu130.sm100a", "cu135")


class Handler(index_check.Quiet):
    """A static server that remembers what it was asked; with `as_json` one that gives installers the JSON
    pages they ask for."""

    as_json = False
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.endswith("/") and self.as_json and JSON in self.headers["Accept"]:
            data = Path(self.translate_path(self.path), "index.json").read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", JSON)
            self.end_headers()
            self.wfile.write(data)
        else:
            super().do_GET()


@contextmanager
def served(folder: Path, as_json: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The address of `folder` on this machine, and the list that requests are added to."""
    asked: list[str] = []
    with index_check.served(folder, type("Served", (Handler,), {"as_json": as_json, "asked": asked})) as url:
        yield url, asked


@pytest.fixture
def made(make_wheel: MakeWheel) -> dict[str, Path]:
    """A wheel of each label, with provenance."""
    return {label: wheel_of(make_wheel, label) for label in LABELS}


def wheel_of(make_wheel: MakeWheel, label: str) -> Path:
    version = f"0.1.0+{label}"
    record = json.dumps({**BUILD_RECORD, "version": version, "source": head()})
    info = f"flash_kda-{version}.dist-info"
    files = {"flash_kda/build_record.json": record, "flash_kda/__init__.py": f"label = {label!r}\n"}
    wheel = make_wheel(files, version=version, tag=TAG, folder=label)
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members[f"{info}/METADATA"] += b"Requires-Python: >=3.10\nRequires-Dist: torch>=2.10\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    provenance.write(wheel)
    return wheel


def install(
    installer: str, url: str, tmp_path: Path, *more: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What an installer said, and the folder that it was to install into."""
    site = tmp_path / installer
    words = [*index_check.command(installer, Path(sys.executable), url, site), *more]
    env = index_check.environment(tmp_path)
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False), site


def label_in(folder: Path) -> str:
    found = re.search("'(.*)'", (folder / "flash_kda" / "__init__.py").read_text())
    assert found
    return found[1]


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
@pytest.mark.parametrize(("place", "label"), [("cu130", "cu130"), ("cu130/sm90a", "cu130.sm90a")])
def test_pip_and_uv_install_from_it(
    made: Mapping[str, Path], tmp_path: Path, place: str, label: str, as_json: bool
) -> None:
    assert index.write(made.values(), tmp_path / "out") == ["cu130", "cu130/sm100a", "cu130/sm90a", "cu135"]
    with served(tmp_path / "out", as_json) as (url, asked):
        for installer in index_check.INSTALLERS:
            asked.clear()
            done, site = install(installer, f"{url}/{place}", tmp_path)
            assert done.returncode == 0, done.stderr
            assert label_in(site) == label
            if installer == "pip":  # uv reads no metadata with --no-deps
                assert any(path.endswith(".whl.metadata") for path in asked), asked


@pytest.mark.parametrize("installer", index_check.INSTALLERS)
def test_each_python_of_the_matrix_is_served_and_none_before(
    made: Mapping[str, Path], tmp_path: Path, installer: str
) -> None:
    index.write(made.values(), tmp_path / "out")
    with served(tmp_path / "out") as (url, _):
        for python in (*matrix.load().test_python, "3.9"):
            words = ["--python-version", python, "--only-binary", ":all:"]
            done, site = install(installer, f"{url}/cu130", tmp_path / python, *words)
            came = (site / "flash_kda").is_dir()
            assert (done.returncode == 0) == (python != "3.9") == came, (python, done.stderr)


def test_in_one_index_a_slim_wheel_would_be_taken_for_the_newest() -> None:
    """Why each has an index of its own."""
    assert Version("0.1.0+cu130.sm90a") > Version("0.1.0+cu130.sm100a") > Version("0.1.0+cu130")


@pytest.mark.parametrize("installer", index_check.INSTALLERS)
def test_a_wheel_that_is_not_the_listed_one_is_refused(
    made: Mapping[str, Path], tmp_path: Path, installer: str
) -> None:
    index.write(made.values(), tmp_path / "out")
    copy = tmp_path / "out" / "cu130" / "flash-kda" / made["cu130"].name
    copy.write_bytes(made["cu135"].read_bytes())
    with served(tmp_path / "out") as (url, _):
        done, _ = install(installer, f"{url}/cu130", tmp_path)
    assert done.returncode != 0
    assert re.search("hash", done.stderr, re.IGNORECASE), done.stderr


def test_what_installs_and_does_not_load_is_no_pass(made: Mapping[str, Path], tmp_path: Path) -> None:
    """The wheels made here hold no library."""
    index.write([made["cu130"]], tmp_path / "out")
    words = ["ci.index_check", "--python", sys.executable, "--index", str(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [*words, "--records", str(tmp_path / "records")])
        with pytest.raises(AbiError, match="using what pip installed"):
            index_check.main()
    assert not (tmp_path / "records").exists()


def test_a_problem_that_the_package_tells_of_is_no_pass(
    made: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.write([made["cu130"]], tmp_path / "out")
    monkeypatch.setattr(import_check, "use", lambda *_: "flash_kda")
    monkeypatch.setattr(import_check, "run_beside", lambda *_: "1 problem\n")
    with (
        served(tmp_path / "out") as (url, _),
        pytest.raises(AbiError, match="expected 'no problems found', got"),
    ):
        index_check.check("pip", venv.Venv(Path(sys.prefix)), f"{url}/cu130")


def test_no_index_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an index, got none"):
        list(index_check.check_all([sys.executable], tmp_path))


def test_the_pages_name_hashes_metadata_and_what_was_not_run(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    index.write(made.values(), tmp_path / "out")
    folder = tmp_path / "out" / "cu130" / "flash-kda"
    wheel = made["cu130"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    metadata = hashlib.sha256((folder / f"{wheel.name}.metadata").read_bytes()).hexdigest()
    page = (folder / "index.html").read_text()
    assert f'href="{wheel.name.replace("+", "%2B")}#sha256={digest}"' in page
    assert f'data-core-metadata="sha256={metadata}"' in page and 'data-requires-python="&gt;=3.10"' in page
    assert "built, not run: sm100a" in page
    (file,) = json.loads((folder / "index.json").read_text())["files"]
    assert (file["hashes"]["sha256"], file["core-metadata"]["sha256"]) == (digest, metadata)
    assert (file["size"], file["_note"]) == (wheel.stat().st_size, "built, not run: sm100a")
    assert provenance.place(folder / wheel.name).read_text() == provenance.place(wheel).read_text()
    assert json.loads((folder.parent / "index.json").read_text())["projects"] == [{"name": "flash-kda"}]


def test_the_same_wheels_give_the_same_index(made: Mapping[str, Path], tmp_path: Path) -> None:
    def contents(out: Path) -> dict[str, bytes]:
        index.write(made.values(), out)
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    first = contents(tmp_path / "one")
    assert first == contents(tmp_path / "two") == contents(tmp_path / "one")


def test_a_folder_of_something_else_is_not_removed(made: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="expected an index or no folder"):
        index.write(made.values(), tmp_path / "mine")
    assert (tmp_path / "mine" / "file").exists()


def test_a_web_site_is_not_removed(made: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<title>Mine</title>")
    with pytest.raises(ConfigError, match="expected an index or no folder"):
        index.write(made.values(), tmp_path / "site")
    assert (tmp_path / "site" / "index.html").read_text() == "<title>Mine</title>"


def test_a_link_to_the_index_stays_one(made: Mapping[str, Path], tmp_path: Path) -> None:
    index.write(made.values(), tmp_path / "served")
    (tmp_path / "link").symlink_to(tmp_path / "served")
    index.write([made["cu135"]], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in sorted((tmp_path / "served").iterdir())] == ["cu135", "index.html"]


def test_a_released_file_is_not_replaced(
    made: Mapping[str, Path], make_wheel: MakeWheel, tmp_path: Path
) -> None:
    index.write(made.values(), tmp_path / "out")
    folder = tmp_path / "out" / "cu130" / "flash-kda"
    before = (folder / made["cu130"].name).read_bytes()
    with zipfile.ZipFile(made["cu130"], "a") as archive:
        archive.writestr("late.txt", "x")
    with pytest.raises(ReleaseError, match="a released file is never replaced"):
        index.write(made.values(), tmp_path / "out")
    assert (folder / made["cu130"].name).read_bytes() == before


def test_an_index_stays_whole_until_the_new_one_is(
    made: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.write(made.values(), tmp_path / "index")
    before = sorted(tmp_path.rglob("*"))

    def full(_source: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        index.write(made.values(), tmp_path / "index")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_wheel_that_may_not_be_published_gets_into_no_index(
    made: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified it counts as having code for an architecture that no record says was run."""

    class Image:
        arch = "90a"

    class Library:
        images = (Image,)

    class Report:
        facts = type("Facts", (), {"libraries": (Library,)})

    monkeypatch.setattr(wheels, "verify", lambda _wheel: Report)
    monkeypatch.setattr(sys, "argv", ["ci.index", str(made["cu130"]), "--out", str(tmp_path / "out")])
    with pytest.raises(ReleaseError, match=r"sm90a: expected a record .* got none"):
        index.main()
    assert not (tmp_path / "out").exists()
