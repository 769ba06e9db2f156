"""Registration with torch: the schema, opcheck, torch.compile and torch.export on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_call, oracle, relative
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_kda
from flash_kda import _ops, _select

ROOT = Path(__file__).resolve().parents[2]
OUT_BOUND = 2.5e-3


def positional(call: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(call.values())


def test_the_library_and_python_define_one_schema() -> None:
    source = (ROOT / "csrc" / "binding.cpp").read_text()
    definitions = re.findall(r"m\.def\(\s*((?:\"[^\"]*\"\s*)+)\)", source)
    assert len(definitions) == 1, "expected one m.def in csrc/binding.cpp"
    assert "".join(re.findall(r"\"([^\"]*)\"", definitions[0])) == _ops.SCHEMA


def test_the_registered_schema_is_the_written_one() -> None:
    assert str(torch.ops.flash_kda.fwd.default._schema).removeprefix("flash_kda::") == _ops.SCHEMA


@pytest.mark.parametrize("name", ["fwd", "fwd_reference"])
@pytest.mark.parametrize("ends", [None, [0, 2, 2, 6]])
def test_opcheck(name: str, ends: list[int] | None) -> None:
    call = make_call(B=1 if ends else 2, T=6, cu_seqlens=ends)
    result = torch.library.opcheck(getattr(torch.ops.flash_kda, name).default, positional(call))
    assert set(result.values()) == {"SUCCESS"}


def test_the_operator_checks_what_a_graph_could_not() -> None:
    call = make_call()
    with pytest.raises(ValueError, match=r"argument 'out'.*memory that v uses"):
        torch.ops.flash_kda.fwd(*positional(call | {"out": call["v"]}))
    bad = make_call(B=1, T=5, cu_seqlens=[0, 2, 5])
    bad["cu_seqlens"][-1] = 6
    with pytest.raises(ValueError, match="argument 'cu_seqlens'"):
        torch.ops.flash_kda.fwd(*positional(bad))


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call_fwd(call: dict[str, Any]) -> Any:
    flash_kda.fwd(**call)
    return call["out"] * 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(dynamic: bool) -> None:
    compiled = torch.compile(call_fwd, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for T, change in ((5, {}), (9, {"scale": 0.5}), (9, {"lower_bound": -2.0}), (9, {"lower_bound": None})):
        call = make_call(T=T) | change
        assert relative(compiled(call) / 2, oracle(call)[0]) < OUT_BOUND
        assert relative(call["out"], oracle(call)[0]) < OUT_BOUND


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_packed_sequences_and_the_wrappers() -> None:
    def call_func(call: dict[str, Any]) -> Any:
        return flash_kda.flash_kda_varlen_func(**call, output_final_state=True)

    call = make_call(B=1, T=9, cu_seqlens=[0, 4, 9])
    want_out, want_final = oracle(call)
    packed = {n: t for n, t in call.items() if n not in ("out", "final_state")}
    packed |= {n: call[n][0] for n in ("q", "k", "v", "g", "beta")}
    out, final = torch.compile(call_func, fullgraph=True, backend="aot_eager")(packed)
    assert relative(out, want_out[0]) < OUT_BOUND
    assert relative(final, want_final) < 1e-6


@pytest.mark.usefixtures("fresh_compiler")
def test_a_bad_call_does_not_compile() -> None:
    call = make_call()
    call["k"] = call["k"].float()
    with pytest.raises(Exception, match="argument 'k'"):
        torch.compile(call_fwd, fullgraph=True, backend="aot_eager")(call)


@pytest.mark.usefixtures("fresh_compiler")
def test_exports() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            return flash_kda.flash_kda_func(q, k, v, g, beta, output_final_state=True)

    call = make_call()
    program = torch.export.export(Layer(), tuple(call[n] for n in ("q", "k", "v", "g", "beta")))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.flash_kda.fwd.default in targets


def test_fake_tensors_pass_the_checks() -> None:
    with FakeTensorMode() as mode:
        call = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in make_call().items()}
        flash_kda.fwd(**call)


def test_the_mark_for_tracing_is_torch_s_own() -> None:
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked).items() <= vars(_select.select).items()
