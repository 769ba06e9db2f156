"""Architectures: spelling, and what runs on what (the full relation, machine code and PTX)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci.archs import arch

DEVICES = [(8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)]

# Machine code: which of DEVICES run it.  CUDA Blackwell Compatibility Guide; agrees with ptxas 13.0 and 13.5.
RUNS = {
    "80": "y.......",
    "89": "y.......",
    "90": ".y......",
    "90a": ".y......",
    "100": "..yyy...",
    "100f": "..yyy...",
    "100a": "..y.....",
    "103": "...yy...",
    "103f": "...yy...",
    "103a": "...y....",
    "107": "....y...",
    "107f": "....y...",
    "107a": "....y...",
    "110": ".....y..",
    "110f": ".....y..",
    "110a": ".....y..",
    "120": "......yy",
    "120f": "......yy",
    "120a": "......y.",
    "121": ".......y",
    "121f": ".......y",
    "121a": ".......y",
}

# PTX compiled by the driver: plain crosses majors upwards, f keeps to its family, a to its capability.
RUNS_PTX = {
    "80": "yyyyyyyy",
    "90": ".yyyyyyy",
    "90a": ".y......",
    "100": "..yyyyyy",
    "100f": "..yyy...",
    "100a": "..y.....",
    "103": "...yyyyy",
    "103f": "...yy...",
    "107f": "....y...",
    "110f": ".....y..",
    "120": "......yy",
    "120f": "......yy",
    "120a": "......y.",
    "121f": ".......y",
}


def _cells(table: dict[str, str]) -> list[tuple[str, tuple[int, int], bool]]:
    return [
        (name, cc, cell == "y") for name, row in table.items() for cc, cell in zip(DEVICES, row, strict=True)
    ]


@pytest.mark.parametrize(("name", "cc", "expected"), _cells(RUNS))
def test_machine_code_relation(name: str, cc: tuple[int, int], expected: bool) -> None:
    assert arch.runs(arch.parse_target(name), cc) is expected


@pytest.mark.parametrize(("name", "cc", "expected"), _cells(RUNS_PTX))
def test_ptx_relation(name: str, cc: tuple[int, int], expected: bool) -> None:
    assert arch.runs_ptx(arch.parse_target(name), cc) is expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("90a", "90a"),
        (" 90A ", "90a"),
        ("sm_90a", "90a"),
        ("SM_90A", "90a"),
        ("sm90a", "90a"),
        ("9.0a", "90a"),
        ("10.3f", "103f"),
        ("12.1", "121"),
        ("75", "75"),
    ],
)
def test_accepted_spellings(text: str, name: str) -> None:
    target = arch.parse_target(text)
    assert (target.name, target.sm, target.compute) == (name, f"sm_{name}", f"compute_{name}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9a",
        "090a",
        "90aa",
        "90af",
        "9.00a",
        "09.0a",
        "1000a",
        "0x90",
        "Hopper",
        "native",
        "-90a",
        "90 a",
        "\uff19\uff10a",
    ],
)
def test_refused_spellings(text: str) -> None:
    with pytest.raises(arch.ArchSelectionError) as caught:
        arch.parse_target(text)
    assert repr(text) in str(caught.value)
    assert "90a, sm_90a or 9.0a" in str(caught.value)


def test_a_target_has_no_ptx() -> None:
    with pytest.raises(arch.ArchSelectionError, match="PTX"):
        arch.parse_target("100f+PTX")


def test_targets_sort_by_number_not_by_text() -> None:
    names = ["120a", "90a", "100f", "100a", "103a"]
    assert [t.name for t in sorted(map(arch.parse_target, names))] == ["90a", "100a", "100f", "103a", "120a"]


def _choice(name: str) -> arch.Choice:
    return arch.parse_list(name)[0][0]


@pytest.mark.parametrize(
    ("built", "cc", "best"),
    [
        ("100a,100f", (10, 0), "100a"),
        ("100a,100f", (10, 3), "100f"),
        ("100f,103f", (10, 7), "103f"),
        ("100f,103a", (10, 3), "103a"),
        ("100f+PTX", (10, 3), "100f+PTX"),
        ("100f+PTX", (12, 0), None),
        ("90a", (10, 0), None),
        ("120a", (12, 1), None),
        ("120f", (12, 1), "120f"),
        ("", (9, 0), None),
    ],
)
def test_best_for(built: str, cc: tuple[int, int], best: str | None) -> None:
    found = arch.best_for(arch.parse_list(built)[0], cc)
    assert (found.name if found else None) == best


def test_gencode_flags() -> None:
    flags = arch.gencode_flags([_choice("90a"), _choice("100f+PTX"), arch.Target(12, 0, "a")])
    assert flags == [
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        "-gencode",
        "arch=compute_100f,code=[sm_100f,compute_100f]",
        "-gencode",
        "arch=compute_120a,code=sm_120a",
    ]


def test_table_rows_are_sorted_unique_and_suffixed() -> None:
    targets = [row.target for row in arch.KERNEL_TARGETS]
    assert targets == sorted(set(targets))
    assert all(row.needs in ("a", "f") and row.gpus for row in arch.KERNEL_TARGETS)
    assert all(row.default_in_all == (row.needs == "a") for row in arch.KERNEL_TARGETS)


def test_module_imports_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import ci.archs; "
        "new = {n.split('.')[0] for n in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'ci', 'flash_kda'}), 'flash_kda' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[] False"), done.stderr


def test_one_set_of_classes_whichever_way_it_is_imported() -> None:
    code = (
        "from ci.archs import arch; import flash_kda.arch as other; from flash_kda import arch as third; "
        "assert arch.Target is other.Target is third.Target"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
