"""Each checker of ci/verify against an artifact it must reject, and a good wheel that passes them all.

The libraries are compiled here by the locked nvcc and linked by g++: what is judged is real.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from verify_artifacts import (
    BUILD_RECORD,
    GOOD_CODE,
    LABEL,
    LIBRARY,
    METADATA,
    NAME,
    ROOT,
    TAG,
    VERSION,
    Forge,
    WheelPlan,
    cuda_home,
)

from ci import errors, matrix, sbom
from ci.toolchain import lock_path, read_lock
from ci.verify import Report, audits, expectations, gather, verify_wheel
from ci.verify import judge as judge_facts
from ci.verify.elf import read_elf
from ci.verify.facts import Facts, Image, Library, PlatformAudit, Symbol, VersionNeed
from ci.verify.request import Request, make_request
from ci.verify.sass import check_contract

if TYPE_CHECKING:
    from handmade import MakeLibrary

pytest_plugins = ["handmade"]
ARCHS = "90a,100a"
CUDA = {"nvcc": "13.0.88", "ptxas": "13.0.88"}
CODE_90A, CODE_100A = GOOD_CODE


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    return Forge(tmp_path_factory.mktemp("verify"), cuda_home())


@pytest.fixture(scope="session", autouse=True)
def look_at_each_library_once() -> Iterator[None]:
    """Most wheels here hold the same library; what other programs say of it, seconds of work, is kept."""
    libraries: dict[tuple[bytes, str, Path], Library] = {}
    platforms: dict[tuple[bytes, ...], PlatformAudit] = {}
    read, audit = gather.read_library, gather.audit_platform

    def read_once(path: Path, name: str, cuobjdump: Path, oldest_python: str) -> Library:
        key = (path.read_bytes(), name, cuobjdump)
        if key not in libraries:
            libraries[key] = read(path, name, cuobjdump, oldest_python)
        return libraries[key]

    def audit_once(wheel: Path) -> PlatformAudit:
        with zipfile.ZipFile(wheel) as archive:
            found = [archive.read(name) for name in archive.namelist() if ".so" in name]
        key = (wheel.name.encode(), *found)
        if key not in platforms:
            platforms[key] = audit(wheel)
        return platforms[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "read_library", read_once)
        patch.setattr(gather, "audit_platform", audit_once)
        yield


def judge(forge: Forge, path: Path, expect: str | None = ARCHS, row: str | None = None) -> Report:
    return verify_wheel(
        path, expect=expect, row=row, cuobjdump=forge.cuobjdump, expectations=forge.expectations()
    )


def assert_rejected(report: Report, error: type[errors.CiError], *texts: str) -> None:
    """The report fails with `error` alone, and each of `texts` is in one of its violations."""
    failed = [verdict.error for verdict in report.verdicts if not verdict.ok]
    assert failed == [error], report.message()
    assert report.exit_code == error.exit_code
    found = [str(v) for verdict in report.verdicts for v in verdict.violations]
    for text in texts:
        assert any(text in line for line in found), f"{text!r} not in {found}"
    with pytest.raises(error):
        report.raise_on_failure()


# ---- the good artifact -------------------------------------------------------------------------------------


def test_good_library_passes(forge: Forge) -> None:
    report = judge(forge, forge.good())
    assert report.ok, report.message()
    assert report.exit_code == 0
    report.raise_on_failure()


def test_good_wheel_passes_every_concern(forge: Forge, tmp_path: Path) -> None:
    report = judge(forge, WheelPlan(forge.good()).write(tmp_path))
    assert report.ok, report.message()
    concerns = ["sass", "resources", "instructions", "platform", "abi", "metadata", "size"]
    assert [verdict.concern for verdict in report.verdicts] == concerns
    assert all(verdict.checked for verdict in report.verdicts)


def test_label_names_the_row_and_with_it_the_architectures(forge: Forge, tmp_path: Path) -> None:
    report = judge(forge, WheelPlan(forge.good()).write(tmp_path), expect=None)
    assert report.row == LABEL
    missing = (
        "missing machine code for architecture: expected 103a",
        "missing machine code for architecture: expected 120a",
    )
    assert_rejected(report, errors.SassError, *missing)
    assert f"Build again: nox -s build_wheels -- --cuda {LABEL}\n" in report.message() + "\n"
    report = judge(forge, WheelPlan(forge.good()).write(tmp_path), expect="90a,100f+PTX")
    assert f"nox -s build_wheels -- --cuda {LABEL} --archs 90a,100f+PTX\n" in report.message() + "\n"


# ---- SASS contract -----------------------------------------------------------------------------------------


def test_missing_architecture(forge: Forge) -> None:
    assert_rejected(
        judge(forge, forge.good(), "90a,100a,120a"), errors.SassError, "expected 120a, got 100a, 90a"
    )


def test_unexpected_architecture(forge: Forge) -> None:
    report = judge(forge, forge.good(), "90a")
    assert_rejected(
        report, errors.SassError, "unexpected machine code for architecture: expected 90a, got 100a"
    )


def test_ptx_is_no_machine_code(forge: Forge) -> None:
    library = forge.library(forge.device("arch=compute_90a,code=compute_90a"))
    report = judge(forge, library, "90a")
    sass = report.verdicts[0]
    assert report.exit_code == errors.SassError.exit_code
    lines = [str(violation) for violation in sass.violations]
    assert any("missing machine code for architecture: expected 90a, got none" in line for line in lines)
    assert any("unexpected PTX for architecture: expected none, got 90a" in line for line in lines)


def test_no_kernel_means_no_budget_was_compared(forge: Forge) -> None:
    report = judge(forge, forge.library(None))
    assert [v.concern for v in report.verdicts if not v.ok] == ["sass", "resources", "instructions"]
    assert "nothing was compared" in report.message()


def test_ptx_beside_machine_code_is_unexpected_unless_named(forge: Forge) -> None:
    family = "arch=compute_100f,code=[sm_100f,compute_100f]"
    library = forge.library(forge.device(CODE_90A, family))
    (violation,) = judge_contract(forge, library, "90a,100f")
    assert violation.endswith("unexpected PTX for architecture: expected none, got 100f")
    assert judge_contract(forge, library, "90a,100f+PTX") == []


def judge_contract(forge: Forge, library: Path, expect: str) -> list[str]:
    """The contract's violations alone, for architectures of which the fixture has no budget."""
    request = make_request(library, expectations.load(forge.expectations()), matrix.load(), expect, None)
    return [
        str(v)
        for v in check_contract(
            gather.gather_facts(library, forge.cuobjdump, "3.10").libraries, request
        ).violations
    ]


def test_suffix_is_part_of_the_architecture(forge: Forge) -> None:
    library = forge.library(forge.device("arch=compute_90,code=sm_90", "arch=compute_100f,code=sm_100f"))
    lines = judge_contract(forge, library, ARCHS)
    for text in ("expected 90a, got 100f, 90", "expected 100a, got 100f, 90", "got 90", "got 100f"):
        assert any(line.endswith(text) for line in lines), lines


def test_kernel_missing_for_one_architecture(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE, macros=["PARTIAL"]))
    assert_rejected(
        judge(forge, library), errors.SassError, "[100a]: missing kernel: expected _ZN7fixture10sum_kernel"
    )


def test_kernel_nobody_expects(forge: Forge, tmp_path: Path) -> None:
    folder = edited(forge, tmp_path, "kernels.toml", '"_ZN7fixture10sum_kernelILi3EEEvPfi"', '"renamed"')
    report = verify_wheel(forge.good(), expect=ARCHS, cuobjdump=forge.cuobjdump, expectations=folder)
    missing, unexpected = "missing kernel: expected renamed", "unexpected kernel"
    assert_rejected(report, errors.SassError, missing, unexpected)


def edited(forge: Forge, folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of the fixture's expectations with one text replaced."""
    target = folder / "edited"
    target.mkdir()
    for source in forge.expectations().iterdir():
        text = source.read_text()
        if source.name == name:
            assert old in text
            text = text.replace(old, new)
        (target / source.name).write_text(text)
    return target


def test_missing_library(forge: Forge, tmp_path: Path) -> None:
    folder = edited(forge, tmp_path, "kernels.toml", LIBRARY, "flash_kda/_D.abi3.so")
    wheel = WheelPlan(forge.good()).write(tmp_path)
    report = verify_wheel(wheel, expect=ARCHS, cuobjdump=forge.cuobjdump, expectations=folder)
    assert "missing library: expected flash_kda/_D.abi3.so, got flash_kda/_C.abi3.so" in report.message()
    assert report.exit_code == errors.SassError.exit_code


def test_relocatable_device_code_that_nobody_linked(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE, flags=["-rdc=true"]))
    report = judge(forge, library)
    assert report.exit_code == errors.SassError.exit_code
    assert "device code never linked" in report.message()


def test_bulk_copy_that_sm_120_lacks_becomes_an_external_call(forge: Forge) -> None:
    library = forge.library(forge.device("arch=compute_120a,code=sm_120a", macros=["TRAP"]))
    report = judge(forge, library, "120a")
    text = "external device symbol: expected none, got __cuda_syscall_cp_async_bulk_multicast"
    assert any(text in str(violation) for violation in report.verdicts[0].violations), report.message()
    # STACK reads 0 there, so the budget alone would not have noticed.
    assert report.verdicts[1].ok


def test_device_function_left_as_a_call(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE, macros=["CALLS"]))
    report = judge(forge, library)
    failed = [verdict.error for verdict in report.verdicts if not verdict.ok]
    assert failed == [errors.SassError, errors.InstructionError], report.message()
    assert "device function that was not inlined" in report.message()
    assert "forbidden instruction: expected no CALL" in report.message()


# ---- resources and instructions ----------------------------------------------------------------------------


def test_registers_over_budget(forge: Forge, tmp_path: Path) -> None:
    folder = edited(forge, tmp_path, "kernels.toml", "90a = { registers = 32", "90a = { registers = 8")
    report = verify_wheel(forge.good(), expect=ARCHS, cuobjdump=forge.cuobjdump, expectations=folder)
    assert_rejected(report, errors.ResourceError, "[90a]: registers over budget: expected at most 8 a thread")


def test_static_shared_memory_over_budget(forge: Forge, tmp_path: Path) -> None:
    folder = edited(forge, tmp_path, "kernels.toml", "shared = 5376", "shared = 4096")
    report = verify_wheel(forge.good(), expect=ARCHS, cuobjdump=forge.cuobjdump, expectations=folder)
    assert_rejected(report, errors.ResourceError, "shared over budget: expected at most 4096 bytes, got 5128")


def test_spills_are_stack_and_local_instructions(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE, macros=["SPILLS"], flags=["-maxrregcount=32"]))
    report = judge(forge, library)
    failed = [verdict.error for verdict in report.verdicts if not verdict.ok]
    assert failed == [errors.ResourceError, errors.InstructionError], report.message()
    assert report.exit_code == errors.ResourceError.exit_code
    for text in ("stack over budget: expected at most 0 bytes", "expected no LDL", "expected no STL"):
        assert text in report.message()


def test_instructions_that_are_not_there(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE, macros=["BARE"]))
    report = judge(forge, library)
    wanted = ("HMMA.16816.F32.BF16", "LDSM", "STSM", "LDGSTS|UBLKCP", "SYNCS.ARRIVE", "SYNCS.EXCH")
    texts = [f"missing instruction: expected {name}, got none" for name in wanted]
    assert_rejected(report, errors.InstructionError, *texts)


def test_architecture_without_a_budget_is_a_fault_of_the_expectations(forge: Forge) -> None:
    library = forge.library(forge.device("arch=compute_90,code=sm_90"))
    with pytest.raises(errors.ConfigError, match=r"no budget for 90: .*observe"):
        judge(forge, library, "90")


# ---- platform ----------------------------------------------------------------------------------------------

PLATFORM_FAULTS: dict[str, tuple[dict[str, Sequence[str]], str]] = {
    "newer glibc": (
        {"macros": ["FUTURE_GLIBC"], "libraries": ["future"]},
        "symbol version needed of libm.so.6: expected at most GLIBC_2.28, got GLIBC_2.99",
    ),
    "libcudart": ({"libraries": ["cudart"]}, "NEEDED library not allowed"),
    "rpath": ({"flags": ["-Wl,--disable-new-dtags,-rpath,/opt/cuda"]}, "got RPATH /opt/cuda"),
    "runpath": (
        {"flags": ["-Wl,--enable-new-dtags,-rpath,$ORIGIN/../torch"]},
        "got RUNPATH $ORIGIN/../torch",
    ),
    "extra export": ({"macros": ["EXTRA_EXPORT"]}, "exported symbol not allowed"),
}


@pytest.mark.parametrize("fault", PLATFORM_FAULTS)
def test_platform_rejects(forge: Forge, fault: str) -> None:
    order, text = PLATFORM_FAULTS[fault]
    library = forge.library(forge.device(*GOOD_CODE), **order)  # type: ignore[arg-type]
    assert_rejected(judge(forge, library), errors.PlatformError, text)


def test_symbol_table_left_in(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE), strip=False)
    assert_rejected(judge(forge, library), errors.PlatformError, "got .strtab, .symtab")


def test_debug_sections_left_in(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE), strip=False, flags=["-g"])
    assert_rejected(judge(forge, library), errors.PlatformError, ".debug_info")


def test_unwinder_linked_statically(forge: Forge) -> None:
    library = forge.library(forge.device(*GOOD_CODE), static_unwinder=True)
    assert_rejected(
        judge(forge, library), errors.PlatformError, "missing NEEDED library: expected libgcc_s.so.1"
    )


@pytest.mark.parametrize(
    "platform", ["linux_x86_64", "manylinux_2_34_x86_64", "manylinux_2_24_x86_64.manylinux_2_28_x86_64"]
)
def test_platform_tag_must_be_the_audited_one(forge: Forge, tmp_path: Path, platform: str) -> None:
    tag = f"cp310-abi3-{platform}"
    plan = WheelPlan(forge.good(), filename=f"{NAME}-{VERSION}+{LABEL}-{tag}.whl", tag=tag)
    report = judge(forge, plan.write(tmp_path))
    assert_rejected(report, errors.PlatformError, "platform tag: expected manylinux_2_28_x86_64, got")


def test_auditwheel_names_the_tag_that_the_symbols_allow(forge: Forge, tmp_path: Path) -> None:
    library = forge.library(forge.device(*GOOD_CODE), macros=["FUTURE_GLIBC"], libraries=["future"])
    report = judge(forge, WheelPlan(library).write(tmp_path))
    assert_rejected(report, errors.PlatformError, "auditwheel")


def test_grafted_library(forge: Forge, tmp_path: Path) -> None:
    plan = WheelPlan(forge.good(), extra={"flash_kda.libs/libcudart-1234.so.13": forge.good().read_bytes()})
    report = judge(forge, plan.write(tmp_path))
    assert (
        "grafted library: expected no .libs folder, got flash_kda.libs/libcudart-1234.so.13"
        in report.message()
    )
    assert report.exit_code == errors.PlatformError.exit_code


def test_library_nobody_expects(forge: Forge, tmp_path: Path) -> None:
    plan = WheelPlan(forge.good(), extra={"flash_kda/_old.abi3.so": forge.good().read_bytes()})
    report = judge(forge, plan.write(tmp_path))
    assert (
        "library nobody expects: expected flash_kda/_C.abi3.so, got flash_kda/_old.abi3.so"
        in report.message()
    )
    assert report.exit_code == errors.PlatformError.exit_code


# ---- stable ABI --------------------------------------------------------------------------------------------

ABI_FAULTS = {
    "TORCH_CXX": (
        "unstable torch symbol: ",
        "unstable torch symbol (torch-abi-audit): expected none, got c10::fail",
    ),
    "FUTURE_TORCH": ("oldest torch that has the shims: expected 2.10 or older, got 2.13.0",),
    "UNKNOWN_SHIM": ("shim of no torch release on record",),
    "CUDA_SHIM": ("symbol that CPU-only torch lacks",),
    "CUDA_RUNTIME": ("symbol that nothing provides",),
    "PYTHON_API": ("Python C API symbol", "outside Python's limited API (abi3audit)"),
}


@pytest.mark.parametrize("macro", ABI_FAULTS)
def test_abi_rejects(forge: Forge, macro: str) -> None:
    library = forge.library(forge.device(*GOOD_CODE), macros=[macro])
    assert_rejected(judge(forge, library), errors.AbiError, *ABI_FAULTS[macro])


def test_file_name_must_say_abi3(forge: Forge, tmp_path: Path) -> None:
    renamed = tmp_path / "_C.cpython-310-x86_64-linux-gnu.so"
    renamed.write_bytes(forge.good().read_bytes())
    assert_rejected(judge(forge, renamed), errors.AbiError, "file name: expected NAME.abi3.so")


# ---- the archive -------------------------------------------------------------------------------------------


def _swap(old: str, new: str) -> dict[str, object]:
    assert old in METADATA
    return {"metadata": METADATA.replace(old, new)}


def _sbom(change: Callable[[dict[str, Any]], object]) -> dict[str, object]:
    """A wheel whose bill of materials went through `change`."""

    def edit(text: str) -> str:
        bom = json.loads(text)
        change(bom)
        return json.dumps(bom)

    return {"edit_sbom": edit}


LOCKED_NVCC = next(pin.hashes[0] for pin in read_lock(lock_path("13.0")) if pin.name == "nvidia-cuda-nvcc")
DIST_INFO = f"{NAME}-{VERSION}+{LABEL}.dist-info"
FOREIGN = TAG.replace("x86_64", "aarch64")


def of_aarch64(library: Path, folder: Path) -> Path:
    """A copy whose header names the other machine; all else is as it was."""
    data = bytearray(library.read_bytes())
    data[18:20] = (183).to_bytes(2, "little")  # e_machine: EM_AARCH64
    folder.mkdir(exist_ok=True)
    copy = folder / library.name
    copy.write_bytes(data)
    return copy


def test_an_x86_library_in_an_aarch64_wheel(forge: Forge, tmp_path: Path) -> None:
    plan = WheelPlan(forge.good(), filename=f"{NAME}-{VERSION}+{LABEL}-{FOREIGN}.whl", tag=FOREIGN)
    report = judge(forge, plan.write(tmp_path))
    assert_rejected(
        report,
        errors.PlatformError,
        "machine: expected EM_AARCH64, got EM_X86_64",
        "no ELF executable or shared library file",  # auditwheel
    )


def test_an_aarch64_library_in_an_x86_wheel(forge: Forge, tmp_path: Path) -> None:
    plan = WheelPlan(of_aarch64(forge.good(), tmp_path / "library"))
    report = judge(forge, plan.write(tmp_path))
    assert_rejected(
        report,
        errors.PlatformError,
        "machine: expected EM_X86_64, got EM_AARCH64",
        "no ELF executable or shared library file",
    )


def test_a_library_alone_is_of_the_platform_that_is_named(forge: Forge, tmp_path: Path) -> None:
    foreign = of_aarch64(forge.good(), tmp_path / "library")
    known = {"expect": ARCHS, "cuobjdump": forge.cuobjdump, "expectations": forge.expectations()}
    assert verify_wheel(foreign, platform="aarch64", **known).ok
    for library, platform in ((foreign, None), (forge.good(), "aarch64")):
        report = verify_wheel(library, platform=platform, **known)
        assert_rejected(report, errors.PlatformError, "machine: expected")
    with pytest.raises(errors.ConfigError, match="no platform 'arm'"):
        verify_wheel(foreign, platform="arm", **known)


def test_the_checkers_of_others_read_another_machine_s_library(make_foreign: MakeLibrary) -> None:
    # To be found: a function outside Python's limited API, one of torch's C++ side, two of its C shim.
    names = ("PyUnicode_New", "_ZN3c104failEPKc", "aoti_torch_get_dim", "torch_stream_native_handle")
    text = "".join(f"int {name}(void);\n" for name in names)
    text += f"int f(void) {{ return {' + '.join(f'{name}()' for name in names)}; }}\n"
    library = make_foreign("_C.abi3.so", text, "-Wl,-z,undefs")
    assert read_elf(library).machine == "EM_AARCH64"
    assert {symbol.name for symbol in read_elf(library).undefined} >= set(names)
    assert audits.audit_python(library, "3.10").violations == ("PyUnicode_New (not in the limited API)",)
    found = audits.audit_torch(library)
    assert found.unstable == ("c10::fail(char const*)",)
    assert (found.shims, found.minimum) == (2, "2.13.0")


def test_a_platform_has_rows_of_its_own(forge: Forge, tmp_path: Path) -> None:
    plan = WheelPlan(forge.good(), filename=f"{NAME}-{VERSION}+{LABEL}-{FOREIGN}.whl", tag=FOREIGN)
    report = judge(forge, plan.write(tmp_path), expect=None)
    assert report.archs == matrix.load().on("aarch64").cuda_row(LABEL).archs
    assert report.archs != matrix.load().cuda_row(LABEL).archs
    assert f"nox -s build_wheels -- --cuda {LABEL} --platform aarch64\n" in report.message() + "\n"


OTHER_TAG = "cp311-abi3-manylinux_2_28_x86_64"
METADATA_FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "version edited": (
        _swap("Version: 0.1.0+", "Version: 0.1.1+"),
        "Version in METADATA against the file name",
    ),
    "label dropped": (_swap(f"+{LABEL}", ""), "Version in METADATA against the file name"),
    "name edited": (_swap("Name: flash-kda", "Name: flash-kdb"), "Name in METADATA: expected flash-kda"),
    "no torch": (
        _swap("Requires-Dist: torch>=2.10\n", ""),
        "Requires-Dist of torch: expected >=2.10, got none",
    ),
    "older torch": (_swap("torch>=2.10", "torch>=2.9"), "Requires-Dist of torch: expected >=2.10, got >=2.9"),
    "optional torch": (_swap("torch>=2.10", 'torch>=2.10; extra == "x"'), "Requires-Dist of torch"),
    "a package added": (
        _swap("Requires-Dist: torch", "Requires-Dist: evil\nRequires-Dist: torch"),
        "unexpected Requires-Dist: expected ",
    ),
    "another package for an extra": (
        _swap("Requires-Dist: fla-core", "Requires-Dist: fla-kore"),
        'missing Requires-Dist: expected fla-core>=0.6; extra == "fla"',
    ),
    "older Python": (_swap(">=3.10", ">=3.9"), "Requires-Python: expected >=3.10, got >=3.9"),
    "other licence": (
        _swap("License-Expression: MIT", "License-Expression: ISC"),
        "License-Expression: expected MIT",
    ),
    "licence unnamed": (_swap("License-File: LICENSE\n", ""), "missing License-File: expected LICENSE"),
    "unknown field": (
        _swap("Summary:", "Sumary:"),
        "METADATA: expected valid fields, got unknown field sumary",
    ),
    "licence text missing": (
        {"licenses": {}},
        "licence text: expected flash_kda-0.1.0+cu130.dist-info/licenses/LICENSE",
    ),
    "licence text empty": ({"licenses": {"LICENSE": b""}}, "licence text"),
    "tag in WHEEL": ({"tag": OTHER_TAG}, f"missing Tag in WHEEL: expected {TAG}"),
    "other Python tag": (
        {"filename": f"{NAME}-{VERSION}+{LABEL}-{OTHER_TAG}.whl", "tag": OTHER_TAG},
        "missing Python and ABI tag: expected cp310-abi3",
    ),
    "dist-info of another version": ({"dist_info": f"{NAME}-0.0.9.dist-info"}, ".dist-info folder"),
    "package of another version": (
        {"module_version": "0.0.9"},
        "__version__ in the package: expected 0.1.0, got 0.0.9",
    ),
    "hash in RECORD": (
        {
            "edit_record": lambda text: text.replace(
                "flash_kda/_version.py,sha256=", "flash_kda/_version.py,sha256=A", 1
            )
        },
        "flash_kda/_version.py didn't match RECORD",
    ),
    "no hash in RECORD": (
        {"edit_record": lambda text: re.sub(r"(_version.py),[^\n]*", r"\1,,", text)},
        "_version.py is not included in RECORD",
    ),
    "file that RECORD lacks": (
        {"after_record": {"flash_kda/late.py": b"x = 1\n"}},
        "flash_kda/late.py is not mentioned",
    ),
    "file that only RECORD has": (
        {"edit_record": lambda text: "flash_kda/gone.py,sha256=abc,1\n" + text},
        "RECORD lists flash_kda/gone.py, which is not in the wheel",
    ),
    "file at the top level": ({"extra": {"setup.py": b"pass\n"}}, "file outside the package"),
    "script folder": (
        {"extra": {f"{NAME}-{VERSION}+{LABEL}.data/scripts/x": b"#!python\n"}},
        "file outside the package",
    ),
    "bytecode": ({"extra": {"flash_kda/__pycache__/a.cpython-310.pyc": b"x"}}, "check-wheel-contents"),
    "no build record": ({"record": None}, "build_record.json: expected one JSON object, got none"),
    "architectures recorded": (
        {"record": {**BUILD_RECORD, "architectures": ["90a"]}},
        "unexpected architecture in the images against the build record: expected 90a, got 100a",
    ),
    "PTX recorded": (
        {"record": {**BUILD_RECORD, "architectures": ["90a", "100a+PTX"]}},
        "missing PTX in the images against the build record: expected 100a, got none",
    ),
    "toolkit recorded": (
        {"record": {**BUILD_RECORD, "cuda": {**CUDA, "toolkit": "13.5"}}},
        "missing toolkit in the images against the build record: expected 13.5, got 13.0",
    ),
    "version recorded": ({"record": {**BUILD_RECORD, "version": "0.1.0"}}, "version in the build record"),
    "torch target recorded": (
        {"record": {**BUILD_RECORD, "torch": {"built_with": "2.13.0", "target": "2.13"}}},
        "torch target in the build record: expected 2.10, got 2.13",
    ),
    "Python recorded": ({"record": {**BUILD_RECORD, "python": "cp311-abi3"}}, "Python in the build record"),
    "another form of record": ({"record": {**BUILD_RECORD, "schema": 2}}, "schema of the build record"),
    "another Wheel-Version": ({"wheel_version": "2.0"}, "Wheel-Version in WHEEL: expected 1.0, got 2.0"),
    "top_level.txt of another": (
        {"tamper": {f"{DIST_INFO}/top_level.txt": b"torch\n"}},
        "unexpected name in top_level.txt: expected flash_kda, got torch",
    ),
    "source digest recorded": (
        {"source": {"sha256": "0" * 64}},
        "source.sha256 in the build record against its files",
    ),
    "dirty is no truth value": ({"source": {"dirty": "no"}}, "source.dirty in the build record"),
    "unknown key recorded": (
        {"record": {**BUILD_RECORD, "extra": 1}},
        "unexpected key in the build record",
    ),
    "name recorded": ({"record": {**BUILD_RECORD, "name": "other"}}, "name in the build record"),
    "claims to have been run": (
        {"record": {**BUILD_RECORD, "built_not_run": []}},
        "missing architecture built and not run in the build record: expected 100a, got none",
    ),
    "nvcc that is not the locked one": (
        {"record": {**BUILD_RECORD, "cuda": {**CUDA, "nvcc": "13.0.1", "toolkit": "13.0"}}},
        "nvcc of CUDA 13.0: expected 13.0.88, the locked one, got 13.0.1",
    ),
    "no SBOM": (
        {"tamper": {f"{DIST_INFO}/{sbom.MEMBER}": None}},
        "sboms/flash-kda.cdx.json: expected one JSON object, got none",
    ),
    "SBOM that is no JSON": ({"edit_sbom": lambda _: "{"}, "sboms/flash-kda.cdx.json: expected one JSON"),
    "SBOM without components": (_sbom(lambda bom: bom.pop("components")), "missing component in the SBOM"),
    "component missing": (
        _sbom(lambda bom: bom["components"].pop()),
        "missing component in the SBOM: expected pkg:torch",
    ),
    "component that no lock lists": (
        _sbom(lambda bom: bom["components"].append({"bom-ref": "pkg:evil", "name": "evil"})),
        "unexpected component in the SBOM",
    ),
    "component given twice": (
        _sbom(lambda bom: bom["components"].append(bom["components"][0])),
        "unexpected component in the SBOM",
    ),
    "hash edited": (
        {"edit_sbom": lambda text: text.replace(LOCKED_NVCC, "0" * 64)},
        "externalReferences of pkg:nvidia-cuda-nvcc in the SBOM",
    ),
    "hash dropped": (
        _sbom(lambda bom: [item.pop("externalReferences", None) for item in bom["components"]]),
        "externalReferences of pkg:nvidia-cuda-nvcc in the SBOM",
    ),
    "compiler edited": (
        {"edit_sbom": lambda text: text.replace("g++ 12.2.0", "g++ 13.2.0")},
        "version of tool:g++ in the SBOM",
    ),
    "SBOM of another wheel": (_sbom(lambda bom: bom["metadata"].pop("component")), "metadata of SBOM"),
    "SBOM with a random number": (
        {"edit_sbom": lambda text: text.replace("urn:uuid:", "urn:uuid:0")},
        "serialNumber of SBOM",
    ),
    "SBOM without a date": (_sbom(lambda bom: bom["metadata"].pop("timestamp")), "timestamp in the SBOM"),
}

# RECORD is written after these changes: what catches them is the build record.
TAMPERED: dict[str, tuple[str, bytes | None, str]] = {
    "package dropped": ("flash_kda/__init__.py", None, "missing file: expected flash_kda/__init__.py"),
    "marker dropped": ("flash_kda/py.typed", None, "missing file: expected flash_kda/py.typed"),
    "module changed": (
        "flash_kda/__init__.py",
        b"from flash_kda._version import __version__\nimport os\n",
        "flash_kda/__init__.py: sha256 against the build record",
    ),
    "module that is no Python": ("flash_kda/__init__.py", b"(\n", "__init__.py: sha256 against"),
    "module added": ("flash_kda/late.py", b"x = 1\n", "unexpected file"),
    "data added": ("flash_kda/data.bin", b"x", "unexpected file"),
    "machine code added": ("flash_kda/x.cubin", b"x", "unexpected file"),
    "path file added": ("flash_kda/x.pth", b"import os\n", "unexpected file"),
    "hidden file added": ("flash_kda/.pth", b"x", "unexpected file"),
    "entry points added": (
        "flash_kda-0.1.0+cu130.dist-info/entry_points.txt",
        b"[console_scripts]\nx=flash_kda:evil\n",
        "unexpected file",
    ),
}


@pytest.mark.parametrize("fault", TAMPERED)
def test_file_lost_added_or_changed_after_the_build(forge: Forge, tmp_path: Path, fault: str) -> None:
    name, data, text = TAMPERED[fault]
    wheel = WheelPlan(forge.good(), tamper={name: data}).write(tmp_path)
    assert_rejected(judge(forge, wheel), errors.MetadataError, text)


@pytest.mark.parametrize(
    "key", ["name", "version", "python", "cxx", "cuda", "torch", "flags", "tools", "architectures", "source"]
)
def test_build_record_without_one_of_its_keys(forge: Forge, tmp_path: Path, key: str) -> None:
    whole = json.loads(json.dumps({**BUILD_RECORD, "source": {}}))
    plan = WheelPlan(forge.good(), record={name: value for name, value in whole.items() if name != key})
    report = judge(forge, plan.write(tmp_path) if key != "source" else sourceless(plan, tmp_path))
    assert f"missing key in the build record: expected {key}" in report.message()
    assert report.exit_code == errors.MetadataError.exit_code


def sourceless(plan: WheelPlan, folder: Path) -> Path:
    record = json.dumps(dict(plan.record or {})).encode()
    return plan.change(tamper={"flash_kda/build_record.json": record}).write(folder)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"dirty": True}, "sources that differ from commit aaaa"),
        ({"commit": None, "dirty": None}, "an unknown commit"),
    ],
)
def test_wheel_of_uncommitted_sources_is_warned_of(
    forge: Forge, tmp_path: Path, source: dict[str, object], words: str
) -> None:
    report = judge(forge, WheelPlan(forge.good(), source=source).write(tmp_path))
    assert report.ok, report.message()
    (warning,) = report.warnings
    assert words in warning and json.loads(report.as_json())["warnings"] == [warning]
    assert judge(forge, WheelPlan(forge.good()).write(tmp_path)).warnings == ()


WHEEL_NAME = f"{NAME}-{VERSION}+{LABEL}-{TAG}.whl"
DEEP = b"[" * 100_000 + b"]" * 100_000
# RECORD is written after `tamper`, and before `after_record` and `edit_record`.
UNREADABLE: dict[str, dict[str, object]] = {
    "RECORD that is no text": {"after_record": {f"{DIST_INFO}/RECORD": b"\xff\xfe,,\n"}},
    "RECORD with two columns": {"edit_record": lambda text: "a,b\n" + text},
    "RECORD with four columns": {"edit_record": lambda text: "a,b,c,d\n" + text},
    "RECORD with a size of letters": {"edit_record": lambda text: text + "flash_kda/x.py,,many\n"},
    "RECORD with an unknown hash": {"edit_record": lambda text: text.replace("sha256=", "zzz=")},
    "no RECORD": {"after_record": {f"{DIST_INFO}/RECORD": None}},
    "no WHEEL": {"tamper": {f"{DIST_INFO}/WHEEL": None}},
    "no METADATA": {"tamper": {f"{DIST_INFO}/METADATA": None}},
    "WHEEL that is no text": {"tamper": {f"{DIST_INFO}/WHEEL": b"\xff\xfe"}},
    "METADATA that is no text": {"tamper": {f"{DIST_INFO}/METADATA": METADATA.encode() + b"\n\xff"}},
    "absolute name": {"extra": {"/etc/x": b""}},
    "name of the folder above": {"extra": {"flash_kda/../../x": b""}},
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_archive_that_cannot_be_read(forge: Forge, tmp_path: Path, fault: str) -> None:
    wheel = WheelPlan(forge.good()).change(**UNREADABLE[fault]).write(tmp_path)
    with pytest.raises(errors.MetadataError, match=rf"^{re.escape(WHEEL_NAME)}: .*expected"):
        judge(forge, wheel)


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        ({"flash_kda/_version.py": b'__version__ = "\xff"\n'}, "__version__ in the package"),
        ({"flash_kda/build_record.json": DEEP}, "build_record.json: expected one JSON object, got none"),
        ({f"{DIST_INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: cp310\n"}, "unexpected Tag in WHEEL"),
        ({f"{DIST_INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: a-b-c-d\n"}, "unexpected Tag in WHEEL"),
    ],
)
def test_part_that_cannot_be_read(
    forge: Forge, tmp_path: Path, tamper: dict[str, bytes | None], text: str
) -> None:
    report = judge(forge, WheelPlan(forge.good(), tamper=tamper).write(tmp_path))
    assert_rejected(report, errors.MetadataError, text)


# Bytes of the central directory and local header of a zip's first member, as offsets from their signatures.
@pytest.mark.parametrize(("central", "local", "value"), [(8, 6, 1), (10, 8, 99)], ids=["encrypted", "packed"])
def test_member_that_python_cannot_unpack(
    forge: Forge, tmp_path: Path, central: int, local: int, value: int
) -> None:
    wheel = WheelPlan(forge.good()).write(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[data.index(b"PK\x01\x02") + central] = data[data.index(b"PK\x03\x04") + local] = value
    wheel.write_bytes(data)
    with pytest.raises(errors.MetadataError, match="can be unpacked"):
        judge(forge, wheel)


def with_hidden_member(wheel: Path) -> bytes:
    """The wheel with a member that its directory does not name: who unpacks while downloading installs it."""
    data = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        start = archive.start_dir
    hidden = io.BytesIO()
    with zipfile.ZipFile(hidden, "w") as archive:
        archive.writestr("flash_kda/sitecustomize.py", b"import os\n")
        length = archive.start_dir
    end = bytearray(data[start:])
    end[-6:-2] = (start + length).to_bytes(4, "little")  # where the directory starts
    return data[:start] + hidden.getvalue()[:length] + bytes(end)


def with_comment(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.comment = b"PK\5\6" + bytes(18)  # the last record of another zip
    return wheel.read_bytes()


LAYOUTS: dict[str, Callable[[Path], bytes]] = {
    "member that the directory lacks": with_hidden_member,
    "bytes before the zip": lambda wheel: b"#!/bin/sh\n" + wheel.read_bytes(),
    "bytes after the zip": lambda wheel: wheel.read_bytes() + b"x",
    "comment": with_comment,
}


@pytest.mark.parametrize("fault", LAYOUTS)
def test_zip_that_installers_may_read_in_two_ways(forge: Forge, tmp_path: Path, fault: str) -> None:
    wheel = WheelPlan(forge.good()).write(tmp_path)
    wheel.write_bytes(LAYOUTS[fault](wheel))
    with pytest.raises(errors.MetadataError, match="expected members without gaps"):
        judge(forge, wheel)


def test_member_that_is_a_link(forge: Forge, tmp_path: Path) -> None:
    wheel, link = WheelPlan(forge.good()).write(tmp_path), zipfile.ZipInfo("flash_kda/late.py")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(errors.MetadataError, match=r"got symbolic links \['flash_kda/late.py'\]"):
        judge(forge, wheel)


def test_member_that_fills_the_memory(forge: Forge, tmp_path: Path) -> None:
    wheel = WheelPlan(forge.good()).write(tmp_path)
    with (
        zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("flash_kda/x.bin", "w", force_zip64=True) as member,
    ):
        for _ in range(20):
            member.write(bytes(2**24))
    with pytest.raises(errors.MetadataError, match=r"expected at most \d+ bytes unpacked, got 3355"):
        judge(forge, wheel)


def test_build_number_that_installers_prefer(forge: Forge, tmp_path: Path) -> None:
    name = WHEEL_NAME.replace(f"{LABEL}-", f"{LABEL}-1-")
    with pytest.raises(errors.MetadataError, match=r"expected NAME-VERSION-PYTHON.* got: a build number"):
        judge(forge, WheelPlan(forge.good(), filename=name).write(tmp_path))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_library_cut_short(forge: Forge, tmp_path: Path, share: float) -> None:
    data = forge.good().read_bytes()
    cut = data[: int(len(data) * share)]
    alone = tmp_path / "_C.abi3.so"
    alone.write_bytes(cut)
    for path in (alone, WheelPlan(forge.good(), tamper={LIBRARY: cut}).write(tmp_path)):
        with pytest.raises(errors.PlatformError, match=r"_C.abi3.so: expected"):
            judge(forge, path)


def test_library_with_damaged_bytes_is_judged_or_refused(forge: Forge, tmp_path: Path) -> None:
    """No damage ends in an exception that is not ours."""
    data, dice = forge.good().read_bytes(), random.Random(0)
    path = tmp_path / "_C.abi3.so"
    for _ in range(200):
        broken = bytearray(data)
        places = [*(dice.randrange(len(data)) for _ in range(20)), *(dice.randrange(64) for _ in range(2))]
        for place in places:
            broken[place] = dice.randrange(256)
        path.write_bytes(broken)
        with contextlib.suppress(errors.CiError):
            read_elf(path)


@pytest.mark.parametrize("fault", METADATA_FAULTS)
def test_metadata_rejects(forge: Forge, tmp_path: Path, fault: str) -> None:
    changes, text = METADATA_FAULTS[fault]
    wheel = WheelPlan(forge.good()).change(**changes).write(tmp_path)
    assert_rejected(judge(forge, wheel), errors.MetadataError, text)


def test_label_of_another_toolkit(forge: Forge, tmp_path: Path) -> None:
    """The whole wheel says cu135; the images know that CUDA 13.0 compiled them."""
    plan = WheelPlan(
        forge.good(),
        filename=f"{NAME}-{VERSION}+cu135-{TAG}.whl",
        metadata=METADATA.replace(LABEL, "cu135"),
        dist_info=f"{NAME}-{VERSION}+cu135.dist-info",
        record={**BUILD_RECORD, "version": f"{VERSION}+cu135", "cuda": {**CUDA, "toolkit": "13.5"}},
    )
    report = judge(forge, plan.write(tmp_path))
    assert_rejected(
        report, errors.MetadataError, "toolkit in the images against the build record: expected 13.5"
    )


def test_label_against_the_row_asked_for(forge: Forge, tmp_path: Path) -> None:
    report = judge(forge, WheelPlan(forge.good()).write(tmp_path), row="cu135")
    assert_rejected(report, errors.MetadataError, "label in the file name: expected cu135, got cu130")


def slim(forge: Forge, names: str) -> WheelPlan:
    """A wheel of 90a alone, whose label says `names`."""
    version = f"{VERSION}+{LABEL}.{names}"
    return WheelPlan(
        forge.library(forge.device(CODE_90A)),
        filename=f"{NAME}-{version}-{TAG}.whl",
        metadata=METADATA.replace(f"{VERSION}+{LABEL}", version),
        dist_info=f"{NAME}-{version}.dist-info",
        record={**BUILD_RECORD, "version": version, "architectures": ["90a"], "built_not_run": []},
    )


def test_label_of_a_slim_wheel_names_its_architecture(forge: Forge, tmp_path: Path) -> None:
    report = judge(forge, slim(forge, "sm90a").write(tmp_path), expect=None)
    assert report.ok, report.message()
    assert (report.row, report.archs) == (LABEL, ("90a",))


def test_label_of_another_architecture(forge: Forge, tmp_path: Path) -> None:
    wheel = slim(forge, "sm100a").write(tmp_path)
    assert_rejected(
        judge(forge, wheel, expect="90a"),
        errors.MetadataError,
        "unexpected architecture in the label: expected 90a, got 100a",
    )
    with pytest.raises(errors.SassError, match="missing machine code for architecture: expected 100a"):
        judge(forge, wheel, expect=None).raise_on_failure()


def test_label_that_names_no_architecture(forge: Forge, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="junk"):
        judge(forge, slim(forge, "junk").write(tmp_path), expect=None)


def test_label_that_is_no_row(forge: Forge, tmp_path: Path) -> None:
    wheel = WheelPlan(forge.good(), filename=f"{NAME}-{VERSION}+cu999-{TAG}.whl").write(tmp_path)
    with pytest.raises(errors.MetadataError, match=r"expected one of cu130.* got cu999"):
        judge(forge, wheel, expect=None)


def test_size_over_budget(forge: Forge, tmp_path: Path) -> None:
    folder = edited(forge, tmp_path, "wheel.toml", "max_bytes = 4_000_000", "max_bytes = 4_000")
    wheel = WheelPlan(forge.good()).write(tmp_path)
    report = verify_wheel(wheel, expect=ARCHS, cuobjdump=forge.cuobjdump, expectations=folder)
    assert_rejected(report, errors.MetadataError, "size over budget: expected at most 4000 bytes")
    assert report.failure is not None and report.failure.concern == "size"


LEDGER_FAULTS = {
    "wheel grew": ("wheel = 200000", "wheel = 4000", "wheel over budget: expected at most 4200 bytes"),
    "library grew": (
        "library = 200000",
        "library = 4000",
        "library over budget: expected at most 4200 bytes",
    ),
    "kernel grew": (
        "[row.cu130.code.fixture_fwd_kernel]\n90a = 20000",
        "[row.cu130.code.fixture_fwd_kernel]\n90a = 100",
        "fixture_fwd_kernel for sm_90a over budget: expected at most 105 bytes",
    ),
    "kernel without a line": (
        "[row.cu130.code.fixture_fwd_kernel]",
        "[row.cu130.code.other_kernel]",
        "fixture_fwd_kernel for sm_100a over budget: expected at most 0 bytes",
    ),
    "row without a line": ("[row.cu130", "[row.cu999", "line in size.toml: expected cu130, got none"),
}


@pytest.mark.parametrize("fault", LEDGER_FAULTS)
def test_size_over_the_ledger(forge: Forge, tmp_path: Path, fault: str) -> None:
    old, new, text = LEDGER_FAULTS[fault]
    folder = edited(forge, tmp_path, "size.toml", old, new)
    matrix_file = tmp_path / "matrix.toml"
    whole = matrix.PATH.read_text().replace('["90a", "100a", "103a", "120a"]', '["90a", "100a"]')
    matrix_file.write_text(whole)
    wheel = WheelPlan(forge.good()).write(tmp_path)
    report = verify_wheel(wheel, cuobjdump=forge.cuobjdump, expectations=folder, matrix=matrix_file)
    assert_rejected(report, errors.MetadataError, text)
    assert report.failure is not None and report.failure.concern == "size"


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("flash_kda-0.1.0+cu130-cp310-abi3-manylinux_2_28_x86_64.whl", b"not a zip", errors.MetadataError),
        ("flash_kda.whl", b"", errors.MetadataError),
        ("flash_kda.so", b"not an ELF file", errors.PlatformError),
        ("flash_kda.txt", b"", errors.ConfigError),
    ],
)
def test_what_is_no_artifact_at_all(
    forge: Forge, tmp_path: Path, name: str, data: bytes, error: type[errors.CiError]
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(error):
        judge(forge, path)


def test_absent_file_is_named(forge: Forge, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="no such file"):
        judge(forge, tmp_path / "gone.so")


# ---- several failures, and the command line ----------------------------------------------------------------


def test_first_class_gives_the_code_and_all_violations_are_listed(forge: Forge, tmp_path: Path) -> None:
    library = forge.library(forge.device(*GOOD_CODE), macros=["TORCH_CXX", "EXTRA_EXPORT"])
    report = judge(forge, WheelPlan(library, licenses={}).write(tmp_path))
    failed = [verdict.error for verdict in report.verdicts if not verdict.ok]
    assert failed == [errors.PlatformError, errors.AbiError, errors.MetadataError]
    assert report.exit_code == errors.PlatformError.exit_code
    for text in ("leaked", "c10", "licenses/LICENSE"):
        assert text in report.message()


def command(forge: Forge, *words: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ci.verify", *map(str, words), "--cuobjdump", str(forge.cuobjdump)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_command_prints_a_json_report(forge: Forge) -> None:
    words = (forge.good(), "--expect", "90a,100a,120a", "--expectations", forge.expectations(), "--json")
    done = command(forge, *words)
    assert done.returncode == errors.SassError.exit_code, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["ok"], report["failure"]) == (1, False, "SassError")
    (violation,) = report["verdicts"][0]["violations"]
    assert violation["expected"] == "120a"
    kernels = {kernel["symbol"] for kernel in report["facts"]["libraries"][0]["images"][0]["kernels"]}
    assert "fixture_fwd_kernel" in kernels


def test_command_prints_a_text_report(forge: Forge) -> None:
    done = command(forge, forge.good(), "--expect", ARCHS, "--expectations", forge.expectations())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fixture_fwd_kernel" in done.stdout and "FAIL" not in done.stdout


def test_command_needs_to_know_what_to_expect(forge: Forge) -> None:
    done = command(forge, forge.good(), "--expectations", forge.expectations(), "--json")
    assert done.returncode == errors.ConfigError.exit_code
    assert "--expect" in json.loads(done.stdout)["message"]


@pytest.mark.parametrize("value", ["", "90a,banana", "compute_90a", "90a+PTX"])
def test_command_refuses_a_wrong_list(forge: Forge, value: str) -> None:
    done = command(forge, forge.good(), "--expect", value, "--expectations", forge.expectations())
    assert done.returncode == errors.ConfigError.exit_code, done.stderr


def test_observe_prints_expectations_that_the_artifact_meets(forge: Forge, tmp_path: Path) -> None:
    wheel = WheelPlan(forge.good()).write(tmp_path)
    done = command(forge, "observe", wheel)
    assert done.returncode == 0, done.stderr
    folder = edited(forge, tmp_path, "platform.toml", "schema", "schema")
    (folder / "kernels.toml").write_text(done.stdout)
    report = verify_wheel(wheel, expect=ARCHS, cuobjdump=forge.cuobjdump, expectations=folder)
    assert report.ok, report.message()


def test_absent_cuobjdump_is_a_fault_of_the_toolchain(forge: Forge, tmp_path: Path) -> None:
    with pytest.raises(errors.ToolchainError, match="cannot run"):
        verify_wheel(
            forge.good(), expect=ARCHS, cuobjdump=tmp_path / "none", expectations=forge.expectations()
        )


# ---- faults that no compiler here makes: facts of the good wheel, one thing changed -----------------------


@pytest.fixture(scope="session")
def good_facts(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    wheel = WheelPlan(forge.good()).write(tmp_path_factory.mktemp("good"))
    return gather.gather_facts(wheel, forge.cuobjdump, "3.10")


@pytest.fixture(scope="session")
def good_request(forge: Forge) -> Request:
    path = Path(WheelPlan(forge.good()).filename)
    return make_request(path, expectations.load(forge.expectations()), matrix.load(), ARCHS, None)


def with_library(facts: Facts, change: Callable[[Library], Library]) -> Facts:
    (library,) = facts.libraries
    return replace(facts, libraries=(change(library),))


def with_elf(facts: Facts, **changes: object) -> Facts:
    return with_library(facts, lambda library: replace(library, elf=replace(library.elf, **changes)))  # type: ignore[arg-type]


def with_image(facts: Facts, change: Callable[[Image], Image]) -> Facts:
    return with_library(
        facts, lambda library: replace(library, images=(change(library.images[0]), *library.images[1:]))
    )


def with_wheel(facts: Facts, **changes: object) -> Facts:
    assert facts.wheel is not None
    return replace(facts, wheel=replace(facts.wheel, **changes))  # type: ignore[arg-type]


def with_audit(facts: Facts, **changes: object) -> Facts:
    assert facts.wheel is not None and facts.wheel.platform is not None
    return with_wheel(facts, platform=replace(facts.wheel.platform, **changes))  # type: ignore[arg-type]


def with_shims(facts: Facts, names: Sequence[str]) -> Facts:
    def change(library: Library) -> Library:
        others = tuple(
            symbol for symbol in library.elf.undefined if not symbol.name.startswith("aoti_torch_")
        )
        symbols = (*others, *(Symbol(name) for name in names))
        return replace(library, elf=replace(library.elf, undefined=symbols))

    return with_library(facts, change)


Edit = Callable[[Facts], Facts]
FACT_FAULTS: dict[str, tuple[Edit, type[errors.CiError], str]] = {
    "other machine": (
        lambda facts: with_elf(facts, machine="EM_AARCH64"),
        errors.PlatformError,
        "machine: expected EM_X86_64, got EM_AARCH64",
    ),
    "symbol family without a limit": (
        lambda facts: with_elf(facts, version_needs=(VersionNeed("libz.so.1", "ZLIB_1.2.9"),)),
        errors.PlatformError,
        "symbol version needed of libz.so.1: expected one of CXXABI, GCC, GLIBC, GLIBCXX, got ZLIB_1.2.9",
    ),
    "symbol version that is no number": (
        lambda facts: with_elf(facts, version_needs=(VersionNeed("libc.so.6", "GLIBC_PRIVATE"),)),
        errors.PlatformError,
        "got GLIBC_PRIVATE",
    ),
    "export that is gone": (
        lambda facts: with_elf(facts, exported=("flash_kda_version",)),
        errors.PlatformError,
        "missing exported symbol: expected flash_kda_cuda_archs, got flash_kda_version",
    ),
    "library that auditwheel would graft": (
        lambda facts: with_audit(facts, blockers={"manylinux_2_28_x86_64": ("libtorch.so", "libfoo.so.1")}),
        errors.PlatformError,
        "auditwheel's objections: expected libtorch.so, libtorch_cpu.so, got libfoo.so.1",
    ),
    "instruction set beyond the baseline": (
        lambda facts: with_audit(facts, unsupported_isa=True),
        errors.PlatformError,
        "instruction set extensions",
    ),
    "auditwheel's tag of another machine": (
        lambda facts: with_audit(facts, symbol_tag="manylinux_2_17_aarch64"),
        errors.PlatformError,
        "got manylinux_2_17_aarch64",
    ),
    "no verdict of auditwheel": (
        lambda facts: with_wheel(facts, platform=None),
        errors.PlatformError,
        "auditwheel's verdict: expected one, got none",
    ),
    "no torch symbols at all": (
        lambda facts: with_shims(facts, []),
        errors.AbiError,
        "torch symbols in use: expected at least one",
    ),
    "symbols that torch-abi-audit did not see": (
        lambda facts: with_shims(facts, ["aoti_torch_get_dim", "aoti_torch_get_sizes"]),
        errors.AbiError,
        "stable shims that torch-abi-audit counts: expected 2, got 1",
    ),
    "pure wheel": (
        lambda facts: with_wheel(facts, root_is_purelib=True),
        errors.MetadataError,
        "Root-Is-Purelib in WHEEL: expected False, got True",
    ),
    "another distribution": (
        lambda facts: with_wheel(facts, name="flash_kdb"),
        errors.MetadataError,
        "name in the file name: expected flash_kda, got flash_kdb",
    ),
    "architecture only in the record": (
        lambda facts: with_wheel(
            facts, build_record={**BUILD_RECORD, "architectures": ["90a", "100a", "120a"]}
        ),
        errors.MetadataError,
        "missing architecture in the images against the build record: expected 120a",
    ),
    "local memory": (
        lambda facts: with_image(facts, lambda image: with_kernel(image, local=8)),
        errors.ResourceError,
        "local over budget: expected at most 0 bytes, got 8",
    ),
    "kernel twice": (
        lambda facts: with_image(
            facts, lambda image: replace(image, kernels=(*image.kernels, *image.kernels[:1]))
        ),
        errors.SassError,
        "kernel entries: expected 2, got 3",
    ),
}


def with_kernel(image: Image, **changes: object) -> Image:
    first, *others = image.kernels
    return replace(image, kernels=(replace(first, **changes), *others))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", FACT_FAULTS)
def test_facts_are_judged(good_facts: Facts, good_request: Request, fault: str) -> None:
    assert judge_facts(good_facts, good_request).ok
    edit, error, text = FACT_FAULTS[fault]
    assert_rejected(judge_facts(edit(good_facts), good_request), error, text)


def test_ptx_that_is_expected_must_be_there(good_facts: Facts, good_request: Request) -> None:
    report = judge_facts(good_facts, replace(good_request, ptx=("100f",)))
    assert_rejected(report, errors.SassError, "missing PTX for architecture: expected 100f, got none")


def test_ptx_that_the_record_does_not_name(good_facts: Facts, good_request: Request) -> None:
    facts = with_library(good_facts, lambda lib: replace(lib, images=(*lib.images, Image("ptx", "100f"))))
    report = judge_facts(facts, replace(good_request, ptx=("100f",)))
    assert_rejected(report, errors.MetadataError, "unexpected PTX in the images against the build record")


def test_platform_tag_without_a_policy(good_facts: Facts, good_request: Request) -> None:
    project = replace(good_request.project, plat="manylinux_2_39_x86_64")
    report = judge_facts(good_facts, replace(good_request, project=project))
    assert report.exit_code == errors.PlatformError.exit_code
    assert (
        "platform tag without a policy: expected manylinux_2_28_aarch64, manylinux_2_28_x86_64, "
        "got manylinux_2_39_x86_64" in report.message()
    )
