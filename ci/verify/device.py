"""Facts of the device side of a shared library, read from cuobjdump's text.

Traps (cuobjdump 13.5.37): the exit code is 0 for a library with PTX alone, so it is no verdict; ``-lelf``
shows 100f as ``sm_100``; a plain dump prints ``arch =`` for PTX as for machine code; spills are counted as
STACK, LOCAL stays 0; of a linked and a relocatable fatbin section only the linked one is shown (the other, of
``-rdc`` objects that nobody device-linked, is judged by its name).

Whatever this parser does not recognise is an error: a tool whose format changed must not make a check pass
because nothing was found.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ci.errors import ToolchainError
from ci.verify.facts import Image, Kernel

_NO_DEVICE_CODE = "does not contain device code"
_HEADER = re.compile(r"^Fatbin (.+) code:$")
_ARCH = re.compile(r"^arch = (\S+)$")
_SM = re.compile(r"^sm_(\d{2,3}[af]?)$")
_RESOURCE_FUNCTION = re.compile(r"^ Function (\S+):$")
_RESOURCES = re.compile(r"^  REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+) ")
_SASS_FUNCTION = re.compile(r"^\t\tFunction : (\S+)$")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P(?:\d+|T)\s+)?([A-Z][A-Z0-9_.]*)")
_SYMBOL = re.compile(r"^([A-Z_]+)\s+(LOCAL|GLOBAL|WEAK)\s+\S+\s+(\S+)\s+(U\s)?\s*(\S*)$")
_RELEASE = re.compile(rb"Cuda compilation tools, release (\d+\.\d+), V")
# Start of an ELF file in the format that CUDA 12 writes for sm_90 and older: it has no .note.nv.tkinfo.
_WITHOUT_NOTE = b"\x7fELF\x02\x01\x01\x33\x07"
# Placeholders that every image of sm_90 and newer has; the driver fills them in.
_RESERVED = (".nv.reservedSmem.",)


@dataclass
class _Draft:
    kind: str
    arch: str = ""
    resources: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    opcodes: dict[str, Counter[str]] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    externals: list[str] = field(default_factory=list)
    symbols_seen: bool = False


def read_images(library: Path, cuobjdump: Path) -> tuple[Image, ...]:
    """The device images of `library`, perhaps none; ToolchainError when the tool's text is unknown."""
    done = _run([str(cuobjdump), "-symbols", "-res-usage", "-sass", str(library)])
    if done.returncode != 0:
        if _NO_DEVICE_CODE in done.stdout + done.stderr:
            return ()
        raise ToolchainError(
            f"{cuobjdump.name} failed on {library.name}: expected exit status 0, got {done.returncode}:\n"
            f"{done.stderr.strip()}\nRun: {cuobjdump} -sass {library}"
        )
    images = parse_dump(done.stdout)
    if not images:
        raise _unknown("an image", f"nothing, though {cuobjdump.name} did not say '{_NO_DEVICE_CODE}'")
    return images


def read_toolkits(library: Path, cuobjdump: Path) -> tuple[str, ...]:
    """CUDA releases that the machine-code images name as their compiler, sorted: ``("13.0",)``.

    An image in the format that has no place for it names none.
    """
    with tempfile.TemporaryDirectory(prefix="flash-kda-cubins-") as folder:
        done = _run([str(cuobjdump), "-xelf", "all", str(library.resolve())], folder)
        cubins = sorted(Path(folder).glob("*.cubin"))
        if done.returncode != 0 and cubins:
            raise ToolchainError(f"{cuobjdump.name} -xelf failed on {library.name}: {done.stderr.strip()}")
        images = {cubin.name: cubin.read_bytes() for cubin in cubins}
        telling = {name: data for name, data in images.items() if not data.startswith(_WITHOUT_NOTE)}
        return tuple(sorted({_release(data, name) for name, data in telling.items()}))


def _release(cubin: bytes, name: str) -> str:
    match = _RELEASE.search(cubin)
    if match is None:
        raise _unknown("'Cuda compilation tools, release X.Y' in .note.nv.tkinfo", f"no such text in {name}")
    return match.group(1).decode("ascii")


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise ToolchainError(
            f"cannot run {command[0]}: {error}. Expected cuobjdump of the locked toolkit; see --cuobjdump."
        ) from error


def parse_dump(text: str) -> tuple[Image, ...]:
    """Read the text of ``cuobjdump -symbols -res-usage -sass``; ToolchainError on anything unknown."""
    return tuple(_finish(_read_block(kind, lines)) for kind, lines in _blocks(text.splitlines()))


def _blocks(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    kind: str | None = None
    block: list[str] = []
    for line in lines:
        match = _HEADER.match(line)
        if match is None:
            block.append(line)
            continue
        if kind is not None:
            yield kind, block
        elif any(item.strip() for item in block):
            raise _unknown("'Fatbin ... code:' first", repr(next(item for item in block if item.strip())))
        kind, block = match.group(1), []
    if kind is not None:
        yield kind, block


def _read_block(kind: str, lines: list[str]) -> _Draft:
    if kind not in ("elf", "ptx"):
        raise _unknown("an elf or ptx image", f"'Fatbin {kind} code:'")
    draft = _Draft(kind)
    function = resource = ""
    for line in lines:
        if draft.symbols_seen and line.strip():
            _read_symbol(draft, line)
        elif line == "symbols:":
            draft.symbols_seen = True
        elif match := _INSTRUCTION.match(line):
            _opcodes_of(draft, function)[match.group(1)] += 1
        elif match := _SASS_FUNCTION.match(line):
            function = match.group(1)
            draft.opcodes[function] = Counter()
        elif match := _RESOURCE_FUNCTION.match(line):
            resource = match.group(1)
        elif match := _RESOURCES.match(line):
            registers, stack, shared, local = (int(group) for group in match.groups())
            draft.resources[resource] = (registers, stack, local, shared)
        elif match := _ARCH.match(line):
            draft.arch = match.group(1)
    return draft


def _opcodes_of(draft: _Draft, function: str) -> Counter[str]:
    if function not in draft.opcodes:
        raise _unknown("'Function : NAME' before the first instruction", "an instruction")
    return draft.opcodes[function]


def _read_symbol(draft: _Draft, line: str) -> None:
    match = _SYMBOL.match(line)
    if match is None:
        raise _unknown("a symbol line", repr(line))
    kind, _, other, undefined, name = match.groups()
    if undefined:
        if name and not name.startswith(_RESERVED):
            draft.externals.append(name)
    elif kind == "FUNC":
        (draft.entries if other == "ENTRY" else draft.functions).append(name)


def _finish(draft: _Draft) -> Image:
    match = _SM.match(draft.arch)
    if match is None:
        raise _unknown("'arch = sm_N'", repr(draft.arch))
    if draft.kind == "elf" and not draft.symbols_seen:
        raise _unknown(f"'symbols:' for {draft.arch}", "none")
    strays = sorted((set(draft.resources) | set(draft.opcodes)) - set(draft.entries) - set(draft.functions))
    if strays:
        raise _unknown(f"the functions of {draft.arch} among its symbols", f"{strays} elsewhere only")
    kernels = tuple(_kernel(draft, entry) for entry in sorted(draft.entries))
    return Image(
        draft.kind,
        match.group(1),
        kernels,
        tuple(sorted(draft.functions)),
        tuple(sorted(draft.externals)),
    )


def _kernel(draft: _Draft, entry: str) -> Kernel:
    if entry not in draft.resources:
        raise _unknown(f"'Function {entry}:' and 'REG: STACK: SHARED: LOCAL:' for {draft.arch}", "none")
    if not draft.opcodes.get(entry):
        raise _unknown(f"instructions of {entry} for {draft.arch}", "none")
    registers, stack, local, shared = draft.resources[entry]
    return Kernel(entry, registers, stack, local, shared, dict(sorted(draft.opcodes[entry].items())))


def _unknown(expected: str, got: str) -> ToolchainError:
    return ToolchainError(
        f"cuobjdump's output has a form this checker does not know: expected {expected}, got {got}. "
        "Nothing was verified. Run cuobjdump -symbols -res-usage -sass on it; adapt ci/verify/device.py."
    )
