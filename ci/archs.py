"""``flash_kda.arch`` without ``flash_kda``: ``from ci.archs import arch``.

``import flash_kda.arch`` first runs the package's ``__init__``, which may need torch; planning a build,
reading the matrix and making an sdist must not.  The module is registered under its real name, so that code
which imports it the ordinary way later in the same process gets the same classes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
_NAME = "flash_kda.arch"


def _load() -> ModuleType:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    spec = importlib.util.spec_from_file_location(_NAME, ROOT / "flash_kda" / "arch.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {ROOT / 'flash_kda' / 'arch.py'}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from flash_kda import arch as arch
else:
    arch = _load()
