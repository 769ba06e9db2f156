"""Sessions of the factory.  Each installs what ``ci/`` imports and calls it; the work is there.

The wheels serve Python 3.10 and newer; the factory itself runs under 3.11 and newer.
"""

from __future__ import annotations

import sys

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
# nox 2026.10 reuses an environment that another Python made, so each Python gets a folder of its own.
nox.options.envdir = f".nox/py{sys.version_info.major}.{sys.version_info.minor}"
nox.options.sessions = ["lint", "build_wheels", "tests"]


def call(session: nox.Session, module: str, *arguments: str, also: str | None = None) -> None:
    """Run ``python -m ci.<module>`` in the session's environment, what follows ``--`` passed on."""
    names = ["ci", *([also] if also else [])]
    locks = [word for name in names for word in ("-r", f"ci/requirements/{name}.txt")]
    session.install("--require-hashes", *locks)
    session.run("python", "-m", f"ci.{module}", *arguments, *session.posargs)


@nox.session
def build_wheels(session: nox.Session) -> None:
    """Toolchain, build, repair, verify: every row, or ``-- --cuda cu130``, ``--archs LIST``, ``--slim``,
    ``--platform aarch64``."""
    call(session, "build", also="verify")


@nox.session
def verify_wheels(session: nox.Session) -> None:
    """Verify every wheel in wheels/, or ``-- FILE``."""
    call(session, "wheels", also="verify")


@nox.session
def reproduce(session: nox.Session) -> None:
    """Build twice under different conditions and compare the bytes; ``-- --cuda all`` for every row."""
    call(session, "reproduce")


@nox.session
def rebuild(session: nox.Session) -> None:
    """Build a wheel again from the commit in its record and compare the bytes: ``-- WHEEL``."""
    call(session, "rebuild")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs no GPU; arguments after ``--`` go to pytest."""
    call(session, "tests")


@nox.session
def dsl_matrix(session: nox.Session) -> None:
    """The CuTe DSL's kernels without a GPU, beside each version of it; ``-- --dsl 4.8.1`` for one."""
    call(session, "dsl_matrix")


@nox.session(venv_backend="none")
def gpu_tests(session: nox.Session) -> None:
    """Test a wheel on its GPU beside the active Python's torch: ``-- --target sm90a --fla-path DIR``."""
    session.run("python", "-m", "ci.gpu_tests", *session.posargs)


@nox.session(venv_backend="none")
def fallthrough(session: nox.Session) -> None:
    """``auto`` on a GPU that the wheel is not for: ``-- --wheel FILE --cute-path DIR --fla-path DIR``."""
    session.run("python", "-m", "ci.fallthrough", *session.posargs)


@nox.session(venv_backend="none")
def gpu_matrix(session: nox.Session) -> None:
    """The GPU tests that CI runs, from ci/matrix.toml; ``-- --json``, ``-- --github``."""
    session.run("python", "-m", "ci.gpu_matrix", *session.posargs)


@nox.session(venv_backend="none")
def wheel_matrix(session: nox.Session) -> None:
    """The wheels that CI builds, from ci/matrix.toml; ``-- --json``, ``-- --github``."""
    session.run("python", "-m", "ci.wheel_matrix", *session.posargs)


@nox.session
def sdist(session: nox.Session) -> None:
    """The sdist, from a clean copy of the sources, in wheels/sdist."""
    call(session, "sdist")


@nox.session
def release_check(session: nox.Session) -> None:
    """Whether wheels may be published: verified, of a commit, each architecture passed: ``-- [WHEEL]``."""
    call(session, "release", also="verify")


@nox.session
def index(session: nox.Session) -> None:
    """The package index of wheels that may be published, in wheels/index: ``-- [WHEEL]``."""
    call(session, "index", also="verify")


@nox.session
def index_check(session: nox.Session) -> None:
    """Install from wheels/index with pip and uv under the matrix's Pythons; ``-- --python 3.12`` for one."""
    call(session, "index_check", also="verify")


@nox.session
def size(session: nox.Session) -> None:
    """Bytes of each kernel and architecture of wheels; ``-- --write`` makes them the budget."""
    call(session, "size", also="verify")


@nox.session
def diff(session: nox.Session) -> None:
    """What changed between two wheels, kernel by kernel: ``-- A.whl B.whl [--sass KERNEL]``."""
    call(session, "diff", also="verify")


@nox.session
def import_matrix(session: nox.Session) -> None:
    """Use the wheels under the matrix's Pythons and torches, without a GPU; ``-- --python 3.12`` for one."""
    call(session, "import_check")


@nox.session
def import_aarch64(session: nox.Session) -> None:
    """Use the wheels in wheels/aarch64 under qemu; ``-- FILE`` for others."""
    call(session, "import_emulated")


@nox.session
def cibw(session: nox.Session) -> None:
    """One row by cibuildwheel in the builder image; docs/containers.md: ``-- --cuda cu130``."""
    call(session, "cibw")


@nox.session
def containers(session: nox.Session) -> None:
    """One row locally, by the Dockerfile and by cibuildwheel: the same bytes, with a record."""
    call(session, "ways")


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint, types, architectures written twice; ``-- --fix`` rewrites what can be."""
    call(session, "lint")


@nox.session
def update(session: nox.Session) -> None:
    """Refresh what is pinned: locks, CUDA toolkits, images, actions."""
    call(session, "update")
    session.run("python", "-m", "ci.toolchain", "update")
