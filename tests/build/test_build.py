"""From sources to a wheel: the environment of the build, its failures, the wheel it makes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ci import build, cache, import_check, matrix, provenance, sbom, source, venv, wheels
from ci.errors import BuildError, ConfigError, SassError, ToolchainError
from ci.platforms import PLATFORMS
from ci.venv import Venv

pytest_plugins = ["handmade"]
ROW = matrix.load().rows[0]
READERS = ("setup.py", "ci/nvcc.py", "ci/selection.py", "ci/resources.py")
# Read by find_cuda_home after CUDA_HOME, which is set.
NOT_NEEDED = {"CUDA_PATH"}


@pytest.fixture
def tools_by_hand(tmp_path: Path) -> build.Tools:
    return build.Tools(Venv(tmp_path / "env"), tmp_path / "cuda", tmp_path / "sysroot")


def variables_of_the_build() -> set[str]:
    """Names of the environment variables that the code of the build mentions as strings or in its
    docstring."""
    text = "\n".join((source.ROOT / name).read_text() for name in READERS)
    text += "\n".join(path.read_text() for path in (source.ROOT / "ci/extension").glob("*.py"))
    return set(re.findall(r"\b(?:FLASH_KDA_[A-Z_]+|MAX_JOBS|NVCC_THREADS|CUDA_HOME|CUDA_PATH|CXX)\b", text))


def test_every_variable_the_build_reads_is_set(tools_by_hand: build.Tools) -> None:
    env = build.environment(ROW, ROW.value, tools_by_hand, build.Conditions())
    macros = {"FLASH_KDA_CUDA_ARCHS_BUILT", "FLASH_KDA_VERSION"}
    commit = set() if source.revision().commit else {"FLASH_KDA_SOURCE_COMMIT"}
    missing = variables_of_the_build() - macros - NOT_NEEDED - commit - set(env)
    assert not missing
    assert {"MAX_JOBS", "FLASH_KDA_CUDA_ARCHS", "CUDA_HOME"} <= variables_of_the_build()


def test_nothing_of_the_caller_leaks_in(tools_by_hand: build.Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CFLAGS", "NVCC_APPEND_FLAGS", "FLASH_KDA_CUDA_ARCHS", "CXX", "PYTHONPATH", "LD_PRELOAD"):
        monkeypatch.setenv(name, "leaked")
    env = build.environment(ROW, ROW.value, tools_by_hand, build.Conditions())
    assert "leaked" not in env.values()


def test_the_callers_job_count_wins(tools_by_hand: build.Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    monkeypatch.setenv("NVCC_THREADS", "3")
    env = build.environment(ROW, ROW.value, tools_by_hand, build.Conditions())
    assert (env["MAX_JOBS"], env["NVCC_THREADS"]) == ("7", "3")


def test_conditions_reach_the_environment(tools_by_hand: build.Tools) -> None:
    wanted = build.Conditions(jobs=5, threads=6, timezone="Asia/Tokyo", locale="C", hash_seed="9")
    env = build.environment(ROW, ROW.value, tools_by_hand, wanted)
    names = ("MAX_JOBS", "NVCC_THREADS", "TZ", "LANG", "PYTHONHASHSEED")
    assert [env[name] for name in names] == ["5", "6", "Asia/Tokyo", "C", "9"]


def test_a_build_for_another_machine_differs_in_compiler_and_name(tools_by_hand: build.Tools) -> None:
    here = build.environment(ROW, ROW.value, tools_by_hand, build.Conditions())
    foreign = replace(tools_by_hand, target=PLATFORMS["aarch64"])
    there = build.environment(ROW, ROW.value, foreign, build.Conditions())
    changed = {name: there[name] for name in there if there[name] != here.get(name)}
    assert changed == {"CXX": "aarch64-linux-gnu-g++", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    assert set(here) < set(there)


def test_without_its_compiler_a_platform_is_refused_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(venv, "locked", lambda *_arguments, **_options: pytest.fail("went on"))
    with pytest.raises(ToolchainError, match=r"\nNext: apt-get install g\+\+-aarch64-linux-gnu"):
        build.build_row(ROW.label, None, tmp_path, platform="aarch64")
    with pytest.raises(ConfigError, match=r"no platform 'riscv64'"):
        build.build_row(ROW.label, None, tmp_path, platform="riscv64")


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA row.*\nNext: "):
        build.build_row("cu000")


@pytest.mark.parametrize("archs", ["", " ", ",", "junk", "90a,junk"])
def test_a_wrong_list_of_architectures_is_refused_before_anything_else(
    archs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "tools_for", lambda *_: pytest.fail("went on"))
    with pytest.raises(ConfigError, match=r"^--archs .*\nNext: "):
        build.build_row(ROW.label, archs, tmp_path)
    monkeypatch.setattr(sys, "argv", ["ci.wheels", "--archs", archs, str(tmp_path / "none.whl")])
    with pytest.raises(ConfigError, match=r"^--archs .*\nNext: "):
        wheels.main()


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "tools_for", lambda *_: pytest.fail("went on"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"/file/x/y: expected a folder .*\nNext: .* --out"):
        build.build_row(ROW.label, None, tmp_path / "file" / "x" / "y")


def test_a_cache_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.ENV, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"expected a folder .*\nNext: .* {cache.ENV}"):
        build.tools_for(ROW)
    cache.check_folder(tmp_path / "new" / "deep", "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def broken_checkout(tmp_path: Path) -> Path:
    root = tmp_path / "broken"
    source.copy(root)
    (root / "csrc" / "kda" / "fwd.cu").write_text("this is not a kernel;\n")
    return root


def test_a_compile_error_is_a_build_error_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "ROOT", broken_checkout(tmp_path))
    with pytest.raises(BuildError, match=r"this is not a kernel[\s\S]*Next: read .*\.log"):
        build.build_row(ROW.label, ROW.archs[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_build_that_leaves_no_wheel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="left none"):
        build._only_wheel(tmp_path, tmp_path / "log")


def test_the_wheel(real_wheel: Path) -> None:
    project = matrix.load().project
    assert real_wheel.name.endswith(
        f"+{ROW.label_for(ROW.archs[0])}-{project.python_tag}-abi3-{project.plat}.whl"
    )
    with zipfile.ZipFile(real_wheel) as archive:
        names = archive.namelist()
        record = json.loads(archive.read("flash_kda/build_record.json"))
        (materials,) = [name for name in names if name.endswith(f".dist-info/{sbom.MEMBER}")]
        assert archive.read(materials).decode() == sbom.make(record, source.revision().epoch)
    assert "flash_kda/_C.abi3.so" in names
    assert not [name for name in names if ".libs/" in name or name.startswith(("ci/", "csrc/", "tests/"))]
    assert record["built_not_run"] == matrix.load().not_run([ROW.archs[0]])
    assert record["source"]["commit"] == source.revision().commit


def test_the_wheel_is_importable_here(real_wheel: Path) -> None:
    import_check.check(real_wheel)


def test_a_wheel_without_its_library_is_caught(real_wheel: Path, tmp_path: Path) -> None:
    stripped = tmp_path / real_wheel.name
    shutil.copyfile(real_wheel, stripped)
    subprocess.run(["python3", "-c", _DROP, str(stripped)], check=True)
    with pytest.raises(import_check.AbiError, match="expected it to load, got missing_file"):
        import_check.check(stripped)


_DROP = """
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive:
    kept = {n: archive.read(n) for n in archive.namelist() if not n.endswith(".so")}
with zipfile.ZipFile(sys.argv[1], "w") as archive:
    for name, data in kept.items():
        archive.writestr(name, data)
"""


def test_an_unverified_wheel_does_not_reach_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(_label: str, _archs: str | None, out: Path, **_options: str) -> Path:
        out.mkdir(parents=True)
        wheel = out / "flash_kda-0.whl"
        wheel.write_bytes(b"")
        return wheel

    def refuse(*_arguments: object) -> None:
        raise SassError("an image is missing")

    monkeypatch.setattr(build, "build_row", built)
    monkeypatch.setattr(wheels, "verify", refuse)
    with pytest.raises(SassError):
        build.release(ROW.label, None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["unverified"]
    monkeypatch.setattr(wheels, "verify", lambda *_arguments: None)
    monkeypatch.setattr(import_check, "check", lambda _wheel: None)
    said: list[Path] = []
    monkeypatch.setattr(provenance, "write", said.append)
    (tmp_path / "unverified").rename(tmp_path / "old")
    assert build.release(ROW.label, None, tmp_path) == tmp_path / "flash_kda-0.whl"
    assert (tmp_path / "flash_kda-0.whl").is_file()
    assert said == [tmp_path / "flash_kda-0.whl"]


def test_a_wheel_of_another_machine_is_verified_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(_label: str, _archs: str | None, out: Path, *, platform: str, **_options: object) -> Path:
        out.mkdir(parents=True)
        (out / f"{platform}.whl").touch()
        return out / f"{platform}.whl"

    verified: list[Path] = []
    monkeypatch.setattr(build, "build_row", built)
    monkeypatch.setattr(wheels, "verify", lambda wheel, *_rest: verified.append(wheel))
    monkeypatch.setattr(import_check, "check", lambda _wheel: pytest.fail("imported"))
    monkeypatch.setattr(provenance, "write", lambda _wheel: None)
    assert build.release(ROW.label, None, tmp_path, "aarch64") == tmp_path / "aarch64.whl"
    assert [path.name for path in verified] == ["aarch64.whl"]
    assert "Not imported: aarch64.whl" in capsys.readouterr().out


def built_by(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[tuple[str, str | None]]:
    """What ``ci.build`` releases with these options."""
    asked: list[tuple[str, str | None]] = []

    def released(label: str, archs: str | None, out: Path, _platform: str) -> Path:
        asked.append((label, archs))
        assert out == wheels.FOLDER
        return Path(__file__)

    monkeypatch.setattr(build, "release", released)
    monkeypatch.setattr(sys, "argv", ["ci.build", *options])
    assert build.main() == 0
    return asked


def test_the_command_builds_rows_lists_or_single_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = matrix.load().locked_rows
    assert built_by(monkeypatch) == [(row.label, None) for row in rows]
    assert built_by(monkeypatch, "--cuda", ROW.label, "--archs", "90a") == [(ROW.label, "90a")]
    assert built_by(monkeypatch, "--slim") == [(row.label, name) for row in rows for name in row.archs]
    with pytest.raises(SystemExit):
        built_by(monkeypatch, "--slim", "--archs", "90a")


def test_a_wheel_of_another_list_has_another_version(tools_by_hand: build.Tools) -> None:
    def label(archs: str) -> str:
        env = build.environment(ROW, archs, tools_by_hand, build.Conditions())
        return env["FLASH_KDA_LOCAL_VERSION"]

    assert label(ROW.value) == label(" ".join(reversed(ROW.archs))) == "cu130"
    assert [label("90a"), label("100a 90a")] == ["cu130.sm90a", "cu130.sm90a.sm100a"]
    assert label("100f+PTX") == "cu130.sm100fptx"


@pytest.mark.parametrize("archs", ["90a", "90a,100a", "100f+PTX", "90a,100f+PTX"])
def test_the_version_says_which_list_it_was(archs: str) -> None:
    label = ROW.label_for(archs)
    assert (matrix.row_of_label(label), matrix.archs_of_label(label)) == (ROW.label, archs)
    assert matrix.archs_of_label(ROW.label) is None


@pytest.mark.parametrize("name", ["x.whl", "x.whl.intoto.json", "index/cu130/index.html"])
def test_what_is_made_in_wheels_is_ignored_by_git(name: str) -> None:
    done = subprocess.run(["git", "check-ignore", "-q", f"wheels/{name}"], cwd=source.ROOT, check=False)
    assert done.returncode == 0


def test_what_is_left_to_other_platforms_is_told_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, Path, str]] = []

    def released(label: str, _archs: str | None, out: Path, platform: str) -> Path:
        asked.append((label, out, platform))
        (tmp_path / "a.whl").touch()
        return tmp_path / "a.whl"

    monkeypatch.setattr(build, "release", released)
    labels = [row.label for row in matrix.load().locked_rows]
    told = (
        "Not built: cu129, whose toolkit is in the builder image.\n"
        "Next: python -m ci.containers --cuda cu129\n"
        f"Not built: {', '.join(labels)} for aarch64.\n"
        "Next: apt-get install g++-aarch64-linux-gnu && nox -s build_wheels -- --platform aarch64\n"
    )
    cases = {(): told, ("--cuda", ROW.label): "", ("--platform", "aarch64"): ""}
    for words, said in cases.items():
        monkeypatch.setattr(sys, "argv", ["ci.build", *words])
        assert build.main() == 0
        assert capsys.readouterr().out == said
    here, there = wheels.FOLDER, wheels.FOLDER / "aarch64"
    assert asked[: len(labels)] == [(label, here, "x86_64") for label in labels]
    assert asked[-len(labels) :] == [(label, there, "aarch64") for label in labels]


def test_verifying_no_wheel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no wheel in"):
        wheels.built(tmp_path)


def test_the_failures_of_all_wheels_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / f"flash_kda-0.1.0+{ROW.label}-cp310-abi3-manylinux_2_28_x86_64.whl"
    bad.write_bytes(b"no zip")
    monkeypatch.setattr(sys, "argv", ["ci.wheels", str(tmp_path / "gone.whl"), str(bad)])
    with pytest.raises(ConfigError, match=r"gone\.whl: .*no such file[\s\S]*flash_kda-0.*expected a zip"):
        wheels.main()


def test_a_python_too_old_for_the_checkers_is_refused_at_once() -> None:
    with pytest.raises(ToolchainError, match=r"need Python 3\.11 .* got 3\.10"):
        wheels.check_python((3, 10))
    wheels.check_python((3, 12))


def test_the_oldest_torch_is_imported_under_too() -> None:
    table = matrix.load()
    build = table.project.torch_build
    pairs = import_check.combinations([], None, table)
    assert [python for python, torch in pairs if torch == build] == list(table.test_python)
    assert {torch for _, torch in pairs} == set(table.test_torch)
    assert import_check.combinations(["3.12"], None, table) == [("3.12", build)]
    assert import_check.combinations(["3.12"], "2.11.0", table) == [("3.12", "2.11.0")]


def test_an_unknown_interpreter_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such interpreter"):
        import_check.interpreter("2.6")
