"""The decision as a table: who runs what, in which order refusals are met, and that it is total."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flash_kda.arch import parse_list
from flash_kda.dispatch import (
    ORDER,
    DeviceFacts,
    Facts,
    LibraryFacts,
    Request,
    Unavailable,
    decide,
    is_backend_supported,
    trace,
)
from flash_kda.dsl import DslFacts, Install
from flash_kda.reasons import NO_PACKAGE, Reason

ROOT = Path(__file__).resolve().parents[2]


def facts(cc: tuple[int, int] | None, archs: str = "90a,100a", code: str = "loaded") -> Facts:
    device = DeviceFacts("cpu") if cc is None else DeviceFacts("cuda", 0, cc)
    library = LibraryFacts(code, f"the library: {code}", tuple(parse_list(archs)[0]))
    absent = Reason(NO_PACKAGE, "it is not installed")
    return Facts(device, library, lambda: DslFacts(Install(reason=absent)), lambda: absent)


@pytest.mark.parametrize(
    ("cc", "archs", "code"),
    [
        ((9, 0), "90a,100a", None),
        ((10, 3), "90a,100a", "not_in_wheel"),
        ((10, 0), "100f", None),
        ((10, 3), "100f", None),
        ((10, 7), "100f", None),
        ((12, 0), "100f", "not_in_wheel"),
        ((10, 0), "100a,100f", None),
        ((12, 1), "120a", "not_in_wheel"),
        ((12, 1), "120f", None),
        ((10, 3), "100f+PTX", None),
        ((12, 0), "100f+PTX", "not_in_wheel"),
        ((9, 0), "", "not_in_wheel"),
        ((8, 9), "90a", "no_kernel"),
        ((11, 0), "90a", "no_kernel"),
        ((13, 0), "90a", "no_kernel"),
        (None, "90a", "no_device"),
    ],
)
def test_what_runs_on_what(cc: tuple[int, int] | None, archs: str, code: str | None) -> None:
    decision = decide(facts(cc, archs), Request("cuda"))
    assert decision.backend == (None if code else "cuda")
    assert [refusal.code for refusal in decision.refusals] == ([code] if code else [])
    assert decide(facts(cc, archs), Request()).backend == ("reference" if code else "cuda")


def test_not_in_wheel_names_what_is_there_what_is_needed_and_what_to_do() -> None:
    text = decide(facts((10, 3)), Request("cuda")).refusals[0].text
    for part in ("90a, 100a", "10.3", "103a", "100f", "FLASH_KDA_CUDA_ARCHS=", "cuda:0"):
        assert part in text


def test_a_gpu_that_need_not_be_here_is_not_called_cuda() -> None:
    """``cuda`` alone is the name of a backend too."""
    elsewhere = replace(facts((10, 3)), device=DeviceFacts("cuda", None, (10, 3)))
    assert "and the GPU is of compute capability 10.3" in decide(elsewhere, Request("cuda")).refusals[0].text


@pytest.mark.parametrize("code", ["missing_file", "undefined_symbol", "load_error", "name_taken"])
def test_load_failures_keep_their_code_and_text(code: str) -> None:
    refusal = decide(facts((9, 0), "", code), Request("cuda")).refusals[0]
    assert (refusal.backend, refusal.code, refusal.text) == ("cuda", code, f"the library: {code}")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request("cuda", head_k=64), "K = 64, V = 128"),
        (Request("cuda", head_v=256), "K = 128, V = 256"),
        (Request("cuda", head_k=0), r"K = ?"),
        (Request("cuda", head_v=-1), r"V = ?"),
        (Request("cuda", gate="softplus"), "softplus"),
    ],
)
def test_unsuitable(request_: Request, says: str) -> None:
    refusal = decide(facts((9, 0)), request_).refusals[0]
    assert refusal.code == "unsuitable" and says in refusal.text


def test_capability_is_asked_before_availability_and_that_before_suitability() -> None:
    soft = Request("cuda", gate="softplus")
    assert decide(facts((8, 9), "", "missing_file"), soft).refusals[0].code == "no_kernel"
    assert decide(facts((9, 0), "", "missing_file"), soft).refusals[0].code == "missing_file"
    assert decide(facts((9, 0), "100a"), soft).refusals[0].code == "not_in_wheel"


def test_an_unknown_name_lists_the_known_ones() -> None:
    decision = decide(facts((9, 0)), Request("triton"))
    assert decision.backend is None and decision.refusals[0].code == "unknown_backend"
    assert all(name in decision.refusals[0].text for name in ("auto", *ORDER))


def test_it_is_total_and_auto_always_finds_a_backend() -> None:
    devices = [None, (0, 0), (8, 0), (9, 0), (10, 7), (99, 9)]
    codes = ("loaded", "missing_file", "undefined_symbol", "load_error", "name_taken", "anything")
    for cc, code, backend, k, gate in itertools.product(
        devices, codes, ("auto", *ORDER, "", "AUTO"), (0, 1, 128), ("bounded", "softplus", "?")
    ):
        decision = decide(facts(cc, "90a", code), Request(backend, k, 128, gate))
        assert (decision.backend is None) <= bool(decision.refusals)
        assert [verdict.backend for verdict in trace(facts(cc, "90a", code), Request())] == list(ORDER)
        if backend == "auto":
            assert decision.backend in ORDER


def test_capability_is_static() -> None:
    """R26's other half: which GPUs each backend was written for."""
    devices = ["7.5", "8.0", "8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1", "13.0"]
    written_for = {
        backend: [device for device in devices if is_backend_supported(backend, device)] for backend in ORDER
    }
    blackwell = ["10.0", "10.3", "10.7", "12.0", "12.1"]
    assert written_for == {
        "cuda": ["9.0", *blackwell],
        "cute_dsl": ["9.0", *blackwell],
        "fla": devices[1:],
        "reference": devices,
    }


@pytest.mark.parametrize(
    ("backend", "capability", "error"),
    [
        (None, "9.0", TypeError),
        (True, "9.0", TypeError),
        (b"cuda", "9.0", TypeError),
        ("", "9.0", ValueError),
        ("CUDA", "9.0", ValueError),
        ("auto", "9.0", ValueError),
        ("triton", "9.0", ValueError),
        ("cuda", None, TypeError),
        ("cuda", True, TypeError),
        ("cuda", 90, TypeError),
        ("cuda", (9, True), TypeError),
        ("cuda", (9.0, 0), TypeError),
        ("cuda", ("9", "0"), TypeError),
        ("cuda", {9, 0}, TypeError),
        ("cuda", "", ValueError),
        ("cuda", "90a", ValueError),
        ("cuda", "sm_90", ValueError),
        ("cuda", "9.0.0", ValueError),
        ("cuda", "\u0669.\u0660", ValueError),
        ("cuda", (9,), ValueError),
        ("cuda", (9, 0, 0), ValueError),
        ("cuda", (9, 10), ValueError),
        ("cuda", (-9, 0), ValueError),
        ("cuda", float("nan"), ValueError),
        ("cuda", 1e30, ValueError),
        ("cuda", 9.05, ValueError),
    ],
)
def test_a_bad_question_about_capability_is_refused(
    backend: object, capability: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"takes|there are"):
        is_backend_supported(backend, capability)  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", ["10.7", " 10.7 ", 10.7, (10, 7), [10, 7]])
def test_spellings_of_a_capability(capability: object) -> None:
    assert is_backend_supported("cute_dsl", capability) and not is_backend_supported("cute_dsl", (8, 9))


def test_amd_gpus_are_not_taken_for_nvidia_s() -> None:
    """An MI250 reports compute capability 9.0."""
    device = DeviceFacts("cuda", 0, (9, 0), hip=True)
    there = Facts(device, facts((9, 0)).library, facts((9, 0)).cute_dsl, lambda: None)
    decision = decide(there, Request())
    assert decision.backend == "fla"
    assert [(r.backend, r.code) for r in decision.refusals] == [
        ("cuda", "no_kernel"),
        ("cute_dsl", "no_kernel"),
    ]
    assert all("AMD" in refusal.text for refusal in decision.refusals)


@pytest.mark.parametrize(
    ("request_", "backend"),
    [
        (Request(gate="softplus"), "cute_dsl"),
        (Request(head_k=64, head_v=64), "fla"),
        (Request(head_k=256, head_v=512), "fla"),
        (Request(head_k=257), "reference"),
        (Request(head_k=16, head_v=16, gate="softplus"), "fla"),
        (Request(head_k=15), "reference"),
        (Request(head_v=15), "reference"),
        (Request(head_k=0), "reference"),
        (Request(head_k=-1, head_v=-1), "fla"),
        (Request(head_k=-1, head_v=0), "reference"),
        (Request(), "cuda"),
    ],
)
def test_each_backend_takes_what_suits_it(request_: Request, backend: str) -> None:
    names = ("sm_90", "sm_90a")
    everything = Facts(
        DeviceFacts("cuda", 0, (9, 0)),
        facts((9, 0)).library,
        lambda: DslFacts(Install("4.8.1", names)),
        lambda: None,
    )
    assert decide(everything, request_).backend == backend


def test_unavailable_lists_every_reason() -> None:
    refusals = decide(facts((8, 9)), Request("cuda")).refusals + decide(facts(None), Request("cuda")).refusals
    error = Unavailable("auto", "cuda:0", refusals)
    assert isinstance(error, ValueError) and error.code == "no_kernel" and error.refusals == refusals
    assert all(refusal.text in str(error) for refusal in refusals)


def test_unavailable_can_be_copied_and_sent_to_another_process() -> None:
    error = Unavailable("cuda", "cuda:0", decide(facts((8, 9)), Request("cuda")).refusals, (8, 9), True)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is Unavailable and str(again) == str(error) and vars(again) == vars(error)


def test_the_decision_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import flash_kda.dispatch as d; print(d.ORDER)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
