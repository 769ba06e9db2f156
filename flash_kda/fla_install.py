"""The installed flash-linear-attention: whether its KDA can be called, without importing it or Triton.

Its kernels are compiled by Triton, and assembled by a ptxas that has to know the GPU: the one that comes with
Triton, or the one that a variable names. It is asked, once a process and GPU, with ``--help``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from pathlib import Path

from .arch import Capability, dotted, native
from .reasons import DSL_ARCH, NO_PACKAGE, PROBE_ERROR, Reason

DISTRIBUTION = "fla-core"  # what flash-linear-attention depends on, and enough by itself
OLDEST = (0, 6)  # the first whose KDA takes raw beta and grouped heads, and states of rows = value channels
EXTRA = "pip install 'flash-kda[fla]'"


def _version() -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None  # a source tree on the import path: its files are looked at all the same


def _too_old(version: str | None) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (int(found[1]), int(found[2])) < OLDEST


def _known_to(ptxas: str) -> frozenset[str] | None:
    """The targets that a ptxas says it takes; None for a file that is no ptxas that runs."""
    try:
        done = subprocess.run([ptxas, "--help"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    names = frozenset(re.findall(r"'(sm_[0-9]+[af]?)'", done.stdout))
    return names if done.returncode == 0 and names else None


def _assembler(folders: list[Path], cc: Capability) -> tuple[str, list[str]]:
    """The variable that names Triton's ptxas for a GPU, and where Triton looks, in its order."""
    inside = [folder / "backends" / "nvidia" / "bin" for folder in folders]
    name, variable = "ptxas", "TRITON_PTXAS_PATH"
    if cc >= (10, 0) and any((folder / "ptxas-blackwell").is_file() for folder in inside):
        name, variable = "ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"
    named = os.environ.get(variable)
    return variable, [*([named] if named else []), *(str(folder / name) for folder in inside)]


def _assembles(folders: list[Path], cc: Capability) -> Reason | None:
    variable, places = _assembler(folders, cc)
    wanted = native(cc).sm
    for place in places:
        known = _known_to(place)
        if known is None:
            continue  # as Triton does
        if wanted in known:
            return None
        text = (
            f"Triton's ptxas ({place}) has no target {wanted} for compute capability {dotted(cc)}; name a "
            f"newer one: export {variable}=/usr/local/cuda/bin/ptxas, or upgrade Triton"
        )
        return Reason(DSL_ARCH, text)
    where = ", ".join(places)
    return Reason(PROBE_ERROR, f"Triton has no ptxas that runs ({where}); name one with {variable}")


def _read(cc: Capability | None) -> Reason | None:
    # Top levels only: for a submodule find_spec imports the parent.
    package, triton = importlib.util.find_spec("fla"), importlib.util.find_spec("triton")
    if package is None:
        return Reason(NO_PACKAGE, f"flash-linear-attention is not installed; {EXTRA}")
    version = _version()
    folders = [Path(folder) / "ops" / "kda" for folder in package.submodule_search_locations or ()]
    needs = f"it needs {DISTRIBUTION} >= {OLDEST[0]}.{OLDEST[1]}"
    if _too_old(version):
        return Reason(NO_PACKAGE, f"{needs}, found {version}; {EXTRA}")
    if not any(folder.is_dir() for folder in folders):  # a script of that name hides an install too
        where = package.origin or ", ".join(package.submodule_search_locations or ())
        return Reason(NO_PACKAGE, f"{needs}, and the import name fla, without KDA, is {where}; {EXTRA}")
    if triton is None:
        return Reason(NO_PACKAGE, "it needs triton, which is not installed; pip install triton")
    if cc is None:
        return None
    return _assembles([Path(folder) for folder in triton.submodule_search_locations or ()], cc)


@functools.cache
def reason(cc: Capability | None) -> Reason | None:
    """Why it cannot be called, None when it can; looked at once a process and GPU. Never raises.

    Args:
        cc: compute capability of an NVIDIA GPU; None for others, which ptxas has nothing to do with.
    """
    try:
        return _read(cc)
    except Exception as error:  # whatever a foreign or damaged package makes of it
        text = f"flash-linear-attention could not be looked at ({type(error).__name__}: {error}); {EXTRA}"
        return Reason(PROBE_ERROR, text, error)


def reset() -> None:
    """Forgets the answer, for tests."""
    reason.cache_clear()
