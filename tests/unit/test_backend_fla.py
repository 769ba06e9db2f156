"""The backend that calls flash-linear-attention: what it hands over, what it copies back, and no loop.

A stand-in takes fla-core 0.6.0's arguments (the real one needs a GPU) and computes with our oracle, so that a
layout or an activation mistaken is a wrong number.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import make_call
from conftest import oracle, relative
from torch import Tensor

import flash_kda
from flash_kda import _ops, _select, dispatch, fla_install
from flash_kda.backends import _capture, fla, reference
from flash_kda.reasons import NO_KERNEL, Reason
from flash_kda.reference import kda_reference

# In fla-core 0.6.0's order; those of chunk_kda alone come with their defaults.
COMMON = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state"),
    *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
    *("lower_bound", "state_v_first", "cu_seqlens"),
)


class Standin:
    """``fla.ops.kda`` as far as it is used, with the dispatcher that calls us back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.dispatched = 0
        self.chunk_kda = self._dispatcher(self._entry("chunk"))
        self.fused_recurrent_kda = self._guard(self._entry("recurrent"))

    def _entry(self, name: str) -> Callable[..., Any]:
        def entry(**given: Any) -> tuple[Tensor, Tensor | None]:
            self.calls.append((name, given))
            return compute(name, **given)

        return entry

    def _dispatcher(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(entry)
        def dispatcher(**given: Any) -> Any:
            self.dispatched += 1
            return flash_kda.flash_kda_func(**{name: given[name] for name in ("q", "k", "v", "g", "beta")})

        return torch.compiler.disable(dispatcher)

    def _guard(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(entry)
        def guard(**given: Any) -> Any:
            for value in given.values():
                assert not isinstance(value, Tensor) or value.is_floating_point() or value.is_contiguous()
            return entry(**given)

        return guard


def compute(
    name: str,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_final_state: bool = False,
    state_v_first: bool = False,
    safe_gate: bool | None = None,
    **call: Any,
) -> tuple[Tensor, Tensor | None]:
    """What fla's functions do with these arguments, and what they refuse."""
    assert use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel and state_v_first
    assert not allow_neg_eigval and not torch.is_grad_enabled()
    assert call["A_log"] is not None and call["A_log"].dtype == torch.float32
    assert call["dt_bias"] is None or call["dt_bias"].dim() == 1
    assert call["initial_state"] is None or call["initial_state"].dtype == torch.float32
    assert call["cu_seqlens"] is None or call["cu_seqlens"].dtype == torch.int64
    assert (safe_gate is None) == (name == "recurrent")
    assert name == "recurrent" or safe_gate == (call["lower_bound"] is not None)
    if call["dt_bias"] is not None:
        call["dt_bias"] = call["dt_bias"].view(call["v"].shape[2], -1)
    out, final = kda_reference(**call)
    return out.to(call["q"].dtype), final.float() if output_final_state else None


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    module = Standin()
    monkeypatch.setitem(sys.modules, "fla.ops.kda", module)  # type: ignore[arg-type]
    fla.load.cache_clear()
    yield module
    fla.load.cache_clear()


def arguments(call: dict[str, Any]) -> tuple[Any, ...]:
    lower_bound = call["lower_bound"]
    return tuple((call | {"lower_bound": 0.0 if lower_bound is None else lower_bound}).values())


@pytest.mark.parametrize("tokens", [1, 64, 65])
@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, None])
@pytest.mark.parametrize("absent", [(), ("A_log", "dt_bias"), ("initial_state",), ("final_state",)])
def test_it_computes_the_call(
    standin: Standin, tokens: int, lower_bound: float | None, absent: tuple[str, ...]
) -> None:
    call = make_call(T=tokens, H=2, HV=4, K=32, V=16) | {"lower_bound": lower_bound, "scale": 0.5}
    call |= dict.fromkeys(absent)
    fla.run(*arguments(call))
    assert [name for name, _ in standin.calls] == ["recurrent" if tokens <= 64 else "chunk"]
    out, final = oracle(call)
    assert relative(call["out"], out) < 2.5e-3
    assert call["final_state"] is None or relative(call["final_state"], final) < 1e-6
    assert standin.dispatched == 0


@pytest.mark.parametrize("ends", [[0, 3, 3, 70], [0, 0, 5], [0, 7]])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences(standin: Standin, ends: list[int], index: torch.dtype) -> None:
    call = make_call(B=1, T=ends[-1], K=32, V=32, cu_seqlens=ends)
    call["cu_seqlens"] = call["cu_seqlens"].to(index)
    fla.run(*arguments(call))
    out, final = oracle(call)
    assert relative(call["out"], out) < 2.5e-3 and relative(call["final_state"], final) < 1e-6


def test_states_in_bf16_and_in_place(standin: Standin) -> None:
    call = make_call(K=32, V=32, state_dtype=torch.bfloat16)
    want = oracle(call)[1]
    call["final_state"] = call["initial_state"]
    fla.run(*arguments(call))
    assert relative(call["final_state"], want) < 4e-3


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("ends", [None, [0, 0, 0]])
def test_without_tokens_the_states_stay(standin: Standin, ends: list[int] | None, with_state: bool) -> None:
    call = make_call(B=1 if ends else 2, T=0, K=32, V=32, cu_seqlens=ends)
    if not with_state:
        call["initial_state"] = None
    fla.run(*arguments(call))
    want = call["initial_state"] if with_state else torch.zeros_like(call["final_state"])
    assert torch.equal(call["final_state"], want) and not standin.calls
    fla.run(*arguments(call | {"final_state": None}))


def test_strided_outputs_are_written_in_place(standin: Standin) -> None:
    call = make_call(K=32, V=32)
    whole = torch.full((*call["out"].shape[:-1], 64), float("nan"), dtype=torch.bfloat16)
    call["out"] = whole[..., :32]
    fla.run(*arguments(call))
    assert relative(whole[..., :32], oracle(call)[0]) < 2.5e-3 and whole[..., 32:].isnan().all()


def test_the_dispatcher_is_not_entered(standin: Standin) -> None:
    """Which, called from outside, hands the call to us as it did before."""
    call = make_call(T=70, K=32, V=32)
    fla.run(*arguments(call))
    assert standin.dispatched == 0
    standin.chunk_kda(**{name: call[name] for name in ("q", "k", "v", "g", "beta")})
    assert standin.dispatched == 1


def test_a_loop_ends_at_its_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should unwrapping not reach below a later version's dispatcher."""
    call = make_call(T=70, K=32, V=32)

    def back(**given: Any) -> Any:
        return fla.run(*arguments(call))

    monkeypatch.setattr(fla, "load", lambda: fla.Entries(back, back))
    for _ in range(2):  # the guard is let go of
        with pytest.raises(RuntimeError, match="FLA_FLASH_KDA=0"):
            fla.run(*arguments(call))


def test_threads_do_not_see_each_other_s_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads inside at once: one is no turn of the other's loop."""
    both, errors = threading.Barrier(2, timeout=20), list[BaseException]()

    def wait(**given: Any) -> Any:
        both.wait()
        return given["v"], None

    monkeypatch.setattr(fla, "load", lambda: fla.Entries(wait, wait))

    def work() -> None:
        try:
            fla.run(*arguments(make_call(K=32, V=32) | {"final_state": None}))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_traced_call_is_one_operator(standin: Standin) -> None:
    call = make_call(T=5, K=32, V=32)
    traced = torch.compile(lambda *given: fla.run(*given), backend="eager", fullgraph=True)
    traced(*arguments(call))
    assert relative(call["out"], oracle(call)[0]) < 2.5e-3 and len(standin.calls) == 1


@pytest.mark.parametrize("head", [8, 32, 128, 272])
def test_a_compiled_call_takes_the_backend_of_the_same_eager_one(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, head: int
) -> None:
    """On a machine where the others do not serve the device."""
    refuse = Reason(NO_KERNEL, "not this one")
    monkeypatch.setattr(
        dispatch, "_capability", lambda backend, device: refuse if backend in ("cuda", "cute_dsl") else None
    )
    monkeypatch.setattr(fla_install, "_read", lambda cc: None)
    monkeypatch.delenv("FLASH_KDA_BACKEND", raising=False)
    _select.reset()
    torch._dynamo.reset()
    call = make_call(K=head, V=head)
    try:
        torch.compile(flash_kda.fwd, backend="eager", fullgraph=True)(**call)
        compiled = len(standin.calls)
        assert relative(call["out"], oracle(call)[0]) < 2.5e-3
        flash_kda.fwd(**call)
    finally:
        _select.reset()
        torch._dynamo.reset()
    assert compiled == len(standin.calls) - compiled == (16 <= head <= 256)


def test_the_operators_have_the_schema_of_fwd() -> None:
    for name in ("fwd_fla", "fwd_cute_dsl"):
        schema = str(getattr(torch.ops.flash_kda, name).default._schema)
        assert schema == f"flash_kda::{name}{_ops.ARGUMENTS}"


def test_what_is_handed_over_are_the_arguments_of_the_real_one(standin: Standin) -> None:
    call = make_call(T=70, K=32, V=32)
    fla.run(*arguments(call))
    fla.run(*arguments(make_call(T=5, K=32, V=32)))
    (_, chunk), (_, recurrent) = standin.calls
    assert set(recurrent) <= set(COMMON) and set(chunk) <= {*COMMON, "safe_gate"}
    assert inspect.unwrap(standin.chunk_kda).__name__ == "entry"


# ---- what is installed -------------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Puts packages on the path and says what is made of them."""

    def put(version: str | None, *files: str, cc: tuple[int, int] | None = None) -> Any:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("raise AssertionError('imported')")
        if version is not None:
            info = tmp_path / f"fla_core-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fla-core\nVersion: {version}\n")
        fla_install.reset()
        return fla_install.reason(cc)

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] in ("fla", "triton")]:
        monkeypatch.delitem(sys.modules, name)
    yield put
    fla_install.reset()


FLA, KDA, TRITON = "fla/__init__.py", "fla/ops/kda/__init__.py", "triton/__init__.py"


@pytest.mark.parametrize(
    ("version", "files", "says"),
    [
        (None, (), "not installed"),
        (None, (TRITON,), "not installed"),
        ("0.6.0", (FLA, KDA), "needs triton"),
        ("0.4.1", (FLA, KDA, TRITON), "needs fla-core >= 0.6, found 0.4.1"),
        ("0.6.0", (FLA, TRITON), "fla/__init__.py; pip"),
        ("0.6.0", ("fla.py", TRITON), "needs fla-core >= 0.6, and the import name fla, without KDA, is /"),
        ("0.6.0", ("fla/data/x", TRITON), "/fla; pip"),
        (None, (FLA, TRITON), "without KDA"),
        ("0.6.0", (FLA, KDA, TRITON), None),
        ("0.10.1", (FLA, KDA, TRITON), None),
        ("1.0.dev3", (FLA, KDA, TRITON), None),
        (None, (FLA, KDA, TRITON), None),
        ("unknown", (FLA, KDA, TRITON), None),
    ],
)
def test_what_is_made_of_what_is_installed(
    packages: Callable[..., Any], version: str | None, files: tuple[str, ...], says: str | None
) -> None:
    reason = packages(version, *files)
    if says is None:
        assert reason is None
    else:
        assert reason.code == "no_package" and says in reason.text and "pip install" in reason.text


def test_a_module_without_a_spec_is_not_taken_for_it(packages: Callable[..., Any]) -> None:
    broken = types.ModuleType("fla")
    broken.__spec__ = None
    sys.modules["fla"] = broken
    try:
        reason = packages(None)
    finally:
        del sys.modules["fla"]
    assert reason.code == "probe_error" and isinstance(reason.cause, ValueError)


# ---- Triton's assembler ------------------------------------------------------------------------------------

BIN = "triton/backends/nvidia/bin"
OLD = "sm_80 sm_89 sm_90 sm_90a sm_100 sm_100a"
NEW = f"{OLD} sm_103a sm_107a sm_120a"


@pytest.fixture
def ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a program that says, as ptxas does, which targets it takes."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)

    def put(path: str, targets: str, code: int = 0) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        values = ",".join(f"'{name}'" for name in targets.split())
        file.write_text(f'#!/bin/sh\necho "Allowed values: {values}."\nexit {code}\n')
        file.chmod(0o755)
        return file

    return put


def on(packages: Callable[..., Any], major: int, minor: int) -> Any:
    return packages(None, FLA, KDA, TRITON, cc=(major, minor))


def test_the_ptxas_of_triton_is_asked_for_the_gpu(
    packages: Callable[..., Any], ptxas: Callable[..., Path]
) -> None:
    ptxas(f"{BIN}/ptxas", OLD)
    assert [on(packages, *cc) for cc in ((8, 0), (8, 9), (9, 0), (10, 0))] == [None] * 4
    reason = on(packages, 10, 7)
    assert reason.code == "dsl_arch"
    for part in ("sm_107a", "10.7", "export TRITON_PTXAS_PATH=", f"{BIN}/ptxas)"):
        assert part in reason.text
    assert packages(None, cc=None) is None  # AMD's GPUs


def test_the_ptxas_for_blackwell_where_there_is_one(
    packages: Callable[..., Any], ptxas: Callable[..., Path]
) -> None:
    ptxas(f"{BIN}/ptxas", OLD)
    ptxas(f"{BIN}/ptxas-blackwell", f"{OLD} sm_103a")
    assert on(packages, 9, 0) is None and on(packages, 10, 3) is None
    assert "export TRITON_PTXAS_BLACKWELL_PATH=" in on(packages, 12, 0).text


def test_the_ptxas_of_the_variable_comes_first(
    packages: Callable[..., Any], ptxas: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ptxas(f"{BIN}/ptxas", OLD)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas("newer", NEW)))
    assert on(packages, 10, 7) is None
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas("older", "sm_80")))
    assert on(packages, 9, 0).code == "dsl_arch"
    for broken in ("/nowhere/ptxas", str(ptxas("fails", NEW, code=1)), str(ptxas("mute", ""))):
        monkeypatch.setenv("TRITON_PTXAS_PATH", broken)  # Triton takes its own then
        assert on(packages, 9, 0) is None and on(packages, 10, 7).code == "dsl_arch"


def test_without_a_ptxas_that_runs(packages: Callable[..., Any], ptxas: Callable[..., Path]) -> None:
    assert on(packages, 9, 0).code == "probe_error"
    ptxas(f"{BIN}/ptxas", NEW).chmod(0o644)
    reason = on(packages, 9, 0)
    assert reason.code == "probe_error" and "TRITON_PTXAS_PATH" in reason.text


# ---- CUDA graphs -------------------------------------------------------------------------------------------


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_capture_is_refused_by_name(capturing: None) -> None:
    with pytest.raises(flash_kda.Unavailable, match="it reads the ends on the host") as caught:
        _capture.refuse_capture("fla", torch.device("cuda", 1), "the ends")
    assert (caught.value.code, caught.value.device, caught.value.cc) == ("capture", "cuda:1", (9, 0))
    _capture.refuse_capture("fla", torch.device("cpu"), "the ends")


@pytest.mark.parametrize(
    ("tokens", "packed", "asked"), [(65, True, True), (64, True, False), (65, False, False)]
)
def test_what_reads_on_the_host_asks_for_a_capture(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, tokens: int, packed: bool, asked: bool
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(fla, "refuse_capture", lambda backend, device, reads: seen.append(backend))
    ends = [0, 3, tokens] if packed else None
    fla.run(*arguments(make_call(B=1, T=tokens, K=32, V=32, cu_seqlens=ends)))
    assert seen == ["fla"] * asked


def test_the_reference_asks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(reference, "refuse_capture", lambda backend, device, reads: seen.append(backend))
    flash_kda.fwd(**make_call(), backend="reference")
    assert seen == ["reference"]
