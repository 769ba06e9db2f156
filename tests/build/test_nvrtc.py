"""The device code of rows whose toolkit is in the builder image alone, compiled by that CUDA's NVRTC.

PyPI has no nvcc 12.9, but its NVRTC, which is the same compiler without host code.  The headers are CUDA
12.9's own: runtime, cccl, crt.  What the kernels must hold is judged by the expectations of the wheels.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nvrtc import Nvrtc, Refused

from ci import matrix, source
from ci.toolchain import nvrtc
from ci.verify import default_cuobjdump, device, expectations, sass
from ci.verify.facts import Elf, Library, PythonAudit, TorchAudit
from ci.verify.request import make_request

ROWS = [row for row in matrix.load().rows if row.toolkit_from == matrix.IMAGE]
CASES = [pytest.param(row, arch, id=f"{row.label}-{arch}") for row in ROWS for arch in row.archs]
KERNELS = source.ROOT / "csrc" / "kda"
NAMELESS = ("90a",)  # CUDA 12 writes its images in a format that does not name the compiler
SHIMS = source.ROOT / "tests" / "fixtures" / "nvrtc"


TEXT = (KERNELS / "fwd.cu").read_text(encoding="utf-8")


def build(row: matrix.CudaRow, arch: str, text: str = TEXT) -> bytes:
    """The cubin of `text` for `arch`, by the NVRTC of the row's toolkit."""
    made = Nvrtc(nvrtc.ensure(row.toolkit))
    assert ".".join(map(str, made.version())) == row.toolkit
    options = [f"--gpu-architecture=sm_{arch}", "-std=c++17", "-default-device", "--pre-include=host.h"]
    options += [f"-I{SHIMS}", f"-I{KERNELS}", *made.includes()]
    return made.cubin(text, "fwd.cu", options)


def fatbin_of(cubin: bytes, arch: str, folder: Path) -> Path:
    """The cubin as the image of `arch` in a fatbin, whose images cuobjdump lists; RuntimeError when it is for
    another one, by NVIDIA's own check."""
    bare, path = folder / "fwd.cubin", folder / "fwd.fatbin"
    bare.write_bytes(cubin)
    tool = default_cuobjdump(matrix.load(), None).with_name("fatbinary")
    command = [tool, f"--create={path}", "--64", f"--image3=kind=elf,sm={arch},file={bare}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return path


def judge(cubin: bytes, arch: str, folder: Path, row: matrix.CudaRow) -> list[str]:
    """What the expectations of wheels find wrong with `cubin` as the one image of a wheel for `arch`."""
    path, table = fatbin_of(cubin, arch, folder), matrix.load()
    tool = default_cuobjdump(table, row)
    request = make_request(Path("fwd.whl"), expectations.load(), table, arch, row.label)
    (expected,) = request.libraries
    library = Library(
        path=expected.path,
        size=len(cubin),
        elf=Elf("", (), (), (), (), (), ()),
        images=device.read_images(path, tool),
        toolkits=device.read_toolkits(path, tool),
        torch=TorchAudit((), 0, None, (), ()),
        python=PythonAudit("", "", ()),
    )
    checks = (sass.check_contract, sass.check_resources, sass.check_instructions)
    verdicts = [check([library], request) for check in checks]
    assert all(verdict.checked for verdict in verdicts)
    assert library.toolkits == (() if arch in NAMELESS else (row.toolkit,))
    return [str(violation) for verdict in verdicts for violation in verdict.violations]


def test_there_is_such_a_row() -> None:
    assert [row.label for row in ROWS] == ["cu129"]


@pytest.mark.parametrize(("row", "arch"), CASES)
def test_the_kernels_compile_and_are_as_expected(row: matrix.CudaRow, arch: str, tmp_path: Path) -> None:
    assert judge(build(row, arch), arch, tmp_path, row) == []


def test_a_target_that_the_toolkit_does_not_know_is_refused() -> None:
    with pytest.raises(Refused, match="invalid value for --gpu-architecture"):
        build(ROWS[0], "107a")


def test_code_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(Refused, match="setmaxnreg"):
        build(ROWS[0], "90")


def test_wrong_text_is_refused() -> None:
    with pytest.raises(Refused, match="no_such_name"):
        build(ROWS[0], "90a", TEXT.replace("init_barriers(smem, rank);", "no_such_name(smem, rank);"))


def test_an_image_for_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="elf arch does not match"):
        judge(build(ROWS[0], "100a"), "90a", tmp_path, ROWS[0])


def test_a_missing_kernel_is_found(tmp_path: Path) -> None:
    text = TEXT.replace("kda_fwd_scan_kernel", "renamed")
    found = judge(build(ROWS[0], "90a", text), "90a", tmp_path, ROWS[0])
    assert any("kda_fwd_scan_kernel" in violation for violation in found)
