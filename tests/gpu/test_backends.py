"""Which backend runs on this GPU as images and packages go, each result against the oracle.

The wheel's image for this GPU is hidden from the decision, as if it had been built for another one. The
backends `cute_dsl` and `fla` are tried where their packages are: installed, or in `--cute-path DIR` and
`--fla-path DIR`; where not, the tests that are left out say so. ci/fallthrough.py does it in fresh processes,
with a wheel that was built for another GPU.
"""

from __future__ import annotations

import functools
import site
import sys
from collections.abc import Iterator

import pytest
import torch
from kda_gpu import Problem, assert_close, call, make, oracle, same_bits
from test_fla_client import FLA_BOUND, few_configurations

import flash_kda
from flash_kda import _library, _select, dispatch, dsl, fla_install
from flash_kda.arch import KERNEL_TARGETS, Choice, runs
from flash_kda.reasons import NO_PACKAGE, Reason

pytestmark = [pytest.mark.cuda_only, pytest.mark.filterwarnings("ignore")]
ABSENT = Reason(NO_PACKAGE, "hidden by this test")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A decision of its own for each test, and FLA where --fla-path says."""
    if (folder := request.config.getoption("--fla-path", default=None)) and folder not in sys.path:
        sys.path.append(str(folder))
    if folder := request.config.getoption("--cute-path", default=None):
        site.addsitedir(str(folder))  # the DSL is found by way of a .pth file
    monkeypatch.delenv("FLASH_KDA_BACKEND", raising=False)
    _select.reset()
    yield
    monkeypatch.undo()
    _select.reset()


def here() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def hide_image(monkeypatch: pytest.MonkeyPatch) -> None:
    other = next(Choice(row.target) for row in KERNEL_TARGETS if not runs(row.target, here()))
    monkeypatch.setattr(_library, "built_choices", lambda: (other,))
    _select.reset()


def hide_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsl, "_read_install", lambda: dsl.Install(reason=ABSENT))
    _select.reset()


def hide_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_install, "_read", lambda cc: ABSENT)
    _select.reset()


def chosen(p: Problem, backend: str = "auto") -> str | None:
    gate = dispatch.SOFTPLUS if p.lower_bound is None else dispatch.BOUNDED
    return _select.select(backend, "cuda", p.q.device.index, p.q.shape[-1], p.v.shape[-1], gate)


def right(p: Problem, backend: str, bound: float = FLA_BOUND) -> None:
    """The call, by that backend, against the oracle."""
    out = torch.full_like(p.v, float("nan"))
    assert p.final_dtype is not None
    final = torch.full(p.state_shape, float("nan"), device=p.v.device, dtype=p.final_dtype)
    call(p, out, final, backend=backend)
    want_out, want_final = oracle(p)
    assert_close(f"{backend}'s out", out, want_out, bound)
    assert_close(f"{backend}'s final_state", final, want_final, bound)


BF16 = torch.bfloat16
PROBLEMS = [  # names: the tensors are made in the test
    *(f"{tokens} tokens" for tokens in (*range(1, 9), 64, 65, 200)),
    *("no state in", "bf16 states", "no parameters"),
    *("packed, short", "packed, one token each", "packed, long", "packed, int32"),
]


def problems() -> dict[str, Problem]:
    """Short and long (past 64 tokens fla takes its chunked kernels), batched and packed, empty sequences,
    states of both types, in and out or absent. One number of heads: Triton compiles for each."""
    short = {f"{tokens} tokens": make(2, tokens, 2, 4, seed=tokens) for tokens in range(1, 9)}
    return short | {
        "64 tokens": make(1, 64, 2, 4),
        "65 tokens": make(1, 65, 2, 4),
        "200 tokens": make(2, 200, 2, 4),
        "no state in": make(2, 40, 2, 4, initial=None),
        "bf16 states": make(2, 40, 2, 4, initial=BF16, final=BF16),
        "no parameters": make(2, 90, 2, 4, a_log=False, dt_bias=False),
        "packed, short": make(heads=2, value_heads=4, lens=[3, 0, 20]),
        "packed, one token each": make(heads=2, value_heads=4, lens=[1] * 8),
        "packed, long": make(heads=2, value_heads=4, lens=[300, 0, 17, 130, 65]),
        "packed, int32": make(heads=2, value_heads=4, lens=[70, 1, 70], cu_dtype=torch.int32, initial=None),
    }


def test_the_wheel_s_kernels_come_first() -> None:
    assert chosen(make(1, 5, 2)) == "cuda"


def test_a_wheel_for_another_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_image(monkeypatch)
    p = make(1, 5, 2)
    with pytest.raises(
        flash_kda.Unavailable, match=r"holds machine code for .* FLASH_KDA_CUDA_ARCHS="
    ) as caught:
        call(p, torch.empty_like(p.v), None, backend="cuda")
    assert caught.value.code == "not_in_wheel" and caught.value.cc == here()


def test_auto_falls_through_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda, then cute_dsl, fla, reference, as far as their packages are here."""
    few_configurations_if_fla()
    p = make(2, 40, 2, 4)
    order = ["cuda"]
    order += ["cute_dsl"] if dsl.installed().reason is None else []
    order += ["fla"] if fla_install.reason(here()) is None else []
    order += ["reference"]
    hide = {"cuda": hide_image, "cute_dsl": hide_dsl, "fla": hide_fla}
    for backend in order:
        assert chosen(p) == backend
        right(p, "auto")
        if backend in hide:
            hide[backend](monkeypatch)
    print("fell through", order)


@functools.cache
def few_configurations_if_fla() -> None:
    if fla_install.reason(here()) is None:
        few_configurations()


def need(backend: str) -> None:
    """Skips by name where a package is absent."""
    reason = {"cute_dsl": lambda: dsl.installed().reason, "fla": lambda: fla_install.reason(here())}
    if backend in reason and (found := reason[backend]()) is not None:
        pytest.skip(f"BACKEND {backend} NOT TESTED: {found.text}")


@pytest.mark.parametrize("backend", ["cute_dsl", "fla", "reference"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "softplus"])
def test_a_backend_is_right(backend: str, name: str, bounded: bool) -> None:
    need(backend)
    few_configurations_if_fla()
    p = problems()[name]
    right(p if bounded else p.with_(lower_bound=None), backend)


def test_every_problem_is_tried() -> None:
    assert list(problems()) == PROBLEMS


def test_auto_is_cuda_on_a_gpu_of_the_wheel_and_gives_its_bits() -> None:
    p = make(2, 200, 2, 4)
    outs = [torch.full_like(p.v, float("nan")) for _ in range(2)]
    for out, backend in zip(outs, ("auto", "cuda"), strict=True):
        call(p, out, None, backend=backend)
    assert same_bits(*outs)


@pytest.mark.parametrize("backend", ["cuda", "cute_dsl", "fla"])
def test_a_backend_that_is_absent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    {"cuda": hide_image, "cute_dsl": hide_dsl, "fla": hide_fla}[backend](monkeypatch)
    p = make(1, 5, 2)
    with pytest.raises(flash_kda.Unavailable, match=f"backend='{backend}' cannot run on cuda:") as caught:
        call(p, torch.empty_like(p.v), None, backend=backend)
    assert caught.value.code == ("not_in_wheel" if backend == "cuda" else "no_package")


def test_a_graph_of_the_dsl_s_kernels_replays() -> None:
    need("cute_dsl")
    p = make(heads=2, lens=[70, 0, 70])
    out, final = torch.empty_like(p.v), torch.empty(p.state_shape, device=p.v.device)
    call(p, out, final, backend="cute_dsl")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(p, out, final, backend="cute_dsl")
    out.fill_(float("nan"))
    final.fill_(float("nan"))
    graph.replay()
    want_out, want_final = oracle(p)
    assert_close("out", out, want_out)
    assert_close("final_state", final, want_final)


@pytest.mark.parametrize("backend", ["fla", "reference"])
def test_a_capture_of_what_reads_on_the_host_is_refused_by_name(backend: str) -> None:
    need(backend)
    few_configurations_if_fla()
    p = make(heads=2, lens=[70, 0, 70])
    out = torch.empty_like(p.v)
    call(p, out, None, backend=backend)
    with pytest.raises(flash_kda.Unavailable) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(p, out, None, backend=backend)
    assert caught.value.code == "capture"
    right(p, backend)  # and the process goes on


def test_fla_calls_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    need("fla")
    few_configurations()
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    calls: list[int] = []
    real = flash_kda.fwd
    monkeypatch.setattr(flash_kda, "fwd", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1])
    with torch.inference_mode():
        right(make(1, 200, 2), "fla")
    assert len(calls) == 1, "flash-linear-attention handed the call back"
