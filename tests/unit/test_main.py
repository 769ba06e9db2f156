"""``python -m flash_kda``: the JSON's fields, the text, and each problem it must notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_kda
from flash_kda import __main__, _report, dispatch
from flash_kda.dispatch import DeviceFacts, Refusal

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "schema": int,
    "version": str,
    "python": str,
    "location": str,
    "build_record": (dict, type(None)),
    "library": dict,
    "torch": dict,
    "driver": dict,
    "gpus": list,
    "choices": list,
    "owners": list,
    "problems": list,
}


def module(*arguments: str, prelude: str = "pass") -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys, runpy; {prelude}; sys.argv = ['flash_kda', *{arguments!r}]\n"
        "runpy.run_module('flash_kda', run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_json_has_every_field() -> None:
    done = module("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name: isinstance(report[name], kind) for name, kind in FIELDS.items()} == dict.fromkeys(
        FIELDS, True
    )
    assert report.keys() == FIELDS.keys()
    assert report["schema"] == 1 and report["version"] == flash_kda.__version__
    assert {"path", "code", "text", "version", "built", "images", "images_error"} == report["library"].keys()
    assert (
        report["choices"]
        and {"device", "backend", "refusals", "trace", "asked"} == report["choices"][0].keys()
    )
    assert [verdict["backend"] for verdict in report["choices"][0]["trace"]] == list(dispatch.ORDER)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [[], ["--json"], ["--device-capability", "9.0"]])
def test_a_full_disk_is_told_in_a_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "flash_kda", *arguments]
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == __main__.NOT_WRITTEN
    assert re.fullmatch(r"error: the report could not be written: .*No space left on device\n", done.stderr)


def test_a_reader_that_left_is_told_nothing() -> None:
    words = [sys.executable, "-m", "flash_kda"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (__main__.NOT_WRITTEN, "")


def test_a_terminal_of_few_characters_gets_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "Ünder"
    folder.mkdir()
    (folder / "flash_kda").symlink_to(ROOT / "flash_kda")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "flash_kda"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "\\xdcnder" in done.stdout, done.stderr


def test_text_names_the_backend_and_why_not_the_others() -> None:
    done = subprocess.run([sys.executable, "-m", "flash_kda"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert flash_kda.__version__ in done.stdout and "backend" in done.stdout


def test_without_torch_it_says_so() -> None:
    done = module("--json", prelude="sys.modules['torch'] = None")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["torch"]["version"] is None and "torch" in report["torch"]["error"]
    assert report["library"]["code"] == "no_torch"
    assert all(choice["backend"] is None for choice in report["choices"])
    assert any("torch did not import" in problem for problem in report["problems"])


def test_a_foreign_owner_of_the_name_is_a_problem(tmp_path: Path) -> None:
    assert _report.name_problems(("flash-kda",), tmp_path, []) == []
    (problem,) = _report.name_problems(("flash-kda", "tokenspeed-flashkda"), tmp_path, [])
    assert "tokenspeed-flashkda" in problem and "pip uninstall" in problem


def installed(folder: Path, name: str, files: list[str]) -> None:
    """A distribution as pip leaves it, metadata only."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.mark.parametrize("name", ["tokenspeed-flashkda", "somebody_elses.kda"])
def test_owners_are_read_from_installed_metadata(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(_report.owners())
    installed(tmp_path, name, ["flash_kda/__init__.py"])
    assert set(_report.owners()) - before == {name.replace("_", "-").replace(".", "-")}


@pytest.mark.parametrize("file", ["METADATA", "RECORD"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n"])
def test_damaged_metadata_does_not_stop_the_report(
    file: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(_report.owners())
    for name in ("somebody-elses.kda", "bystander"):
        installed(tmp_path, name, ["flash_kda/__init__.py"] if name != "bystander" else [])
        (tmp_path / f"{name.replace('-', '_')}-1.0.dist-info" / file).write_bytes(content)
    assert set(_report.owners()) - before == ({"somebody-elses-kda"} if file == "METADATA" else set())


def test_a_second_copy_on_the_path_is_a_problem(tmp_path: Path) -> None:
    here, there = tmp_path / "a" / "flash_kda", tmp_path / "b" / "flash_kda"
    for folder in (here, there):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    path = [str(folder.parent) for folder in (here, there)]
    (problem,) = _report.name_problems((), here, [*path, *path])
    assert str(there) in problem
    assert _report.name_problems((), here, path[:1]) == []


def test_an_entry_of_the_path_that_cannot_be_looked_into_holds_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    path = ["", str(tmp_path / "loop"), "x" * 300, str(tmp_path / "no.zip")]
    assert _report.other_copies(tmp_path, path) == []


def test_the_folder_that_python_runs_in_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_kda").mkdir()
    (tmp_path / "flash_kda" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert _report.other_copies(Path("/elsewhere"), [""]) == [tmp_path.resolve() / "flash_kda"]


def library(code: str = "loaded", **change: Any) -> dict[str, Any]:
    images = [
        {"kind": "elf", "target": "90a"},
        {"kind": "elf", "target": "100f"},
        {"kind": "ptx", "target": "100f"},
    ]
    facts = {"code": code, "text": "the text", "version": flash_kda.__version__, "built": ["90a", "100f+PTX"]}
    return facts | {"path": "x", "images": images, "images_error": None} | change


@pytest.mark.parametrize(
    ("facts", "record", "says"),
    [
        (library(), {"architectures": ["90a", "100f"]}, None),
        (library(), None, "without a usable build_record.json"),
        (library(built=["90a"]), {}, "the library names the architectures"),
        (library(), {"architectures": ["90a", "100f", "103a"]}, "the build record names"),
        (library(version="0.0.9"), {}, "version 0.0.9"),
        (library(version=flash_kda.__version__ + "+cu130"), {}, None),
        (library(images_error="cut short"), {}, "cut short"),
        (library("undefined_symbol"), None, "the text"),
        (library("missing_file", images=[], built=[]), None, "slowly if it is reference: the text"),
    ],
)
def test_what_the_library_says_must_agree_with_its_bytes(facts: Any, record: Any, says: str | None) -> None:
    problems = _report.library_problems(facts, record)
    assert len(problems) == (says is not None)
    assert says is None or says in problems[0]


@pytest.mark.parametrize(
    ("runs", "toolkit", "old"),
    [
        ("12.8", "13.0", True),
        ("13.0", "13.0", False),
        ("13.0", "13.5", False),
        ("14.0", "13.5", False),
        (None, "13.0", False),
        ("12.8", None, False),
    ],
)
def test_a_driver_older_than_the_runtime_inside_is_a_problem(
    runs: str | None, toolkit: str | None, old: bool
) -> None:
    record = {"cuda": {"toolkit": toolkit}} if toolkit else None
    problems = _report.driver_problems({"version": None, "cuda": runs}, record)
    assert len(problems) == old
    assert not old or ("up to 12.8" in problems[0] and "CUDA 13.0" in problems[0])


def test_a_gpu_left_to_the_slow_backend_is_a_problem() -> None:
    gpu = _report.Gpu("cuda:0", "H200", "9.0")
    choice = _report.BackendChoice("cuda:0", "reference", (Refusal("cuda", "missing_file", "not there"),))
    (problem,) = _report.device_problems(
        (gpu,), {"version": "2.11", "cuda": "13.0", "error": None}, (choice,)
    )
    assert "cuda:0" in problem and "not there" in problem


def test_a_gpu_that_torch_cannot_see_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "driver_gpus", lambda: ("NVIDIA H200, 9.0",))
    (problem,) = _report.device_problems((), {"version": "2.13.0+cpu", "cuda": None, "error": None}, ())
    assert "NVIDIA H200" in problem and "CPU build" in problem


def test_a_gpu_that_fails_when_asked_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and CUDA cannot start the second."""

    def capability(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA error: device(s) is/are busy or unavailable\nFor debugging ...")
        return (9, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    report = _report.collect()
    assert [gpu.device for gpu in report.gpus] == ["cuda:0"]
    (problem,) = [text for text in report.problems if "cannot use" in text]
    assert "(cuda:1: CUDA error: device(s) is/are busy or unavailable)" in problem


def test_choices_follow_the_gpus() -> None:
    gpus = (_report.Gpu("cuda:0", "H200", "9.0"), _report.Gpu("cuda:1", "L4", "8.9"))
    facts = library("missing_file")
    made = _report.choices(map(_report.device_of, gpus), facts)
    assert [c.device for c in made] == ["cuda:0", "cuda:1"]
    assert [c.refusals[0].code for c in made] == ["missing_file", "no_kernel"]
    (cpu,) = _report.choices([DeviceFacts("cpu")], facts)
    assert cpu.device == "cpu"
    assert cpu.refusals == tuple(
        Refusal(backend, "no_device", "no GPU that torch can use") for backend in ("cuda", "cute_dsl", "fla")
    )


@pytest.mark.parametrize(
    ("value", "backend", "problems"), [("reference", "reference", 0), ("cuda", None, 0), ("triton", None, 1)]
)
def test_the_variable_is_followed_and_shown(
    monkeypatch: pytest.MonkeyPatch, value: str, backend: str | None, problems: int
) -> None:
    monkeypatch.setenv("FLASH_KDA_BACKEND", value)
    (choice,) = _report.choices([DeviceFacts("cuda", 0, (8, 9))], library())
    assert (choice.backend, choice.asked) == (backend, value)
    found = _report.device_problems((), {"version": "2.11", "cuda": "13.0", "error": None}, (choice,))
    assert len([problem for problem in found if "FLASH_KDA_BACKEND" in problem]) == problems
    assert any(f"(FLASH_KDA_BACKEND={value})" in line for line in rendered(choices=(choice,)))


def rendered(**change: Any) -> list[str]:
    """Lines of the report of this machine with some fields replaced."""
    return __main__.render(replace(_report.collect(), **change)).splitlines()


def test_problems_are_printed_before_the_details() -> None:
    assert rendered(problems=("one", "two"))[:3] == ["PROBLEM: one", "PROBLEM: two", ""]
    lines = rendered(problems=())
    assert lines[0] == "no problems found" and not any(line.startswith("PROBLEM") for line in lines)


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        (flash_kda.__version__ + "+cu130", flash_kda.__version__ + "+cu130"),
        ("0.0.9+cu130", flash_kda.__version__),
        (3, flash_kda.__version__),
        (None, flash_kda.__version__),
    ],
)
def test_the_version_has_the_local_label_of_the_record(recorded: Any, shown: str) -> None:
    record = None if recorded is None else {"version": recorded}
    (line,) = [line for line in rendered(build_record=record) if line.startswith("flash_kda ")]
    assert line.split()[1] == shown + ","


def test_architectures_that_were_built_and_not_run_are_shown() -> None:
    assert '  built_not_run: ["100a"]' in rendered(build_record={"built_not_run": ["100a"]})


def test_a_code_is_printed_unless_the_library_is_loaded() -> None:
    for facts, shown in (
        (library(text="loaded /x"), "loaded /x"),
        (library("load_error"), "load_error: the text"),
    ):
        (line,) = [line for line in rendered(library=facts) if line.startswith("library ")]
        assert line.split(maxsplit=1)[1] == shown


def test_beside_a_second_copy_no_wheel_is_advised(tmp_path: Path) -> None:
    facts = library("missing_file", text="Install a CUDA wheel")
    text = _report.beside_copies(facts, [tmp_path])["text"]
    assert str(tmp_path) in text and "run from another folder" in text and "wheel" not in text
    assert _report.beside_copies(facts, []) == facts
    assert _report.beside_copies(library("load_error"), [tmp_path]) == library("load_error")


def test_a_second_copy_is_named_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "flash_kda").mkdir()
    (tmp_path / "flash_kda" / "__init__.py").touch()
    done = module("--json", prelude=f"sys.path.append({str(tmp_path)!r})")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and any(str(tmp_path) in problem for problem in report["problems"])
    if report["library"]["code"] == "missing_file":
        assert str(tmp_path) in report["library"]["text"] and "wheel" not in report["library"]["text"]


def test_the_version_of_the_kernel_module_is_read() -> None:
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (dvs-builder)\n",
    ):
        match = _report._KERNEL_MODULE.search(line)
        assert match and match[1] in ("550.54.15", "580.159.03")
