"""The public calls: the drop-in contract of flash-linear-attention, the wrappers, the choice of a backend."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import make_call
from conftest import oracle, relative

import flash_kda
from flash_kda import _library, _select, dsl, fla_install
from flash_kda.backends import reference
from flash_kda.dispatch import Unavailable
from flash_kda.reasons import NO_PACKAGE, Reason

OUT_BOUND = 2.5e-3
STATE_BOUND = 1e-6


def test_positional_order_is_the_drop_in_one() -> None:
    parameters = inspect.signature(flash_kda.fwd).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound"),
        *("initial_state", "final_state", "cu_seqlens"),
    ]
    assert {n: parameters[n].default for n in positional[10:]} == dict.fromkeys(positional[10:])
    keywords = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {"backend": "auto", "segment_tokens": None}


@pytest.mark.parametrize("ends", [None, [0, 3, 3, 11]])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_client_call_of_flash_linear_attention(ends: list[int] | None, with_state: bool) -> None:
    """What fla-core 0.6.0's chunk_kda does once it has found this package, with its caller's loosest inputs.

    It runs in inference mode, passes five tensors, the scale and the output by position and the rest by
    name, reshapes a flat dt_bias, makes initial_state contiguous, turns cu_seqlens to int64, allocates an
    fp32 final state, and passes q, k, v, g, beta as they come: here slices of one projection.
    """
    call = make_call(B=1 if ends else 2, T=11, H=3, HV=3, cu_seqlens=ends)
    want_out, want_final = oracle(call | {"initial_state": call["initial_state"] if with_state else None})
    B, _, H, K = call["q"].shape
    with torch.inference_mode():
        projection = torch.cat([call[n].flatten(2) for n in ("q", "k", "v", "g")], dim=-1)
        q, k, v, g = (part.unflatten(-1, (H, K)) for part in projection.chunk(4, dim=-1))
        dt_bias = call["dt_bias"].reshape(-1).view(H, -1)
        initial = (
            call["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2) if with_state else None
        )
        cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32).to(torch.long)
        out = torch.empty_like(v)
        N = len(ends) - 1 if ends else B
        final = torch.empty(N, H, K, K, dtype=torch.float32)
        result = flash_kda.fwd(
            q,
            k,
            v,
            g,
            call["beta"],
            K**-0.5,
            out,
            A_log=call["A_log"],
            dt_bias=dt_bias,
            lower_bound=-5,
            initial_state=None if initial is None else initial.contiguous(),
            final_state=final,
            cu_seqlens=cu_seqlens,
        )
    assert result is None
    assert relative(out, want_out) < OUT_BOUND
    assert relative(final, want_final) < STATE_BOUND


def test_keywords_and_positions_agree() -> None:
    by_name, by_position = make_call(), make_call()
    flash_kda.fwd(**by_name)
    flash_kda.fwd(*by_position.values())
    assert torch.equal(by_name["out"], by_position["out"])


def inputs(call: dict[str, Any]) -> dict[str, Any]:
    return {n: t for n, t in call.items() if n not in ("out", "final_state")}


def test_func_returns_what_fwd_writes() -> None:
    call = make_call(T=9, HV=4)
    out, final = flash_kda.flash_kda_func(**inputs(call), output_final_state=True)
    flash_kda.fwd(**call)
    assert torch.equal(out, call["out"]) and torch.equal(final, call["final_state"])
    assert flash_kda.flash_kda_func(**inputs(call))[1] is None


def test_varlen_func_takes_packed_tensors() -> None:
    call = make_call(B=1, T=9, cu_seqlens=[0, 4, 9])
    flash_kda.fwd(**call)
    packed = inputs(call) | {n: call[n][0] for n in ("q", "k", "v", "g", "beta")}
    out, final = flash_kda.flash_kda_varlen_func(**packed, output_final_state=True)
    assert torch.equal(out, call["out"][0]) and torch.equal(final, call["final_state"])


def test_qkvpacked_func_reads_the_fused_buffer() -> None:
    call = make_call(T=9)
    flash_kda.fwd(**call)
    rest = {n: t for n, t in inputs(call).items() if n not in ("q", "k", "v")}
    qkv = torch.stack([call[n] for n in ("q", "k", "v")], dim=2)
    out, final = flash_kda.flash_kda_qkvpacked_func(qkv, **rest, output_final_state=True)
    assert torch.equal(out, call["out"]) and torch.equal(final, call["final_state"])


@pytest.mark.parametrize(
    ("function", "change", "error", "name"),
    [
        (flash_kda.flash_kda_func, {"q": None}, TypeError, "q"),
        (flash_kda.flash_kda_func, {"v": [1]}, TypeError, "v"),
        (flash_kda.flash_kda_func, {"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens"),
        (flash_kda.flash_kda_func, {"k": torch.zeros(3)}, TypeError, "k"),
        (flash_kda.flash_kda_varlen_func, {"cu_seqlens": None}, TypeError, "cu_seqlens"),
        (flash_kda.flash_kda_varlen_func, {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "q"),
    ],
)
def test_wrappers_name_the_argument(
    function: Any, change: dict[str, Any], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=f"argument '{name}'"):
        function(**(inputs(make_call()) | change))


FUNCTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "fwd": lambda call: flash_kda.fwd(**call),
    "flash_kda_func": lambda call: flash_kda.flash_kda_func(**inputs(call)),
    "flash_kda_varlen_func": lambda call: flash_kda.flash_kda_varlen_func(
        **(inputs(call) | {n: call[n][0] for n in ("q", "k", "v", "g", "beta")})
    ),
    "flash_kda_qkvpacked_func": lambda call: flash_kda.flash_kda_qkvpacked_func(
        torch.stack([call[n] for n in ("q", "k", "v")], dim=2),
        **{n: t for n, t in inputs(call).items() if n not in ("q", "k", "v")},
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("given", "handed_on"),
    [({}, -1), ({"segment_tokens": None}, -1)] + [({"segment_tokens": n}, n) for n in (0, 256, 4096)],
)
def test_every_call_hands_segment_tokens_to_the_operator(
    monkeypatch: pytest.MonkeyPatch, name: str, given: dict[str, Any], handed_on: int
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(reference, "run", lambda *arguments: seen.append(arguments))
    FUNCTIONS[name](make_call(B=1, T=9, cu_seqlens=[0, 4, 9]) | given)
    assert [arguments[13:] for arguments in seen] == [(handed_on,)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_call_refuses_a_bad_segment(name: str) -> None:
    call = make_call(B=1, T=9, cu_seqlens=[0, 4, 9])
    for bad, error in ((264, ValueError), (-1, ValueError), (True, TypeError), (256.0, TypeError)):
        with pytest.raises(error, match=r"argument 'segment_tokens': got .*, takes None"):
            FUNCTIONS[name](call | {"segment_tokens": bad})
    assert call["out"].isnan().all()


def test_segment_tokens_is_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        flash_kda.fwd(*make_call().values(), "auto", 256)  # type: ignore[misc]


def test_qkvpacked_refuses_another_third_dimension() -> None:
    call = make_call()
    with pytest.raises(ValueError, match="argument 'qkv'"):
        flash_kda.flash_kda_qkvpacked_func(torch.stack([call["q"]] * 2, dim=2), call["g"], call["beta"])


def test_no_silent_loss_of_a_gradient() -> None:
    call = make_call()
    call["A_log"] = torch.nn.Parameter(call["A_log"])
    with pytest.raises(ValueError, match=r"argument 'A_log'.*requires grad"):
        flash_kda.flash_kda_func(**inputs(call))
    with pytest.raises(ValueError, match=r"argument 'A_log'.*requires grad"):
        flash_kda.fwd(**call)
    assert call["out"].isnan().all()
    with torch.no_grad():
        flash_kda.flash_kda_func(**inputs(call))
        flash_kda.fwd(**call)
    assert not call["out"].requires_grad and call["out"].grad_fn is None


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(
        Unavailable, match=r"backend='triton'.*auto, cuda, cute_dsl, fla, reference"
    ) as caught:
        flash_kda.fwd(**make_call(), backend="triton")
    assert caught.value.code == "unknown_backend"


def test_the_named_backend_is_taken_or_refused() -> None:
    with pytest.raises(Unavailable, match="cpu") as caught:
        flash_kda.fwd(**make_call(), backend="cuda")
    assert isinstance(caught.value, ValueError) and caught.value.code == "no_device"
    call = make_call()
    flash_kda.fwd(**call, backend="reference")
    assert call["out"].isfinite().all()


@pytest.fixture
def gpu_without_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0 and an install without the library."""
    status = _library.LibraryStatus(_library.MISSING_FILE, "x", "the library is missing")
    monkeypatch.setattr(_library, "load", lambda: status)
    monkeypatch.setattr(_library, "built_choices", lambda: ())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    absent = Reason(NO_PACKAGE, "it is not installed")
    monkeypatch.setattr(fla_install, "_read", lambda cc: absent)
    monkeypatch.setattr(dsl, "_read_install", lambda: dsl.Install(reason=absent))
    monkeypatch.delenv("FLASH_KDA_BACKEND", raising=False)
    _select.reset()
    yield
    _select.reset()


@pytest.mark.usefixtures("gpu_without_images")
def test_auto_falls_to_the_slow_backend_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flash_kda"):
        for gate in ("bounded", "bounded", "softplus"):
            assert _select.select("auto", "cuda", 0, 128, 128, gate) == "reference"
    (record,) = caplog.records
    assert all(f"{backend}: " in record.getMessage() for backend in ("cuda", "cute_dsl", "fla"))
    assert "the library is missing" in caplog.text and "cuda:0" in caplog.text


@pytest.mark.usefixtures("gpu_without_images")
def test_an_explicit_request_does_not_fall() -> None:
    wanted = ("cuda", "cuda", 0, 128, 128, "bounded")
    assert _select.select(*wanted) is None
    error = _select.unavailable(*wanted)
    assert (
        error.code == "missing_file" and error.device == "cuda:0" and "the library is missing" in str(error)
    )


@pytest.mark.parametrize(
    "name", ["fwd", "flash_kda_func", "flash_kda_varlen_func", "flash_kda_qkvpacked_func"]
)
def test_the_help_names_every_argument(name: str) -> None:
    function = getattr(flash_kda, name)
    text = inspect.getdoc(function) or ""
    listed = re.findall(r"^ {4}([\w, ]+):", text.partition("Args:")[2].partition("Raises:")[0], re.MULTILINE)
    named = {word.strip() for names in listed for word in names.split(",")}
    assert set(inspect.signature(function).parameters) - named == set()
    assert "orward only" in text
