"""flash_kda/cute without the DSL: what a cubin says of itself, what is refused, arguments in memory."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flash_kda.cute import compiled, cubin
from flash_kda.cute.arguments import MAX_HEADS, MAX_SEQUENCES, MAX_TOKENS, WORDS, Block, Variant
from flash_kda.fatbin import FatbinError

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "cubin"
VARIANT = Variant(None, None, None, False, False, False)


def fixture(name: str) -> bytes:
    return (FIXTURES / f"{name}.cubin").read_bytes()


@pytest.mark.parametrize(
    ("name", "arch"), [("sm_100f", "sm_100f"), ("old_sm_90a", "sm_90a"), ("old_sm_90", "sm_90")]
)
def test_what_a_cubin_was_made_for(name: str, arch: str) -> None:
    assert cubin.recorded_arch(fixture(name)) == arch


def test_options_of_the_tool() -> None:
    assert [line.split() for line in cubin.tool_options(fixture("sm_100f"))] == [
        ["-O", "3", "-arch", "sm_100f"]
    ]


def test_a_cubin_that_does_not_say() -> None:
    data = fixture("sm_100f")
    with pytest.raises(FatbinError, match="expected one -arch"):
        cubin.recorded_arch(data.replace(cubin.SECTION, b".note.nv.tkinf0"))
    with pytest.raises(FatbinError, match="expected one -arch"):
        cubin.recorded_arch(data.replace(b"-arch", b"-arhc"))
    with pytest.raises(FatbinError, match="not a 64-bit"):
        cubin.recorded_arch(b"//\n.version 9.3\n")


def test_the_flags_of_an_old_cubin_are_trusted_below_10_alone() -> None:
    data = bytearray(fixture("old_sm_90a"))
    struct.pack_into("<I", data, 0x30, 0x640864)  # 100, where f targets exist
    with pytest.raises(FatbinError):
        cubin.recorded_arch(bytes(data))


@pytest.mark.parametrize("end", [100, 1000, 3000, 5000])
def test_a_cubin_cut_short(end: int) -> None:
    with pytest.raises(FatbinError):
        cubin.recorded_arch(fixture("sm_100f")[:end])


@pytest.mark.parametrize("kept", [fixture("sm_100f"), b"", None, "a path", fixture("old_sm_90")])
def test_r30_code_for_another_architecture_is_not_kept(monkeypatch: pytest.MonkeyPatch, kept: Any) -> None:
    monkeypatch.setattr(compiled, "_compile", lambda variant, arch: SimpleNamespace(__cubin__=kept))
    for _ in range(2):
        with pytest.raises(compiled.WrongArchitecture, match="expected a cubin for sm_90a"):
            compiled.compile_kernel(VARIANT, "sm_90a")
    assert not compiled._compiled


def test_a_kernel_is_compiled_once_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_one(variant: Variant, arch: str) -> Any:
        made.append((variant, arch))
        return SimpleNamespace(__cubin__=fixture("old_sm_90a" if arch == "sm_90a" else "sm_100f"))

    monkeypatch.setattr(compiled, "_compile", compile_one)
    try:
        first = compiled.compile_kernel(VARIANT, "sm_90a")
        assert compiled.compile_kernel(VARIANT, "sm_90a") is first
        assert compiled.compile_kernel(VARIANT, "sm_100f") is not first
        assert len(made) == 2
    finally:
        compiled.reset()


def test_importing_needs_no_dsl() -> None:
    code = (
        "import sys, flash_kda.cute.compiled; sys.exit(sorted({'cutlass', 'cuda'} & set(sys.modules)) != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_arguments_in_memory() -> None:
    block = Block(*range(len(WORDS)), 0.5, -5.0)
    words = (ctypes.c_int64 * len(WORDS)).from_address(ctypes.addressof(block))
    floats = (ctypes.c_float * 2).from_address(ctypes.addressof(block) + 8 * len(WORDS))
    assert list(words) == list(range(len(WORDS)))
    assert list(floats) == [0.5, -5.0]


def test_slots_hand_out_addresses() -> None:
    value = ctypes.c_int64(7)
    (address,) = compiled._Slot(ctypes.addressof(value)).__c_pointers__()
    assert ctypes.c_int64.from_address(address).value == 7


@pytest.mark.parametrize(
    "sizes",
    [(MAX_SEQUENCES + 1, 1, 1), (1, MAX_TOKENS + 1, 1), (1, 1, MAX_HEADS + 1)],
)
def test_sizes_past_what_the_kernel_counts(sizes: tuple[int, int, int]) -> None:
    compiled._check_sizes(MAX_SEQUENCES, MAX_TOKENS, MAX_HEADS)
    with pytest.raises(ValueError, match="at most"):
        compiled._check_sizes(*sizes)
