"""Asking nvcc, with a shell script in nvcc's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import devices, nvcc, selection
from ci.archs import arch
from ci.errors import ConfigError, ToolchainError

T90A = arch.Target(9, 0, "a")

FAKE = """\
#!/bin/sh
echo "$*|${{NVCC_APPEND_FLAGS-unset}}|${{NVCC_PREPEND_FLAGS-unset}}" >> {log}
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  *--dryrun*) {dryrun} ;;
  *) {compile} ;;
esac
"""


class Fake:
    """A toolkit folder with a script for nvcc; ``log`` has a line a call."""

    def __init__(self, home: Path, dryrun: str = "exit 0", compile: str = "exit 0") -> None:
        self.log = home / "calls"
        path = home / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(FAKE.format(log=self.log, dryrun=dryrun, compile=compile))
        path.chmod(0o755)
        self.home = home
        self.nvcc = nvcc.open_nvcc(path)

    def calls(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "--version" not in line]


def test_version_and_label(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    assert (fake.nvcc.version, fake.nvcc.toolkit) == ("13.0.88", "13.0")
    assert fake.nvcc.label == f"nvcc 13.0 ({tmp_path}/bin/nvcc)"


def test_one_candidate_a_call_and_remembered(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    assert fake.nvcc.emits(T90A)
    assert fake.nvcc.emits(T90A)
    assert len(fake.calls()) == 1
    assert fake.calls()[0].count("-gencode") == 1


def test_probes_use_the_builds_host_compiler(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    with_compiler = nvcc.open_nvcc(fake.nvcc.path, "g++-12")
    with_compiler.emits(T90A)
    with_compiler.compile_check([arch.Choice(T90A)])
    assert [call.startswith("-ccbin g++-12 ") for call in fake.calls()] == [True, True]


def test_a_changed_nvcc_is_asked_again(tmp_path: Path) -> None:
    import os

    fake = Fake(tmp_path)
    assert fake.nvcc.emits(T90A)
    os.utime(fake.nvcc.path, (1, 1))
    assert fake.nvcc.emits(T90A)
    assert len(fake.calls()) == 2


def test_unsupported_is_an_answer(tmp_path: Path) -> None:
    said = "echo \"nvcc fatal   : Unsupported gpu architecture 'compute_90a'\" >&2; exit 1"
    assert not Fake(tmp_path, dryrun=said).nvcc.emits(T90A)


def test_b30_no_host_compiler_is_an_environment_error(tmp_path: Path) -> None:
    said = (
        "echo 'gcc: not found' >&2; echo 'nvcc fatal   : Failed to preprocess host compiler properties.' >&2"
    )
    fake = Fake(tmp_path, dryrun=f"{said}; exit 1")
    with pytest.raises(arch.ProbeError) as caught:
        fake.nvcc.emits(T90A)
    assert "Failed to preprocess host compiler properties" in str(caught.value)
    assert "gcc: not found" in str(caught.value)
    with pytest.raises(arch.ProbeError):
        selection.select({"FLASH_KDA_CUDA_ARCHS": "90a"}, fake.nvcc)


def test_b31_foreign_flags_do_not_reach_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-gencode arch=compute_80a,code=sm_80a")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-lineinfo")
    fake = Fake(tmp_path)
    assert fake.nvcc.emits(T90A)
    assert fake.nvcc.compile_check([arch.Choice(T90A)]) == {}
    assert [call.split("|")[1:] for call in fake.calls()] == [["unset", "unset"]] * 2
    chosen = selection.select({"FLASH_KDA_CUDA_ARCHS": "90a", "NVCC_APPEND_FLAGS": "-x"}, fake.nvcc)
    assert any("NVCC_APPEND_FLAGS is ignored" in notice for notice in chosen.notices)


def test_b32_torchs_list_is_ignored_with_one_line(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    environ = {"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"}
    chosen = selection.select(environ, fake.nvcc, lambda: [(9, 0)])
    assert chosen.names == ("90a",)
    assert [n for n in chosen.notices if "TORCH_CUDA_ARCH_LIST='8.0 9.0+PTX' is ignored" in n] == list(
        chosen.notices
    )
    with_ours = selection.select({**environ, "FLASH_KDA_CUDA_ARCHS": "90a"}, fake.nvcc, list)
    assert with_ours.notices == ()


def test_compile_check_names_the_failing_choices_alone(tmp_path: Path) -> None:
    said = "case \"$*\" in *sm_100a*) echo 'ptxas fatal   : no' >&2; exit 1 ;; esac"
    fake = Fake(tmp_path, compile=said)
    choices, _ = arch.parse_list("90a,100a")
    failed = fake.nvcc.compile_check(choices)
    assert {choice.name: said for choice, said in failed.items()} == {"100a": "ptxas fatal   : no"}
    with pytest.raises(arch.ArchSelectionError, match="ptxas fatal"):
        selection.select({"FLASH_KDA_CUDA_ARCHS": "90a,100a"}, fake.nvcc)


def test_the_value_is_checked_before_a_toolkit_is_looked_for() -> None:
    for value in (" ", ",", "foo", "90a+PTX"):
        with pytest.raises(arch.ArchSelectionError):
            selection.precheck(value)
    for good in (None, "auto", "ALL", "90a", "80a"):  # 80a needs nvcc's answer for its message
        selection.precheck(good)


@pytest.mark.parametrize("value", ["2", "maybe"])
def test_unclear_switches_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="FLASH_KDA_CUDA_ARCHS_STRICT: expected 1 or 0"):
        selection.strict_from({"FLASH_KDA_CUDA_ARCHS_STRICT": value})
    assert selection.strict_from({"FLASH_KDA_CUDA_ARCHS_STRICT": "1"})
    assert not selection.strict_from({"FLASH_KDA_CUDA_ARCHS_STRICT": "0"})
    assert not selection.strict_from({})


def test_cuda_home_wins_and_is_not_replaced(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "good")
    on_path = {"PATH": f"{fake.home}/bin:/usr/bin:/bin"}
    assert nvcc.find_cuda_home({"CUDA_HOME": str(fake.home)}) == fake.home
    assert nvcc.find_cuda_home(on_path) == fake.home
    with pytest.raises(ToolchainError, match="CUDA_HOME=/nowhere"):
        nvcc.find_cuda_home({**on_path, "CUDA_HOME": "/nowhere"})


def test_a_script_on_path_is_asked_where_its_toolkit_is(tmp_path: Path) -> None:
    real = Fake(tmp_path / "real", dryrun=f"echo '#$ _HERE_={tmp_path}/real/bin' >&2")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real.nvcc.path} "$@"\n')
    wrapper.chmod(0o755)
    assert nvcc.find_cuda_home({"PATH": f"{wrapper.parent}:/usr/bin:/bin"}) == real.home


def test_a_program_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    with pytest.raises(ToolchainError, match="does not start"):
        nvcc.tool_version(broken)
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ToolchainError, match="expected V<version>"):
        nvcc.tool_version(broken)


def test_capabilities_from_nvidia_smi() -> None:
    assert devices.parse_capabilities("9.0\n10.0\n[N/A]\n\n") == [(9, 0), (10, 0)]
