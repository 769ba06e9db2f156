"""Verdicts on the device code: which images and kernels are there, what they use, which instructions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ci.errors import ConfigError, InstructionError, ResourceError, SassError
from ci.platforms import HOST
from ci.verify.expectations import EVERY_ARCH, Budget, KernelGroup, LibraryExpectation
from ci.verify.facts import Image, Kernel, Library
from ci.verify.request import Request
from ci.verify.verdicts import Sheet, Verdict, listing

_RELOCATABLE = "__nv_relfatbin"
_SASS_HINT = "Look at: cuobjdump -lelf -lptx LIBRARY. Build again: "
_BUDGET_HINT = (
    "Read the kernel's change; when the new numbers are meant: python -m ci.verify observe ARTIFACT"
)
_OPCODE_HINT = "Look at: cuobjdump -sass -fun KERNEL LIBRARY"


def check_contract(libraries: Iterable[Library], request: Request) -> Verdict:
    """Every (kernel entry x architecture) is there as machine code, and nothing else is."""
    sheet = Sheet("sass", SassError, _SASS_HINT + rebuild_command(request))
    found = {library.path: library for library in libraries}
    for expected in request.libraries:
        library = found.get(expected.path)
        if (
            sheet.check(library is not None, expected.path, "missing library", expected.path, listing(found))
            and library
        ):
            _check_images(sheet, library, expected, request)
    return sheet.verdict()


def rebuild_command(request: Request) -> str:
    """What builds the expected architectures: the row's command, or the variable where no row is known."""
    wanted = ",".join(f"{name}+PTX" if name in request.ptx else name for name in request.archs)
    if request.row is None:
        return f"FLASH_KDA_CUDA_ARCHS={wanted} pip wheel --no-build-isolation --no-deps ."
    platform = request.project.platform
    elsewhere = "" if platform == HOST else f" --platform {platform}"
    narrowed = "" if wanted == request.row.value else f" --archs {wanted}"
    return f"nox -s build_wheels -- --cuda {request.row.label}{elsewhere}{narrowed}"


def _check_images(sheet: Sheet, library: Library, expected: LibraryExpectation, request: Request) -> None:
    for kind, archs in (("elf", request.archs), ("ptx", request.ptx)):
        label = "machine code for architecture" if kind == "elf" else "PTX for architecture"
        sheet.same_set(library.path, label, archs, {i.arch for i in library.images if i.kind == kind})
    relocatable = _RELOCATABLE in library.elf.sections
    sheet.check(
        not relocatable, library.path, "device code never linked", "linked images", f"section {_RELOCATABLE}"
    )
    for arch in request.archs:
        images = _images(library, arch)
        if not images:
            continue
        where = f"{library.path} [{arch}]"
        wanted = {symbol for group in expected.groups if _covers(group, arch) for symbol in group.symbols}
        entries = [kernel.symbol for image in images for kernel in image.kernels]
        sheet.same_set(where, "kernel", wanted, entries)
        sheet.equal(where, "kernel entries", len(set(entries)), len(entries))
        functions = {name for image in images for name in image.functions} - set(expected.functions)
        allowed = listing(expected.functions)
        sheet.check(not functions, where, "device function that was not inlined", allowed, listing(functions))
        # From sm_120 on a bulk copy in a form that the hardware lacks becomes a call of such a symbol
        # (__cuda_syscall_cp_async_bulk_*): STACK reads 0, and the first launch reserves gigabytes.
        externals = {name for image in images for name in image.externals} - set(expected.externals)
        allowed = listing(expected.externals)
        sheet.check(not externals, where, "external device symbol", allowed, listing(externals))


def _images(library: Library, arch: str) -> list[Image]:
    return [image for image in library.images if image.kind == "elf" and image.arch == arch]


def _covers(group: KernelGroup, arch: str) -> bool:
    return group.archs is None or arch in group.archs


def _pairs(libraries: Iterable[Library], request: Request) -> Iterator[tuple[str, str, KernelGroup, Kernel]]:
    """(subject, arch, expectation, kernel) of each kernel that is both expected and there."""
    found = {library.path: library for library in libraries}
    for expected in request.libraries:
        if expected.path not in found:
            continue
        by_symbol = {symbol: group for group in expected.groups for symbol in group.symbols}
        for arch in request.archs:
            for image in _images(found[expected.path], arch):
                for kernel in image.kernels:
                    group = by_symbol.get(kernel.symbol)
                    if group is not None and _covers(group, arch):
                        yield f"{kernel.symbol} [{arch}]", arch, group, kernel


def check_resources(libraries: Iterable[Library], request: Request) -> Verdict:
    """Registers, stack, local and static shared memory of each kernel stay within its written budget."""
    sheet = Sheet("resources", ResourceError, _BUDGET_HINT)
    for subject, arch, group, kernel in _pairs(libraries, request):
        budget = budget_for(group, arch)
        for name in ("registers", "stack", "local", "shared"):
            limit, used = getattr(budget, name), getattr(kernel, name)
            unit = "a thread" if name == "registers" else "bytes"
            sheet.check(used <= limit, subject, f"{name} over budget", f"at most {limit} {unit}", str(used))
    return sheet.verdict()


def budget_for(group: KernelGroup, arch: str) -> Budget:
    """The budget of `group` on `arch`; ConfigError when nobody wrote one."""
    budget = group.budget.get(arch) or group.budget.get(EVERY_ARCH)
    if budget is None:
        raise ConfigError(
            f"{group.symbols[0]}: no budget for {arch}: expected one, or one for 'all', in the file, "
            f"got {listing(group.budget)}. Run: python -m ci.verify observe ARTIFACT"
        )
    return budget


def check_instructions(libraries: Iterable[Library], request: Request) -> Verdict:
    """Each kernel has the instructions it must use and none it must not."""
    sheet = Sheet("instructions", InstructionError, _OPCODE_HINT)
    for subject, arch, group, kernel in _pairs(libraries, request):
        for pattern in (*group.require, *group.require_on.get(arch, ())):
            count = count_opcodes(kernel, pattern)
            sheet.check(count > 0, subject, "missing instruction", pattern, _nearest(kernel, pattern))
        for pattern in group.forbid:
            count = count_opcodes(kernel, pattern)
            sheet.check(count == 0, subject, "forbidden instruction", f"no {pattern}", f"{count} of them")
    return sheet.verdict()


def count_opcodes(kernel: Kernel, pattern: str) -> int:
    """How many instructions of `kernel` are `pattern` (``A|B``: either) or begin with it and a dot."""
    names = pattern.split("|")
    hits = (count for opcode, count in kernel.opcodes.items() if any(_is(opcode, name) for name in names))
    return sum(hits)


def _is(opcode: str, name: str) -> bool:
    return opcode == name or opcode.startswith(name + ".")


def _nearest(kernel: Kernel, pattern: str) -> str:
    stems = {name.split(".")[0] for name in pattern.split("|")}
    near = [opcode for opcode in kernel.opcodes if opcode.split(".")[0] in stems]
    return listing(near) if near else f"none among {len(kernel.opcodes)} opcodes"
