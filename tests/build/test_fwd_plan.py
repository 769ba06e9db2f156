"""csrc/kda/fwd_plan.h, compiled by g++ alone: which plan a call gets, and that it holds for any lengths.

Compiled so that overflow of a signed number and division by zero end the program.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flash_kda.checks import MAX_SEGMENT as MAX_TOKENS
from flash_kda.checks import SEGMENT_STEP as CHUNK

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "kda" / "fwd_plan.h"
H200 = 132  # multiprocessors
MAX_PAIRS = 2**31 - 1  # of (sequence, value head), as csrc/binding.cpp has it

HARNESS = """\
#include <cstdio>

#include "fwd_plan.h"

int main() {
  long long sequences, tokens;
  int heads, packed, wanted, sms;
  while (std::scanf("%lld %lld %d %d %d %d", &sequences, &tokens, &heads, &packed, &wanted, &sms) == 6) {
    const flash_kda::FwdPlan p = flash_kda::plan_fwd({sequences, tokens, heads, packed != 0, wanted, sms});
    const long long max_segments = p.max_segments;
    std::printf("%d %d %lld %u %d\\n", p.split, p.segment_chunks, max_segments, p.tasks, p.ordered ? 1 : 0);
  }
}
"""
FLAGS = (
    "-std=c++17",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fsanitize=undefined,float-divide-by-zero,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
)


@dataclass(frozen=True)
class Size:
    """`lens`: lengths of the sequences; without cu_seqlens they are equal."""

    lens: tuple[int, ...]
    heads: int
    packed: bool = False
    wanted: int = -1
    sms: int = H200

    def line(self) -> str:
        numbers = (len(self.lens), sum(self.lens), self.heads, int(self.packed), self.wanted, self.sms)
        return " ".join(map(str, numbers))


@dataclass(frozen=True)
class Plan:
    split: int
    segment_chunks: int
    max_segments: int
    tasks: int
    ordered: bool


def compile_plan(folder: Path, header: str) -> Path:
    """The harness around a header's text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fwd_plan.h").write_text(header, encoding="utf-8")
    (folder / "main.cpp").write_text(HARNESS, encoding="utf-8")
    command = ["g++", *FLAGS, "-o", str(folder / "plan"), str(folder / "main.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "plan"


def plans(program: Path, sizes: Sequence[Size]) -> list[Plan]:
    """What the header says of each size; AssertionError when the program ended before the last."""
    text = "".join(f"{size.line()}\n" for size in sizes)
    done = subprocess.run([str(program)], input=text, capture_output=True, text=True, timeout=60)
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"signal or exit code {done.returncode}"
    assert len(rows) == len(sizes)
    return [Plan(*row[:4], ordered=bool(row[4])) for row in rows]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_plan(tmp_path_factory.mktemp("plan"), HEADER.read_text(encoding="utf-8"))


# ---- the benchmark's cases ----

VARLEN6 = (1300, 547, 2048, 963, 271, 3063)
UNCUT, CUT = False, True
TABLE = {
    "t8192_h96": (Size((8192,), 96), 1, UNCUT),
    "t8192_h64": (Size((8192,), 64), 2, UNCUT),
    "t8192_h32": (Size((8192,), 32), 4, UNCUT),
    "t8192_h24": (Size((8192,), 24), 4, UNCUT),
    "t8192_h12": (Size((8192,), 12), None, CUT),
    "t8192_h8": (Size((8192,), 8), None, CUT),
    "t65536_h8": (Size((65536,), 8), None, CUT),
    "t131072_h8": (Size((131072,), 8), None, CUT),
    "t512_h32": (Size((512,), 32), 4, UNCUT),
    "b32_t1024_h32": (Size((1024,) * 32, 32), 1, UNCUT),
    "varlen6_h96": (Size(VARLEN6, 96, packed=True), 1, UNCUT),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_benchmarks_cases_on_an_h200(program: Path, name: str) -> None:
    size, split, cut = TABLE[name]
    (plan,) = plans(program, [size])
    assert (plan.segment_chunks > 0) == cut, plan
    assert split in (None, plan.split), plan
    assert plan.ordered == size.packed


def test_packed_sequences_are_taken_to_differ(program: Path) -> None:
    uneven, even = (2160, 0, 1, 5360, 15, 1104), (1440,) * 6
    packed, equal = plans(program, [Size(uneven, 2, packed=True), Size(even, 2)])
    assert packed.segment_chunks > 0 and equal.segment_chunks == 0
    alone, same = plans(program, [Size((2048,), 2, packed=True), Size((2048,), 2)])
    assert alone.segment_chunks == same.segment_chunks


def test_which_packed_calls_are_ordered(program: Path) -> None:
    """Those with more tasks than multiprocessors."""
    for count, ordered in ((1, False), (2, True)):
        (plan,) = plans(program, [Size((100,) * count, 67, packed=True)])
        assert plan.ordered == ordered
    (forced,) = plans(program, [Size((100,) * 6, 96, packed=True, wanted=16)])
    assert not forced.ordered


# ---- what holds for every size ----


def chunks(length: int) -> int:
    return -(-length // CHUNK)


def segments(lens: Iterable[int], segment_chunks: int) -> int:
    """What the kernels count: an empty sequence has one too."""
    return sum(max(1, -(-chunks(length) // segment_chunks)) for length in lens)


def check(size: Size, plan: Plan) -> None:
    """AssertionError where a plan makes the kernels leave something out or write past their workspace."""
    pairs = len(size.lens) * size.heads
    if pairs == 0:
        assert plan.tasks == 0
        return
    assert plan.split in (1, 2, 4)
    if size.wanted >= 0:
        assert plan.segment_chunks == size.wanted
    if plan.segment_chunks == 0:
        assert plan.tasks == pairs
        assert plan.split == 1 or plan.split * pairs <= size.sms
        assert plan.ordered == (size.packed and pairs > size.sms)
        return
    needed = segments(size.lens, plan.segment_chunks)
    assert plan.max_segments >= needed, f"{plan.max_segments} places for {needed} segments"
    assert size.packed or plan.max_segments == needed
    assert plan.max_segments <= len(size.lens) + sum(size.lens) // (plan.segment_chunks * CHUNK) + 1
    assert plan.tasks == plan.max_segments * size.heads
    assert not plan.ordered
    if size.wanted < 0:
        assert plan.segment_chunks >= 16, "binding.cpp refuses shorter ones"
        even = [sum(size.lens) // len(size.lens)] * len(size.lens)
        assert 3 * len(size.lens) <= segments(even, plan.segment_chunks) <= 64 * len(size.lens)


def division(rng: random.Random, total: int, count: int) -> tuple[int, ...]:
    """Lengths with the given sum: some empty, some a token more than whole segments, one the rest."""
    lens = []
    for _ in range(count - 1):
        kind = rng.random()
        share = rng.randint(0, 2 * total // count)
        if kind < 0.2:
            share = 0
        elif kind < 0.5:
            share = share // 256 * 256 + 1
        lens.append(min(total, share))
        total -= lens[-1]
    lens.append(total)
    rng.shuffle(lens)
    return tuple(lens)


def random_size(rng: random.Random) -> Size:
    packed = rng.random() < 0.6
    count = rng.choice((1, 1, 2, 3, 5, 8, 40, 300))
    heads = rng.choice((1, 2, 3, 8, 12, 16, 24, 32, 48, 64, 96, 200))
    total = int(2 ** rng.uniform(0, 20)) - 1
    lens = division(rng, total, count) if packed else (total // count,) * count
    wanted = rng.choice((-1, -1, 0, 16, 17, 33, 64, 1000))
    return Size(lens, heads, packed, wanted, rng.choice((1, 2, 3, 7, 64, 78, 114, H200, 148, 188)))


def extremes() -> list[Size]:
    """The smallest and the largest that binding.cpp lets through."""
    found = []
    for wanted in (-1, 0, 16, MAX_TOKENS // CHUNK):
        for packed in (False, True):
            for sms in (1, 2, 3, H200):
                shapes: list[tuple[tuple[int, ...], int]] = [
                    ((), 4),
                    ((0,), 0),
                    ((0,), 1),
                    ((0, 0, 0), 5),
                    ((1,), 1),
                    ((15,), 33),
                    ((16,), 1),
                    ((17, 0) if packed else (17, 17), 1),
                    ((MAX_TOKENS,), 1),
                    ((MAX_TOKENS,), 33),
                    ((MAX_TOKENS - 3, 0, 3, 0) if packed else (MAX_TOKENS,) * 4, 2),
                    ((2**20,) * 2000 if packed else (2**20,) * 4096, 1),
                    ((1,) * 1000, MAX_PAIRS // 1000) if wanted < 1 else ((1,), 1),
                ]
                found += [Size(lens, heads, packed, wanted, sms) for lens, heads in shapes]
    return found


def all_sizes() -> list[Size]:
    rng = random.Random(20)
    return extremes() + [random_size(rng) for _ in range(6000)]


def check_all(program: Path) -> None:
    sizes = all_sizes()
    for size, plan in zip(sizes, plans(program, sizes), strict=True):
        try:
            check(size, plan)
        except AssertionError as error:
            raise AssertionError(f"{size.line()}: {plan}: {error}") from None


def test_plans_hold_for_any_size(program: Path) -> None:
    check_all(program)


def test_the_sizes_reach_every_kind_of_plan(program: Path) -> None:
    sizes = all_sizes()
    found = {
        (plan.split, plan.segment_chunks > 0, plan.ordered, size.packed, size.wanted < 0)
        for size, plan in zip(sizes, plans(program, sizes), strict=True)
    }
    for split in (1, 2, 4):
        for packed in (False, True):
            assert (split, False, False, packed, True) in found
            assert (split, True, False, packed, False) in found
    assert any(cut and chosen and packed for _, cut, _, packed, chosen in found)
    assert any(ordered for _, _, ordered, _, _ in found)


TASKS = "plan.tasks = static_cast<unsigned>(plan.max_segments * s.heads_v);"
PACKED = "s.packed ? s.num_sequences + s.total_tokens / (length * kChunk) : "
MUTANTS = {
    "a place too few": (TASKS, "--plan.max_segments; " + TASKS),
    "a task too few": (TASKS, TASKS.replace("* s.heads_v", "* s.heads_v - 1")),
    "packed as if of equal length": (PACKED, ""),
    "a part of a segment dropped": ("(1, ceil_div(chunks, length))", "(1, chunks / length)"),
    "a split that does not run at once": ("4 * tasks <= sms ? 4", "3 * tasks <= sms ? 4"),
    "never cut is not kept": ("s.segment_chunks == 0 ||", "false &&"),
    "order for equal lengths": ("s.packed && tasks > s.sms", "tasks > s.sms"),
    "no look at empty calls": ("if (s.num_sequences * s.heads_v == 0) return {};", ""),
    "32 bits": ("best_split(int64_t tasks", "best_split(int tasks"),
}
# With the costs as they are these change nothing; the bounds have to hold whatever is measured.
FREE = "whole = 1.0, half = 1.0, quarter = 1.0, state = 0.01, scan_step = 0.0, uncut = 0.0, cut = 0.0"
MUTANTS_OF_FREE = {
    "shorter segments than a caller may ask for": ("chunks / n >= kMinSegmentChunks", "chunks / n >= 4"),
    "two segments": ("int64_t n = 3;", "int64_t n = 2;"),
    "more segments than a scan should have": ("n <= 64", "n <= 99"),
}


def with_free_cuts() -> str:
    """The header if cutting cost nothing."""
    text, count = re.subn(r"whole = [^;]*", FREE, HEADER.read_text(encoding="utf-8"))
    assert count == 1, "the costs do not stand where they did"
    return text


def mutated(text: str, change: tuple[str, str]) -> str:
    old, new = change
    assert old in text, f"{old!r} is gone from {HEADER.name}: choose another place"
    return text.replace(old, new)


def test_plans_hold_where_cutting_costs_nothing(tmp_path: Path) -> None:
    check_all(compile_plan(tmp_path, with_free_cuts()))


@pytest.mark.parametrize("name", MUTANTS_OF_FREE)
def test_a_wrong_bound_is_noticed(name: str, tmp_path: Path) -> None:
    program = compile_plan(tmp_path, mutated(with_free_cuts(), MUTANTS_OF_FREE[name]))
    with pytest.raises(AssertionError):
        check_all(program)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_header_is_noticed(name: str, tmp_path: Path) -> None:
    text = mutated(HEADER.read_text(encoding="utf-8"), MUTANTS[name])
    program = compile_plan(tmp_path, text)
    with pytest.raises(AssertionError):
        check_all(program)


def test_the_bound_of_pairs_is_the_bindings() -> None:
    text = (ROOT / "csrc" / "binding.cpp").read_text(encoding="utf-8")
    assert re.search(r"num_sequences \* heads_v <= INT32_MAX", text)
