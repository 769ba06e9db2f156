"""Which GPUs a build can see, for ``FLASH_KDA_CUDA_ARCHS=auto``; standard library only, for ``setup.py``."""

from __future__ import annotations

import subprocess
import sys

from ci.archs import arch

_QUERY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")


def visible() -> list[arch.Capability]:
    """Compute capabilities of the visible GPUs, one a GPU; empty when there is none or no way to ask.

    A CUDA build of torch is asked when it can be imported; else nvidia-smi, which does not honour
    CUDA_VISIBLE_DEVICES (said on stderr).
    """
    asked = _from_torch()
    if asked is not None:
        return asked
    found = _from_smi()
    if found:
        print("flash_kda: GPUs listed by nvidia-smi, which ignores CUDA_VISIBLE_DEVICES.", file=sys.stderr)
    return found


def _from_torch() -> list[arch.Capability] | None:
    try:
        import torch
    except (ImportError, OSError):  # OSError: a CUDA build of torch without its libraries
        return None
    if torch.version.cuda is None:
        return None
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def _from_smi() -> list[arch.Capability]:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, check=False)
    except OSError:
        return []
    if done.returncode != 0:
        return []
    return parse_capabilities(done.stdout)


def parse_capabilities(text: str) -> list[arch.Capability]:
    """Read nvidia-smi's answer, one ``9.0`` a line; other lines (``[N/A]`` on old GPUs) are left out."""
    pairs = [line.strip().split(".") for line in text.splitlines()]
    # isdecimal, not isdigit: the latter takes a superscript two, which int() refuses.
    return [(int(p[0]), int(p[1])) for p in pairs if len(p) == 2 and p[0].isdecimal() and p[1].isdecimal()]
