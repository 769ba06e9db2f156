"""What is timed: the shapes of cases.toml, and the bytes and operations each must at least cost."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomllib

HEAD_DIM = 128
CASES_FILE = Path(__file__).with_name("cases.toml")
MOST = 2**24  # sequences, or their tokens, of generated lengths
MOST_BYTES = 2**40  # of a case: more than any GPU holds


@dataclass(frozen=True)
class Case:
    """One shape. `lens`: None for a fixed-length batch, else the lengths of the packed sequences (B = 1);
    `generator` is the text they were made from, where they were not listed."""

    name: str
    batch: int
    seqlen: int
    nheads: int
    lens: tuple[int, ...] | None = None
    peers: tuple[str, ...] = ()
    generator: str | None = None

    @property
    def sequences(self) -> int:
        return self.batch if self.lens is None else len(self.lens)

    @property
    def token_heads(self) -> int:
        return self.batch * self.seqlen * self.nheads

    @property
    def bytes_moved(self) -> int:
        """Bytes that must move: q, k, v, g, beta read and o written (bf16), fp32 states in and out."""
        per_token_head = 5 * HEAD_DIM * 2 + 2
        states = 2 * self.sequences * self.nheads * HEAD_DIM * HEAD_DIM * 4
        return self.token_heads * per_token_head + states

    @property
    def flops(self) -> int:
        """Operations of the recurrence: S k, the rank-one update and S q, 2 K V each per token and head."""
        return self.token_heads * 6 * HEAD_DIM * HEAD_DIM

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Case:
        lens = data["lens"]
        return Case(
            data["name"],
            data["batch"],
            data["seqlen"],
            data["nheads"],
            None if lens is None else tuple(lens),
            tuple(data["peers"]),
            data["generator"],
        )


@dataclass(frozen=True)
class AccuracyLine:
    """One line of the error table; see cases.toml for the meaning of each field."""

    name: str
    batch: int
    seqlen: int
    nheads: int
    lower_bound: float
    random_state: bool
    keys: str | float = "normal"
    g: str | float = "normal"
    beta: str | float = "normal"
    a_log: str | float = 0.0
    dt_bias: str | float = 0.0
    qk_scale: float = 1.0

    @property
    def label(self) -> str:
        return self.name + (", random initial state" if self.random_state else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> AccuracyLine:
        return AccuracyLine(**data)


@dataclass(frozen=True)
class Suite:
    """Cases with one name, and whether the accuracy table goes with them."""

    cases: tuple[str, ...]
    accuracy: bool


def parse_lens(text: str) -> tuple[int, ...]:
    """Lengths from "1300,547", "8x1024" or "random:COUNT:LOW:HIGH:TOTAL"; ValueError for anything else."""
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        count, each = (int(part) for part in match.groups())
        _refuse_generated(text, count, count * each)
        return (each,) * count
    if match := re.fullmatch(r"random:(\d+):(\d+):(\d+):(\d+)", text):
        count, low, high, total = (int(part) for part in match.groups())
        _refuse_generated(text, count, count * high)
        return random_lens(count, low, high, total)
    if re.fullmatch(r"\d+(,\d+)*", text):
        return tuple(int(part) for part in text.split(","))
    raise ValueError(
        f"lengths {text!r} are not understood: expected '1300,547', '8x1024' or 'random:COUNT:LOW:HIGH:TOTAL'"
    )


def _refuse_generated(text: str, count: int, tokens: int) -> None:
    """ValueError for lengths that would fill the memory before anything runs."""
    if max(count, tokens) > MOST:
        raise ValueError(f"lengths {text!r} are {count} of up to {tokens} tokens; expected at most {MOST}")


def random_lens(count: int, low: int, high: int, total: int) -> tuple[int, ...]:
    """`count` lengths in [low, high] that sum to `total`, the same on every machine."""
    if not count * low <= total <= count * high:
        raise ValueError(f"{count} lengths in [{low}, {high}] cannot sum to {total}")
    rng = random.Random(0)
    lens = [rng.randint(low, high) for _ in range(count)]
    step = 1 if sum(lens) < total else -1
    while sum(lens) != total:
        index = rng.randrange(count)
        lens[index] = min(high, max(low, lens[index] + step))
    return tuple(lens)


def make_case(
    name: str, nheads: int, batch: int, seqlen: int, lens: str | None, peers: Iterable[str]
) -> Case:
    """A case from plain fields; `lens` (text, see parse_lens) replaces batch and seqlen."""
    parsed = None if lens is None else parse_lens(lens)
    if parsed is not None:
        batch, seqlen = 1, sum(parsed)
    if min(batch, seqlen, nheads) < 1:
        raise ValueError(
            f"case {name!r}: batch, seqlen, nheads must be >= 1, got {batch}, {seqlen}, {nheads}"
        )
    generator = lens if lens is not None and ("x" in lens or ":" in lens) else None
    case = Case(name, batch, seqlen, nheads, parsed, tuple(peers), generator)
    if case.bytes_moved > MOST_BYTES:
        raise ValueError(f"case {name!r} moves {case.bytes_moved} bytes; expected at most {MOST_BYTES}")
    return case


def load_cases(path: Path = CASES_FILE) -> list[Case]:
    """Every timing case of the file, in its order."""
    rows = tomllib.loads(path.read_text())["case"]
    return [
        make_case(
            row["name"],
            row["nheads"],
            row.get("batch", 1),
            row.get("seqlen", 0),
            row.get("lens"),
            row.get("peers", ()),
        )
        for row in rows
    ]


def load_accuracy(path: Path = CASES_FILE) -> list[AccuracyLine]:
    """Every accuracy line, each without and with a random initial state."""
    table = tomllib.loads(path.read_text())["accuracy"]
    lines = table.pop("line")
    return [
        AccuracyLine(**{**table, **line}, random_state=state) for line in lines for state in (False, True)
    ]


def load_suites(path: Path = CASES_FILE) -> dict[str, Suite]:
    """Every suite: 'peers' (every case), 'accuracy' (none), 'all' (both), and 'h200', which is 'all' by the
    name of the GPU whose figures the README shows."""
    every = tuple(case.name for case in load_cases(path))
    both = Suite(every, True)
    return {"peers": Suite(every, False), "accuracy": Suite((), True), "all": both, "h200": both}


def choose_suite(text: str, path: Path = CASES_FILE) -> Suite:
    """What --suite asks for: a suite's name, or names of cases with commas (a suite without accuracy)."""
    suites = load_suites(path)
    return suites[text] if text in suites else Suite(tuple(text.split(",")), False)


def select(names: Iterable[str], cases: list[Case], path: Path = CASES_FILE) -> list[Case]:
    """The cases of these names, in this order; ValueError that lists what there is."""
    by_name = {case.name: case for case in cases}
    wanted = list(names)
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        known = ", ".join((*load_suites(path), *by_name))
        raise ValueError(f"no case named {', '.join(unknown)}; known: {known}")
    return [by_name[name] for name in wanted]


def cases_of(text: str) -> list[Case]:
    """The cases of what --suite asks for; ValueError when it has none."""
    cases = select(choose_suite(text).cases, load_cases())
    if not cases:
        raise ValueError(f"suite {text!r} has no case to run; give another, or case names (a,b)")
    return cases


def shrink(case: Case) -> Case:
    """A few tokens and two heads of the same kind of case."""
    lens = None if case.lens is None else tuple(min(5, n) for n in case.lens[:4])
    seqlen = min(24, case.seqlen) if lens is None else sum(lens)
    return Case(case.name, min(2, case.batch), seqlen, min(2, case.nheads), lens, case.peers)
