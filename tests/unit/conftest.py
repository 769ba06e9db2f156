"""Inputs and small helpers shared by the unit tests. Nothing here needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
sys.path.insert(0, str(ROOT))  # the tree under test, also when nothing is installed


def make_call(
    B: int = 2,
    T: int = 5,
    H: int = 2,
    HV: int = 2,
    K: int = 128,
    V: int = 128,
    *,
    cu_seqlens: Sequence[int] | None = None,
    state_dtype: Any = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Valid arguments of ``flash_kda.fwd`` by name, random and reproducible."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    state_dtype = state_dtype or torch.float32
    call = {
        "q": normal(B, T, H, K).bfloat16(),
        "k": normal(B, T, H, K).bfloat16(),
        "v": normal(B, T, HV, V).bfloat16(),
        "g": normal(B, T, HV, K).bfloat16(),
        "beta": normal(B, T, HV).bfloat16(),
        "scale": K**-0.5,
        "out": torch.full((B, T, HV, V), float("nan"), dtype=torch.bfloat16),
        "A_log": normal(HV),
        "dt_bias": normal(HV, K),
        "lower_bound": -5.0,
        "initial_state": normal(N, HV, V, K).to(state_dtype),
        "final_state": torch.full((N, HV, V, K), float("nan"), dtype=state_dtype),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int64),
    }
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()
    }


def oracle(call: dict[str, Any]) -> tuple[Any, Any]:
    """What the float64 oracle says of a call."""
    from flash_kda.reference import kda_reference

    names = (
        "q",
        "k",
        "v",
        "g",
        "beta",
        "scale",
        "A_log",
        "dt_bias",
        "lower_bound",
        "initial_state",
        "cu_seqlens",
    )
    return kda_reference(**{name: call[name] for name in names})


def relative(got: Any, want: Any) -> float:
    """Relative Frobenius error; NaN anywhere makes it NaN, which no bound admits."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(1e-300))


@pytest.fixture
def fixtures() -> Path:
    """Folder of the committed test artifacts."""
    return FIXTURES
