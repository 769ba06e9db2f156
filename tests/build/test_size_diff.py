"""The ledger of sizes is what a wheel measures; what changed between two wheels is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from verify_artifacts import BUILD_RECORD, GOOD_CODE, LIBRARY, ROOT, Forge, WheelPlan, cuda_home

from ci import diff, matrix, platforms, size
from ci.errors import ConfigError, MetadataError
from ci.verify.expectations import load_sizes
from ci.verify.facts import Facts

KERNEL = "fixture_fwd_kernel"


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    return Forge(tmp_path_factory.mktemp("size"), cuda_home())


@pytest.fixture(scope="module")
def wheel(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WheelPlan(forge.good()).write(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def facts(wheel: Path) -> Facts:
    return size.facts_of(wheel)


def test_what_is_written_is_what_was_measured(facts: Facts, tmp_path: Path) -> None:
    measured = size.measure(facts)
    path = tmp_path / "size.toml"
    path.write_text(size.ledger_text(7, {"cu130": measured}))
    read = load_sizes(path)
    assert (read.growth, read.rows) == (7, {"cu130": measured})
    assert measured.wheel == facts.wheel.size  # type: ignore[union-attr]
    assert set(measured.code[KERNEL]) == {"90a", "100a"}
    assert all(count > 0 and count % 16 == 0 for row in measured.code.values() for count in row.values())


def test_the_ledger_has_a_line_for_each_row_and_architecture() -> None:
    sizes = load_sizes(size.LEDGER)
    assert size.LEDGER.read_text() == size.ledger_text(sizes.growth, sizes.rows)
    for platform in platforms.PLATFORMS:
        for row in matrix.load().on(platform).locked_rows:
            for kernel, archs in sizes.rows[platforms.line(row.label, platform)].code.items():
                assert set(archs) == set(row.archs), kernel


def test_writing_keeps_the_rows_of_other_wheels_and_refuses_narrowed_ones(
    facts: Facts, tmp_path: Path
) -> None:
    path = tmp_path / "size.toml"
    one, two = size.measure(facts), replace(size.measure(facts), wheel=1)
    size._write({"cu130": one}, path)
    size._write({"cu135": two}, path)
    assert load_sizes(path).rows == {"cu130": one, "cu135": two}
    with pytest.raises(ConfigError, match=r"expected wheels of whole rows .*, got cu130\.sm90a"):
        size._write({"cu130.sm90a": one}, path)


def test_a_wheel_does_not_differ_from_itself(facts: Facts) -> None:
    assert diff.compare(facts, facts) == []


def test_what_changed_is_told(facts: Facts) -> None:
    (library,) = facts.libraries
    image = library.images[0]
    kernel = image.kernels[0]
    changed = replace(kernel, registers=kernel.registers + 1, opcodes={**kernel.opcodes, "NOP": 1000})
    elf = replace(library.elf, exported=(*library.elf.exported, "leaked"), needed=library.elf.needed[1:])
    other = replace(
        facts,
        libraries=(
            replace(
                library,
                elf=elf,
                toolkits=("13.5",),
                images=(replace(image, kernels=(changed, *image.kernels[1:])),),
            ),
        ),
        wheel=replace(
            facts.wheel,  # type: ignore[type-var]
            size=1,
            build_record={**BUILD_RECORD, "cuda": {"toolkit": "13.5"}},
        ),
    )
    lines = diff.compare(facts, other)
    name = f"{kernel.symbol} sm_{image.arch}"
    for line in (
        f"wheel bytes: {facts.wheel.size} -> 1",  # type: ignore[union-attr]
        "build record cuda.toolkit: 13.0 -> 13.5",
        "exported leaked: none -> there",
        f"needed {library.elf.needed[0]}: there -> none",
        "compiled by CUDA toolkit: -13.0 +13.5",
        f"image elf {library.images[1].arch}: there -> none",
        f"kernel {kernel.symbol} sm_{library.images[1].arch}: there -> none",
        f"{name} registers: {kernel.registers} -> {kernel.registers + 1}",
    ):
        assert line in lines, line
    assert any(line.startswith(f"{name} opcodes: NOP: ") for line in lines)
    assert any(line.startswith(f"{name} instructions: ") for line in lines)


def test_the_instructions_that_changed_are_shown(forge: Forge, wheel: Path, tmp_path: Path) -> None:
    other = WheelPlan(forge.library(forge.device(GOOD_CODE[0]))).write(tmp_path)
    lines = diff.sass(wheel, other, KERNEL)
    assert lines[0] == f"--- {KERNEL} sm_100a {wheel.name}"  # 90a is the same in both
    assert any(line.startswith("-") and "MUFU.EX2" in line for line in lines)
    assert not any(line.startswith("+") for line in lines[2:])
    assert diff.sass(wheel, wheel, KERNEL) == []
    with pytest.raises(ConfigError, match="no kernel nothing in either wheel"):
        diff.sass(wheel, wheel, "nothing")


def test_the_command_says_when_nothing_changed(wheel: Path) -> None:
    command = [sys.executable, "-m", "ci.diff", str(wheel), str(wheel)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "no difference\n"


def test_a_library_alone_is_refused(forge: Forge, facts: Facts) -> None:
    with pytest.raises(ConfigError, match="expected two wheels, got a library"):
        diff.compare(replace(facts, wheel=None), facts)
    assert LIBRARY in (item.path for item in facts.libraries)


def test_a_file_that_is_no_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    for path in (tmp_path / "x.whl", tmp_path / "gone.whl"):
        with pytest.raises(MetadataError, match=r"expected a zip archive"):
            diff.sass(wheel, path, KERNEL)
