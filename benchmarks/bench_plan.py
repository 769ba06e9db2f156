#!/usr/bin/env python3
"""Measure the costs of csrc/kda/fwd_plan.h on this GPU, and hold its choice against others.

    python benchmarks/bench_plan.py --ours-path . --sweep --json benchmarks/results/plan_h200.json

The plan of a call is chosen by `FwdCosts`, microseconds on an H200. Each is measured here from start and end
times of kernels, by torch's profiler, as the median over single calls on rotated inputs. A kernel's time is
that from the end of the kernel before it in the same call, since each starts early and waits. Lines are
fitted with the least relative errors.

    whole, half, quarter  slope of the kernel's time over chunks: 96, 64 and 32 heads, never cut
    state                 the same over the chunks of a segment: 8 heads, as many segments as run at once
    scan_step             slope of the scan's time over the number of segments
    uncut                 median of the first three kernels' intercepts: what a call takes besides its chunks
    cut                   the same of a call with segments: a call of `state`, from the start of its first
                          kernel to the end of its last, less the chunks of a segment in both passes and a
                          step of the scan for each segment. It holds the launches, the start of the scan and
                          every error of the others; median over the lengths

Exit code 1: a constant is off by more than 25 %, or could not be measured (a GPU other than an H200 has other
times). --sweep also times whole calls by CUDA events: the choice, no cuts, and 4, 8, 16 and 32 segments, for
1 to 48 heads and 2048 to 32768 tokens.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from _plan import HEADER, build_result, cost_table, min_segment, read_costs, size, sweep_table
from _report import read_lines
from _run import add_options, check_device, gather_facts, prepared, publish, publish_nothing, spawn, wait
from _words import machine


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--sweep", action="store_true", help="also time the choice against forced segments")
    add_options(parser, timeout_s=400)
    return parser.parse_args(argv)


def tables(result: dict[str, Any]) -> str:
    """What was measured as text."""
    found = [f"{machine(result)}; microseconds", cost_table(result)]
    if result["sweep"]:
        found += ["", sweep_table(result)]
    return "\n".join(found)


def benchmark(args: argparse.Namespace) -> int:
    """Measure, compare, publish; the exit code is 1 when something is off."""
    check_device("cuda")
    header = read_costs(HEADER.read_text(encoding="utf-8"))
    min_segment(), size("kScanParts")  # said now, not by the process that needs them
    with prepared(args) as run:
        facts = gather_facts(run, args.wheel)
        process = spawn("_plan_worker.py", "plan", "ours", {"sweep": args.sweep}, run)
        problems = wait(process, "plan", run, args.timeout)
        result = build_result(read_lines(run.scratch / "plan.jsonl"), header, facts, problems)
    if result["points"] or result["sweep"]:
        return publish(result, args.json, tables(result))
    return publish_nothing("nothing was measured", result["problems"], args.json)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return benchmark(args)
    except (OSError, ValueError) as error:
        print(f"bench_plan: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
