"""The GPU suite: the kernels of an installed wheel against the float64 oracle.

It fails, never skips, where there is no GPU or where `flash_kda` did not load its compiled library.
`--cpu-dry-run` runs what can run on the reference backend, to check the tests themselves; such a session
always ends as a failure.
"""

from __future__ import annotations

from collections.abc import Iterator

import kda_gpu
import pytest
import torch

import flash_kda
from flash_kda import _library

DRY_RUN_EXIT_CODE = 13


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-dry-run", action="store_true", help="check the tests on the CPU; never a pass")
    parser.addoption("--fla-path", help="folder that holds the fla package, where it is not installed")
    parser.addoption("--cute-path", help="folder that nvidia-cutlass-dsl was installed into with --target")
    parser.addoption(
        "--allow-missing-fla",
        action="store_true",
        help="skip the flash-linear-attention client where it is absent",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_only: has no meaning on the CPU; not run in a dry run")
    if config.getoption("--cpu-dry-run", default=False):
        kda_gpu.use_cpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--cpu-dry-run", default=False):
        return
    skip = pytest.mark.skip(reason="needs a GPU (dry run)")
    for item in items:
        if item.get_closest_marker("cuda_only"):
            item.add_marker(skip)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--cpu-dry-run", default=False) and exitstatus == 0:
        print("\nCPU DRY RUN: says nothing about the kernels, so it ends as a failure.")
        session.exitstatus = DRY_RUN_EXIT_CODE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} NOT RUN")
        for report in skipped:
            terminalreporter.line(f"{report.nodeid}: {report.longrepr[2]}")


def why_not_here() -> str | None:
    """Why this machine or install cannot run the suite; None when it can."""
    if kda_gpu.DEVICE.type == "cpu":
        return None
    if not torch.cuda.is_available():
        return f"tests/gpu needs an NVIDIA GPU; torch {torch.__version__} sees none."
    status = _library.load()
    if not status.loaded:
        return (
            f"tests/gpu needs the compiled library beside {flash_kda.__file__}: {status.code}: {status.text}"
        )
    return None


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    """Every test of this folder fails with the reason where the suite cannot run."""
    if reason := why_not_here():
        pytest.fail(reason, pytrace=False)


@pytest.fixture(autouse=True)
def no_sticky_error(machine: None) -> Iterator[None]:
    """A CUDA error that a test left behind is that test's failure, not the next one's."""
    yield
    if kda_gpu.DEVICE.type == "cuda":
        torch.cuda.synchronize()
