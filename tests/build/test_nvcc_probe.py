"""Asking the real nvcc of the locked toolkits."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from ci import matrix, nvcc, selection, toolchain
from ci.archs import arch

# By 13.0 and 13.5.
ACCEPTED = ["80", "89", "90", "90a", "100", "100a", "100f", "103", "103a", "103f"]
ACCEPTED += ["110", "110a", "110f", "120", "120a", "120f", "121", "121a", "121f"]
ONLY_NEWER = ["107", "107a", "107f"]  # by 13.5
NEVER = ["80a", "89a", "90f", "101a"]


@pytest.fixture(scope="module")
def homes() -> Mapping[str, Path]:
    return {toolkit: toolchain.ensure(toolkit) for toolkit in ("13.0", "13.5")}


def _nvcc(home: Path) -> nvcc.Nvcc:
    return nvcc.open_nvcc(home / "bin" / "nvcc")


@pytest.mark.parametrize("toolkit", ["13.0", "13.5"])
def test_b33_what_nvcc_emits(homes: Mapping[str, Path], toolkit: str) -> None:
    real = _nvcc(homes[toolkit])
    assert real.toolkit == toolkit
    asked = [*ACCEPTED, *ONLY_NEWER, *NEVER]
    emitted = [name for name in asked if real.emits(arch.parse_target(name))]
    assert emitted == ACCEPTED + (ONLY_NEWER if toolkit == "13.5" else [])


@pytest.mark.parametrize("toolkit", ["13.0", "13.5"])
def test_the_matrix_records_what_nvcc_emits(homes: Mapping[str, Path], toolkit: str) -> None:
    real = _nvcc(homes[toolkit])
    suffixed = {t for emits in matrix.load().emits.values() for t in emits}
    assert matrix.load().emittable(toolkit) == {target for target in suffixed if real.emits(target)}


def test_rows_pass_the_real_compile(homes: Mapping[str, Path]) -> None:
    for row in matrix.load().locked_rows:
        environ = {"FLASH_KDA_CUDA_ARCHS": row.value, "FLASH_KDA_CUDA_ARCHS_STRICT": "1"}
        assert selection.select(environ, _nvcc(homes[row.toolkit])).names == row.archs


def _copy(home: Path, target: Path) -> Path:
    """A toolkit whose bin folder is its own (nvcc resolves links) and whose other folders are linked."""
    shutil.copytree(home / "bin", target / "bin")
    for name in ("include", "lib", "nvvm"):
        (target / name).symlink_to(home / name)
    return target


def test_b35_a_ptxas_of_another_version_fails_the_real_compile(
    homes: Mapping[str, Path], tmp_path: Path
) -> None:
    home = _copy(homes["13.5"], tmp_path / "cuda")
    shutil.copy2(homes["13.0"] / "bin" / "ptxas", home / "bin" / "ptxas")
    skewed = _nvcc(home)
    assert skewed.emits(arch.Target(10, 3, "a"))  # the dry run does not notice
    with pytest.raises(arch.ArchSelectionError) as caught:
        selection.select({"FLASH_KDA_CUDA_ARCHS": "103a"}, skewed)
    assert caught.value.codes == ("compile_failed",)
    assert "ptxas" in str(caught.value)
    assert "Unsupported .version" in str(caught.value)


def test_b36_a_foreign_ptxas_on_path_has_no_effect(
    homes: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "ptxas"
    foreign.write_text("#!/bin/sh\nexit 7\n")
    foreign.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert selection.select({"FLASH_KDA_CUDA_ARCHS": "90a"}, _nvcc(homes["13.0"])).names == ("90a",)
