"""What an artifact contains, as plain frozen data; nothing here says whether that is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kernel:
    """One kernel entry of one image: resources as ``cuobjdump -res-usage`` prints them, and opcodes.

    `stack`, `local` and `shared` are bytes, `shared` static and with the 1024 bytes that the system reserves
    from sm_90 on.  `opcodes` counts the instructions by full mnemonic, for example ``HMMA.16816.F32.BF16``.
    """

    symbol: str
    registers: int
    stack: int
    local: int
    shared: int
    opcodes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Image:
    """One device image: `kind` is ``elf`` (machine code) or ``ptx``; `arch` is for example ``90a``.

    `functions` are device functions that were not inlined, `externals` device symbols left to the loader.
    """

    kind: str
    arch: str
    kernels: tuple[Kernel, ...] = ()
    functions: tuple[str, ...] = ()
    externals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Symbol:
    """One entry of ``.dynsym``; `version` is for example ``GLIBC_2.17`` or None."""

    name: str
    version: str | None = None
    weak: bool = False


@dataclass(frozen=True)
class VersionNeed:
    """One entry of ``.gnu.version_r``: `library` must offer `version`, for example ``GLIBCXX_3.4.21``."""

    library: str
    version: str


@dataclass(frozen=True)
class Elf:
    """The host side of a shared library."""

    machine: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    version_needs: tuple[VersionNeed, ...]
    undefined: tuple[Symbol, ...]
    exported: tuple[str, ...]
    sections: tuple[str, ...]


@dataclass(frozen=True)
class TorchAudit:
    """What torch-abi-audit says of a library; `minimum` is such as ``2.10.0``, None without torch symbols."""

    unstable: tuple[str, ...]
    shims: int
    minimum: str | None
    minimum_because: tuple[str, ...]
    unknown_shims: tuple[str, ...]


@dataclass(frozen=True)
class PythonAudit:
    """What abi3audit says of a library."""

    baseline: str
    computed: str
    violations: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """One shared library; `path` is its place in the wheel, or its file name when it was given alone.

    `toolkits` are the CUDA releases that compiled the images, such as ``13.0``, as the images themselves say.
    """

    path: str
    size: int
    elf: Elf
    images: tuple[Image, ...]
    toolkits: tuple[str, ...]
    torch: TorchAudit
    python: PythonAudit


@dataclass(frozen=True)
class PlatformAudit:
    """What ``auditwheel show`` says of a wheel; `blockers` maps a stricter tag to the reasons against it."""

    symbol_tag: str
    overall_tag: str
    unsupported_isa: bool
    blockers: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Metadata:
    """The fields of ``METADATA`` that the checks read; absent ones are empty."""

    name: str
    version: str
    requires_python: str
    requires_dist: tuple[str, ...]
    license_expression: str
    license_files: tuple[str, ...]
    invalid: tuple[str, ...]


@dataclass(frozen=True)
class Wheel:
    """The archive around the libraries; `tags` come from the name, `wheel_tags` from ``WHEEL``, expanded.

    `name` and `version` come from the file name, `module_version` from ``_version.py`` (None without one).
    `members` maps each file to its size, `digests` to its sha256; `top_level` is ``top_level.txt``.
    """

    filename: str
    size: int
    name: str
    version: str
    tags: tuple[str, ...]
    wheel_tags: tuple[str, ...]
    wheel_version: str | None
    root_is_purelib: bool | None
    dist_info: str
    members: Mapping[str, int]
    digests: Mapping[str, str]
    top_level: tuple[str, ...]
    metadata: Metadata
    module_version: str | None
    record_problems: tuple[str, ...]
    content_problems: tuple[str, ...]
    build_record: Mapping[str, object] | None
    sbom: Mapping[str, object] | None
    platform: PlatformAudit | None


@dataclass(frozen=True)
class Facts:
    """Everything gathered from one artifact; `wheel` is None for a library given alone."""

    artifact: str
    sha256: str
    libraries: tuple[Library, ...]
    wheel: Wheel | None = None
