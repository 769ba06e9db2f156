"""``setup.py``: metadata and sdist without tools, refusals, the wheel, and the same bytes from any folder.

A small csrc stands in for the kernels; setup.py, ci and flash_kda are the real ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ci import matrix, toolchain
from ci.extension import flags, record
from flash_kda import dsl, fla_install

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "flash_kda", "ci")
OURS = ("FLASH_KDA_", "MAX_JOBS", "NVCC_", "CUDA_", "CXX", "TORCH_CUDA_ARCH_LIST", "SOURCE_DATE_EPOCH")

BINDING = """\
#include <torch/csrc/stable/tensor.h>
#include "kda/fwd.h"
#define TEXT_(...) #__VA_ARGS__
#define TEXT(...) TEXT_(__VA_ARGS__)
#define API extern "C" __attribute__((visibility("default")))
API const char* flash_kda_cuda_archs() { return TEXT(FLASH_KDA_CUDA_ARCHS_BUILT); }
API const char* flash_kda_version() { return TEXT(FLASH_KDA_VERSION); }
API int flash_kda_hidden(const torch::stable::Tensor& t) { return kda_launch(static_cast<int>(t.dim())); }
"""
HEADER = "#pragma once\n#define FACTOR 3\nint kda_launch(int n);\n"
KERNEL = """\
#include <cuda_bf16.h>
#include "fwd.h"
namespace flash_kda {
__constant__ float table[4];
template <int N> __global__ void kda_fwd_kernel(float* out) {
  __shared__ float buffer[64];
  buffer[threadIdx.x] = table[threadIdx.x & 3] * N;
  __syncthreads();
  out[threadIdx.x] = buffer[63 - threadIdx.x] * FACTOR;
}
}  // namespace flash_kda
int kda_launch(int n) {
  flash_kda::kda_fwd_kernel<3><<<n, 64>>>(nullptr);
  flash_kda::kda_fwd_kernel<5><<<n, 64>>>(nullptr);
  return static_cast<int>(cudaGetLastError());
}
"""
EXPORTS = "{ global: flash_kda_cuda_archs; flash_kda_version; local: *; };\n"


def make_tree(folder: Path, kernel: str = KERNEL) -> Path:
    """A source tree with the small csrc; `folder` must not exist."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "build_record.json")
    folder.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    (folder / "README.md").write_text("# FlashKDA\n", encoding="utf-8")
    files = {"binding.cpp": BINDING, "exports.map": EXPORTS, "kda/fwd.h": HEADER, "kda/fwd.cu": kernel}
    for name, text in files.items():
        path = folder / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without anything a build reads, plus `variables`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    return {**kept, "SOURCE_DATE_EPOCH": "1700000000", **variables}


def setup(tree: Path, words: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", *words]
    return subprocess.run(command, cwd=tree, env=environment(**variables), capture_output=True, text=True)


def build(tree: Path, **variables: str) -> Path:
    """Build a wheel in `tree`; its path."""
    home = str(toolchain.ensure("13.0"))
    done = setup(tree, ["bdist_wheel"], {"CUDA_HOME": home, "FLASH_KDA_CUDA_ARCHS": "90a,100f", **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("first") / "source")


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build(tree, FLASH_KDA_LOCAL_VERSION="cu130", MAX_JOBS="1", NVCC_THREADS="1")


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("flash_kda/_C.abi3.so", tmp_path_factory.mktemp("wheel")))


# ---- without tools -----------------------------------------------------------------------------------------

BARE = """\
import socket, sys
def refuse(*_, **__): raise AssertionError("network used")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "ninja", "rich"):
            raise AssertionError(name + " looked for")
sys.meta_path.insert(0, NoTorch())
import setuptools.build_meta as backend
print(getattr(backend, sys.argv[1])(sys.argv[2]))
"""


def bare(tree: Path, hook: str, out: Path, **variables: str) -> str:
    """Run a hook of the build backend with no network, torch, nvcc or git; what it returned."""
    empty = out.parent / "empty"
    empty.mkdir(exist_ok=True)
    environ = environment(PATH=str(empty), CUDA_HOME="/nowhere", **variables)
    command = [sys.executable, "-c", BARE, hook, str(out)]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def metadata(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (folder / "METADATA").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        key, _, value = line.partition(": ")
        found.setdefault(key, []).append(value)
    return found


def test_metadata_needs_nothing(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    name = bare(tree, "prepare_metadata_for_build_wheel", out, FLASH_KDA_LOCAL_VERSION="cu130")
    found = metadata(out / name)
    project = matrix.load().project
    assert found["Name"] == ["flash-kda"]
    assert found["Version"][0].endswith("+cu130")
    always = [f"torch>={project.torch_target}"]
    assert [wanted for wanted in found["Requires-Dist"] if "extra ==" not in wanted] == always
    extras = [re.split("[<>;]", wanted)[0] for wanted in found["Requires-Dist"] if wanted not in always]
    assert extras == [dsl.DISTRIBUTION, fla_install.DISTRIBUTION]
    assert (
        f"{fla_install.DISTRIBUTION}>={'.'.join(map(str, fla_install.OLDEST))};" in found["Requires-Dist"][-1]
    )
    assert f">={matrix.load().dsl[0]};" in found["Requires-Dist"][-2]  # the oldest that is tested beside
    assert found["Provides-Extra"] == ["cute", "fla"]
    assert all(
        f"[{name}]" in hint
        for name, hint in zip(found["Provides-Extra"], (dsl.EXTRA, fla_install.EXTRA), strict=True)
    )
    assert found["Requires-Python"] == [f">=3.{project.python_tag.removeprefix('cp3')}"]
    assert found["License-Expression"] == ["MIT"]
    assert found["License-File"] == ["LICENSE"]
    assert (out / name / "licenses" / "LICENSE").is_file() or (out / name / "LICENSE").is_file()


def test_sdist_needs_nothing_and_is_whole(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with tarfile.open(out / bare(tree, "build_sdist", out)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked")  # ours; filter= is newer than Debian 12's Python
    for part in (
        "setup.py",
        "LICENSE",
        "README.md",
        "csrc/binding.cpp",
        "csrc/exports.map",
        "csrc/kda/fwd.cu",
    ):
        assert part in names
    assert {"csrc/kda/fwd.h", "ci/matrix.toml", "ci/extension/command.py", "ci/toolchain/13.0.lock"} <= names
    assert {"flash_kda/py.typed", "flash_kda/_version.py", "flash_kda/arch.py"} <= names
    assert not [
        name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("tests", "build"))
    ]
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    bare(unpacked, "prepare_metadata_for_build_wheel", out)


def test_without_cuda_on_purpose(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "source")
    done = setup(tree, ["bdist_wheel"], {"FLASH_KDA_SKIP_CUDA_BUILD": "1", "CUDA_HOME": "/nowhere"})
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [
        name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", "build_record.json"))
    ]
    assert "no CUDA kernels are built" in done.stderr


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """A toolkit whose nvcc notes each call; ``calls`` in the folder has them."""
    path = tmp_path / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cuda/calls\necho "release 13.0, V13.0.88"\n')
    path.chmod(0o755)
    return tmp_path / "cuda"


@pytest.mark.parametrize("value", ["", "  ", ",", "foo", "90a+PTX", "all,90a"])
def test_a_wrong_value_is_refused_before_nvcc(tree: Path, watched: Path, value: str) -> None:
    done = setup(tree, ["build_ext"], {"CUDA_HOME": str(watched), "FLASH_KDA_CUDA_ARCHS": value})
    assert done.returncode != 0
    assert f"ConfigError: FLASH_KDA_CUDA_ARCHS={value!r}: cannot build for" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (watched / "calls").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"FLASH_KDA_LOCAL_VERSION": ""}, "FLASH_KDA_LOCAL_VERSION: expected"),
        ({"FLASH_KDA_LOCAL_VERSION": "CU130"}, "FLASH_KDA_LOCAL_VERSION: expected"),
        ({"FLASH_KDA_LOCAL_VERSION": "cu13-0"}, "FLASH_KDA_LOCAL_VERSION: expected"),
        ({"FLASH_KDA_SKIP_CUDA_BUILD": "perhaps"}, "FLASH_KDA_SKIP_CUDA_BUILD: expected 1 or 0"),
        ({"CUDA_HOME": "/nowhere"}, "no CUDA toolkit: expected bin/nvcc"),
        ({"CXX": "no-such-compiler"}, "the C++ compiler 'no-such-compiler' does not start"),
        ({"FLASH_KDA_CUDA_ARCHS": "80a"}, "cannot build for 80a"),
        ({"FLASH_KDA_CUDA_ARCHS": "107a"}, "cannot emit 107a; needs CUDA 13.4 or newer"),
        ({"FLASH_KDA_CUDA_ARCHS": "all", "FLASH_KDA_CUDA_ARCHS_STRICT": "1"}, "cannot build for 107a"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS: expected a positive integer"),
        ({"FLASH_KDA_LINK_SYSROOT": "/nowhere"}, "FLASH_KDA_LINK_SYSROOT='/nowhere': expected"),
        ({"FLASH_KDA_SOURCE_COMMIT": "HEAD"}, "FLASH_KDA_SOURCE_COMMIT: expected <sha>"),
    ],
)
def test_wrong_variables_are_refused(tmp_path: Path, variables: Mapping[str, str], said: str) -> None:
    tree = make_tree(tmp_path / "source")
    home = str(toolchain.ensure("13.0"))
    done = setup(tree, ["bdist_wheel"], {"CUDA_HOME": home, "FLASH_KDA_CUDA_ARCHS": "90a", **variables})
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tree.rglob("*.whl"))


def test_a_compiler_error_ends_the_build(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "source", kernel='#error "this source is wrong"\n')
    home = str(toolchain.ensure("13.0"))
    done = setup(tree, ["build_ext"], {"CUDA_HOME": home, "FLASH_KDA_CUDA_ARCHS": "90a"})
    assert done.returncode != 0
    assert "this source is wrong" in done.stdout
    assert "BuildError: compiling failed" in done.stderr


LOCAL = {
    "anonymous kernel": "namespace { __global__ void extra() {} }\nvoid use() { extra<<<1, 1>>>(); }",
    "anonymous variable": "namespace { __device__ int extra; }\n__global__ void use() { extra = 1; }",
    "static variable": "namespace kda { static __device__ int extra; __global__ void use() { ++extra; } }",
}


@pytest.mark.parametrize("name", LOCAL)
def test_device_code_with_folder_dependent_names_is_refused(tmp_path: Path, name: str) -> None:
    tree = make_tree(tmp_path / "source", kernel=f"{KERNEL}\n{LOCAL[name]}\n")
    home = str(toolchain.ensure("13.0"))
    done = setup(tree, ["build_ext"], {"CUDA_HOME": home, "FLASH_KDA_CUDA_ARCHS": "90a"})
    assert done.returncode != 0
    assert "csrc/kda/fwd.cu: device code with internal linkage" in done.stderr


# ---- the wheel ---------------------------------------------------------------------------------------------


def test_name_and_contents(wheel: Path) -> None:
    tag = matrix.load().project.python_tag
    assert re.fullmatch(rf"flash_kda-[0-9.]+\+cu130-{tag}-abi3-linux_x86_64\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "flash_kda/_C.abi3.so",
        "flash_kda/build_record.json",
        "flash_kda/py.typed",
        "flash_kda/arch.py",
    } <= set(names)
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert not [name for name in names if name.startswith(("ci/", "csrc/", "tests/"))]


def test_build_record(wheel: Path, tree: Path) -> None:
    found = json.loads(zipfile.ZipFile(wheel).read("flash_kda/build_record.json"))
    assert found["version"].endswith("+cu130")
    assert found["architectures"] == ["90a", "100f"]
    assert found["cuda"] == {"toolkit": "13.0", "nvcc": "13.0.88", "ptxas": "13.0.88"}
    assert found["torch"]["target"] == matrix.load().project.torch_target
    assert found["source"] == record.sources(tree)
    assert (found["source"]["commit"], found["source"]["dirty"]) == (None, None)
    made_from = found["source"]["files"]
    assert {"csrc/binding.cpp", "flash_kda/__init__.py", "flash_kda/py.typed"} <= set(made_from)
    with zipfile.ZipFile(wheel) as archive:
        shipped = {n: hashlib.sha256(archive.read(n)).hexdigest() for n in archive.namelist()}
    assert {n: h for n, h in made_from.items() if n.startswith("flash_kda/")}.items() <= shipped.items()
    assert "arch=compute_100f,code=sm_100f" in found["flags"]["nvcc"]
    assert str(tree) not in json.dumps(found)
    assert str(Path.home()) not in json.dumps(found)


def _tool(name: str, path: Path, *words: str) -> str:
    return subprocess.run([name, *words, str(path)], capture_output=True, text=True, check=True).stdout


def test_b34_images_are_the_exported_list(wheel: Path, library: Path) -> None:
    said = _tool(str(toolchain.ensure("13.0") / "bin" / "cuobjdump"), library)
    images = {match[1] for match in re.finditer(r"^arch = sm_(\w+)$", said, re.MULTILINE)}
    import torch  # noqa: F401  (the library needs torch's libraries in the process)

    opened = ctypes.CDLL(str(library), os.RTLD_LAZY)
    opened.flash_kda_cuda_archs.restype = ctypes.c_char_p
    opened.flash_kda_version.restype = ctypes.c_char_p
    exported = opened.flash_kda_cuda_archs().decode().split(",")
    recorded = json.loads(zipfile.ZipFile(wheel).read("flash_kda/build_record.json"))["architectures"]
    assert images == set(exported) == set(recorded) == {"90a", "100f"}
    assert f"-{opened.flash_kda_version().decode()}-" in wheel.name


def test_linked_libraries(library: Path) -> None:
    said = _tool("readelf", library, "-d")
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", said))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert needed <= {
        "libtorch.so",
        "libtorch_cpu.so",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libm.so.6",
        "libc.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "librt.so.1",
        "ld-linux-x86-64.so.2",
    }
    assert "RPATH" not in said
    assert "RUNPATH" not in said


def test_exports_and_sections(library: Path, tree: Path) -> None:
    defined = {line.split()[-1] for line in _tool("nm", library, "-D", "--defined-only").splitlines()}
    assert defined == {"flash_kda_cuda_archs", "flash_kda_version"}  # flash_kda_hidden is not in the map
    sections = _tool("readelf", library, "-SW")
    assert not re.search(r"\.debug|\.symtab|build-id", sections)
    data = library.read_bytes()
    for path in (str(tree), str(Path.home()), sys.prefix):
        assert path.encode() not in data
    assert b"torch/include/torch/csrc/stable" in data  # __FILE__ was mapped, not dropped


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _torch_that_cannot_be_imported(folder: Path) -> Path:
    """A place for PYTHONPATH: torch's headers and libraries, as when its nvidia-* wheels are absent."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    real = Path(spec.submodule_search_locations[0])
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: not found')\n")
    for name in ("include", "lib"):
        (folder / "torch" / name).symlink_to(real / name)
    return folder


def test_the_same_bytes_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    # Another folder (with a space), other counts, locale and foreign flags, torch elsewhere and broken.
    other = make_tree(tmp_path / "another place" / "deeper" / "source tree")
    noise = {
        "PYTHONPATH": str(_torch_that_cannot_be_imported(tmp_path / "site")),
        "MAX_JOBS": "2",
        "NVCC_THREADS": "4",
        "CFLAGS": "-g -O0",
        "CXXFLAGS": "-g -O0",
        "LDFLAGS": "-Wl,-rpath,/somewhere",
        "NVCC_APPEND_FLAGS": "-lineinfo",
        "TORCH_CUDA_ARCH_LIST": "8.0",
        "LC_ALL": "C",
    }
    again = build(other, FLASH_KDA_LOCAL_VERSION="cu130", **noise)
    first, second = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    differing = [name for name in first.namelist() if first.read(name) != second.read(name)]
    assert differing == []
    assert _digest(wheel) == _digest(again)


@pytest.fixture
def touched(tree: Path, wheel: Path) -> Iterator[Path]:
    """The built tree, its header changed for the test."""
    header = tree / "csrc" / "kda" / "fwd.h"
    header.write_text(HEADER.replace("FACTOR 3", "FACTOR 4"), encoding="utf-8")
    yield tree
    header.write_text(HEADER, encoding="utf-8")


def test_a_changed_header_is_compiled_anew_and_nothing_else(touched: Path) -> None:
    home = str(toolchain.ensure("13.0"))
    variables = {"CUDA_HOME": home, "FLASH_KDA_CUDA_ARCHS": "90a,100f", "FLASH_KDA_LOCAL_VERSION": "cu130"}
    variables |= {"MAX_JOBS": "1", "NVCC_THREADS": "1"}
    first = setup(touched, ["build_ext"], variables)
    assert first.returncode == 0, first.stderr
    assert len(re.findall(r"^\[\d+/3\]", first.stdout, re.MULTILINE)) == 3  # both sources include it
    (touched / "csrc" / "kda" / "fwd.cu").touch()
    second = setup(touched, ["build_ext"], variables)
    assert len(re.findall(r"^\[\d+/2\]", second.stdout, re.MULTILINE)) == 2
    third = setup(touched, ["build_ext"], variables)
    assert "no work to do" in third.stdout


def test_in_place_for_development(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "source")
    variables = {"CUDA_HOME": str(toolchain.ensure("13.0")), "FLASH_KDA_CUDA_ARCHS": "90a"}
    done = setup(tree, ["build_ext", "--inplace"], variables)
    assert done.returncode == 0, done.stderr
    assert (tree / "flash_kda" / "_C.abi3.so").is_file()
    assert not list(tree.glob(".ninja*"))
    assert json.loads((tree / "flash_kda" / "build_record.json").read_text())["architectures"] == ["90a"]


def test_get_arch_flags() -> None:
    code = "import setup; print(setup.SUPPORTED_CUDA_ARCHS, setup.get_arch_flags())"
    home = str(toolchain.ensure("13.0"))
    environ = environment(CUDA_HOME=home, FLASH_KDA_CUDA_ARCHS="90a")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert "('90a', '100a', '100f', " in done.stdout
    assert "['-gencode', 'arch=compute_90a,code=sm_90a']" in done.stdout


def test_torch_target_macro() -> None:
    assert flags.torch_target_macro("2.10") == "0x020a000000000000"
    assert flags.torch_target_macro("2.9") == "0x0209000000000000"
