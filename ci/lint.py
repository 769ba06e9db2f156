"""Format, lint, types and the project's own rules: ``python -m ci.lint [--fix]``.

Own rules: workflows use actions at the commits of ``.github/actions.toml``; an architecture is written in
``ci/matrix.toml`` and ``flash_kda/arch.py`` alone (exceptions with their reason in ``lint_allow.toml``).
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ci import actions
from ci.errors import ConfigError, LintError, run_cli
from ci.process import CONSOLE
from ci.toml import read_toml
from ci.venv import Venv, checks

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).with_name("lint_allow.toml")
CPP = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
# Documents may name architectures, and tests and expectations must; the two homes define them.
HOMES = ("ci/matrix.toml", "flash_kda/arch.py")
FREE = ("docs/", "tests/", "wheels/", "benchmarks/results/", "ci/lint_allow.toml")
READ = (*CPP, ".py", ".toml", ".yml", ".yaml", ".sh", ".cfg", ".in", ".hcl")
ARCH_LITERAL = re.compile(
    r"\b(?:(?:sm|compute)_\d{2,3}[af]?|sm\d{2,3}[af]|(?:9|1[0-2])\.\d[af]|(?:90|10\d|110|12[01])[af])\b",
    re.IGNORECASE,
)
_CPP_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """One complaint of an own rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Allowance:
    """A place where an architecture may stand a second time, and why."""

    path: str
    literals: tuple[str, ...]
    reason: str


def tracked(root: Path = ROOT) -> list[str]:
    """Files of the working tree that git knows or does not ignore; ConfigError outside git."""
    command = [
        "git",
        "-c",
        f"safe.directory={root}",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"git ls-files failed in {root}: {done.stderr.strip()}\nNext: run lint in a checkout"
        )
    return sorted(name for name in done.stdout.split("\0") if name and (root / name).is_file())


# ---- architectures written twice ----


def is_checked(name: str) -> bool:
    """Whether architectures in that file are duplicates."""
    if name in HOMES or name.startswith(FREE):
        return False
    path = PurePosixPath(name)
    return path.suffix in READ or "Dockerfile" in path.name or name.startswith(".ci/")


def literals(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Pairs of line number and architecture written in the code of a file; comments and docstrings left
    out."""
    code = _python_code(text) if name.endswith(".py") else _without_comments(name, text)
    for number, line in enumerate(code.splitlines(), 1):
        for match in ARCH_LITERAL.finditer(line):
            yield number, match.group()


def _python_code(text: str) -> str:
    """The text with comments and docstrings blanked."""
    lines = text.splitlines(keepends=True)
    starts_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and starts_statement
        if token.type == tokenize.COMMENT or is_docstring:
            _blank(lines, token.start, token.end)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            starts_statement = token.type in (
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.ENCODING,
            )
    return "".join(lines)


def _blank(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> None:
    for row in range(start[0], end[0] + 1):
        line = lines[row - 1]
        left = start[1] if row == start[0] else 0
        right = end[1] if row == end[0] else len(line.rstrip("\n"))
        lines[row - 1] = line[:left] + " " * (right - left) + line[right:]


def _without_comments(name: str, text: str) -> str:
    if name.endswith(CPP):
        return _cpp_code(text)
    return re.sub(r"(?m)(?:^|\s)#.*$", "", text)


def _cpp_code(text: str) -> str:
    """C++ with comments and strings blanked, line breaks kept."""
    return _CPP_TOKEN.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def allowances(path: Path = ALLOWED) -> list[Allowance]:
    """The exceptions on file; ConfigError when one has no reason."""
    found = []
    for entry in read_toml(path).get("allow", []):
        if not entry.get("reason") or not entry.get("literals"):
            raise ConfigError(
                f"{path.name}: expected path, literals and reason, got {entry}.\nNext: say why it is needed"
            )
        found.append(Allowance(entry["path"], tuple(entry["literals"]), entry["reason"]))
    return found


def duplicate_architectures(root: Path, names: Iterable[str], allowed: list[Allowance]) -> list[Finding]:
    """Architectures outside their homes, and exceptions that no longer apply."""
    permitted = {(entry.path, literal) for entry in allowed for literal in entry.literals}
    used: set[tuple[str, str]] = set()
    findings = []
    for name in filter(is_checked, names):
        for line, literal in literals(name, (root / name).read_text(encoding="utf-8")):
            if (name, literal) in permitted:
                used.add((name, literal))
            else:
                advice = "read it from ci.matrix or flash_kda.arch, or add it to ci/lint_allow.toml"
                findings.append(Finding(name, line, f"architecture {literal!r} written again; {advice}"))
    for path, literal in sorted(permitted - used):
        findings.append(
            Finding("ci/lint_allow.toml", 1, f"{literal!r} no longer stands in {path}; remove the entry")
        )
    return findings


# ---- actions ----


def loose_actions(root: Path, names: Iterable[str], pins: Mapping[str, actions.Pin]) -> list[Finding]:
    """Actions in workflows at another commit than the pinned one, and pins that no workflow uses."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in filter(is_workflow, names)}
    findings = [
        Finding(name, *problem) for name, text in texts.items() for problem in actions.problems(text, pins)
    ]
    unused = sorted(set(pins) - set(actions.used(texts.values())))
    return findings + [
        Finding(".github/actions.toml", 1, f"{name}: no workflow uses it; run: nox -s update")
        for name in unused
    ]


def is_workflow(name: str) -> bool:
    """Whether that file is a workflow."""
    return name.startswith(".github/workflows/") and name.endswith((".yml", ".yaml"))


# ---- tools ----


def tool_commands(tools: Venv, names: list[str], fix: bool) -> dict[str, list[str]]:
    """The programs to run, by title."""
    ruff, clang, hadolint = (str(tools.bin / name) for name in ("ruff", "clang-format", "hadolint"))
    sources = [name for name in names if name.startswith("csrc/") and name.endswith(CPP)]
    commands = {
        "ruff format": [ruff, "format", *([] if fix else ["--check"]), "."],
        "ruff check": [ruff, "check", *(["--fix"] if fix else []), "."],
        "mypy": [str(tools.python), "-m", "mypy"],  # what, and how strictly: pyproject.toml
    }
    if sources:
        commands["clang-format"] = [
            clang,
            *(["-i"] if fix else ["--dry-run", "-Werror", "--ferror-limit=5"]),
            *sources,
        ]
    if dockerfiles := [name for name in names if "Dockerfile" in PurePosixPath(name).name]:
        commands["hadolint"] = [hadolint, *dockerfiles]
    if workflows := [name for name in names if is_workflow(name)]:
        commands["actionlint"] = [str(tools.bin / "actionlint"), *workflows]
        commands["zizmor"] = [str(tools.bin / "zizmor"), "--offline", "--no-progress", *workflows]
    return commands


def run_tool(title: str, command: list[str]) -> bool:
    """Run one program in the checkout, its output shown; whether it was content."""
    CONSOLE.print(f"[bold]{title}[/bold]")
    return subprocess.run(command, check=False, cwd=ROOT).returncode == 0


def run_rule(title: str, rule: Callable[[], list[Finding]]) -> bool:
    """Run one own rule, its findings shown; whether there were none."""
    CONSOLE.print(f"[bold]{title}[/bold]")
    findings = rule()
    for finding in findings:
        print(finding)
    return not findings


def lint(fix: bool) -> None:
    """Everything, to the end; LintError naming what complained."""
    names = tracked()
    tools = checks()
    verdicts = {
        title: run_tool(title, command) for title, command in tool_commands(tools, names, fix).items()
    }
    verdicts["architectures"] = run_rule(
        "architectures", lambda: duplicate_architectures(ROOT, names, allowances())
    )
    verdicts["actions"] = run_rule("actions", lambda: loose_actions(ROOT, names, actions.load()))
    bad = [title for title, good in verdicts.items() if not good]
    if bad:
        raise LintError(
            f"{', '.join(bad)} complained; expected silence.\nNext: nox -s lint -- --fix, then edit the rest"
        )
    CONSOLE.print(f"[green]clean[/green]: {', '.join(verdicts)}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.lint", description="Format, lint, types and own rules."
    )
    parser.add_argument("--fix", action="store_true", help="let ruff and clang-format rewrite files")
    lint(parser.parse_args().fix)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
