"""``python -m flash_kda --wheel FILE`` and ``--device-capability``: verdicts about what is not here."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flash_kda import __main__, _report, _wheel, dispatch, dsl, fla_install
from flash_kda.dispatch import DeviceFacts
from flash_kda.reasons import NO_PACKAGE, Reason

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Path]
LIBRARY, RECORD = "flash_kda/_C.abi3.so", "flash_kda/build_record.json"


@pytest.fixture
def make(tmp_path: Path, fixtures: Path) -> Make:
    """Writes a wheel with the device images of a fixture (None: no library) and a build record."""

    def write(library: str | bytes | None = "mixed", record: Any = None, package: str = "flash_kda") -> Path:
        path = tmp_path / "flash_kda-0.1.0-cp310-abi3-linux_x86_64.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{package}/__init__.py", "raise AssertionError('imported')")
            if isinstance(library, str):
                library = (fixtures / "fatbin" / f"{library}.so").read_bytes()
            if library is not None:
                archive.writestr(LIBRARY, library)
            if record is not None:
                archive.writestr(RECORD, record if isinstance(record, bytes) else json.dumps(record))
        return path

    return write


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Reason(NO_PACKAGE, "it is not installed")
    monkeypatch.setattr(dsl, "installed", lambda: dsl.Install(reason=absent))
    monkeypatch.setattr(fla_install, "reason", lambda cc: absent)
    monkeypatch.setattr(_report, "torch_gpus", lambda torch: ((), None))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")  # the fixtures' own


ARCHS = {"architectures": ["90a", "100a", "100f", "103a", "120a"], "version": "0.1.0+cu130"}


@pytest.mark.parametrize(
    ("capability", "backend", "code"),
    [
        ("9.0", "cuda", None),
        ("10.3", "cuda", None),
        ("10.7", "cuda", None),
        ("12.1", "reference", "not_in_wheel"),
        ("8.9", "reference", "no_kernel"),
    ],
)
def test_the_verdict_of_a_wheel(
    make: Make, capsys: pytest.CaptureFixture[str], capability: str, backend: str, code: str | None
) -> None:
    arguments = ["--wheel", str(make(record=ARCHS)), "--device-capability", capability, "--json"]
    assert __main__.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"schema", "wheel", "build_record", "images", "choices", "problems"}
    (choice,) = report["choices"]
    assert choice["backend"] == backend and report["problems"] == []
    assert [v["backend"] for v in choice["trace"]] == list(dispatch.ORDER)
    assert choice["trace"][0]["code"] == (code or "")
    assert {"kind": "ptx", "target": "100f"} in report["images"]
    if capability == "10.7":
        assert choice["trace"][0]["text"] == "runs the library's 100f+PTX"
    assert report["build_record"] == ARCHS


def test_a_wheel_without_the_image_says_what_it_holds_and_what_helps(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make("cu135")
    assert __main__.main(["--wheel", str(path), "--device-capability", "12.0"]) == 0
    text = capsys.readouterr().out
    for part in ("107a", "not_in_wheel", "12.0", "needs 120a", "FLASH_KDA_CUDA_ARCHS=120a", str(path)):
        assert part in text


def test_each_visible_gpu_gets_a_verdict(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (_report.Gpu("cuda:0", "H200", "9.0"), _report.Gpu("cuda:1", "GB10", "12.1"))
    monkeypatch.setattr(_report, "torch_gpus", lambda torch: (gpus, None))
    report = __main__._on_wheel(make(record=ARCHS), None)
    assert [(c.device, c.backend) for c in report.choices] == [("cuda:0", "cuda"), ("cuda:1", "reference")]


def test_without_a_gpu_it_asks_for_one(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--wheel", str(make())]) == 0
    assert "--device-capability 9.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (ARCHS, None),
        (None, "without a usable build_record.json"),
        (b"\xff", "without a usable build_record.json"),
        (b"[]", "without a usable build_record.json"),
        ({"architectures": 5}, "without a usable build_record.json"),
        ({"architectures": ["90a"]}, "names the architectures ['90a'], the file holds"),
    ],
)
def test_the_record_is_held_against_the_images(make: Make, record: Any, says: str | None) -> None:
    problems = _wheel.judge(make(record=record), [], True).problems
    assert len(problems) == (says is not None) and (says is None or says in problems[0])


def test_a_wheel_without_kernels(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--wheel", str(make(None)), "--device-capability", "9.0"]) == 0
    text = capsys.readouterr().out
    assert "missing_file" in text and "PROBLEM" in text and "built without kernels" in text


def test_a_wheel_for_another_processor_is_a_problem(make: Make, fixtures: Path) -> None:
    """One GPU may sit beside either: GH200 is compute capability 9.0 and aarch64."""
    library = bytearray((fixtures / "fatbin" / "mixed.so").read_bytes())
    library[0x12:0x14] = (183).to_bytes(2, "little")
    (problem,) = _wheel.judge(make(bytes(library), ARCHS), [], True).problems
    assert "is for aarch64, and this machine is x86_64" in problem


def test_ptx_alone_is_no_machine_code(make: Make) -> None:
    (choice,) = _wheel.judge(make("ptx_only"), [DeviceFacts("cuda", 0, (10, 0))], True).choices
    assert choice.refusals[0].code == "not_in_wheel"


def test_without_torch_the_images_are_told_all_the_same(make: Make) -> None:
    report = _wheel.judge(make(record=ARCHS), [DeviceFacts("cuda", None, (9, 0))], False)
    assert report.images and report.choices[0].refusals[0].code == "no_torch"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    path.write_bytes(data)


def flip_lzma(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("flash_kda/__init__.py", bytes(range(256)) * 4)
    flip(path)


def encrypt(path: Path) -> None:
    data = path.read_bytes()
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.index(magic) + flags
        data = data[:at] + b"\x01" + data[at + 1 :]
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [cut, flip, flip_lzma, encrypt, lambda path: path.write_bytes(b""), lambda path: path.unlink()],
)
@pytest.mark.parametrize("options", [[], ["--json"], ["--device-capability", "9.0"]])
def test_a_bad_file_is_one_line_and_exit_code_2(
    make: Make, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], options: list[str]
) -> None:
    path = make(record=ARCHS)
    damage(path)
    assert __main__.main(["--wheel", str(path), *options]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert path.name in said.err


@pytest.mark.parametrize("library", [b"", b"not an ELF file", b"\x7fELF\x02\x01" + bytes(58)])
def test_a_library_that_is_none_is_one_line_and_exit_code_2(
    make: Make, capsys: pytest.CaptureFixture[str], library: bytes
) -> None:
    assert __main__.main(["--wheel", str(make(library))]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and "_C.abi3.so" in said.err


def test_another_package_is_refused(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--wheel", str(make(package="other"))]) == 2
    assert "not a wheel of flash_kda" in capsys.readouterr().err


def test_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--wheel", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_of_the_wheel_runs(make: Make) -> None:
    """It holds an __init__.py that raises; a process of its own, beside what is really installed."""
    command = [
        sys.executable,
        "-m",
        "flash_kda",
        "--wheel",
        str(make()),
        "--device-capability",
        "9.0",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["backend"] == "cuda"


def test_a_variable_that_names_no_backend_is_told(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_KDA_BACKEND", "CUDA")
    for arguments in ([], ["--wheel", str(make())]):
        assert __main__.main([*arguments, "--device-capability", "9.0"]) == 0
        assert "CUDA       no, name: unknown_backend: FLASH_KDA_BACKEND='CUDA'" in capsys.readouterr().out


# ---- a GPU that is not here --------------------------------------------------------------------------------


def test_the_trace_for_a_hypothetical_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--device-capability", "10.7"]) == 0
    text = capsys.readouterr().out
    assert "compute capability 10.7: reference" in text
    assert [line.split()[0] for line in text.splitlines()[1:]] == list(dispatch.ORDER)
    assert __main__.main(["--device-capability", "8.9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == _report.SCHEMA
    (choice,) = report["choices"]
    assert [(v["question"], v["code"]) for v in choice["trace"]] == [
        ("capability", "no_kernel"),
        ("capability", "no_kernel"),
        ("availability", "no_package"),
        (None, ""),
    ]


@pytest.mark.parametrize("value", ["", "foo", "107", "sm_90a", "9.0a", "-1.0", "10.77", "nan"])
def test_a_bad_capability_is_exit_code_2(capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        __main__.main([f"--device-capability={value}"])
    assert caught.value.code == 2 and "takes a compute capability" in capsys.readouterr().err
