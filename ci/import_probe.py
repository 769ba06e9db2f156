"""Uses an installed wheel on a machine without a GPU; run by ``ci/import_check.py`` with the folder it lies
in, by cibuildwheel without: the environment's own.

Exits non-zero with a line that says what failed.  Needs torch and flash_kda, nothing of this project's
``ci``.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

import flash_kda
from flash_kda import _library


def tensors() -> dict[str, Any]:
    """One chunk and a bit, two heads: arguments of ``flash_kda.fwd`` on the CPU."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 20, 2, 128).bfloat16() for _ in range(4))
    beta = torch.randn(1, 20, 2).bfloat16()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": 128**-0.5, "out": torch.zeros_like(v)}


def check_origin(folder: Path) -> None:
    """The package imported is the wheel's."""
    file = Path(flash_kda.__file__).resolve()
    if not file.is_relative_to(folder.resolve()):
        sys.exit(f"flash_kda: expected a file below {folder}, got {file}")


def check_library() -> None:
    """The compiled library loads under this torch and says what it was built for."""
    status = _library.load()
    if not status.loaded:
        sys.exit(f"library: expected it to load, got {status.code}: {status.text}")
    if not _library.built_choices():
        sys.exit("library: expected a list of architectures, got none")


def check_cpp_error() -> None:
    """An error thrown in C++ arrives as RuntimeError.  The CUDA kernel is called with CPU tensors, which it
    refuses."""
    given = tensors()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    rest = (None, None, -5.0, None, None, None)
    try:
        torch.ops.flash_kda.fwd.default.redispatch(keys, *given.values(), *rest)
    except RuntimeError as error:
        if "flash_kda" in str(error):
            return
        sys.exit(f"C++ error: expected a message of flash_kda, got {error}")
    sys.exit("C++ error: expected RuntimeError for CPU tensors, got none")


def check_reference() -> None:
    """The call works on CPU tensors."""
    given = tensors()
    flash_kda.fwd(**given, A_log=None, dt_bias=None, lower_bound=-5.0)
    if not torch.isfinite(given["out"].float()).all() or not given["out"].any():
        sys.exit("flash_kda.fwd on the CPU: expected finite, non-zero values, got others")


def main() -> None:
    """Run every check in turn."""
    check_origin(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("platlib")))
    check_library()
    check_cpp_error()
    check_reference()
    print(
        f"flash_kda {flash_kda.__version__} under Python {sys.version.split()[0]}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
