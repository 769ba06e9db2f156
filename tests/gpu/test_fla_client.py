"""flash-linear-attention calls this package as its users do; both agree with each other and the oracle."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kda_gpu import Problem, assert_close, make, oracle

import flash_kda

pytestmark = [pytest.mark.cuda_only, pytest.mark.filterwarnings("ignore")]

HEADS = 4
LINE = "[FLA Backend] fla.ops.kda.chunk.chunk_kda -> flash_kda"
FLA_BOUND = 1.5e-2


@pytest.fixture(scope="module")
def chunk_kda(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """FLA's entry point. Its absence is a failure unless --allow-missing-fla was given."""
    if folder := request.config.getoption("--fla-path", default=None):
        sys.path.append(str(folder))
    try:
        entry: Callable[..., Any] = importlib.import_module("fla.ops.kda").chunk_kda
    except ImportError as error:
        reason = (
            f"flash-linear-attention is not importable ({error}); install fla-core==0.6.0 or give --fla-path"
        )
        if request.config.getoption("--allow-missing-fla", default=False):
            pytest.skip("CLIENT NOT TESTED: " + reason)
        pytest.fail(reason, pytrace=False)
    few_configurations()
    return entry


def few_configurations() -> None:
    """Three candidates per kernel instead of up to 36: FLA is here to be right, not to be fast."""
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune = tuner.prune_configs

    def pruned(self: Any, kwargs: Any) -> Any:
        configs = prune(self, kwargs)
        return configs[:: max(1, len(configs) // 3)][:3]

    tuner.prune_configs = pruned


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Every call of flash_kda.fwd, with its keyword arguments."""
    seen: list[dict[str, Any]] = []
    real = flash_kda.fwd

    def spy(*args: Any, **kwargs: Any) -> None:
        seen.append(kwargs)
        real(*args, **kwargs)

    monkeypatch.setattr(flash_kda, "fwd", spy)
    yield seen


def client(chunk_kda: Callable[..., Any], p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The call as FLA's KDA layer makes it."""
    assert p.dt_bias is not None
    with torch.inference_mode():
        out, final = chunk_kda(
            q=p.q,
            k=p.k,
            v=p.v,
            g=p.g,
            beta=p.beta,
            scale=p.scale,
            initial_state=p.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=p.lower_bound,
            state_v_first=True,
            cu_seqlens=p.cu_seqlens,
            A_log=p.A_log,
            dt_bias=p.dt_bias.reshape(-1),
        )
    return out, final


def problem(packed: bool) -> Problem:
    if packed:
        return make(heads=HEADS, lens=[300, 0, 17, 130, 65])
    return make(2, 512, HEADS)


class Lines(logging.Handler):
    """Collects messages; FLA logs each decision once a process, so it is attached before the first call."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module")
def lines() -> Iterator[Lines]:
    logger = logging.getLogger("fla.backends")
    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("packed", [False, True])
def test_dispatches_here(
    lines: Lines,
    chunk_kda: Callable[..., Any],
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
) -> None:
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    p = problem(packed)
    out, final = client(chunk_kda, p)
    assert len(calls) == 1, f"flash_kda.fwd was called {len(calls)} times"
    assert LINE in lines.messages, f"FLA logged {lines.messages}"
    print(LINE)
    assert final.dtype == torch.float32
    want_out, want_final = oracle(p)
    assert_close("out", out, want_out)
    assert_close("final_state", final, want_final)


@pytest.mark.parametrize("packed", [False, True])
def test_agrees_with_the_triton_path(
    chunk_kda: Callable[..., Any], calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    p = problem(packed)
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    ours, ours_final = client(chunk_kda, p)
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    theirs, theirs_final = client(chunk_kda, p)
    assert len(calls) == 1, "FLA_FLASH_KDA=0 did not keep FLA on its own kernels"
    want_out, want_final = oracle(p)
    assert_close("FLA's out", theirs, want_out, FLA_BOUND)
    assert_close("FLA's final_state", theirs_final, want_final, FLA_BOUND)
    assert_close("out against FLA", ours, theirs, FLA_BOUND)
    assert_close("final_state against FLA", ours_final, theirs_final, FLA_BOUND)
