"""Containers without a container: pins, arguments, the environment that reaches cibuildwheel, the comparison.

The builds themselves are ``nox -s containers``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_build import NOT_NEEDED, variables_of_the_build

from ci import build, cibw, containers, images, lint, matrix, prepare, source, stand_in, venv, verify, ways
from ci.errors import BuildError, ConfigError, ReproducibilityError, ToolchainError
from ci.toml import read_toml
from ci.toolchain import image

DOCKER = source.ROOT / "docker"
ROW = matrix.load().rows[0]
IMAGE_ROW = next(row for row in matrix.load().rows if row.toolkit_from == matrix.IMAGE)
FRAME = containers.Frame(ROW, "podman", "base:1", (Path("/etc/pip.conf"),))
BUILDER, GPU_TEST = (DOCKER / f"{name}.Dockerfile" for name in ("builder", "gpu-test"))


# ---- pinned images ----


@pytest.mark.parametrize("platform", images.PLATFORMS)
def test_the_pins_are_those_of_the_locked_cibuildwheel(platform: str, tmp_path: Path) -> None:
    images.update(venv.locked("cibw"), tmp_path / "images.toml")
    assert images.load(platform, tmp_path / "images.toml") == images.load(platform)
    assert (tmp_path / "images.toml").read_text() == images.PATH.read_text()
    assert re.fullmatch(rf"quay\.io/pypa/{platform}@sha256:[0-9a-f]{{64}}", images.load(platform).reference)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r'digest = "sha256:.*"', "", "'digest' is missing"),
        (r'digest = "sha256:.*"', 'digest = "sha256:12"', "expected sha256: and 64 hexadecimal digits"),
        (r'tag = ".*"', 'tag = "latest"', "expected a tag such as"),
        (r'name = "(.*)"', r'name = "\1@sha256"', "expected an image without tag and digest"),
        (r'(tag = ".*")', r"\1\nmore = 1", "unknown key 'more'"),
        (r"\[manylinux_2_28_x86_64\]", "[other]", "'manylinux_2_28_x86_64' is missing"),
    ],
)
def test_an_image_without_its_pin_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "images.toml"
    path.write_text(re.sub(old, new, images.PATH.read_text(), count=1))
    with pytest.raises(ConfigError, match=re.escape(said)):
        images.load("manylinux_2_28_x86_64", path)


@pytest.mark.parametrize(
    "text",
    [
        "[x86_64]\nmanylinux_2_28 = quay.io/a/b:latest\n",
        "[aarch64]\n",
        "[x86_64]\nmanylinux_2_34 = x\n",
        "no section\n",
        "[x86_64]\nmanylinux_2_28 = x\nmanylinux_2_28 = x\n",
        "[x86_64]\nmanylinux_2_28 = %(x)s\n",
    ],
)
def test_pins_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected NAME@sha256:DIGEST"):
        images.pinned(text, "manylinux_2_28_x86_64")


def test_another_base_image_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    pinned = images.load(matrix.load().project.plat).reference
    assert containers.base_image(None) == containers.base_image(pinned) == pinned
    assert capsys.readouterr().out == ""
    assert containers.base_image("debian:12") == "debian:12"
    assert "not the pinned" in capsys.readouterr().out


# ---- Dockerfiles ----


def arguments_of(path: Path) -> set[str]:
    return set(re.findall(r"^ARG ([A-Z_]+)$", path.read_text(), re.MULTILINE))


def test_the_dockerfiles_take_what_they_are_given() -> None:
    given = set(containers.variables(FRAME))
    assert arguments_of(BUILDER) == given
    assert arguments_of(GPU_TEST) == {"BASE_IMAGE"}
    bake = (DOCKER / "docker-bake.hcl").read_text()
    assert set(re.findall(r'^variable "([A-Z_]+)"', bake, re.MULTILINE)) == {*given, "CONTEXT"}
    assert set(re.findall(r"^    ([A-Z_]+) += \1$", bake, re.MULTILINE)) == given
    for name in re.findall(r'dockerfile = "(.+)"', bake):
        assert (source.ROOT / name).is_file()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", BUILDER.read_text(), re.MULTILINE))
    assert set(re.findall(r'^  target +(?:= )"(.+)"', bake, re.MULTILINE)) <= stages


def test_one_python_everywhere() -> None:
    (tag,) = {
        tag for path in (BUILDER, GPU_TEST) for tag in re.findall(r"/opt/python/(\S+)/bin", path.read_text())
    }
    options = read_toml(source.ROOT / "pyproject.toml")["tool"]["cibuildwheel"]
    assert options["build"].split("-")[0] == tag.split("-")[0]
    assert Path("/", stand_in._PYTHON).name == tag


def test_the_gpu_image_has_the_torch_of_the_matrix() -> None:
    lock = (venv.REQUIREMENTS / "gpu.txt").read_text()
    assert re.findall(r"^torch==(\S+)", lock, re.MULTILINE) == [matrix.load().project.torch_build]
    assert re.findall(r"^fla-core==(\S+)", lock, re.MULTILINE) == re.findall(
        r"install fla-core==([0-9.]+)", (source.ROOT / "tests/gpu/test_fla_client.py").read_text()
    )


def test_hadolint_is_run_and_complains(tmp_path: Path) -> None:
    commands = lint.tool_commands(venv.Venv(Path(sys.prefix)), lint.tracked(), fix=False)
    assert {Path(name).name for name in commands["hadolint"][1:]} == {BUILDER.name, GPU_TEST.name}
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN cd /tmp && apt-get install gcc\n")
    done = subprocess.run([commands["hadolint"][0], bad], capture_output=True, text=True)
    assert done.returncode == 1 and "DL3007" in done.stdout


def test_the_context_is_the_sources_and_nothing_else(tmp_path: Path) -> None:
    folder = containers.context(tmp_path / "context")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(source.files()) | {"docker/builder.Dockerfile", "wheels/expectations/kernels.toml"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) and "fixtures" not in name]
    assert not (folder / ".git").exists()
    assert len({path.stat().st_mtime for path in folder.rglob("*")}) == 1


def test_what_the_engines_are_asked() -> None:
    words = [str(word) for word in containers.command(FRAME, "builder", Path("/ctx"))]
    assert (
        words[:4] == ["podman", "build", "--file", "/ctx/docker/builder.Dockerfile"] and words[-1] == "/ctx"
    )
    assert "--build-arg CUDA=cu130" in " ".join(
        words
    ) and "--tag localhost/flash-kda-builder:cu130" in " ".join(words)
    assert "--volume /etc/pip.conf:/etc/pip.conf:ro" in " ".join(words)
    wheel = [str(word) for word in containers.command(FRAME, "wheel", Path("/ctx"), Path("/out"))]
    assert "--output type=local,dest=/out" in " ".join(wheel) and "--tag" not in wheel
    gpu = [str(word) for word in containers.command(FRAME, "gpu-test", Path("/ctx"))]
    assert gpu[3] == "/ctx/docker/gpu-test.Dockerfile" and "localhost/flash-kda-gpu-test:cu130" in gpu
    docker = containers.Frame(ROW, "docker", "base:1")
    baked = [str(word) for word in containers.command(docker, "wheel", Path("/ctx"), Path("/out"))]
    assert baked[:5] == ["docker", "buildx", "bake", "--file", "/ctx/docker/docker-bake.hcl"]
    assert baked[-2:] == ["wheel.output=type=local,dest=/out", "wheel"]


@pytest.mark.parametrize(
    ("engine", "mounts", "there", "said"),
    [
        ("podman", [], False, "no such program"),
        ("docker", [Path("/etc")], True, "no mounts of the host"),
        ("podman", [Path("etc")], True, "an absolute path that exists"),
        ("podman", [Path("/no/such/place")], True, "an absolute path that exists"),
        ("podman", [], True, "expected a folder that can be written to"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(
    engine: str, mounts: list[Path], there: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if there else None)
    given = argparse.Namespace(engine=engine, mount=mounts, cuda=ROW.label, base=None, out=Path("/dev/null"))
    with pytest.raises(ConfigError, match=said):
        containers.frame_of(given)


def test_an_image_for_a_wheel_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["containers", "--gpu-test", "/nowhere/x.whl"])
    with pytest.raises(ConfigError, match=r"/nowhere/x\.whl: no such file\.\nNext: nox -s build_wheels"):
        containers.main()


def test_a_build_that_leaves_no_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="expected one wheel, got none"):
        containers.only(tmp_path)
    for name in ("a.whl", "b.whl"):
        (tmp_path / name).touch()
    with pytest.raises(BuildError, match=r"got a\.whl, b\.whl"):
        containers.only(tmp_path)


# ---- cibuildwheel ----


def test_every_variable_the_build_reads_reaches_cibuildwheel() -> None:
    macros = {"FLASH_KDA_CUDA_ARCHS_BUILT", "FLASH_KDA_VERSION"}
    assert variables_of_the_build() - macros - NOT_NEEDED <= set(cibw.passed())
    made = cibw.environment(ROW, cibw.passed())
    assert made["FLASH_KDA_CUDA_ARCHS"] == ROW.value and made["FLASH_KDA_LOCAL_VERSION"] == ROW.label
    assert (made["CUDA_HOME"], made["FLASH_KDA_LINK_SYSROOT"]) == (str(prepare.CUDA), str(prepare.SYSROOT))


@pytest.mark.parametrize("name", cibw.passed())
def test_a_variable_that_is_lost_on_the_way_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"without {name} and with nothing"):
        cibw.environment(ROW, tuple(other for other in cibw.passed() if other != name))


def test_a_variable_that_no_build_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="without nothing and with CFLAGS"):
        cibw.environment(ROW, (*cibw.passed(), "CFLAGS"))


def test_cibuildwheel_is_pointed_at_the_places_of_the_image() -> None:
    options = read_toml(source.ROOT / "pyproject.toml")["tool"]["cibuildwheel"]
    wanted = {"PYTHONPATH": str(prepare.BUILD), "PATH": f"$PATH:{prepare.PROGRAMS}"}
    assert options["linux"]["environment"] == wanted
    assert options["test-environment"]["PYTHONPATH"] == str(prepare.CHECKS)


# ---- comparison ----


def wheel(folder: Path, data: bytes, name: str = "x-1-py3-none-any.whl") -> Path:
    folder.mkdir()
    (folder / name).write_bytes(data)
    return folder / name


def test_the_same_bytes_are_one_digest(tmp_path: Path) -> None:
    made = {way: wheel(tmp_path / way, b"same") for way in ("local", "podman")}
    assert len(set(ways.compare(made).values())) == 1


def test_other_bytes_or_names_are_refused(tmp_path: Path) -> None:
    first = wheel(tmp_path / "a", b"same")
    for other in (wheel(tmp_path / "b", b"other"), wheel(tmp_path / "c", b"same", "y-1-py3-none-any.whl")):
        with pytest.raises(ReproducibilityError, match="expected the same bytes"):
            ways.compare({"local": first, "podman": other})


def test_the_records_are_of_one_digest_and_clean_sources() -> None:
    records = sorted(ways.RECORDS.glob("*.json"))
    assert records
    for path in records:
        found = json.loads(path.read_text())
        assert found["row"] == path.stem and found["dirty"] is False
        locked = found["row"] in [row.label for row in matrix.load().locked_rows]
        assert ("local" in found["sha256"]) is locked and "cibuildwheel" in found["sha256"]
        assert len(set(found["sha256"].values())) == 1


# ---- a toolkit that is in the image alone ----


def test_a_row_of_the_image_is_refused_elsewhere_and_says_how() -> None:
    with pytest.raises(
        ToolchainError, match=r"is not on PyPI as a whole.*\nNext: python -m ci\.containers --cuda cu129"
    ):
        build.tools_for(IMAGE_ROW)


def data_file(folder: Path, home: Path) -> Path:
    path = folder / "image.toml"
    path.write_text(image.DATA.read_text().replace("/usr/local/cuda-12.9", str(home)))
    return path


def fake_nvcc(home: Path, version: str) -> None:
    (home / "bin").mkdir(parents=True, exist_ok=True)
    (home / "bin/nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V{version}'\n")
    (home / "bin/nvcc").chmod(0o755)


def test_the_toolkit_of_the_image_is_taken_at_its_version_only(tmp_path: Path) -> None:
    data = data_file(tmp_path, tmp_path / "cuda")
    fake_nvcc(tmp_path / "cuda", "12.9.41")
    with pytest.raises(ToolchainError, match=r"expected nvcc 12\.9\.86 in .*, got 12\.9\.41"):
        image.find(IMAGE_ROW, data)
    fake_nvcc(tmp_path / "cuda", "12.9.86")
    assert image.find(IMAGE_ROW, data) == tmp_path / "cuda"


def test_dnf_is_asked_for_exact_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dnf").write_text(f'#!/bin/sh\necho "$@" > {asked}\n')
    (tmp_path / "bin/dnf").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    image.install(IMAGE_ROW.toolkit, tmp_path)
    assert "cuda-nvcc-12-9-12.9.86-1" in asked.read_text().split()
    assert "gpgcheck=1" in (tmp_path / "flash-kda-cuda.repo").read_text().splitlines()
    with pytest.raises(ToolchainError, match="expected dnf's folder"):
        image.install(IMAGE_ROW.toolkit, tmp_path / "none")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"12.9.86-1"', '"12.9"', "a version and a release"),
        ("https://", "http://", "an https address"),
        ('cuda-nvcc-12-9 = "12.9.86-1"\n', "", "the package with the nvcc"),
        ('["12.9"]', '["12.8"]', "12.9: key 'home' is missing"),
    ],
)
def test_packages_without_a_version_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "image.toml"
    path.write_text(image.DATA.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(said)):
        image.packages("12.9", path)


def test_a_wheel_of_that_row_is_read_with_the_newest_locked_tools() -> None:
    table = matrix.load()
    assert verify.default_cuobjdump(table, IMAGE_ROW) == verify.default_cuobjdump(
        table, table.locked_rows[-1]
    )
    assert verify.default_cuobjdump(table, table.rows[0]) != verify.default_cuobjdump(table, None)
