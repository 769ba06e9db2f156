"""The readers of ci/verify: of cuobjdump's text (kept as the tool printed it), of expectation files, of other
checkers' output.  A text in a form they do not know is an error, never an empty result."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import auditwheel
import pytest
from verify_artifacts import FIXTURES, ROOT

from ci import errors
from ci.verify import audits, expectations
from ci.verify.device import parse_dump
from ci.verify.facts import Kernel
from ci.verify.request import make_request
from ci.verify.sass import budget_for, count_opcodes
from ci.verify.verdicts import Sheet

DUMP = (FIXTURES / "cuobjdump-13.5.37.txt").read_text()
OURS = ROOT / "wheels" / "expectations"


# ---- cuobjdump ---------------------------------------------------------------------------------------------


def test_dump_tells_machine_code_from_ptx() -> None:
    images = parse_dump(DUMP)
    assert [(image.kind, image.arch) for image in images] == [
        ("elf", "90a"),
        ("elf", "120a"),
        ("ptx", "100f"),
    ]


def test_dump_gives_kernels_resources_and_opcodes() -> None:
    image = parse_dump(DUMP)[0]
    sums, forward = image.kernels
    assert (sums.symbol, forward.symbol) == ("_ZN7fixture10sum_kernelILi3EEEvPfi", "fixture_fwd_kernel")
    assert (forward.registers, forward.stack, forward.local, forward.shared) == (18, 0, 0, 5128)
    for opcode in (
        "HMMA.16816.F32.BF16",
        "LDSM.16.M88.4",
        "STSM.16.M88.4",
        "LDGSTS.E.BYPASS.128",
        "MUFU.EX2",
    ):
        assert forward.opcodes[opcode] == 1
    # Predicated instructions count: this one reads '@!P0 SYNCS.ARRIVE...'.
    assert count_opcodes(forward, "SYNCS.ARRIVE") == 1


def test_dump_gives_functions_and_external_symbols() -> None:
    hopper, blackwell, _ = parse_dump(DUMP)
    assert hopper.externals == ()
    assert blackwell.externals == ("__cuda_syscall_cp_async_bulk_multicast",)
    assert any("not_inlined" in name for name in hopper.functions)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Fatbin elf code:", "Device image, elf:"),
        ("Fatbin elf code:", "Fatbin bitcode code:"),
        ("arch = sm_90a", "architecture: 9.0a"),
        ("arch = sm_90a", "arch = compute_90a"),
        ("  REG:", "  Registers: "),
        (" Function fixture_fwd_kernel:", " Kernel fixture_fwd_kernel:"),
        ("\t\tFunction : ", "\t\tKernel : "),
        ("        /*", "        ["),
        ("symbols:\n", "Symbol table\n"),
        ("FUNC          GLOBAL  DEFAULT    ENTRY", "FUNC GLOBAL"),
        (
            "ENTRY                                fixture_fwd_kernel",
            "-                                    renamed",
        ),
    ],
)
def test_dump_in_another_form_is_an_error(old: str, new: str) -> None:
    assert old in DUMP
    with pytest.raises(errors.ToolchainError, match="Nothing was verified"):
        parse_dump(DUMP.replace(old, new))


def test_kernel_without_instructions_is_an_error() -> None:
    head, _, tail = DUMP.partition("\t\tFunction : fixture_fwd_kernel\n")
    _, _, rest = tail.partition("\t\t..........")
    with pytest.raises(errors.ToolchainError, match="instructions of fixture_fwd_kernel"):
        parse_dump(head + rest)


# ---- opcodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("HMMA", 3),
        ("HMMA.16816.F32", 3),
        ("HMMA.16816.F32.BF16", 2),
        ("HMM", 0),
        ("MMA", 0),
        ("UBLKCP|HMMA", 3),
        ("LD", 0),
    ],
)
def test_opcode_patterns_match_whole_parts(pattern: str, count: int) -> None:
    kernel = Kernel("k", 1, 0, 0, 0, {"HMMA.16816.F32.BF16": 2, "HMMA.16816.F32": 1, "LDSM.16": 5})
    assert count_opcodes(kernel, pattern) == count


# ---- other people's checkers -------------------------------------------------------------------------------


def answer(monkeypatch: pytest.MonkeyPatch, stdout: str, status: int = 0) -> None:
    done = subprocess.CompletedProcess[str]([], status, stdout, "")
    monkeypatch.setattr(audits, "_run", lambda *words: done)


@pytest.mark.parametrize("stdout", ["", "Traceback", "[]", "null"])
def test_checkers_that_print_no_json_object(monkeypatch: pytest.MonkeyPatch, stdout: str) -> None:
    answer(monkeypatch, stdout, 1)
    with pytest.raises(errors.ToolchainError, match=r"ci/requirements/verify\.txt"):
        audits.audit_platform(Path("a.whl"))
    with pytest.raises(errors.ToolchainError):
        audits.audit_python(Path("a.so"), "3.10")


@pytest.mark.parametrize("report", [{"specs": {}}, {"specs": {"a": {"object": {"result": {}}}}}, {}])
def test_abi3audit_report_without_a_result(monkeypatch: pytest.MonkeyPatch, report: object) -> None:
    answer(monkeypatch, json.dumps(report))
    with pytest.raises(errors.ToolchainError, match="expected one audited object"):
        audits.audit_python(Path("a.so"), "3.10")


def test_auditwheel_of_another_schema_gives_no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, json.dumps({"version": 2, "sym_tag": "manylinux_2_5_x86_64"}))
    audit = audits.audit_platform(Path("a.whl"))
    assert audit.symbol_tag == "none" and audit.blockers


@pytest.mark.parametrize(
    ("stdout", "status"), [("", 0), ("a.whl: fine", 0), ("a.whl: OK", 1), ("a.whl: W009: two top levels", 0)]
)
def test_wheel_contents_in_another_form(monkeypatch: pytest.MonkeyPatch, stdout: str, status: int) -> None:
    answer(monkeypatch, stdout, status)
    with pytest.raises(errors.ToolchainError, match="check-wheel-contents"):
        audits.audit_contents(Path("a.whl"))


def test_torch_abi_audit_without_nm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(errors.ToolchainError, match="binutils"):
        audits.audit_torch(Path("a.so"))


# ---- expectation files -------------------------------------------------------------------------------------


def test_the_repository_s_own_expectations_cover_the_matrix() -> None:
    from ci import matrix

    table = matrix.load()
    ours = expectations.load()
    for platform in ("x86_64", *table.others):
        assert table.on(platform).project.plat in ours.platform.floor
    for library in ours.libraries:
        for group in library.groups:
            for name in table.archs:
                if group.archs is None or name in group.archs:
                    assert budget_for(group, name).stack == 0


def auditwheels_floor(plat: str) -> dict[str, str]:
    """The highest version of each family that the locked auditwheel allows for a platform tag."""
    policy, machine = re.fullmatch(r"(manylinux_\d+_\d+)_(\w+)", plat).groups()  # type: ignore[union-attr]
    path = Path(auditwheel.__file__).parent / "policy" / "manylinux-policy.json"
    (entry,) = [entry for entry in json.loads(path.read_text()) if entry["name"] == policy]
    families = entry["symbol_versions"][machine].items()
    return {name: max(filter(is_number, found), key=as_numbers) for name, found in families}


def is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9.]+", text) is not None


def as_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_floors_are_those_of_the_locked_auditwheel() -> None:
    from ci import matrix, sysroot

    for plat, floor in expectations.load().platform.floor.items():
        theirs = auditwheels_floor(plat)
        ours = {family: version for family, version in floor.items() if family != "machine"}
        assert ours == {family: theirs[family] for family in ours}
    assert f"manylinux_{sysroot.GLIBC.replace('.', '_')}_" in matrix.load().project.plat


def test_a_budget_for_all_yields_to_an_architecture_s_own() -> None:
    few, many = expectations.Budget(8, 0, 0, 0), expectations.Budget(9, 0, 0, 0)
    group = expectations.KernelGroup(("k",), None, {"all": few, "120a": many}, (), {}, ())
    assert budget_for(group, "90a") == few and budget_for(group, "120a") == many
    without = replace(group, budget={"120a": many})
    assert budget_for(without, "120a") == many
    with pytest.raises(errors.ConfigError, match="no budget for 90a"):
        budget_for(without, "90a")


def test_row_gives_the_architectures() -> None:
    from ci import matrix

    table = matrix.load()
    for row in table.rows:
        request = make_request(
            Path(f"flash_kda-1+{row.label}-a-b-c.whl"), expectations.load(), table, None, None
        )
        assert (request.archs, request.ptx, request.row) == (row.archs, (), row)


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("kernels.toml", "schema = 1", "schema = 2", "expected schema = 1, got 2"),
        ("kernels.toml", "registers = ", "regs = ", "key 'registers' is missing"),
        ("kernels.toml", "stack = 0", "stack = true", "'stack': expected a number of 0 or more, got True"),
        ("kernels.toml", "stack = 0", "stack = -1", "expected a number of 0 or more, got -1"),
        ("kernels.toml", 'archs = "all"', 'archs = "most"', "'archs'"),
        ("kernels.toml", "externals = []", "external = []", "key 'externals' is missing"),
        ("kernels.toml", "externals = []", "externals = []\nexternal = []", "unknown key 'external'"),
        ("kernels.toml", "require = [", "requires = [", "key 'require' is missing"),
        ("kernels.toml", '"kda_fwd_kernel"', '"kda_fwd_kernel", "kda_fwd_kernel"', "each once"),
        ("kernels.toml", "[[kernels]]", "[kernels", "cannot be read"),
        ("platform.toml", "[floor.", "[flor.", "key 'floor' is missing"),
        ("platform.toml", "forbidden = [", "forbidden = [1, ", "expected a list of names"),
        ("wheel.toml", "max_bytes = 4_000_000", 'max_bytes = "4 MB"', "'max_bytes': expected a number"),
    ],
)
def test_a_fault_in_an_expectation_file_is_named(
    tmp_path: Path, name: str, old: str, new: str, text: str
) -> None:
    for source in OURS.glob("*.toml"):
        body = source.read_text()
        if source.name == name:
            assert old in body
            body = body.replace(old, new)
        (tmp_path / source.name).write_text(body)
    with pytest.raises(errors.ConfigError) as caught:
        expectations.load(tmp_path)
    assert text in str(caught.value) and name in str(caught.value)


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="observe"):
        expectations.load(tmp_path)


# ---- verdicts ----------------------------------------------------------------------------------------------


def test_a_verdict_that_compared_nothing_is_no_pass() -> None:
    verdict = Sheet("empty", errors.SassError).verdict()
    assert not verdict.ok and verdict.violations
    assert not replace(verdict, violations=()).ok
