"""From environment variables and an nvcc to the architectures of a build.

Standard library only: ``setup.py`` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ci import devices
from ci.archs import arch
from ci.errors import ConfigError
from ci.nvcc import FOREIGN_FLAGS, Nvcc

STRICT = "FLASH_KDA_CUDA_ARCHS_STRICT"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def flag(environ: Mapping[str, str], name: str) -> bool:
    """Read an on/off variable; unset and blank are off, anything unclear is a ConfigError."""
    text = environ.get(name, "").strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{name}: expected 1 or 0, got {environ[name]!r}.\nNext: unset {name}, or set it to 1")


def strict_from(environ: Mapping[str, str]) -> bool:
    """Whether a target that ``all`` would leave out is an error."""
    return flag(environ, STRICT)


def selection_error(error: arch.ArchSelectionError, given_by: str = arch.ENV) -> ConfigError:
    """The same refusal as a ConfigError whose details hold the problems as plain data.

    `given_by` is where the value came from, when that was an option and not the variable.
    """
    problems = [{"item": p.item, "code": p.code, "text": p.text} for p in error.problems]
    text = str(error).replace(arch.ENV, given_by)
    return ConfigError(text, {"codes": list(error.codes), "problems": problems})


def check_archs(given: str | None) -> None:
    """Refuse an ``--archs`` that is no list of architectures, before anything else; None is no option."""
    if given is None:
        return
    choices, problems = arch.parse_list(given)
    if problems or not choices:
        said = "; ".join(f"{problem.item}: {problem.text}" for problem in problems) or "the list is empty."
        example = ",".join(row.target.name for row in arch.KERNEL_TARGETS[:2])
        raise ConfigError(
            f"--archs {given!r}: {said}\nNext: leave --archs out, or give a list such as {example}"
        )


def precheck(value: str | None) -> None:
    """Raise ArchSelectionError when FLASH_KDA_CUDA_ARCHS is wrong whatever the nvcc and the GPUs are.

    Runs before a toolkit is looked for, so that a blank variable is reported as that on any machine.
    """
    if value is None or value.strip().lower() in ("auto", "all"):
        return

    def unasked(_: arch.Target) -> bool:
        raise arch.ProbeError("not asked yet")

    try:
        arch.resolve(value, arch.KERNEL_TARGETS, unasked, list)
    except arch.ProbeError:
        return
    except arch.ArchSelectionError as error:
        if set(error.codes) & arch.VALUE_CODES:
            raise


def select(
    environ: Mapping[str, str],
    nvcc: Nvcc,
    visible: Callable[[], list[arch.Capability]] = devices.visible,
) -> arch.Resolution:
    """Choose the architectures for `nvcc`, compile an empty kernel for each, and collect the notices.

    Raises ArchSelectionError or ProbeError before anything of the project is compiled.
    """
    value = environ.get(arch.ENV)
    notices = []
    if value is None and "TORCH_CUDA_ARCH_LIST" in environ:
        listed = environ["TORCH_CUDA_ARCH_LIST"]
        notices.append(f"TORCH_CUDA_ARCH_LIST={listed!r} is ignored; {arch.ENV} chooses the architectures.")
    for name in FOREIGN_FLAGS:
        if name in environ:
            notices.append(f"{name} is ignored: it would add flags that the build record does not show.")
    chosen = arch.resolve(
        value,
        arch.KERNEL_TARGETS,
        nvcc.emits,
        visible,
        strict_from(environ),
        compiler=nvcc.label,
        compile_check=nvcc.compile_check,
    )
    return arch.Resolution(chosen.choices, chosen.notices + tuple(notices))
