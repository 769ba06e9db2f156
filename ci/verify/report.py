"""The report of one verification: text for people, JSON with a schema number for programs, one exit code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci.verify.facts import Facts, Image
from ci.verify.verdicts import Verdict

SCHEMA = 1


@dataclass(frozen=True)
class Report:
    """Facts of an artifact and the verdict of every concern, in the order that decides the exit code."""

    facts: Facts
    archs: tuple[str, ...]
    ptx: tuple[str, ...]
    row: str | None
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every verdict is fine."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def failure(self) -> Verdict | None:
        """The first verdict that is not fine."""
        return next((verdict for verdict in self.verdicts if not verdict.ok), None)

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the first failure's class."""
        return self.failure.error.exit_code if self.failure else 0

    def raise_on_failure(self) -> None:
        """Raise the first failure's CiError, its message listing every violation of every concern."""
        if self.failure is not None:
            raise self.failure.error(self.message())

    def message(self) -> str:
        """Every violation, one a line, grouped by concern."""
        lines = [f"{self.facts.artifact}: {sum(len(v.violations) for v in self.verdicts)} violations."]
        for verdict in self.verdicts:
            lines += [f"  {verdict.concern}: {violation}" for violation in verdict.violations]
            if verdict.violations and verdict.hint:
                lines.append(f"  {verdict.concern}: next: {verdict.hint}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The report as plain data."""
        return {
            "schema": SCHEMA,
            "artifact": self.facts.artifact,
            "sha256": self.facts.sha256,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "failure": self.failure.error.__name__ if self.failure else None,
            "expected": {"archs": list(self.archs), "ptx": list(self.ptx), "row": self.row},
            "warnings": list(self.warnings),
            "verdicts": [_verdict_dict(verdict) for verdict in self.verdicts],
            "facts": asdict(self.facts),
        }

    def as_json(self) -> str:
        """`as_dict` as text, keys sorted."""
        return json.dumps(self.as_dict(), indent=1, sort_keys=True)

    def print(self, console: Console) -> None:
        """Print the report for people."""
        console.print(_summary(self))
        console.print(_kernel_table(self.facts))
        for verdict in self.verdicts:
            console.print(_verdict_text(verdict))
        for warning in self.warnings:
            console.print(Text(f"warning: {warning}", style="yellow"))


def _verdict_dict(verdict: Verdict) -> dict[str, object]:
    return {
        "concern": verdict.concern,
        "error": verdict.error.__name__,
        "exit_code": verdict.error.exit_code,
        "ok": verdict.ok,
        "checked": verdict.checked,
        "violations": [asdict(violation) for violation in verdict.violations],
        "hint": verdict.hint,
    }


def _summary(report: Report) -> Text:
    ptx = f", PTX {','.join(report.ptx)}" if report.ptx else ""
    row = f", row {report.row}" if report.row else ""
    line = (
        f"{report.facts.artifact}\nsha256 {report.facts.sha256}\nexpected {','.join(report.archs)}{ptx}{row}"
    )
    return Text(line)


def _kernel_table(facts: Facts) -> Table:
    table = Table("library", "image", "kernel", "registers", "stack", "local", "shared", "instructions")
    for library in facts.libraries:
        for image in library.images:
            _add_image(table, library.path, image)
    return table


def _add_image(table: Table, path: str, image: Image) -> None:
    name = f"sm_{image.arch}" if image.kind == "elf" else f"PTX {image.arch}"
    if not image.kernels:
        table.add_row(path, name, "-", "", "", "", "", "")
    for kernel in image.kernels:
        numbers = (kernel.registers, kernel.stack, kernel.local, kernel.shared, sum(kernel.opcodes.values()))
        table.add_row(path, name, kernel.symbol, *(str(number) for number in numbers))


def _verdict_text(verdict: Verdict) -> Text:
    text = Text()
    text.append("ok    " if verdict.ok else "FAIL  ", style="green" if verdict.ok else "bold red")
    text.append(f"{verdict.concern} ({verdict.checked} checks")
    text.append(")" if verdict.ok else f"; {verdict.error.__name__}, exit code {verdict.error.exit_code})")
    for violation in verdict.violations:
        text.append(f"\n      {violation}")
    if verdict.violations and verdict.hint:
        text.append(f"\n      next: {verdict.hint}")
    return text
