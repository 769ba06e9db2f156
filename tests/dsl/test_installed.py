"""What dsl.py reads out of the DSL's source, held against the DSL itself; what the gate makes of it.

Whatever imports the DSL does so in a process of its own: that changes what a later test would see.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import python as process

import flash_kda
from flash_kda import _library, _select, dsl, fla_install
from flash_kda.reasons import NO_PACKAGE, Reason

PRELUDE = """
import os, sys, warnings
from flash_kda import dsl
from flash_kda.arch import parse_target, runs
def pinned(first=None):
    return dsl.pinned(lambda: first)
"""


def python(code: str, *options: str, pin: str | None = None) -> str:
    """The last line that a process prints that has CUTE_DSL_ARCH from its start, or has it not."""
    variables = {} if pin is None else {dsl.ENV: pin}
    return process(PRELUDE + code, *options, **variables).splitlines()[-1]


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


# ---- the gate over the installed one -----------------------------------------------------------------------

RUBIN = (10, 7)


@pytest.fixture
def rubin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU of 10.7, a wheel without an image for it, no flash-linear-attention."""
    # Imported by another test, the DSL has guessed a target for want of a GPU, which would count as a pin.
    monkeypatch.delitem(sys.modules, "cutlass.base_dsl.dsl", raising=False)
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    monkeypatch.delenv("FLASH_KDA_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: RUBIN)
    status = _library.LibraryStatus(_library.LOADED, "x", "loaded x")
    monkeypatch.setattr(_library, "load", lambda: status)
    monkeypatch.setattr(_library, "built_choices", lambda: ())
    monkeypatch.setattr(fla_install, "_read", lambda cc: Reason(NO_PACKAGE, "hidden by this test"))
    monkeypatch.setitem(_select._LOADERS, "cute_dsl", lambda: None)
    _select.reset()
    yield
    monkeypatch.undo()
    _select.reset()


def call() -> tuple[Any, ...]:
    return ("cuda", 0, 128, 128, "bounded")


def knows_rubin() -> bool:
    version = tuple(int(part) for part in str(dsl.installed().version).split("."))
    return version >= tuple(int(part) for part in dsl.FIRST_VERSION[RUBIN].split("."))


def test_r1_r4_a_gpu_newer_than_the_dsl_falls_through_and_a_name_gets_our_message(rubin: None) -> None:
    assert ("sm_107a" in dsl.installed().members) == knows_rubin()
    if knows_rubin():
        assert _select.select("auto", *call()) == "cute_dsl"
        assert "compiles for sm_107a" in str(flash_kda.explain(capability="10.7"))
        return
    assert _select.select("auto", *call()) == "reference"
    assert _select.select("cute_dsl", *call()) is None
    error = _select.unavailable("cute_dsl", *call())
    assert error.code == "dsl_arch" and error.cc == RUBIN
    for part in (str(dsl.installed().version), "sm_107a", ">=4.8", "CUTE_DSL_ARCH=sm_100f"):
        assert part in str(error)


def test_r2_r10_the_family_pinned_serves_it(rubin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100f")
    assert _select.select("cute_dsl", *call()) == "cute_dsl"
    assert "compiles for sm_100f" in str(flash_kda.explain(capability="10.7"))
