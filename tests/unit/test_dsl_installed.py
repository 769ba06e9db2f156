"""What dsl.py reads out of the DSL's source, held against the DSL itself; skipped where it is not installed.

Each in a process of its own: importing the DSL changes what a later test would see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_kda import dsl

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    dsl.installed().reason is not None, reason=f"needs an installed {dsl.DISTRIBUTION}"
)
PRELUDE = """
import os, sys, warnings
from flash_kda import dsl
from flash_kda.arch import parse_target, runs
def pinned(first=None):
    return dsl.pinned(lambda: first)
"""


def python(code: str, *options: str, pin: str | None = None) -> str:
    """What a process prints that has CUTE_DSL_ARCH from its start, or has it not."""
    environment = {name: value for name, value in os.environ.items() if name != dsl.ENV}
    if pin is not None:
        environment[dsl.ENV] = pin
    command = [sys.executable, *options, "-c", PRELUDE + code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


RELATION = """
import cutlass
try:
    from cutlass.base_dsl.enums import Arch
except ImportError:
    from cutlass.base_dsl.arch import Arch
members = dsl.installed().members
assert set(members) == set(Arch.__members__), set(members) ^ set(Arch.__members__)
targets = {name: dsl._target(name, dsl.installed()) for name in members}
wrong = [(device, name) for device in members for name in members
         if targets[device].suffix == "a" or targets[device].major < 9
         if Arch[device].can_run_binary_built_for(Arch[name]) != runs(targets[name], targets[device].cc)]
print(wrong)
"""


def test_the_members_and_the_relation_are_the_dsl_s() -> None:
    assert python(RELATION) == "[]"


def test_r16_reading_imports_nothing_and_warns_of_nothing() -> None:
    code = "print(dsl.installed().reason, [name for name in sys.modules if name.startswith('cutlass')])"
    assert python(code, "-W", "error") == "None []"


LATE = "import cutlass; os.environ['CUTE_DSL_ARCH'] = 'sm_103f'; print(pinned())"


@pytest.mark.parametrize("pin", [None, "sm_100f"])
def test_r18_a_variable_set_after_the_import_is_ignored(pin: str | None) -> None:
    assert python(LATE, pin=pin) == str(pin)


def test_r18_the_target_it_detected_is_no_pin() -> None:
    """Without a GPU it takes sm_100a."""
    detect = (
        "import cutlass; from cutlass.base_dsl.dsl import DSLSingletonMeta as meta\n"
        "found = [i.envar.arch for i in meta._instances.values() if i.name == 'CUTE_DSL']\n"
        "first = parse_target(found[0]).cc\n"
        "print(len(found), pinned(first), pinned((8, 0)) == found[0])\n"
    )
    assert python(detect) == "1 None True"


def test_r19_before_the_import_the_variable_is_read_anew() -> None:
    code = "a = pinned(); os.environ['CUTE_DSL_ARCH'] = 'sm_103f'; print(a, pinned())"
    assert python(code, pin="sm_100f") == "sm_100f sm_103f"
