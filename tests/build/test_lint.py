"""The project's own rules, each with a text it must refuse, and the checkout itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import lint
from ci.errors import ConfigError, LintError


def found(name: str, text: str) -> list[tuple[int, str]]:
    return list(lint.literals(name, text))


def write(root: Path, name: str, text: str) -> str:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return name


@pytest.mark.parametrize(
    "literal",
    ["sm_90a", "sm_90", "compute_100a", "compute_103", "sm120f", "90a", "100f", "107a", "9.0a", "12.0f"],
)
def test_an_architecture_is_found(literal: str) -> None:
    assert found("ci/x.py", f"a = 1\nb = '{literal}'\n") == [(2, literal)]
    assert found("docker/Dockerfile", f"ENV A={literal}\n") == [(1, literal)]


def test_each_item_of_a_list_is_found() -> None:
    assert found("x.yml", "archs: 90a,100a") == [(1, "90a"), (1, "100a")]


@pytest.mark.parametrize(
    "text", ["x = 0x90af", "x = '1.90'", "y = 900", "z = '190a'", "v = '9.0'", "cu130 = 1"]
)
def test_other_numbers_are_not(text: str) -> None:
    assert found("ci/x.py", text + "\n") == []


def test_python_comments_and_docstrings_may_name_one() -> None:
    text = '"""Module for 90a."""\ndef f():\n    """Of 90a.\n\n    And 100a."""\n    return 1  # as 90a\n'
    assert found("ci/x.py", text) == []


def test_a_python_string_that_is_no_docstring_may_not() -> None:
    assert found("ci/x.py", 'def f():\n    """Of 90a."""\n    return """\n100a"""\n') == [(4, "100a")]
    assert found("ci/x.py", "f('90a',\n  'sm_90a')\n") == [(1, "90a"), (2, "sm_90a")]


def test_comments_and_messages_in_cpp_may_name_one() -> None:
    text = '// sm_90a\n/* 100a\n 90a */ static_assert(true, "an sm_90 block");\nint sm_90a;\n'
    assert found("csrc/x.cu", text) == [(4, "sm_90a")]


def test_comments_in_toml_may_name_one() -> None:
    assert found("x.toml", '# 90a\narchs = ["90a"]  # 100a\n') == [(2, "90a")]


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        ("ci/build.py", True),
        (".ci/run", True),
        ("docker/Dockerfile.cuda", True),
        ("csrc/kda/fwd.cu", True),
        ("ci/matrix.toml", False),
        ("flash_kda/arch.py", False),
        ("tests/unit/test_arch.py", False),
        ("docs/hacking.md", False),
        ("wheels/expectations/kernels.toml", False),
    ],
)
def test_where_architectures_are_looked_for(name: str, checked: bool) -> None:
    assert lint.is_checked(name) is checked


def test_an_exception_holds_for_its_place_and_must_be_used(tmp_path: Path) -> None:
    names = [write(tmp_path, "ci/x.py", "a = '90a'\nb = '100a'\n")]
    allowed = [lint.Allowance("ci/x.py", ("90a",), "why"), lint.Allowance("ci/gone.py", ("120a",), "why")]
    findings = lint.duplicate_architectures(tmp_path, names, allowed)
    assert [(finding.path, finding.line) for finding in findings] == [
        ("ci/x.py", 2),
        ("ci/lint_allow.toml", 1),
    ]
    assert "'120a' no longer stands in ci/gone.py" in findings[1].text


def test_an_exception_without_a_reason_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "allow.toml", '[[allow]]\npath = "ci/x.py"\nliterals = ["90a"]\n')
    with pytest.raises(ConfigError, match="expected path, literals and reason"):
        lint.allowances(tmp_path / "allow.toml")


def test_this_checkout_keeps_the_rules() -> None:
    names = lint.tracked()
    findings = lint.duplicate_architectures(lint.ROOT, names, lint.allowances())
    assert [str(finding) for finding in findings] == []


def test_one_complaint_fails_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run_tool(title: str, _command: list[str]) -> bool:
        ran.append(title)
        return title != "mypy"

    monkeypatch.setattr(lint, "run_tool", run_tool)
    with pytest.raises(LintError, match=r"^mypy complained"):
        lint.lint(fix=False)
    assert {"ruff format", "ruff check", "mypy"} <= set(ran)


def test_outside_git_lint_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="git ls-files failed"):
        lint.tracked(tmp_path)
