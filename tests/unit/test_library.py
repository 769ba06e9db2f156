"""Loading the compiled library: each failure has its own code, text and remedy; none breaks the import."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_kda
from flash_kda import _library

ROOT = Path(__file__).resolve().parents[2]
RECORD = {"torch": {"built_with": "2.13.0", "target": "2.10"}}
NOTHING = "flash_kda_test::nothing"


def test_a_missing_file(tmp_path: Path) -> None:
    status = _library.load_file(tmp_path / "_C.abi3.so", NOTHING)
    assert (status.code, status.loaded) == ("missing_file", False)
    assert str(tmp_path) in status.text and "pip install" in status.text
    assert status.text.startswith("built without kernels (a source tree, or FLASH_KDA_SKIP_CUDA_BUILD)")


def test_an_undefined_symbol(fixtures: Path) -> None:
    status = _library.load_file(fixtures / "library" / "undefined_symbol.so", NOTHING)
    assert status.code == "undefined_symbol"
    assert "aoti_torch_flash_kda_test" in status.text and str(torch.__version__) in status.text


def test_the_text_names_the_torch_built_for_and_the_torch_found() -> None:
    message = "/x/_C.abi3.so: undefined symbol: aoti_torch_new"
    text = _library.classify(message, Path("/x/_C.abi3.so"), RECORD, "2.8.0").text
    for part in ("aoti_torch_new", "2.8.0", "torch >= 2.10", "2.13.0"):
        assert part in text


def test_any_other_refusal_of_the_loader(tmp_path: Path) -> None:
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"not a library")
    status = _library.load_file(junk, NOTHING)
    assert status.code == "load_error"
    assert "invalid ELF header" in status.text or "too short" in status.text


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.99])
def test_a_truncated_library_is_refused_before_it_is_mapped(
    keep: float, fixtures: Path, tmp_path: Path
) -> None:
    """In a process of its own: without the check the loader may end it with SIGBUS."""
    data = (fixtures / "library" / "exports.so").read_bytes()
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(data[: int(len(data) * keep)])
    done = python(
        f"from flash_kda import _library as l; print(l.load_file(l.Path({str(path)!r}), {NOTHING!r}))"
    )
    assert done.returncode == 0 and "code='load_error'" in done.stdout, (done.returncode, done.stderr)
    assert f"the file has {path.stat().st_size} bytes" in done.stdout


def test_a_segment_past_the_end_is_seen_without_section_headers(fixtures: Path, tmp_path: Path) -> None:
    data = bytearray((fixtures / "library" / "exports.so").read_bytes())
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    struct.pack_into("<Q", data, 0x28, 0)
    struct.pack_into("<H", data, 0x3C, 0)
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(data[:sections])
    assert _library._past_the_end(path) is None
    path.write_bytes(data[: sections // 4])
    assert "the segment at byte" in (_library._past_the_end(path) or "")


@pytest.mark.parametrize("at", [0x20, 0x28])
@pytest.mark.parametrize("offset", [2**20, 2**63, 2**64 - 1])
def test_a_table_past_the_end_is_seen(at: int, offset: int, fixtures: Path, tmp_path: Path) -> None:
    data = bytearray((fixtures / "library" / "exports.so").read_bytes())
    struct.pack_into("<Q", data, at, offset)
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(data)
    status = _library.load_file(path, NOTHING)
    assert status.code == "load_error" and f"the file has {len(data)} bytes" in status.text


def test_a_library_that_is_not_ours(fixtures: Path) -> None:
    status = _library.load_file(fixtures / "library" / "exports.so", NOTHING)
    assert status.code == "load_error" and f"registers no {NOTHING}" in status.text
    registered = "aten::add.Tensor"
    assert _library._foreign(fixtures / "library" / "exports.so", registered) is None
    assert "exports no" in (_library._foreign(Path(math_library()), registered) or "")


def math_library() -> str:
    from ctypes.util import find_library

    return find_library("m") or "libm.so.6"


@pytest.mark.parametrize("kind", ["folder", "dangling", "loop"])
def test_a_path_that_is_no_file_is_not_a_missing_library(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "_C.abi3.so"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "nothing")
    status = _library.load_file(path, NOTHING)
    assert status.code == "load_error" and "a folder or a link to nothing" in status.text


def test_a_taken_operator_is_not_registered_twice(fixtures: Path) -> None:
    assert torch.ops.flash_kda.fwd is not None
    status = _library.load_file(fixtures / "library" / "undefined_symbol.so")
    assert status.code == "name_taken" and "python -m flash_kda" in status.text


def test_the_three_remedies_differ(tmp_path: Path) -> None:
    path = Path("/x/_C.abi3.so")
    texts = {
        _library.load_file(tmp_path / "_C.abi3.so", NOTHING).text,
        _library.classify(f"{path}: undefined symbol: f", path, RECORD, "2.8.0").text,
        _library.classify(f"{path}: version `GLIBC_2.99' not found", path, RECORD, "2.8.0").text,
    }
    assert len(texts) == 3


def test_exported_strings_are_read(fixtures: Path) -> None:
    path = fixtures / "library" / "exports.so"
    assert _library.c_string(path, "flash_kda_cuda_archs") == "90a,100f+PTX"
    assert _library.c_string(path, "flash_kda_version") == "0.1.0"


@pytest.mark.parametrize(
    "content",
    [
        *(None, "", "[1]", "{", "[" * 100_000, '{"architectures": 3}', '{"architectures": [1, 2]}'),
        *('{"cuda": 3}', '{"cuda": {"toolkit": 13.0}}', '{"cuda": {"toolkit": "x"}}'),
    ],
)
def test_no_usable_build_record(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "build_record.json"
    if content is not None:
        path.write_text(content)
    assert _library.build_record(path) is None


def test_the_build_record(tmp_path: Path) -> None:
    path = tmp_path / "build_record.json"
    path.write_text(json.dumps(RECORD))
    assert _library.build_record(path) == RECORD


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_import_pulls_in_no_other_backend_and_no_compiler() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import flash_kda\n"
        "new = set(sys.modules) - before\n"
        "assert not {n.split('.')[0] for n in new} & {'triton', 'fla', 'cutlass', 'numpy', 'sympy'}, new\n"
        "assert not any(name.startswith(('torch._dynamo', 'torch._inductor')) for name in new)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert torch.ops.flash_kda.fwd.default"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_import_without_torch_says_so_when_called() -> None:
    code = "import sys; sys.modules['torch'] = None; import flash_kda as f; print(f.__version__); f.fwd"
    done = python(code)
    assert done.stdout.strip() == flash_kda.__version__
    assert done.returncode == 1 and "ImportError: flash_kda.fwd needs torch >= 2.10" in done.stderr


@pytest.mark.parametrize(
    "torch_init", ["", "__version__ = '2.10'", "raise RuntimeError('half installed')", "def f(:", "1 / 0"]
)
def test_a_broken_torch_does_not_break_the_import(torch_init: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch_init)
    prelude = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    done = python(prelude + "import flash_kda as f; print(f.__version__); f.fwd")
    assert done.stdout.strip() == flash_kda.__version__
    assert "ImportError: flash_kda.fwd needs torch >= 2.10" in done.stderr
    done = python(prelude + "import flash_kda.__main__ as m; m.main([])")
    assert done.returncode == 0 and "PROBLEM: torch did not import" in done.stdout, done.stderr


def test_unknown_attributes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = flash_kda.no_such_name


def test_everything_exported_exists() -> None:
    assert all(hasattr(flash_kda, name) for name in flash_kda.__all__)
