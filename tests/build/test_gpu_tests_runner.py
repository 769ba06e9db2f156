"""The runner of the GPU tests, driven without a GPU: what it refuses, what it records."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci import gpu_tests, matrix
from ci.archs import arch
from ci.errors import ConfigError, GpuTestError, MetadataError, TargetMismatchError

if TYPE_CHECKING:
    from handmade import MakeWheel

pytest_plugins = ["handmade"]
ROOT = Path(__file__).resolve().parents[2]
HOPPER = arch.KERNEL_TARGETS[0].target
SOURCE = {
    "commit": "abc",
    "dirty": False,
    "sha256": "0" * 64,
    "files": {"csrc/a.cu": "1" * 64, "flash_kda/b.py": "2" * 64},
}
PACKAGE = {
    "flash_kda/__init__.py": '__version__ = "0.1.0"\nMARK = "the wheel"\n',
    "flash_kda/build_record.json": json.dumps({"source": SOURCE}),
}
PROBE = gpu_tests.Probe(
    "2.11.0+cu130", "13.0", "3.12.3", "NVIDIA H200", [9, 0], "580.1", "0.1.0", "/x/flash_kda"
)
REPORT = """
import json, pathlib
print(json.dumps({"location": str(pathlib.Path(__file__).parent), "torch": {"error": "no libcudart"}}))
"""
PASSING = "import flash_kda\n\ndef test_mark():\n    assert flash_kda.MARK == 'the wheel'\n"


@pytest.fixture
def wheel(make_wheel: MakeWheel) -> Path:
    return make_wheel(PACKAGE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with its own flash_kda, which must not be the one tested."""
    root = tmp_path / "project"
    (root / "tests" / "gpu").mkdir(parents=True)
    (root / "flash_kda").mkdir()
    (root / "flash_kda" / "__init__.py").write_text('MARK = "the source tree"\n')
    shutil.copy(gpu_tests.ROOT / "pyproject.toml", root)
    monkeypatch.setattr(gpu_tests, "ROOT", root)
    monkeypatch.chdir(root)
    return root


def run(
    project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, *extra: str, **tests: str
) -> tuple[Path, str]:
    """Run `tests` (file name to text) as if on an H200; the folder of records and the error's text."""
    for name, text in tests.items():
        (project / "tests" / "gpu" / f"{name}.py").write_text(text)
    monkeypatch.setattr(gpu_tests, "probe", lambda _environment, _folder: PROBE)
    records, error = project / "records", ""
    try:
        gpu_tests.gpu_tests(HOPPER, wheel, records, ["-q", *extra])
    except GpuTestError as problem:
        error = str(problem)
    return records, error


def only_record(records: Path) -> dict[str, object]:
    (path,) = records.iterdir()
    record: dict[str, object] = json.loads(path.read_text())
    return record


def test_a_passing_run_is_recorded(project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, error = run(project, wheel, monkeypatch, test_a=PASSING)
    record = only_record(records)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert error == ""
    assert [path.name for path in records.iterdir()] == [f"{digest[:16]}-sm{HOPPER.name}.json"]
    assert record["wheel_sha256"] == digest and record["wheel"] == wheel.name
    assert record["counts"] == {"passed": 1, "failed": 0, "errors": 0, "skipped": 0, "xfailed": 0}
    assert record["verdict"] == "passed" and record["exit_code"] == 0
    keys = {"target", "device", "driver", "torch", "torch_cuda", "python", "date", "command", "capability"}
    assert keys <= set(record)
    kernels = hashlib.sha256(f"{'1' * 64}  csrc/a.cu\n".encode()).hexdigest()
    built_from = {"commit": "abc", "dirty": False, "sha256": "0" * 64, "kernels_sha256": kernels}
    assert record["source"] == built_from


def test_a_wheel_built_anew_meanwhile_is_not_the_one_recorded(
    project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    again = f"    import pathlib\n    pathlib.Path({str(wheel)!r}).write_bytes(b'another build')\n"
    records, error = run(project, wheel, monkeypatch, test_a=PASSING + again)
    assert (error, only_record(records)["wheel_sha256"]) == ("", digest)


def test_a_folder_that_takes_no_record_is_refused_before_the_tests(
    project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "records").write_text("a file")
    with pytest.raises(ConfigError, match="give another one with --records"):
        run(project, wheel, monkeypatch, test_a="assert False\n")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": {"commit": "abc"}}'])
def test_a_wheel_that_does_not_say_its_source_is_not_tested(
    text: str, project: Path, make_wheel: MakeWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = make_wheel({**PACKAGE, "flash_kda/build_record.json": text})
    with pytest.raises(MetadataError, match="expected the sources of the wheel"):
        run(project, bare, monkeypatch, test_a=PASSING)
    assert not (project / "records").exists()


@pytest.mark.parametrize(
    "extra",
    [
        ["-k", "mark"],
        ["-m", "not filterwarnings"],
        ["--deselect", "tests/gpu/test_b.py::test_other"],
        ["--ignore", "tests/gpu/test_b.py"],
        ["--ignore-glob", "*test_b.py"],
        ["tests/gpu/test_a.py::test_mark"],
        ["tests/gpu/test_a.py"],
        ["-o", "python_files=test_a.py"],
        ["--noconftest"],
    ],
)
def test_a_run_of_some_tests_leaves_no_record(
    extra: list[str], project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (
        "import pytest, flash_kda\n\n@pytest.mark.filterwarnings('default')\ndef test_other():\n    pass\n"
    )
    records, error = run(project, wheel, monkeypatch, *extra, test_a=PASSING, test_b=other)
    assert error == "" and not records.exists()
    _, error = run(project, wheel, monkeypatch, *extra, test_a=PASSING + "    assert False\n", test_b=other)
    assert error.startswith("failed") and not records.exists()


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan"])
def test_a_run_that_calls_no_test_leaves_no_record(
    option: str, project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", option)
    records, _ = run(project, wheel, monkeypatch, test_a=PASSING + "    assert False\n")
    assert not records.exists()


def test_an_option_with_a_value_leaves_no_test_out(
    project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = "def pytest_addoption(parser):\n    parser.addoption('--fla-path')\n"
    extra = ("--fla-path", str(project), "-x", "-v")
    records, error = run(project, wheel, monkeypatch, *extra, test_a=PASSING, conftest=option)
    record = only_record(records)
    assert error == "" and record["verdict"] == "passed"
    assert "--fla-path DIR -x" in str(record["command"]) and str(project) not in str(record["command"])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (PASSING + "    assert False\n", "failed"),
        (PASSING + "\ndef test_b(missing_fixture):\n    pass\n", "errors"),
        ("import no_such_module\n", "errors"),
    ],
)
def test_a_failing_run_is_recorded_and_fails(
    text: str, count: str, project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, error = run(project, wheel, monkeypatch, test_a=text)
    record = only_record(records)
    counts = record["counts"]
    assert isinstance(counts, dict) and counts[count] == 1
    assert record["verdict"] == "failed" and error.startswith("failed")


@pytest.mark.parametrize(
    "text",
    [
        "import pytest, flash_kda\n\n@pytest.mark.skip(reason='not today')\ndef test_a():\n    pass\n",
        "import pytest\npytest.skip('not today', allow_module_level=True)\n",
        "",
    ],
)
def test_a_run_in_which_nothing_ran_is_no_success(
    text: str, project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, error = run(project, wheel, monkeypatch, test_a=text)
    record = only_record(records)
    assert record["verdict"] == "nothing ran" and error.startswith("nothing ran")
    if text:
        assert "not today" in str(record["skip_reasons"])


def test_tests_of_another_flash_kda_are_no_success(
    project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import sys\nsys.path.insert(0, {str(project)!r})\nimport flash_kda\n\ndef test_a():\n    pass\n"
    records, error = run(project, wheel, monkeypatch, test_a=text)
    assert only_record(records)["verdict"] == "another flash_kda was tested"
    assert error.startswith("another flash_kda")


def test_tests_that_import_no_flash_kda_are_no_success(
    project: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, _ = run(project, wheel, monkeypatch, test_a="def test_a():\n    pass\n")
    assert only_record(records)["verdict"] == "another flash_kda was tested"


def test_without_a_gpu_it_refuses_and_records_nothing(project: Path, make_wheel: MakeWheel) -> None:
    sources = sorted((ROOT / "flash_kda").rglob("*.py"))
    wheel = make_wheel({str(path.relative_to(ROOT)): path.read_text() for path in sources})
    with pytest.raises(TargetMismatchError, match="no GPU: expected a GPU of compute capability"):
        gpu_tests.gpu_tests(HOPPER, wheel, project / "records", [])
    assert not (project / "records").exists()


@pytest.mark.parametrize(
    ("target", "capability", "refused"),
    [("90a", [9, 0], False), ("90a", [10, 0], True), ("100a", [10, 3], True), ("100f", [10, 3], False)],
)
def test_another_gpu_is_refused(target: str, capability: list[int], refused: bool) -> None:
    found = replace(PROBE, capability=capability)
    if refused:
        with pytest.raises(TargetMismatchError, match="another GPU"):
            gpu_tests.check_device(arch.parse_target(target), found)
    else:
        gpu_tests.check_device(arch.parse_target(target), found)


@pytest.mark.parametrize("text", ["sm75", "sm_10.0", "", "hopper", "sm90"])
def test_a_target_without_kernels_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--target"):
        gpu_tests.parse_target(text)


def test_every_target_of_the_matrix_is_accepted() -> None:
    for name, info in matrix.load().archs.items():
        assert gpu_tests.parse_target(info.gpu_test).name == name


def test_a_missing_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no flash_kda wheel"):
        gpu_tests.find_wheel(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        gpu_tests.install(tmp_path / "flash_kda-0.whl", tmp_path)


def test_a_broken_wheel_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "flash_kda-0.1.0-py3-none-any.whl"
    broken.write_bytes(b"not a zip")
    with pytest.raises(MetadataError, match="cannot be installed"):
        gpu_tests.install(broken, tmp_path)


def test_a_wheel_that_does_not_import_is_an_error(tmp_path: Path, make_wheel: MakeWheel) -> None:
    environment = gpu_tests.install(make_wheel({"flash_kda/__init__.py": "1 / 0\n"}), tmp_path)
    with pytest.raises(GpuTestError, match="ZeroDivisionError"):
        gpu_tests.probe(environment, tmp_path)


def test_a_wheel_that_kills_the_process_is_told_apart(tmp_path: Path, make_wheel: MakeWheel) -> None:
    kill = "import os, signal\nos.kill(os.getpid(), signal.SIGBUS)\n"
    environment = gpu_tests.install(make_wheel({"flash_kda/__init__.py": kill}), tmp_path)
    with pytest.raises(GpuTestError, match=r"ended with signal 7 \(SIGBUS\)"):
        gpu_tests.probe(environment, tmp_path)
    assert gpu_tests.ending(1) == "code 1" and gpu_tests.ending(-40) == "signal 40"


def test_the_source_tree_in_the_way_is_noticed(project: Path, tmp_path: Path, make_wheel: MakeWheel) -> None:
    environment = gpu_tests.install(make_wheel({"other/__init__.py": ""}, name="other"), tmp_path)
    said = json.dumps({"location": str(project / "flash_kda")})
    (project / "flash_kda" / "__main__.py").write_text(f"print({said!r})\n")
    with pytest.raises(GpuTestError, match="flash_kda was imported from"):
        gpu_tests.probe(environment, project)


def test_the_probe_reads_what_the_package_reports() -> None:
    import flash_kda
    from flash_kda import _report

    report = _report.collect().as_dict()
    assert gpu_tests.read_report(report | {"gpus": []}).capability is None
    gpus = [{"device": "cuda:0", "name": "NVIDIA H200", "capability": "9.0"}]
    found = gpu_tests.read_report(json.loads(json.dumps(report | {"gpus": gpus})))
    assert (found.device, found.capability, found.flash_kda) == ("NVIDIA H200", [9, 0], flash_kda.__version__)
    assert found.torch and Path(found.location) == Path(flash_kda.__file__).parent


def test_a_wheel_beside_a_torch_that_does_not_import_is_an_error(
    tmp_path: Path, make_wheel: MakeWheel
) -> None:
    files = {"flash_kda/__init__.py": "", "flash_kda/__main__.py": REPORT}
    environment = gpu_tests.install(make_wheel(files), tmp_path)
    with pytest.raises(GpuTestError, match="torch: no libcudart"):
        gpu_tests.probe(environment, tmp_path)


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = "import sys\nfor name in ('rich', 'torch', 'elftools', 'packaging'): sys.modules[name] = None\n"
    done = subprocess.run([sys.executable, "-c", code + "import ci.gpu_tests"], check=False, cwd=ROOT)
    assert done.returncode == 0
