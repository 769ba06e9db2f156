"""What the checks say: a violation is one thing that is wrong, a verdict is all that one concern found."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ci.errors import CiError


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with `subject`: what was expected and what was found."""

    subject: str
    what: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.what}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class Verdict:
    """The findings of one concern; `error` is its failure class, `checked` how many comparisons were made."""

    concern: str
    error: type[CiError]
    checked: int
    violations: tuple[Violation, ...]
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a concern that compared nothing is not fine."""
        return self.checked > 0 and not self.violations


@dataclass
class Sheet:
    """Collects the comparisons of one concern."""

    concern: str
    error: type[CiError]
    hint: str = ""
    checked: int = 0
    violations: list[Violation] = field(default_factory=list)

    def check(self, fine: bool, subject: str, what: str, expected: object, got: object) -> bool:
        """Count one comparison and note a violation unless `fine`; returns `fine`."""
        self.checked += 1
        if not fine:
            self.violations.append(Violation(subject, what, str(expected), str(got)))
        return fine

    def equal(self, subject: str, what: str, expected: object, got: object) -> bool:
        """Check that two values are the same."""
        return self.check(expected == got, subject, what, show(expected), show(got))

    def same_set(self, subject: str, what: str, expected: Collection[str], got: Collection[str]) -> None:
        """Check two sets of names, one violation for each missing and each unexpected name."""
        self.checked += 1
        for name in sorted(set(expected) - set(got)):
            self.violations.append(Violation(subject, f"missing {what}", name, listing(got)))
        for name in sorted(set(got) - set(expected)):
            self.violations.append(Violation(subject, f"unexpected {what}", listing(expected), name))

    def verdict(self) -> Verdict:
        """The frozen result; a sheet on which nothing was compared carries a violation that says so."""
        if self.checked == 0:
            nothing = Violation(self.concern, "nothing was compared", "at least one comparison", "none")
            return Verdict(self.concern, self.error, 0, (nothing,), self.hint)
        return Verdict(self.concern, self.error, self.checked, tuple(self.violations), self.hint)


def listing(names: Iterable[str]) -> str:
    """Names in order, or ``none``."""
    return ", ".join(sorted(names)) or "none"


def show(value: object) -> str:
    """A value for a message: text as it is, nothing as ``none``."""
    return "none" if value is None or value == "" else str(value)
