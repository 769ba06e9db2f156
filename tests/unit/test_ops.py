"""Registration with torch: the schema, opcheck, torch.compile and torch.export on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import make_call
from conftest import oracle, relative
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash_kda
from flash_kda import _ops, _select, checks
from flash_kda.backends import reference

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


def constant(pattern: str) -> int:
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "csrc").rglob("*.*")))
    found = re.findall(rf"(?m)^constexpr int(?:64_t)? {pattern};", sources)
    assert len(found) == 1, f"expected one {pattern} in csrc, got {found}"
    return int(found[0])


def test_the_library_and_python_have_the_same_limits_of_segments() -> None:
    assert constant(r"kMinSegmentChunks = (\d+)") * constant(r"kChunk = (\d+)") == checks.MIN_SEGMENT
    assert 2**31 - 1 - constant(r"kMaxTokens = INT32_MAX - (\d+)") == checks.MAX_SEGMENT
    assert constant(r"kChunk = (\d+)") == checks.SEGMENT_STEP


def test_the_schema_s_default_stands_for_none() -> None:
    arguments = {a.name: a for a in torch.ops.flash_kda.fwd.default._schema.arguments}
    assert arguments["segment_tokens"].default_value == reference.CHOSEN_SEGMENTS
    assert [a.name for a in torch.ops.flash_kda.fwd_reference.default._schema.arguments] == list(arguments)


@pytest.mark.parametrize("name", ["fwd", "fwd_reference"])
@pytest.mark.parametrize(
    ("ends", "segment_tokens"), [(None, ()), ([0, 2, 2, 6], ()), (None, (0,)), ([0, 2, 2, 6], (256,))]
)
def test_opcheck(name: str, ends: list[int] | None, segment_tokens: tuple[int, ...]) -> None:
    call = make_call(B=1 if ends else 2, T=6, cu_seqlens=ends)
    operator = getattr(torch.ops.flash_kda, name).default
    result = torch.library.opcheck(operator, (*positional(call), *segment_tokens))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["fwd", "fwd_reference"])
@pytest.mark.parametrize("bad", [-2, 8, 255, 264, 2**31, 2**62])
def test_the_operator_refuses_a_segment_that_is_none(name: str, device: str, bad: int) -> None:
    call = make_call(device=device)
    with pytest.raises(ValueError, match="argument 'segment_tokens'"):
        getattr(torch.ops.flash_kda, name)(*positional(call), bad)
    assert device == "meta" or call["out"].isnan().all()


@pytest.mark.parametrize("name", ["fwd", "fwd_reference"])
@pytest.mark.parametrize("moved", ["q", "out", "A_log", "final_state"])
def test_one_meta_tensor_among_others_is_refused(name: str, moved: str) -> None:
    call = make_call()
    call[moved] = call[moved].to("meta")
    with pytest.raises(ValueError, match="on meta"):
        getattr(torch.ops.flash_kda, name)(*positional(call))


@pytest.mark.parametrize("name", ["q", "out"])
def test_the_operator_refuses_what_requires_grad(name: str) -> None:
    call = make_call()
    call[name].requires_grad_()
    with pytest.raises(ValueError, match=f"argument '{name}'.*requires grad"):
        torch.ops.flash_kda.fwd(*positional(call))
    with torch.no_grad():
        torch.ops.flash_kda.fwd(*positional(call))


TAKEN = """
import torch
other = torch.library.Library("flash_kda", "DEF")
for name in {names}:
    other.define(name + "(Tensor x) -> Tensor")
import importlib, sys, flash_kda
q = torch.ones(1, 3, 1, 8).bfloat16()
want = torch.empty_like(q)
from flash_kda.backends import reference
reference.compute(q, q, q, q, q[..., 0].contiguous(), 1.0, want, None, None, -5.0, None, None, None)
for _ in range(2):
    assert torch.equal(flash_kda.flash_kda_func(q, q, q, q, q[..., 0].contiguous(), scale=1.0)[0], want)
    importlib.reload(sys.modules["flash_kda._ops"])
    for name in [name for name in sys.modules if name.startswith("flash_kda")]:
        del sys.modules[name]
    import flash_kda
for name in {names}:
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("flash_kda::" + name, "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("flash_kda::" + name, "Meta")
"""


@pytest.mark.parametrize("names", [(), ("fwd",), ("fwd_reference",), ("fwd", "fwd_reference")])
def test_another_library_s_operators_are_left_alone_and_ours_work(names: tuple[str, ...]) -> None:
    code = TAKEN.format(names=names)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def call_on_cuda(call: dict[str, Any]) -> Any:
    flash_kda.fwd(**call, backend="cuda")
    return call["out"]


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
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_keeps_what_unavailable_says(fullgraph: bool) -> None:
    compiled = torch.compile(call_on_cuda, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(Exception, match="it runs on CUDA tensors") as caught:
        compiled(make_call())
    assert isinstance(caught.value, flash_kda.Unavailable) == (not fullgraph)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_gradients_what_holds_parameters() -> None:
    call = make_call()
    call["A_log"] = torch.nn.Parameter(call["A_log"])
    result = torch.compile(torch.no_grad()(call_fwd), fullgraph=True, backend="aot_eager")(call)
    assert relative(result / 2, oracle(call)[0]) < OUT_BOUND


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_with_a_traced_scale() -> None:
    def scaled(call: dict[str, Any], scale: float) -> Any:
        return call_fwd(call | {"scale": scale})

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend="aot_eager")
    for scale in (0.3, 0.7):
        call = make_call()
        assert relative(compiled(call, scale) / 2, oracle(call | {"scale": scale})[0]) < OUT_BOUND


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_with_segments(dynamic: bool | None) -> None:
    def cut(call: dict[str, Any], segment_tokens: int | None) -> Any:
        return call_fwd(call | {"segment_tokens": segment_tokens})

    compiled = torch.compile(cut, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for segment_tokens in (None, 256, 512):
        call = make_call()
        assert relative(compiled(call, segment_tokens) / 2, oracle(call)[0]) < OUT_BOUND
    with pytest.raises(Exception, match=r"argument 'segment_tokens': got 264, takes None"):
        compiled(make_call(), 264)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("segment_tokens", [None, 512])
def test_exports(segment_tokens: int | None) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            return flash_kda.flash_kda_func(
                q, k, v, g, beta, output_final_state=True, segment_tokens=segment_tokens
            )

    call = make_call()
    program = torch.export.export(Layer(), tuple(call[n] for n in ("q", "k", "v", "g", "beta")))
    calls = [node for node in program.graph.nodes if node.target is torch.ops.flash_kda.fwd.default]
    assert len(calls) == 1
    assert calls[0].args[13:] == (() if segment_tokens is None else (segment_tokens,))


def test_fake_tensors_pass_the_checks() -> None:
    with FakeTensorMode() as mode:
        call = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in make_call().items()}
        flash_kda.fwd(**call)


def test_the_mark_for_tracing_is_torch_s_own() -> None:
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked).items() <= vars(_select.select).items()


@pytest.mark.parametrize("size", [64, 128])
def test_a_graph_with_symbolic_sizes(size: int) -> None:
    """make_fx: torch.compiler.is_compiling() is false, and a head size may be a symbol, which has no hash."""
    call = make_call(T=3, K=size, V=size)
    arguments = [call[name] for name in ("q", "k", "v", "g", "beta")]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return flash_kda.flash_kda_func(*tensors)[0]

    graph = make_fx(run, tracing_mode="symbolic")(*arguments)
    assert torch.equal(graph(*arguments), run(*arguments))
