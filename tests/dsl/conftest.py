"""The tests beside an installed CuTe DSL; run by ``python -m ci.dsl_matrix``. Nothing here needs a GPU.

They fail, never skip, where the DSL is not installed: no other run collects this folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tree under test, also when nothing is installed


@pytest.fixture(scope="session", autouse=True)
def installed_dsl() -> None:
    """Every test of this folder fails with the reason where there is no DSL."""
    from flash_kda import dsl

    if reason := dsl.installed().reason:
        pytest.fail(f"{reason.text}\nNext: nox -s dsl_matrix", pytrace=False)


def python(code: str, *options: str, cwd: Path = ROOT, **variables: str) -> str:
    """What a process prints that has these variables of the DSL's from its start, and no other of them."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("DSL_ARCH")}
    environment = {**own, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
