"""Makes the artifacts of test_verify*.py: small libraries with real device code, and wheels around them.

Device code is compiled by the locked nvcc; the host side stands in for the CUDA runtime and is linked by g++.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from ci import sbom, source
from ci.errors import CiError
from ci.source import combined

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "verify"
EPOCH = 1_700_000_000
LABEL, VERSION, NAME = "cu130", "0.1.0", "flash_kda"
LIBRARY = "flash_kda/_C.abi3.so"
TAG = "cp310-abi3-manylinux_2_28_x86_64"
GOOD_CODE = ("arch=compute_90a,code=sm_90a", "arch=compute_100a,code=sm_100a")
_STUBS = {
    "torch": ("libtorch.so", ""),
    "torch_cpu": ("libtorch_cpu.so", "int aoti_torch_get_dim(void) { return 0; }"),
    "future": ("libm.so.6", "int from_the_future(void) { return 0; }"),
    "cudart": ("libcudart.so.13", ""),
}


def run(*command: str | Path) -> None:
    """Run a command; on failure the assertion shows what it printed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@dataclass(frozen=True)
class Forge:
    """Compiles and links under `folder`; `home` is the CUDA toolkit.  The same order twice is made once."""

    folder: Path
    home: Path

    @property
    def cuobjdump(self) -> Path:
        return self.home / "bin" / "cuobjdump"

    def device(self, *gencodes: str, macros: Sequence[str] = (), flags: Sequence[str] = ()) -> Path:
        """Object file with the kernels of kernels.cu for `gencodes`."""
        words = [f"-D{macro}" for macro in macros] + list(flags)
        words += [word for gencode in gencodes for word in ("-gencode", gencode)]
        target = self.folder / f"device-{_digest(*words)}.o"
        if not target.exists():
            nvcc = self.home / "bin" / "nvcc"
            common = ("-std=c++17", "-O3", "-w", "-Xcompiler", "-fPIC,-fvisibility=hidden")
            run(nvcc, *common, *words, "-c", FIXTURES / "kernels.cu", "-o", target)
        return target

    def library(
        self,
        device: Path | None,
        *,
        macros: Sequence[str] = (),
        libraries: Sequence[str] = (),
        strip: bool = True,
        flags: Sequence[str] = (),
        static_unwinder: bool = False,
    ) -> Path:
        """``_C.abi3.so`` of `device` and host.cpp; `libraries`: more stubs to need; `flags`: for the link."""
        words = [str(device), *macros, *libraries, str(strip), *flags, str(static_unwinder)]
        target = self.folder / f"library-{_digest(*words)}" / "_C.abi3.so"
        if target.exists():
            return target
        target.parent.mkdir()
        script = self._exports(macros)
        needed = [f"-l{name}" for name in ("torch", "torch_cpu", *libraries)]
        unwinder = ["-static-libgcc"] if static_unwinder else ["-lgcc_s"]
        defines = [f"-D{macro}" for macro in macros]
        inputs = [FIXTURES / "host.cpp", *([device] if device else [])]
        search = f"-L{self._stubs()}"
        tail = ["-Wl,--no-as-needed", *needed, *unwinder, "-Wl,--as-needed", *(["-s"] if strip else [])]
        compile_words = ("-shared", "-O1", "-fPIC", "-fvisibility=hidden", *defines)
        run("g++", *compile_words, *inputs, *flags, script, search, *tail, "-o", target)
        return target

    def _exports(self, macros: Sequence[str]) -> str:
        names = ["flash_kda_version", "flash_kda_cuda_archs"] + (
            ["leaked"] if "EXTRA_EXPORT" in macros else []
        )
        path = self.folder / f"exports-{len(names)}.map"
        path.write_text("{ global: " + "; ".join(names) + "; local: *; };\n")
        return f"-Wl,--version-script={path}"

    def _stubs(self) -> Path:
        folder = self.folder / "stubs"
        if folder.is_dir():
            return folder
        folder.mkdir()
        script = folder / "future.map"
        script.write_text("GLIBC_2.99 { global: *; };\n")
        for name, (soname, text) in _STUBS.items():
            source = folder / f"{name}.c"
            source.write_text(text + "\n")
            version = [f"-Wl,--version-script={script}"] if name == "future" else []
            run(
                "gcc",
                "-shared",
                "-fPIC",
                source,
                f"-Wl,-soname,{soname}",
                *version,
                "-o",
                folder / f"lib{name}.so",
            )
        return folder

    def good(self) -> Path:
        """A library that meets fixture expectations for 90a and 100a."""
        return self.library(self.device(*GOOD_CODE))

    def expectations(self) -> Path:
        """The repository's expectations, with the kernels of the fixture in place of the real ones."""
        folder = self.folder / "expectations"
        if not folder.is_dir():
            folder.mkdir()
            for name in ("platform.toml", "wheel.toml"):
                shutil.copy(ROOT / "wheels" / "expectations" / name, folder / name)
            for name in ("kernels.toml", "size.toml"):
                shutil.copy(FIXTURES / name, folder / name)
        return folder


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


BUILD_RECORD: dict[str, object] = {
    "schema": 1,
    "name": "flash-kda",
    "version": f"{VERSION}+{LABEL}",
    "python": "cp310-abi3",
    "cxx": "g++ 12.2.0",
    "linker": "GNU ld 2.40",
    "cuda": {"toolkit": "13.0", "nvcc": "13.0.88", "ptxas": "13.0.88"},
    "torch": {"built_with": "2.13.0", "target": "2.10"},
    "flags": {"cxx": ["-O3"], "nvcc": ["-O3"], "link": ["-s"]},
    "tools": {"setuptools": "84.2.1", "ninja": None},
    "architectures": ["90a", "100a"],
    "built_not_run": ["100a"],
}
METADATA = f"""Metadata-Version: 2.4
Name: flash-kda
Version: {VERSION}+{LABEL}
Summary: a wheel of the tests
License-Expression: MIT
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: torch>=2.10
Requires-Dist: nvidia-cutlass-dsl<5,>=4.6.2; extra == "cute"
Requires-Dist: fla-core>=0.6; extra == "fla"
"""


@dataclass(frozen=True)
class WheelPlan:
    """A wheel to write; the defaults make one that passes.  Each test changes one thing."""

    library: Path
    filename: str = f"{NAME}-{VERSION}+{LABEL}-{TAG}.whl"
    metadata: str = METADATA
    tag: str = TAG
    record: Mapping[str, object] | None = field(default_factory=lambda: BUILD_RECORD)
    licenses: Mapping[str, bytes] = field(default_factory=lambda: {"LICENSE": b"MIT License\n"})
    dist_info: str = f"{NAME}-{VERSION}+{LABEL}.dist-info"
    module_version: str = VERSION
    extra: Mapping[str, bytes] = field(default_factory=dict)
    edit_record: Callable[[str], str] = str
    edit_sbom: Callable[[str], str] = str
    after_record: Mapping[str, bytes | None] = field(default_factory=dict)
    tamper: Mapping[str, bytes | None] = field(default_factory=dict)
    source: Mapping[str, object] = field(default_factory=dict)
    wheel_version: str = "1.0"

    def change(self, **changes: object) -> WheelPlan:
        """A copy with `changes`."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def write(self, folder: Path) -> Path:
        """Write the wheel into `folder` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.filename
        files = self._files()
        rows = [f"{name},{_hash(data)},{len(data)}" for name, data in files.items()]
        record = self.edit_record("\n".join([*rows, f"{self.dist_info}/RECORD,,"]) + "\n")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in {
                **files,
                f"{self.dist_info}/RECORD": record.encode(),
                **self.after_record,
            }.items():
                if data is not None:
                    archive.writestr(name, data)
        return path

    def _files(self) -> dict[str, bytes]:
        wheel = f"Wheel-Version: {self.wheel_version}\nGenerator: tests\n"
        wheel += f"Root-Is-Purelib: false\nTag: {self.tag}\n"
        package = {
            "flash_kda/__init__.py": b"from flash_kda._version import __version__\n",
            "flash_kda/_version.py": f'__version__ = "{self.module_version}"\n'.encode(),
            "flash_kda/py.typed": b"",
        }
        files = {
            **package,
            LIBRARY: self.library.read_bytes(),
            **self.extra,
            f"{self.dist_info}/METADATA": self.metadata.encode(),
            f"{self.dist_info}/WHEEL": wheel.encode(),
            f"{self.dist_info}/top_level.txt": b"flash_kda\n",
            **{f"{self.dist_info}/licenses/{name}": data for name, data in self.licenses.items()},
        }
        if self.record is not None:
            record = {"source": self._source(package), **self.record}
            files["flash_kda/build_record.json"] = json.dumps(record).encode()
            files[f"{self.dist_info}/{sbom.MEMBER}"] = self.edit_sbom(self._sbom(record)).encode()
        changed = {**files, **self.tamper}
        return {name: data for name, data in changed.items() if data is not None}

    def _sbom(self, record: Mapping[str, object]) -> str:
        """That of the record; none where the test has spoiled it."""
        try:
            return sbom.make(record, EPOCH)
        except CiError:
            return "{}"

    def _source(self, package: Mapping[str, bytes]) -> dict[str, object]:
        built = {**package, "csrc/kernels.cu": b""}
        files = {name: hashlib.sha256(data).hexdigest() for name, data in built.items()}
        return {"sha256": combined(files), "files": files, "commit": "a" * 40, "dirty": False, **self.source}


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@lru_cache(maxsize=1)
def head() -> dict[str, object]:
    """What the build record of a wheel says of its sources when they are those of this checkout's commit."""
    commit = source.revision().commit
    assert commit is not None
    files = source.digests_at(commit)
    return {"commit": commit, "dirty": False, "sha256": combined(files), "files": files}


@lru_cache(maxsize=1)
def cuda_home() -> Path:
    """The locked toolkit of the first row of ci/matrix.toml, installed into the cache."""
    from ci import matrix, toolchain

    return toolchain.ensure(matrix.load().rows[0].toolkit)
