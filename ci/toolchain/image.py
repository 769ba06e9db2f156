"""CUDA toolkits that PyPI does not have whole: installed by dnf in the builder image, from ``image.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ci.errors import ToolchainError
from ci.matrix import CudaRow
from ci.nvcc import tool_version
from ci.process import run
from ci.toml import Table, open_table

DATA = Path(__file__).with_name("image.toml")
_REPOSITORY = """\
[cuda]
name=NVIDIA CUDA
baseurl={url}
enabled=1
gpgcheck=1
gpgkey={url}/{key}
"""


@dataclass(frozen=True)
class Packages:
    """One toolkit: where it lands, whose packages, and the version and release of each."""

    home: Path
    repository: str
    key: str
    versions: dict[str, str]

    @property
    def nvcc(self) -> str:
        """The version of nvcc, without the package's release."""
        found = next(version for name, version in self.versions.items() if name.startswith("cuda-nvcc-"))
        return found.partition("-")[0]


def packages(toolkit: str, data: Path = DATA) -> Packages:
    """What `toolkit` is installed from; ConfigError for a file that does not say."""
    table = open_table(data).table(toolkit)
    found = Packages(
        home=Path(table.text("home", r"/\S+", "an absolute path")),
        repository=table.text("repository", r"https://\S+[^/]", "an https address"),
        key=table.text("key", r"[^/\s]+", "a file name"),
        versions=_versions(toolkit, table.table("packages")),
    )
    table.done()
    return found


def _versions(toolkit: str, table: Table) -> dict[str, str]:
    versions = {}
    for name in list(table.left):
        versions[name] = table.text(name, r"[0-9]+(\.[0-9]+)+-[0-9]+", "a version and a release: 12.9.86-1")
    if not any(name.startswith("cuda-nvcc-") for name in versions):
        raise table.fail("cuda-nvcc-*", f"the package with the nvcc of CUDA {toolkit}", sorted(versions))
    return versions


def install(toolkit: str, repositories: Path = Path("/etc/yum.repos.d")) -> Path:
    """Install `toolkit` with dnf and return its folder; for the builder image, as root."""
    wanted = packages(toolkit)
    if not repositories.is_dir():
        raise ToolchainError(
            f"{repositories}: expected dnf's folder, found none; CUDA {toolkit} comes as RPM packages.\n"
            "Next: build on the manylinux base image (leave --base out)"
        )
    text = _REPOSITORY.format(url=wanted.repository, key=wanted.key)
    (repositories / "flash-kda-cuda.repo").write_text(text, encoding="utf-8")
    exact = [f"{name}-{version}" for name, version in sorted(wanted.versions.items())]
    run(
        ["dnf", "install", "-y", "--setopt=install_weak_deps=False", *exact],
        title=f"installing CUDA {toolkit} with dnf",
        error=ToolchainError,
        hint=f"compare ci/toolchain/{DATA.name} with what {wanted.repository} offers",
    )
    return wanted.home


def find(row: CudaRow, data: Path = DATA) -> Path:
    """The installed toolkit of `row`; where it is missing, or another, a ToolchainError names the command."""
    wanted = packages(row.toolkit, data)
    nvcc = wanted.home / "bin" / "nvcc"
    got = tool_version(nvcc) if nvcc.is_file() else f"no {nvcc}"
    if got != wanted.nvcc:
        raise ToolchainError(
            f"CUDA {row.toolkit} is not on PyPI as a whole, so {row.label} is built in the builder image: "
            f"expected nvcc {wanted.nvcc} in {wanted.home}, got {got}.\n"
            f"Next: python -m ci.containers --cuda {row.label}"
        )
    return wanted.home
