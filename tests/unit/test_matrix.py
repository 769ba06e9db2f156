"""The matrix: what the checked-in one says, and golden bad ones that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import errors, matrix
from ci.archs import arch
from ci.errors import ConfigError

GOOD = matrix.PATH.read_text(encoding="utf-8")


def test_the_checked_in_matrix() -> None:
    found = matrix.load()
    assert [row.label for row in found.rows] == ["cu130", "cu135", "cu129"]
    assert [row.label for row in found.locked_rows] == ["cu130", "cu135"]
    assert found.cuda_row("cu130").archs == ("90a", "100a", "103a", "120a")
    assert found.cuda_row("cu135").value == "90a,100a,103a,107a,120a"
    assert found.project.torch_target == "2.10"
    assert set(found.archs) == {row.target.name for row in arch.KERNEL_TARGETS}


def test_another_platform_has_its_own_tag_and_rows() -> None:
    found = matrix.load()
    other = found.on("aarch64")
    assert (found.on("x86_64"), found.project.plat) == (found, "manylinux_2_28_x86_64")
    assert other.project.plat == "manylinux_2_28_aarch64"
    assert other.cuda_row("cu130").archs == ("90a", "100a", "103a", "120f")
    assert other.cuda_row("cu135").toolkit == found.cuda_row("cu135").toolkit
    with pytest.raises(ConfigError, match=r"no platform 'riscv64'.* x86_64, aarch64"):
        found.on("riscv64")


def test_a_row_that_a_platform_does_not_name_is_not_there(tmp_path: Path) -> None:
    found = _load(tmp_path, GOOD.replace('cu130 = ["90a"', '# cu130 = ["90a"')).on("aarch64")
    assert [row.label for row in found.rows] == ["cu135"]


def test_a_row_resolves_to_itself_under_its_toolkit() -> None:
    found = matrix.load()
    for row in (*found.rows, *found.on("aarch64").rows):
        emits = found.emittable(row.toolkit)
        chosen = arch.resolve(row.value, arch.KERNEL_TARGETS, emits.__contains__, list, strict=True)
        assert chosen.names == row.archs


def test_all_means_what_the_toolkit_emits(tmp_path: Path) -> None:
    text = GOOD.replace('archs = ["90a", "100a", "103a", "120a"]', 'archs = "all"')
    assert text != GOOD
    assert _load(tmp_path, text).cuda_row("cu130").archs == ("90a", "100a", "103a", "120a")


def test_emits_agrees_with_min_cuda() -> None:
    # Two sources for the oldest CUDA of a target, the table of kernels (for messages) and the measurements.
    for version, emits in matrix.load().emits.items():
        number = tuple(int(part) for part in version.split("."))
        for row in arch.KERNEL_TARGETS:
            assert (row.target in emits) == (number >= row.min_cuda), (version, row.target.name)


def test_unknown_names() -> None:
    found = matrix.load()
    with pytest.raises(ConfigError, match=r"cu128.*cu130, cu135, cu129"):
        found.cuda_row("cu128")
    with pytest.raises(ConfigError, match=r"11\.8"):
        found.emittable("11.8")


def _load(folder: Path, text: str) -> matrix.Matrix:
    path = folder / "matrix.toml"
    path.write_text(text, encoding="utf-8")
    return matrix.load(path)


ROW_130 = 'archs = ["90a", "100a", "103a", "120a"]'
PLATFORM_ROWS = GOOD.partition("[platform.aarch64.archs]\n")[2].partition("\n\n")[0]
BAD = {
    "not toml": ("[project]", "[project", "cannot be read"),
    "missing table": ("[test]", "[tests]", "'test' is missing"),
    "missing key": ('torch_target = "2.10"', "", "'torch_target' is missing"),
    "unknown key": ('torch_target = "2.10"', 'torch_target = "2.10"\ncolour = "red"', "unknown key 'colour'"),
    "unknown table": ("[test]", "[more]\na = 1\n[test]", "unknown key 'more'"),
    "number for text": ('torch_target = "2.10"', "torch_target = 2.10", "expected a torch version"),
    "label of another toolkit": ('label = "cu130"', 'label = "cu131"', "expected the label of CUDA 13.0"),
    "repeated label": (
        'label = "cu135"\ntoolkit = "13.5"\ntoolkit_from = "lock"\narchs = ["90a", "100a", "103a", "107a"',
        'label = "cu130"\ntoolkit = "13.0"\ntoolkit_from = "lock"\narchs = ["90a", "100a", "103a"',
        "labels without repeats",
    ),
    "toolkit from elsewhere": (
        'toolkit_from = "image"',
        'toolkit_from = "disk"',
        "expected 'lock' or 'image'",
    ),
    "toolkit from nowhere": ('toolkit_from = "image"\n', "", "'toolkit_from' is missing"),
    "toolkit without a record": ('[toolkit."13.0"]', '[toolkit."13.1"]', "expected one of"),
    "no architectures": (ROW_130, "archs = []", "a list without repeats"),
    "repeated architecture": (ROW_130, 'archs = ["90a", "90a"]', "a list without repeats"),
    "unsorted": (ROW_130, 'archs = ["100a", "90a"]', "ascending order"),
    "no suffix": (ROW_130, 'archs = ["90"]', "suffixed targets"),
    "no kernels": (ROW_130, 'archs = ["110a"]', "targets with kernels"),
    "toolkit cannot emit": (ROW_130, 'archs = ["90a", "107a"]', "targets CUDA 13.0 emits"),
    "unknown keyword": (ROW_130, 'archs = "auto"', "a list without repeats"),
    "unknown status": ('status = "built, not run"', 'status = "works"', "expected one of"),
    "built but called opt-in": (
        '[arch.100a]\nstatus = "built',
        '[arch.100a]\nstatus = "opt-in',
        "exactly when no row",
    ),
    "hardware without a GPU of CI": ('target = "90a"', 'target = "100a"', "a table for each target that is"),
    "GPU of no target": ('target = "90a"', 'target = "86"', "gpu[0]: 'target': expected one of 90a"),
    "GPU without torch": (
        'runner = "gpu-h200"\ntorch = ["2.10.0", "2.13.0"]',
        'runner = "gpu-h200"\ntorch = []',
        "a list without repeats of torch versions",
    ),
    "GPU with a torch too old": (
        'runner = "gpu-h200"\ntorch = ["2.10.0", "2.13.0"]',
        'runner = "gpu-h200"\ntorch = ["2.9.0"]',
        "torch 2.9.0 is older",
    ),
    "architecture without a status": ("[arch.120f]", "[arch.121f]", "one table for each target"),
    "old python": ('python = ["3.10"', 'python = ["3.9"', "older than project.python_tag"),
    "old torch": ('torch = ["2.10.0"', 'torch = ["2.9.1"', "older than project.torch_target"),
    "oldest torch not tested": ('torch = ["2.10.0", ', "torch = [", "expected a torch 2.10.*"),
    "old build torch": ('torch_build = "2.13.0"', 'torch_build = "2.9.0"', "older than project.torch_target"),
    "platform that no compiler is known for": ("[platform.aarch64]", "[platform.riscv64]", "one of aarch64"),
    "tag of another platform": (
        '"manylinux_2_28_aarch64"',
        '"manylinux_2_28_x86_64"',
        "a manylinux tag of aarch64",
    ),
    "row of a platform that is none": ("cu135 = [", "cu136 = [", "unknown key 'cu136'"),
    "a platform's architecture without kernels": (
        'cu130 = ["90a"',
        'cu130 = ["90a", "110a"',
        "ascending order",
    ),
    "no wheel on a platform": (PLATFORM_ROWS, "", "architectures for some of cu130, cu135"),
    "a platform's architecture that its toolkit lacks": (
        'cu130 = ["90a", "100a", "103a"',
        'cu130 = ["90a", "100a", "103a", "107a"',
        "targets CUDA 13.0 emits",
    ),
    "built for a platform alone but called opt-in": (
        '[arch.120f]\nstatus = "built, not run"',
        '[arch.120f]\nstatus = "opt-in, not run"',
        "exactly when no row",
    ),
    "another machine's tag for this one": (
        'plat = "manylinux_2_28_x86_64"',
        'plat = "manylinux_2_28_aarch64"',
        "a manylinux tag of x86_64",
    ),
    "not manylinux": ('plat = "manylinux_2_28_x86_64"', 'plat = "linux_x86_64"', "a manylinux tag"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_matrices_are_refused(tmp_path: Path, name: str) -> None:
    old, new, said = BAD[name]
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, GOOD.replace(old, new, 1))
    assert said in str(caught.value)
    assert "matrix.toml" in str(caught.value)


def test_rows_that_only_the_image_builds_are_not_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a row with toolkit_from = 'lock'"):
        _load(tmp_path, GOOD.replace('toolkit_from = "lock"', 'toolkit_from = "image"'))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        matrix.load(tmp_path / "none.toml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "matrix.toml"
    path.write_bytes(b"\xff\xfe = 1\n")
    with pytest.raises(ConfigError, match=r"matrix\.toml: cannot be read"):
        matrix.load(path)


def test_exit_codes_are_distinct() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    kinds = [kind for kind in classes if issubclass(kind, errors.CiError)]
    codes = [kind.exit_code for kind in kinds]
    assert len(kinds) > 10
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 126 for code in codes)


def test_run_cli_reports(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise errors.SassError("90a is missing", {"missing": ["90a"]})

    assert errors.run_cli(fails, as_json=True) == errors.SassError.exit_code
    out = capsys.readouterr()
    assert '"missing": ["90a"]' in out.out
    assert out.err == "SassError: 90a is missing\n"


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "x.whl"),
            "x.whl: expected to read or write it, got: ",
        ),
        (OSError(28, "No space left on device"), "a file: expected to read or write it, got: No space left"),
        (
            PermissionError(13, "Permission denied", "one", None, "two"),
            "one and two: expected to read or write",
        ),
    ],
)
def test_a_file_that_the_system_refuses_is_told(
    capsys: pytest.CaptureFixture[str], problem: OSError, said: str
) -> None:
    def fails() -> int:
        raise problem

    assert errors.run_cli(fails) == errors.FileError.exit_code
    told = capsys.readouterr().err
    assert told.startswith(f"FileError: {said}") and "\nNext: " in told


def test_an_interruption_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise KeyboardInterrupt

    assert (errors.run_cli(fails), capsys.readouterr().err) == (130, "interrupted\n")
