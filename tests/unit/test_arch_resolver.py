"""The build-time resolver with a made-up nvcc and made-up GPUs.

The numbers b1 to b36 in names of tests count the scenarios of choosing architectures, one a situation of the
user: b1 to b29 are here, b30 to b32 in test_nvcc.py, b33, b35 and b36 in tests/build/test_nvcc_probe.py, b34
in tests/build/test_setup.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ci.archs import arch

FIRST_SIX = ("90a", "100a", "100f", "103a", "120a", "120f")
TABLE = tuple(row for row in arch.KERNEL_TARGETS if row.target.name in FIRST_SIX)
E128 = {"90a", "100a", "120a"}
E130 = {"90a", "100a", "100f", "103a", "103f", "110a", "120a", "120f", "121a"}
E135 = E130 | {"107a", "107f"}
LABELS = {id(E128): "nvcc 12.8 (/cuda/bin/nvcc)", id(E130): "nvcc 13.0 (/cuda/bin/nvcc)"}


class Asked:
    """A made-up nvcc: emits a set of names and remembers that it was asked."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.calls: list[str] = []

    def __call__(self, target: arch.Target) -> bool:
        self.calls.append(target.name)
        return target.name in self.names


def resolve(
    value: str | None,
    emits: set[str] = E130,
    gpus: Sequence[tuple[int, int]] = (),
    *,
    strict: bool = False,
    table: Sequence[arch.KernelTarget] = TABLE,
    check: Callable[[Sequence[arch.Choice]], dict[arch.Choice, str]] | None = None,
) -> arch.Resolution:
    label = LABELS.get(id(emits), "nvcc 13.5 (/cuda/bin/nvcc)")
    return arch.resolve(value, table, Asked(emits), lambda: gpus, strict, compiler=label, compile_check=check)


def refused(
    value: str | None, emits: set[str] = E130, gpus: Sequence[tuple[int, int]] = (), **more: object
) -> str:
    with pytest.raises(arch.ArchSelectionError) as caught:
        resolve(value, emits, gpus, **more)  # type: ignore[arg-type]
    text = str(caught.value)
    # One template: every refusal says what is supported, what nvcc can do and how to write a request.
    assert text.startswith("FLASH_KDA_CUDA_ARCHS=")
    for part in (
        "cannot build for",
        "flash_kda supports: 90a (H100/H200/GH200)",
        "/cuda/bin/nvcc",
        "Use 'auto'",
    ):
        assert part in text
    return text


def items(value: str | None, emits: set[str] = E130) -> dict[str, str]:
    with pytest.raises(arch.ArchSelectionError) as caught:
        resolve(value, emits)
    return {problem.item: problem.code for problem in caught.value.problems}


def test_b1_unset_means_auto() -> None:
    assert resolve(None, gpus=[(9, 0)]).names == ("90a",)


@pytest.mark.parametrize("value", ["", "  ", "\t\n"])
def test_b2_blank_is_an_error_not_auto(value: str) -> None:
    nvcc = Asked(E130)
    with pytest.raises(arch.ArchSelectionError, match="blank") as caught:
        arch.resolve(value, TABLE, nvcc, lambda: [(9, 0)])
    assert caught.value.codes == ("blank",)
    assert nvcc.calls == []


def test_b3_auto_takes_every_gpu_once() -> None:
    assert resolve("AUTO", gpus=[(9, 0), (9, 0), (10, 0)]).names == ("90a", "100a")


def test_b4_auto_without_a_gpu() -> None:
    text = refused("auto")
    assert "no visible" in text
    assert all(name in text for name in FIRST_SIX)


def test_b5_auto_falls_to_the_family() -> None:
    assert resolve("auto", gpus=[(12, 1)]).names == ("120f",)


def test_b6_auto_family_of_10() -> None:
    assert resolve("auto", E135, [(10, 7)]).names == ("100f",)


def test_b7_auto_no_kernel() -> None:
    text = refused("auto", gpus=[(8, 9)])
    assert "no kernels for compute capability 8.9" in text


def test_b8_auto_partly() -> None:
    found = resolve("auto", gpus=[(9, 0), (8, 9)])
    assert found.names == ("90a",)
    assert len(found.notices) == 1
    assert "8.9" in found.notices[0]


def test_b9_auto_nvcc_too_old() -> None:
    text = refused("auto", E128, [(10, 3)])
    assert "cannot emit 103a" in text
    assert "12.9" in text
    assert "no kernels" not in text


def test_b10_all() -> None:
    found = resolve("all")
    assert found.names == ("90a", "100a", "103a", "120a")
    assert arch.gencode_flags(found.choices).count("-gencode") == 4
    assert found.notices == ()


def test_b11_all_with_an_older_nvcc() -> None:
    found = resolve("all", E128)
    assert found.names == ("90a", "100a", "120a")
    assert len(found.notices) == 1
    assert "103a" in found.notices[0]
    assert "12.9" in found.notices[0]


def test_b12_all_strict() -> None:
    assert "103a" in refused("all", E128, strict=True).splitlines()[0]


def test_all_with_nothing_left() -> None:
    assert "cannot build for 90a, 100a, 103a, 120a" in refused("all", {"80"})


def test_b13_list() -> None:
    found = resolve("90a,100a")
    assert found.names == ("90a", "100a")
    assert "arch=compute_90a,code=sm_90a" in arch.gencode_flags(found.choices)


def test_b14_sorted_and_merged() -> None:
    assert resolve("100a,90a,90a").names == ("90a", "100a")


def test_b15_case_and_space() -> None:
    assert resolve(" 90A , sm_100a ").names == ("90a", "100a")


@pytest.mark.parametrize("value", ["9.0a;10.0a", "9.0a 10.0a", "9.0a\n10.0a"])
def test_b16_torch_style(value: str) -> None:
    assert resolve(value).names == ("90a", "100a")


def test_b17_empty_items() -> None:
    assert resolve("90a,,100a,").names == ("90a", "100a")


@pytest.mark.parametrize("value", [",", " ; , "])
def test_b18_separators_only(value: str) -> None:
    assert "blank" in refused(value)


def test_b19_80a() -> None:
    compiled: list[object] = []

    def check(choices: Sequence[arch.Choice]) -> dict[arch.Choice, str]:
        compiled.extend(choices)
        return {}

    text = refused("80a,90a", check=check)
    assert text.splitlines()[0] == "FLASH_KDA_CUDA_ARCHS='80a,90a': cannot build for 80a."
    assert "suffix 'a' starts at 9.0" in text
    assert "nvcc 13.0 (/cuda/bin/nvcc) can emit: 90a 100a 100f 103a 120a 120f." in text
    assert compiled == []


def test_b20_plain() -> None:
    assert "write 90a" in refused("90")


def test_a_plain_target_beside_its_family_is_refused() -> None:
    assert items("100,100f") == {"100": "unknown"}


def test_b21_90f() -> None:
    assert "no such target; family targets start at 10.0" in refused("90f")


def test_b22_nvcc_too_old_for_the_list() -> None:
    text = refused("107a", E130, table=arch.KERNEL_TARGETS)
    assert "nvcc 13.0 (/cuda/bin/nvcc) cannot emit 107a; needs CUDA 13.4 or newer (or use 100f)." in text


def test_b23_nvcc_could_but_no_kernels() -> None:
    text = refused("107a", E135)
    assert "107a: not an architecture flash_kda has kernels for; 100f would cover 10.7." in text


def test_b24_renamed() -> None:
    assert "renamed 110a in CUDA 13.0" in refused("101a")


def test_near_miss_named_only_when_the_family_is_in_the_table() -> None:
    assert "120f would cover 12.1" in refused("121a")
    without = [row for row in TABLE if row.target.name != "120f"]
    assert "would cover" not in refused("121a", table=without)


def test_b25_every_bad_token_at_once() -> None:
    assert items("foo,9a,90aa,0x90") == dict.fromkeys(["foo", "9a", "90aa", "0x90"], "syntax")


def test_problems_of_several_kinds_come_together() -> None:
    assert items("foo,80a,100a+ptx,90a") == {"foo": "syntax", "80a": "unknown", "100a+ptx": "ptx"}
    assert items("80a,103a", E128) == {"80a": "unknown", "103a": "not_emittable"}


@pytest.mark.parametrize("value", ["all,90a", "90a auto", "all,auto"])
def test_b26_keyword_in_a_list(value: str) -> None:
    assert "stands alone" in refused(value)


def test_b27_virtual_architecture() -> None:
    text = refused("compute_90a")
    assert "virtual architecture" in text
    assert "100f+PTX" in text


def test_b28_ptx() -> None:
    assert "adds no reach" in refused("90a+PTX")
    found = resolve("100f+PTX")
    assert arch.gencode_flags(found.choices) == ["-gencode", "arch=compute_100f,code=[sm_100f,compute_100f]"]
    assert resolve("100f,100f+ptx").names == ("100f+PTX",)


def test_b29_exact_and_family_together() -> None:
    assert resolve("100f,100a").names == ("100a", "100f")


def test_order_of_the_table_does_not_matter() -> None:
    assert resolve("all", table=TABLE[::-1]).names == resolve("all").names


def test_compile_check_sees_the_choices_and_can_refuse() -> None:
    def check(choices: Sequence[arch.Choice]) -> dict[arch.Choice, str]:
        return {choices[0]: "ptxas fatal : Unsupported .version 9.5"}

    text = refused("90a,100a", check=check)
    assert text.splitlines()[0].endswith("cannot build for 90a.")
    assert "Unsupported .version 9.5" in text


def test_a_probe_error_is_not_a_refusal() -> None:
    def emit(_: arch.Target) -> bool:
        raise arch.ProbeError("gcc: No such file or directory")

    with pytest.raises(arch.ProbeError, match="gcc"):
        arch.resolve("90a", TABLE, emit, list)
    with pytest.raises(arch.ArchSelectionError, match="could not be asked: gcc"):
        arch.resolve("80a", TABLE, emit, list)
