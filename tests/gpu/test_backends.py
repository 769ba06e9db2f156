"""Which backend runs on this GPU as images and packages go, each result against the oracle.

The wheel's image for this GPU is hidden from the decision, as if it had been built for another one. The
backends `cute_dsl` and `fla` are tried where their packages are installed; where not, it is said what is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from kda_gpu import Problem, assert_close, call, make, oracle
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
    if folder := request.config.getoption("--fla-path", default=None):
        sys.path.append(str(folder))
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
    final = torch.full(p.state_shape, float("nan"), device=p.v.device)
    call(p, out, final, backend=backend)
    want_out, want_final = oracle(p)
    assert_close(f"{backend}'s out", out, want_out, bound)
    assert_close(f"{backend}'s final_state", final, want_final, bound)


def problems() -> list[Problem]:
    """Short and long, batched and packed (with an empty sequence), grouped heads, states of both types."""
    packed = make(heads=4, lens=[300, 0, 17, 130, 65])
    return [make(2, 5, 2, 4), make(1, 64, 2), make(2, 200, 2, 4), packed, make(heads=2, lens=[3, 0, 20])]


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


def few_configurations_if_fla() -> None:
    if fla_install.reason(here()) is None:
        few_configurations()


@pytest.mark.parametrize("backend", ["cute_dsl", "fla"])
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("bounded", [True, False])
def test_a_backend_is_right(backend: str, number: int, bounded: bool) -> None:
    reason = dsl.installed().reason if backend == "cute_dsl" else fla_install.reason(here())
    if reason is not None:
        pytest.skip(f"BACKEND {backend} NOT TESTED: {reason.text}")
    few_configurations_if_fla()
    p = problems()[number]
    if not bounded:
        p = p.with_(lower_bound=None)
    right(p, backend)


def test_fla_calls_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := fla_install.reason(here())) is not None:
        pytest.skip(f"BACKEND fla NOT TESTED: {reason.text}")
    few_configurations()
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    calls: list[int] = []
    real = flash_kda.fwd
    monkeypatch.setattr(flash_kda, "fwd", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1])
    with torch.inference_mode():
        right(make(1, 200, 2), "fla")
    assert len(calls) == 1, "flash-linear-attention handed the call back"
