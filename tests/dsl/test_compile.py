"""The recurrent kernel compiled by an installed CuTe DSL: what the cubins hold, and what the PTX computes.

``python -m ci.dsl_matrix`` runs it beside each version of the DSL. ``ptx_machine`` runs the PTX.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import struct
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import ptx_machine
import pytest
import torch
from conftest import python

from flash_kda import dsl
from flash_kda.arch import CUTE_DSL_CAPABILITIES, native
from flash_kda.cute import compiled
from flash_kda.cute.arguments import BFLOAT16, FLOAT32, INT32, INT64, Variant
from flash_kda.reference import kda_reference

NAME = "flash_kda_recurrent"
MAX_REGISTERS = 128  # four blocks on a multiprocessor
PLAIN = Variant(FLOAT32, FLOAT32, None, True, True, False)
VARIANTS = (
    PLAIN,
    replace(PLAIN, softplus=True),
    Variant(None, None, None, False, False, False),
    Variant(BFLOAT16, BFLOAT16, INT32, True, True, False),
    Variant(FLOAT32, BFLOAT16, INT64, True, False, True),
    Variant(None, FLOAT32, INT64, False, True, False),
)
WANTED = ("sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_107a", "sm_120a", "sm_121a")
ONLY_SINCE_4_8 = "sm_107a"


def known() -> tuple[str, ...]:
    """Those of WANTED that the installed DSL has."""
    return tuple(name for name in WANTED if name in dsl.installed().members)


@functools.cache
def cuobjdump() -> Path:
    from ci import toolchain

    return toolchain.ensure("13.5") / "bin" / "cuobjdump"


def said(option: str, cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([cuobjdump(), option, path], capture_output=True, text=True, check=True).stdout


def assembled_for(cubin: bytes, folder: Path) -> str:
    """The target in a cubin as cuobjdump reads it: ``-sass`` would not show an f."""
    (command,) = re.findall(r"Tool Command Line Arguments: (.*)", said("-elf", cubin, folder))
    *_, option, arch = command.split()
    assert option == "-arch"
    return str(arch)


def test_architectures_known() -> None:
    """Of the GPUs that the backend was written for, all but Rubin are known to every version."""
    version = tuple(int(part) for part in str(dsl.installed().version).split(".")[:2])
    assert set(WANTED) - set(known()) == (set() if version >= (4, 8) else {ONLY_SINCE_4_8})
    assert {native(cc).sm for cc in CUTE_DSL_CAPABILITIES} <= set(WANTED)


@pytest.mark.parametrize(("arch", "variant"), list(itertools.product(WANTED, VARIANTS)))
def test_r33_cubins(arch: str, variant: Variant, tmp_path: Path) -> None:
    if arch not in known():
        with pytest.raises(compiled.WrongArchitecture, match=f"no target {arch}; it has sm_80, "):
            compiled.compile_kernel(variant, arch)
        return
    cubin = compiled.compile_kernel(variant, arch).__cubin__
    assert assembled_for(cubin, tmp_path) == arch
    usage = said("--dump-resource-usage", cubin, tmp_path)
    (name,) = re.findall(r"Function (\w+):", usage)
    assert NAME in name
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    assert numbers["REG"] <= MAX_REGISTERS
    assert (numbers["STACK"], numbers["LOCAL"]) == (0, 0)


EVERY = """\
from cutlass import Float32, Int64, cute
from cutlass.base_dsl.compiler import DumpDir
from flash_kda import dsl
from flash_kda.cute import cubin

@cute.kernel
def store(address: Int64):
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = Float32(1.0)

@cute.jit
def launch(address: Int64):
    store(address).launch(grid=(1, 1, 1), block=(1, 1, 1))

for name in dsl.installed().members:
    made = cute.compile[cute.GPUArch(name), cute.KeepCUBIN(), DumpDir(".")](launch, Int64(0))
    open(name + ".made", "wb").write(made.__cubin__)
    meant = dict(dsl.installed().aliases).get(name, name)
    assert cubin.recorded_arch(made.__cubin__) == meant, (name, cubin.recorded_arch(made.__cubin__))
"""


def test_r33_a_small_kernel_for_every_target_of_the_dsl(tmp_path: Path) -> None:
    script = tmp_path / "every.py"  # the DSL reads the source of what it compiles
    script.write_text(EVERY)
    python(f"import runpy; runpy.run_path({str(script)!r})", cwd=tmp_path)
    aliases = dict(dsl.installed().aliases)
    for name in dsl.installed().members:
        assert assembled_for((tmp_path / f"{name}.made").read_bytes(), tmp_path) == aliases.get(name, name)


def test_r30_a_cubin_for_another_architecture_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSL told another target than the key says: a real cubin, refused."""
    real = compiled._compile
    compiled.reset()
    monkeypatch.setattr(compiled, "_compile", lambda variant, arch: real(variant, "sm_100f"))
    with pytest.raises(
        compiled.WrongArchitecture, match="expected a cubin for sm_100a, the DSL made one for sm_100f"
    ):
        compiled.compile_kernel(PLAIN, "sm_100a")
    assert not compiled._compiled


@pytest.mark.parametrize("softplus", [False, True])
def test_no_variant_spills(softplus: bool, tmp_path: Path) -> None:
    states = (None, FLOAT32, BFLOAT16)
    for first, last, ends in itertools.product(states, states, (None, INT32, INT64)):
        for rate, bias in itertools.product((False, True), repeat=2):
            variant = Variant(first, last, ends, rate, bias, softplus)
            usage = said(
                "--dump-resource-usage", compiled.compile_kernel(variant, "sm_90a").__cubin__, tmp_path
            )
            assert re.search(r"STACK:0 .*LOCAL:0 ", usage), (variant, usage)


SCRIPT = """\
from flash_kda.cute import compiled, cubin
from flash_kda.cute.arguments import Variant

kernel = compiled.compile_kernel(Variant(None, None, None, False, False, False), "sm_100f")
print(cubin.recorded_arch(kernel.__cubin__))
"""


@pytest.mark.parametrize("variable", ["CUTE_DSL_ARCH", "CUTE_EXPERIMENTAL_DSL_ARCH"])
@pytest.mark.parametrize("value", ["sm_90a", "sm_foo"])
def test_r32_an_architecture_asked_for_wins_over_the_environment(
    tmp_path: Path, variable: str, value: str
) -> None:
    """The variable counts from the DSL's import on, so in a process of its own."""
    assert python(SCRIPT, "-W", "error", cwd=tmp_path, **{variable: value}).strip() == "sm_100f"
    assert list(tmp_path.iterdir()) == [], "the DSL has left files in the working directory"


# ---- what the PTX computes ----


@functools.cache
def program(variant: Variant) -> ptx_machine.Program:
    from cutlass import Int64, cute
    from cutlass.base_dsl.compiler import DumpDir

    from flash_kda.cute import recurrent

    with tempfile.TemporaryDirectory() as folder:
        compiler = cute.compile[cute.GPUArch("sm_90a"), cute.KeepPTX(), DumpDir(folder)]
        kernel = compiler(recurrent.launch, Int64(0), cute.runtime.make_fake_stream(), variant)
        return ptx_machine.parse(kernel.__ptx__)


DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, INT32: torch.int32, INT64: torch.int64}


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes from a view's first element to the end of its last, and no more."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((size,), (1,), tensor.storage_offset()) if tensor.numel() else tensor.view(-1)
    return flat.view(torch.uint8).numpy()


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class Call:
    """Inputs of a call of a variant, outputs full of NaN."""

    def __init__(self, variant: Variant, lengths: tuple[int, ...], H: int, HV: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        packed = variant.cu_seqlens is not None
        B, T = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
        self.variant, self.N, self.HV, self.group = variant, len(lengths), HV, HV // H

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.q, self.k = normal(2, B, T, H, 128).bfloat16().unbind(0)
        self.v, self.g = normal(2, B, T, HV, 128).bfloat16().unbind(0)
        self.beta = normal(B, T, HV).bfloat16()
        self.out = torch.full((B, T, HV, 128), math.nan, dtype=torch.bfloat16)
        self.scale, self.bound = 0.125, -3.0
        self.A_log = normal(HV) if variant.has_rate else None
        self.dt_bias = normal(HV, 128) if variant.has_bias else None
        self.initial_state = self.final_state = self.cu_seqlens = None
        if variant.initial_state is not None:
            self.initial_state = normal(self.N, HV, 128, 128).to(DTYPES[variant.initial_state])
        if variant.final_state is not None:
            dtype = DTYPES[variant.final_state]
            self.final_state = torch.full((self.N, HV, 128, 128), math.nan, dtype=dtype)
        if packed:
            ends = [0, *itertools.accumulate(lengths)]
            self.cu_seqlens = torch.tensor(ends, dtype=DTYPES[str(variant.cu_seqlens)])

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return kda_reference(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.scale,
            self.A_log,
            self.dt_bias,
            None if self.variant.softplus else self.bound,
            self.initial_state,
            self.cu_seqlens,
        )

    def run(self, backwards: bool = False, depth: int = 1) -> None:
        """The whole grid, on the machine for PTX; its sequences in ``depth`` layers."""
        from flash_kda.cute import recurrent

        memory = ptx_machine.Memory()

        def place(tensor: torch.Tensor | None, offset: int = 0) -> int:
            return 0 if tensor is None else memory.add(memory_of(tensor), offset)

        # As little aligned as the operator allows.
        addresses = [place(t, 16) for t in (self.q, self.k, self.v, self.g)]
        addresses += [place(self.beta, 2), place(self.out, 16), place(self.A_log, 4), place(self.dt_bias, 4)]
        addresses.append(place(self.initial_state, 16))
        in_place = self.final_state is self.initial_state
        addresses.append(addresses[-1] if in_place else place(self.final_state, 16))
        addresses.append(place(self.cu_seqlens, 8))
        strides = [s for t in (self.q, self.k, self.v, self.g) for s in t.stride()[:3]]
        strides += [*self.beta.stride()[:2], *self.out.stride()[:3]]
        sizes = [self.N, self.q.shape[1], self.HV, self.group]
        values = [*addresses, *strides, *sizes, bits(self.scale), bits(self.bound)]
        grid = (recurrent.SLICES * self.HV, -(-self.N // depth), depth)
        for block in itertools.product(*map(range, grid)):
            ptx_machine.run_block(
                program(self.variant), values, memory, block, grid, recurrent.WARPS, backwards
            )

    def check(self) -> None:
        """AssertionError unless the outputs are the oracle's, up to fp32 arithmetic and the last rounding."""
        out, state = self.expected()
        self.run()
        torch.testing.assert_close(self.out.double(), out, rtol=2**-8, atol=2e-6)
        if self.final_state is not None:
            exact = self.final_state.dtype == torch.float32
            torch.testing.assert_close(
                self.final_state.double(), state, rtol=1e-5 if exact else 2**-8, atol=2e-6
            )


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("softplus", [False, True])
def test_tokens(tokens: int, softplus: bool) -> None:
    Call(replace(PLAIN, softplus=softplus), (tokens, tokens), 1, 2).check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: Variant) -> None:
    lengths = (2, 2) if variant.cu_seqlens is None else (0, 1, 6, 0, 4)
    Call(variant, lengths, 1, 1).check()


def test_sequences_in_two_dimensions_of_the_grid() -> None:
    """As past 65535 sequences; the last layer has one too many."""
    call = Call(PLAIN, (1, 1, 1), 1, 1)
    _, state = call.expected()
    call.run(depth=2)
    torch.testing.assert_close(call.final_state.double(), state, rtol=1e-5, atol=2e-6)


def test_warps_do_not_race() -> None:
    calls = [Call(PLAIN, (11,), 1, 1) for _ in range(2)]
    for call, backwards in zip(calls, (False, True), strict=True):
        call.run(backwards)
    assert torch.equal(calls[0].out, calls[1].out)
    assert torch.equal(calls[0].final_state, calls[1].final_state)


def test_value_heads_share_a_query_head() -> None:
    Call(PLAIN, (2,), 2, 6).check()


def test_strided_views() -> None:
    call = Call(PLAIN, (3, 3), 2, 2)
    packed = torch.stack((call.q, call.k, call.v), 2)
    call.q, call.k, call.v = packed.unbind(2)
    call.g = torch.cat((call.g, call.g), -1)[..., :128]
    call.beta = torch.cat((call.beta, call.beta), -1)[..., :2]
    call.out = torch.full((3, 2, 2, 136), math.nan, dtype=torch.bfloat16)[..., :128].transpose(0, 1)
    call.check()


def test_the_final_state_may_be_the_initial_one() -> None:
    call = Call(PLAIN, (3,), 1, 1)
    _, state = call.expected()
    call.final_state = call.initial_state
    call.run()
    torch.testing.assert_close(call.final_state.double(), state, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_no_tokens_leave_the_state_as_it_is(dtype: str) -> None:
    call = Call(Variant(dtype, dtype, INT32, True, True, False), (0, 0), 1, 1)
    call.run()
    assert torch.equal(call.final_state, call.initial_state)


def test_cu_seqlens_that_are_wrong_stay_inside_the_tensors() -> None:
    """The machine refuses an access outside; what is computed does not matter."""
    for ends in ([-5, 3, 2**40, 1], [2**62, 0, -(2**62), 2]):
        call = Call(Variant(FLOAT32, FLOAT32, INT64, True, True, False), (1, 1, 1), 1, 1)
        call.cu_seqlens = torch.tensor(ends)
        call.run()


@pytest.mark.parametrize("softplus", [False, True])
def test_gates_at_their_ends(softplus: bool) -> None:
    """Gates before activation of size 100, fast and slow rates: decays of 0 and of 1, none NaN."""
    call = Call(replace(PLAIN, softplus=softplus), (4,), 1, 2)
    call.g = (call.g.float() * 50).bfloat16()
    call.A_log = torch.tensor([5.0, -5.0])
    call.check()


def test_small_decays_of_the_softplus_gate_keep_their_digits() -> None:
    """softplus(-12) is 6e-6; with a rate of e^9 it decays by a twentieth."""
    call = Call(replace(PLAIN, softplus=True), (4,), 1, 1)
    call.g = torch.full_like(call.g, -12.0)
    call.A_log = torch.tensor([9.0])
    call.dt_bias = torch.zeros_like(call.dt_bias)
    call.check()
