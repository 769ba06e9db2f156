"""Inputs and small helpers shared by the unit tests. Nothing here needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
sys.path.insert(0, str(ROOT))  # the tree under test, also when nothing is installed


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
