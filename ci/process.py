"""Runs other programs: output kept in a log, progress shown, failure turned into the caller's error."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ci.errors import CiError, missing_package

try:
    from rich.console import Console
    from rich.markup import escape
except ModuleNotFoundError as error:
    raise missing_package(error, ["ci", "verify"]) from error

# Without a terminal rich takes 80 columns, too few for a table of kernels.
CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else 160)
HEARTBEAT_SECONDS = 20.0
TAIL_LINES = 40


class Step:
    """One piece of work on the screen: its title, its latest line and how long it has run."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.line = ""
        self.began = time.monotonic()
        self._ended = threading.Event()

    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self.began

    def text(self) -> str:
        """What a watcher reads while the step runs."""
        return f"{escape(self.title)} ... {self.seconds():.0f} s  [dim]{escape(self.line[:100])}[/dim]"

    def watch(self) -> None:
        """Report until `end`: a spinner on a terminal, a line now and then in a log."""
        if not CONSOLE.is_terminal:
            while not self._ended.wait(HEARTBEAT_SECONDS):
                CONSOLE.print("  " + self.text())
            return
        with CONSOLE.status(self.text()) as status:
            while not self._ended.wait(0.2):
                status.update(self.text())

    def end(self) -> None:
        """Stop `watch`."""
        self._ended.set()


@contextmanager
def step(title: str) -> Iterator[Step]:
    """Show `title` while the body runs, then how long it took and whether it failed."""
    current = Step(title)
    watcher = threading.Thread(target=current.watch, daemon=True)
    watcher.start()
    verdict = "[red]failed[/red]"
    try:
        yield current
        verdict = "[green]done[/green]"
    finally:
        current.end()
        watcher.join()
        CONSOLE.print(f"{verdict} {escape(title)} ({current.seconds():.1f} s)")


def run(
    command: Sequence[str | Path],
    *,
    title: str,
    error: type[CiError],
    hint: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    umask: int = -1,
) -> str:
    """Run `command` to its end and return its output (stdout and stderr together).

    Raises `error` with the end of the output, the place of the whole log and `hint` (the next command to try)
    when it exits non-zero or cannot be started.
    """
    words = [str(word) for word in command]
    with step(title) as current:
        code, output = _follow(words, current, cwd, env, umask)
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(output)
        if code != 0:
            raise error(_failure(words, title, code, output, log, hint))
    return output


def _follow(
    words: list[str], current: Step, cwd: Path | None, env: Mapping[str, str] | None, umask: int
) -> tuple[int, str]:
    lines: list[str] = []
    try:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=env,
            umask=umask,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as problem:
        return 127, str(problem)
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            current.line = line.strip() or current.line
    return process.returncode, "".join(lines)


def _failure(words: list[str], title: str, code: int, output: str, log: Path | None, hint: str) -> str:
    tail = "\n".join(f"  {line}" for line in deque(output.splitlines(), TAIL_LINES))
    where = f"\nWhole output: {log}" if log is not None else ""
    command = shlex.join(words)
    return f"{title}: expected exit code 0, got {code}.\nCommand: {command}\n{tail}{where}\nNext: {hint}"
