"""A pytest plugin: counts the outcomes and notes where ``flash_kda`` came from, as JSON in a file.

Copied beside the tests by ``ci/gpu_tests.py``; imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

ENV = "FLASH_KDA_GPU_TESTS_RESULT"
FOLDER = "tests/gpu"
_NARROWING = ("ignore", "ignore_glob", "setuponly", "setupplan", "inifilename", "noconftest")
_OWN_OVERRIDE = "strict_markers=true"  # what pytest makes of the --strict-markers in pyproject.toml
COUNTS: Counter[str] = Counter()
REASONS: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count one test once: by its call, or by the phase that kept it from being called."""
    if report.skipped:
        COUNTS["xfailed" if hasattr(report, "wasxfail") else "skipped"] += 1
        if isinstance(report.longrepr, tuple):
            REASONS.add(str(report.longrepr[2]))
    elif report.failed:
        COUNTS["failed" if report.when == "call" else "errors"] += 1
    elif report.when == "call":
        COUNTS["passed"] += 1


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a file that cannot be collected as an error and a skipped one as skipped."""
    if report.failed:
        COUNTS["errors"] += 1
    elif report.skipped:
        COUNTS["skipped"] += 1
        if isinstance(report.longrepr, tuple):
            REASONS.add(str(report.longrepr[2]))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what was found and then left out, by -k, -m, --deselect, --lf or a plugin."""
    COUNTS["deselected"] += len(items)


def _narrowed(config: pytest.Config) -> bool:
    """Whether the command line, or PYTEST_ADDOPTS, may have left tests out.

    With --setup-only and --setup-plan each test passes and none is called; another configuration can collect
    other files.
    """
    overrides = set(config.getoption("override_ini") or ()) - {_OWN_OVERRIDE}
    options = any(config.getoption(name) for name in _NARROWING)
    return bool(COUNTS["deselected"] or options or overrides or config.args != [FOLDER])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was seen."""
    package = sys.modules.get("flash_kda")
    result = {
        "counts": {name: COUNTS[name] for name in ("passed", "failed", "errors", "skipped", "xfailed")},
        "skip_reasons": sorted(REASONS),
        "flash_kda_file": getattr(package, "__file__", None),
        "narrowed": _narrowed(session.config),
        "pytest": pytest.__version__,
        "exit_code": int(exitstatus),
    }
    Path(os.environ[ENV]).write_text(json.dumps(result))
