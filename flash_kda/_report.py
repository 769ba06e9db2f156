"""Facts about this install, for ``python -m flash_kda``: each probe is guarded, none needs a GPU or torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from . import _library, arch, dispatch, fatbin
from ._version import __version__
from .dispatch import DeviceFacts, LibraryFacts, Refusal, Verdict
from .reasons import NO_DEVICE, UNKNOWN_BACKEND

SCHEMA = 1
DISTRIBUTION = "flash-kda"
IMPORT_NAME = "flash_kda"
RIVALS = ("tokenspeed-flashkda",)  # known to install an import package of our name
NO_TORCH = "no_torch"
NO_RECORD = f"the library came without a usable {_library.BUILD_RECORD.name}; reinstall."

_Answer = TypeVar("_Answer", Refusal, Verdict)

_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s")


@dataclass(frozen=True)
class Gpu:
    """One GPU: torch's name of the device, the product, the compute capability, whether AMD made it."""

    device: str
    name: str
    capability: str
    hip: bool = False


@dataclass(frozen=True)
class BackendChoice:
    """Which backend runs a call that names none; why those asked before it do not; what each one says.

    ``asked``: ``auto``, or what ``FLASH_KDA_BACKEND`` puts in its place.
    """

    device: str
    backend: str | None
    refusals: tuple[Refusal, ...]
    trace: tuple[Verdict, ...] = ()
    asked: str = dispatch.AUTO


@dataclass(frozen=True)
class Report:
    """Everything ``python -m flash_kda --json`` prints, field by field."""

    schema: int
    version: str
    python: str
    location: str
    build_record: dict[str, Any] | None
    library: dict[str, Any]
    torch: dict[str, Any]
    driver: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    choices: tuple[BackendChoice, ...]
    owners: tuple[str, ...]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def import_torch() -> tuple[Any, str | None]:
    """torch, or None and why it, or what this package needs of it, did not import."""
    error = sys.modules[IMPORT_NAME].__dict__["_torch_error"]
    if error is not None:
        return None, f"{type(error).__name__}: {error}"
    import torch

    return torch, None


def torch_facts(torch: Any, error: str | None) -> dict[str, Any]:
    """Version of torch, the CUDA it was built with, where it lies, or the error of its import."""
    if torch is None:
        return {"version": None, "cuda": None, "location": None, "error": error}
    location = str(Path(torch.__file__).parent)
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "location": location,
        "error": None,
    }


def library_facts(torch: Any) -> dict[str, Any]:
    """The compiled library: load status, what it says it holds, and what its bytes hold."""
    path = _library.LIBRARY
    facts: dict[str, Any] = {
        "path": str(path),
        "version": None,
        "built": [],
        "images": [],
        "images_error": None,
    }
    try:
        facts["images"] = [{"kind": i.kind, "target": i.target.name} for i in fatbin.images(path)]
    except FileNotFoundError:
        pass
    except (OSError, fatbin.FatbinError) as error:
        facts["images_error"] = str(error)
    if torch is None:
        return facts | {"code": NO_TORCH, "text": "not loaded: torch did not import"}
    status = _library.load()
    built = [choice.name for choice in _library.built_choices()]
    return facts | {
        "code": status.code,
        "text": status.text,
        "version": _library.library_version(),
        "built": built,
    }


def beside_copies(library: dict[str, Any], copies: list[Path]) -> dict[str, Any]:
    """The facts of a library that is not there, with the copy that hides or is hidden as the next step."""
    if library["code"] != _library.MISSING_FILE or not copies:
        return library
    others = ", ".join(str(copy) for copy in copies)
    text = (
        f"{_library.WITHOUT_KERNELS}: no {_library.LIBRARY.name} in {_library.FOLDER}. The import path also "
        f"has {others}: to use that copy, run from another folder"
    )
    return library | {"text": text}


def _cuda_of_driver() -> str | None:
    """Newest CUDA the driver runs, from the driver itself; needs no context and no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def driver_facts() -> dict[str, str | None]:
    """Version of the NVIDIA kernel module and the newest CUDA the driver runs, None for what is not there."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    match = _KERNEL_MODULE.search(text)
    return {"version": match[1] if match else None, "cuda": _cuda_of_driver()}


def _gpu(torch: Any, index: int) -> Gpu:
    capability = arch.dotted(torch.cuda.get_device_capability(index))
    return Gpu(f"cuda:{index}", torch.cuda.get_device_name(index), capability, torch.version.hip is not None)


def torch_gpus(torch: Any) -> tuple[tuple[Gpu, ...], str | None]:
    """GPUs torch can use, and what it says of the first that it counts and cannot use."""
    found: list[Gpu] = []
    try:
        if torch is not None and torch.cuda.is_available():
            # It counts with NVML: a GPU that CUDA cannot start is among them, and fails when asked.
            for index in range(torch.cuda.device_count()):
                found.append(_gpu(torch, index))
    except RuntimeError as error:
        first = (str(error) or type(error).__name__).splitlines()[0]  # advice on debugging follows it
        return tuple(found), f"cuda:{len(found)}: {first}"
    return tuple(found), None


def driver_gpus() -> tuple[str, ...]:
    """GPUs nvidia-smi lists, as text; it does not honour CUDA_VISIBLE_DEVICES."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def _label(device: DeviceFacts) -> str:
    """The device in words; one that need not be here has no index."""
    if device.capability is None or device.index is not None:
        return device.name
    return f"compute capability {arch.dotted(device.capability)}"


def _without_torch(device: DeviceFacts) -> BackendChoice:
    verdicts = tuple(
        Verdict(name, dispatch.AVAILABILITY, NO_TORCH, "torch did not import") for name in dispatch.ORDER
    )
    return BackendChoice(
        _label(device), None, tuple(Refusal(v.backend, v.code, v.text) for v in verdicts), verdicts
    )


def choice_on(device: DeviceFacts, library: LibraryFacts, has_torch: bool) -> BackendChoice:
    """What a call that names no backend runs on a device, with the library given."""
    if not has_torch:
        return _without_torch(device)
    from . import _select  # needs torch

    facts = _select.facts_for(device, library, {})
    request = _select.request(
        dispatch.AUTO,
        os.environ.get(dispatch.ENV),
        dispatch.CUDA_HEAD_DIM,
        dispatch.CUDA_HEAD_DIM,
        dispatch.BOUNDED,
    )
    decision = dispatch.decide(facts, request)
    return BackendChoice(
        _label(device),
        decision.backend,
        tuple(_without_tensors(refusal) for refusal in decision.refusals),
        tuple(_without_tensors(verdict) for verdict in dispatch.trace(facts, request)),
        request.backend,
    )


def _without_tensors(answer: _Answer) -> _Answer:
    # The decision words its refusal for a call, by the device of its tensors; a report has no tensors.
    if answer.code != NO_DEVICE:
        return answer
    return replace(answer, text="no GPU that torch can use")


def choices(devices: Iterable[DeviceFacts], library: dict[str, Any]) -> tuple[BackendChoice, ...]:
    """What ``auto`` runs on each device, for a bf16 call with K = V = 128."""
    built, _ = arch.parse_list(",".join(library["built"]))
    facts = LibraryFacts(library["code"], library["text"], tuple(built))
    return tuple(choice_on(device, facts, library["code"] != NO_TORCH) for device in devices)


def device_of(gpu: Gpu) -> DeviceFacts:
    """A GPU of the report as the decision sees it."""
    capability = arch.parse_capability(gpu.capability)
    return DeviceFacts("cuda", int(gpu.device.split(":")[1]), capability, gpu.hip)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(distribution: importlib.metadata.Distribution, file: str) -> str:
    """A metadata file, empty when there is none or it is not text."""
    try:
        return distribution.read_text(file) or ""
    except (OSError, ValueError):
        return ""


def _name(distribution: importlib.metadata.Distribution) -> str:
    """The name in the metadata; in damaged metadata the name in the folder's, NAME-VERSION.dist-info."""
    found = re.search(
        r"^Name: *(\S+)", _text(distribution, "METADATA") or _text(distribution, "PKG-INFO"), re.M
    )
    folder = str(getattr(getattr(distribution, "_path", None), "name", ""))
    return _normal(found[1] if found else folder.split("-")[0]) or "(a distribution without a name)"


def _owns_the_name(distribution: importlib.metadata.Distribution) -> bool:
    # packages_distributions() of Python 3.10 reads top_level.txt alone, which wheels of today do not have.
    if IMPORT_NAME in _text(distribution, "top_level.txt").split():
        return True
    return f"\n{IMPORT_NAME}/" in "\n" + _text(distribution, "RECORD")


def owners() -> tuple[str, ...]:
    """Installed distributions that own the import name, or are known to take it."""
    found = set()
    for distribution in importlib.metadata.distributions():
        name = _name(distribution)
        if name in RIVALS or _owns_the_name(distribution):
            found.add(name)
    return tuple(sorted(found))


def _copy_in(entry: str) -> Path | None:
    """The package of our name in one entry of an import path."""
    try:
        folder = Path(entry).resolve() / IMPORT_NAME
        return folder if (folder / "__init__.py").is_file() else None
    except (OSError, RuntimeError):  # a locked folder, a working directory that is gone; a link to itself
        return None


def other_copies(location: Path, path: list[str]) -> list[Path]:
    """Other folders on ``path`` that hold a package of our name: what runs depends on their order."""
    copies = dict.fromkeys(map(_copy_in, path))
    return [copy for copy in copies if copy is not None and copy != location]


def name_problems(owned_by: tuple[str, ...], location: Path, path: list[str]) -> list[str]:
    """What is wrong with who owns the import name."""
    problems = []
    foreign = [name for name in owned_by if name != DISTRIBUTION]
    if foreign:
        names = ", ".join(foreign)
        problems.append(
            f"another distribution installs the import name {IMPORT_NAME}: {names}. The one installed last "
            f"overwrote the other's files. Keep one: pip uninstall {names} {DISTRIBUTION}, then install "
            f"{DISTRIBUTION} again."
        )
    for copy in other_copies(location, path):
        problems.append(
            f"a second {IMPORT_NAME} is on the import path: {copy} (running: {location}). Run from another "
            "folder, or remove one."
        )
    return problems


def _recorded(record: dict[str, Any] | None, key: str) -> Any:
    return None if record is None else record.get(key)


def library_problems(library: dict[str, Any], record: dict[str, Any] | None) -> list[str]:
    """What is wrong with the compiled library: what it, its record and its bytes say must agree."""
    if library["code"] == NO_TORCH:
        return []
    if library["code"] == _library.MISSING_FILE:
        runs = "calls run on the backend named below, slowly if it is reference"
        return [f"no compiled kernels, {runs}: {library['text']}"]
    problems = []
    if library["code"] != _library.LOADED:
        problems.append(library["text"])
    elif record is None:
        problems.append(NO_RECORD)
    if library["images_error"]:
        return [*problems, f"the device images of the library cannot be read: {library['images_error']}"]
    holds = {image["target"] for image in library["images"] if image["kind"] == "elf"}
    claims = {"the build record": _recorded(record, "architectures")}
    if library["code"] == _library.LOADED:
        claims["the library"] = library["built"]
        base = str(library["version"]).split("+")[0]
        if base != __version__:
            problems.append(f"the library is of version {base}, the package of {__version__}; reinstall.")
    return problems + architecture_problems(claims, holds)


def architecture_problems(claims: dict[str, Any], holds: set[str]) -> list[str]:
    """Lists of architectures, by who gives them, that are not what the file holds."""
    return [
        f"{who} names the architectures {sorted(names)}, the file holds {sorted(holds)}; reinstall."
        for who, names in claims.items()
        if names is not None and {name.removesuffix("+PTX") for name in names} != holds
    ]


def device_problems(
    gpus: tuple[Gpu, ...],
    torch_info: dict[str, Any],
    made: tuple[BackendChoice, ...],
    unusable: str | None = None,
) -> list[str]:
    """GPUs that are there and not used."""
    problems = []
    if torch_info["error"]:
        problems.append(f"torch did not import ({torch_info['error']}); install torch >= 2.10.")
    if unusable is not None:
        problems.append(
            f"torch counts a GPU that it cannot use ({unusable}); see what nvidia-smi says of it, or leave "
            "it out of CUDA_VISIBLE_DEVICES."
        )
    seen = () if gpus or unusable is not None else driver_gpus()
    if seen:
        build = f"CUDA {torch_info['cuda']}" if torch_info["cuda"] else "a CPU build"
        problems.append(
            f"nvidia-smi lists {'; '.join(seen)}, and torch {torch_info['version']} ({build}) sees no GPU: "
            "install a CUDA build of torch that the driver can run, or unset CUDA_VISIBLE_DEVICES."
        )
    for choice in made:
        problems += [r.text for r in choice.refusals if r.code == UNKNOWN_BACKEND]
        if choice.asked != dispatch.AUTO:
            continue  # as the user wants it
        if choice.device.startswith("cuda") and choice.backend == dispatch.REFERENCE:
            why = "; ".join(f"{refusal.backend}: {refusal.text}" for refusal in choice.refusals)
            problems.append(f"{choice.device} is left to the slow reference backend. {why}")
    return problems


def driver_problems(driver: dict[str, str | None], record: dict[str, Any] | None) -> list[str]:
    """A driver older than the CUDA runtime inside the library. One major version's runtimes run under each of
    its drivers, so that only the majors are compared."""
    runs, toolkit = driver["cuda"], (_recorded(record, "cuda") or {}).get("toolkit")
    if runs is None or toolkit is None or _major(runs) >= _major(toolkit):
        return []
    return [
        f"the driver runs CUDA up to {runs}, and the library holds the runtime of CUDA {toolkit}: it needs a "
        f"driver for CUDA {_major(toolkit)} or newer; update the driver."
    ]


def _major(version: str) -> int:
    return int(version.split(".")[0])


def collect() -> Report:
    """Gathers everything. Never raises for what an install may lack."""
    torch, error = import_torch()
    torch_info = torch_facts(torch, error)
    library = beside_copies(library_facts(torch), other_copies(_library.FOLDER, sys.path))
    gpus, unusable = torch_gpus(torch)
    made = choices([device_of(gpu) for gpu in gpus] or [DeviceFacts("cpu")], library)
    owned_by, record, driver = owners(), _library.build_record(), driver_facts()
    problems = [
        *name_problems(owned_by, _library.FOLDER, sys.path),
        *library_problems(library, record),
        *driver_problems(driver, record),
        *device_problems(gpus, torch_info, made, unusable),
    ]
    return Report(
        schema=SCHEMA,
        version=__version__,
        python=platform.python_version(),
        location=str(_library.FOLDER),
        build_record=record,
        library=library,
        torch=torch_info,
        driver=driver,
        gpus=gpus,
        choices=made,
        owners=owned_by,
        problems=tuple(problems),
    )
