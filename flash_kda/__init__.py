"""FlashKDA: the forward of Kimi Delta Attention on NVIDIA GPUs, with slower backends for other devices.

Importing needs no GPU and no compiled library. Without a usable torch the import still succeeds, so that
``python -m flash_kda`` can say what is wrong; the calls then raise ImportError.
"""

from __future__ import annotations

from typing import Any

from ._version import __version__
from .dispatch import Unavailable, is_backend_supported

try:
    from ._explain import explain
    from .interface import flash_kda_func, flash_kda_qkvpacked_func, flash_kda_varlen_func, fwd
except Exception as _error:  # torch is absent, half installed, too old, or its own libraries do not load
    _torch_error: Exception | None = _error
else:
    _torch_error = None

__all__ = [
    "Unavailable",
    "__version__",
    "explain",
    "flash_kda_func",
    "flash_kda_qkvpacked_func",
    "flash_kda_varlen_func",
    "fwd",
    "is_backend_supported",
]


def __getattr__(name: str) -> Any:
    if name in __all__ and _torch_error is not None:
        raise ImportError(
            f"flash_kda.{name} needs torch >= 2.10, which did not import: "
            f"{type(_torch_error).__name__}: {_torch_error}"
        ) from _torch_error
    raise AttributeError(f"module 'flash_kda' has no attribute {name!r}")
