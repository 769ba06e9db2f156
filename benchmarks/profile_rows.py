#!/usr/bin/env python3
"""Say what limits each kernel of each case: one call under Nsight Compute.

    python benchmarks/profile_rows.py --suite h200 --json benchmarks/results/profile_h200.json
    python benchmarks/profile_rows.py --suite t8192_h96,t8192_h8 --ours-path .

Each case runs in a process of its own, warmed up by a call that is not profiled. Clocks and caches are left
alone. ncu runs one kernel at a time and repeats it for its counters, so kernels do not overlap as they do in
a call, and what fits into the L2 cache is there: bench_prefill.py has the times that count.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import _ncu
import torch
from _cases import Case, choose_suite, load_cases, select
from _report import of_kind, read_lines, shape_of
from _run import Run, command_output, gather_facts, log_end, spawn, wait
from _words import percent, stall_words

COLUMNS = ("issue", "tensor", "shared", "l2", "dram")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--suite", default="h200", help="a suite, or case names (a,b); default h200")
    parser.add_argument("--ours-path", type=Path, help="folder of our flash_kda (default: the installed one)")
    parser.add_argument("--wheel", type=Path, help="our wheel, for its sha256 in the result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    parser.add_argument("--ncu", default="ncu", metavar="PROGRAM", help="Nsight Compute's command line")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=300, help="seconds that one case may take")
    return parser.parse_args(argv)


def choose(suite: str) -> list[Case]:
    """The cases of a suite; ValueError when it has none."""
    cases = select(choose_suite(suite).cases, load_cases())
    if not cases:
        raise ValueError(f"suite {suite!r} has no case to profile; give another, or case names (a,b)")
    return cases


def find_ncu(program: str) -> str:
    """The path of ncu; ValueError without it or without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("torch sees no GPU: run on a machine with one, there is nothing to profile here")
    found = shutil.which(program)
    if found is None:
        raise ValueError(f"no {program!r} on the PATH: install Nsight Compute, or give --ncu PROGRAM")
    return found


def profile_case(case: Case, run: Run, ncu: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and the kernels of one case; ValueError with the end of the logs when there are none."""
    page = run.scratch / f"{case.name}.csv"
    job = {"profile": case.to_json()}
    process = spawn("_worker.py", case.name, "ours", job, run, _ncu.command(ncu, page))
    if problems := wait(process, case.name, run, run.timeout_s):
        raise ValueError(*problems)
    machines = of_kind(read_lines(run.scratch / f"{case.name}.jsonl"), "machine")
    try:
        if not page.exists() or not machines:
            raise ValueError("ncu ended without its table; expected one kernel or more")
        rows = _ncu.parse(page.read_text(errors="replace"))
        return machines[0], [_ncu.kernel(row, machines[0]["sms"]) for row in rows]
    except ValueError as error:
        raise ValueError(f"{case.name}: {error}{log_end(case.name, run)}") from error


def profile_all(run: Run, ncu: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], list[str]]:
    """Every case, one after the other: the machine, the kernels by case, and the problems."""
    machine: dict[str, Any] = {}
    kernels, problems = {}, []
    for case in run.cases:
        start = time.perf_counter()
        try:
            machine, kernels[case.name] = profile_case(case, run, ncu)
        except ValueError as error:
            problems.append(str(error))
        print(f"{case.name:20s} {time.perf_counter() - start:6.1f} s", file=sys.stderr, flush=True)
    return machine, kernels, problems


def ncu_version(ncu: str) -> str | None:
    """The version that ncu states of itself."""
    match = re.search(r"Version (\S+)", command_output(ncu, "--version") or "")
    return match[1] if match else None


def metric_names(kernels: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The names under which each figure stood, over all kernels."""
    used = {key: {k["metrics"][key] for k in kernels if key in k["metrics"]} for key in _ncu.METRICS}
    return {key: sorted(names) for key, names in used.items()}


def build(
    run: Run,
    facts: dict[str, Any],
    machine: dict[str, Any],
    kernels: dict[str, list[dict[str, Any]]],
    problems: list[str],
) -> dict[str, Any]:
    """The result file; a case that could not be profiled has no kernels."""
    every = [kernel for found in kernels.values() for kernel in found]
    rows = []
    for case in run.cases:
        found = [
            {key: value for key, value in kernel.items() if key != "metrics"}
            for kernel in kernels.get(case.name, [])
        ]
        rows.append({**shape_of(case), "kernels": found})
    return {
        "device": machine.get("device"),
        "driver": facts["driver"],
        "torch": machine.get("torch"),
        "ncu": facts["ncu"],
        "date": facts["date"],
        "commit": facts["commit"],
        "wheel_sha256": facts["wheel_sha256"],
        "sms": machine.get("sms"),
        "versions": facts["versions"],
        "metrics": metric_names(every),
        "rows": rows,
        "problems": problems,
    }


def missing_lines(result: dict[str, Any]) -> list[str]:
    """Every figure that ncu did not give, and of how many kernels."""
    kernels = [kernel for row in result["rows"] for kernel in row["kernels"]]
    counts = Counter(key for kernel in kernels for key in kernel["missing"])
    return [
        f"MISSING {key} of {count} of {len(kernels)} kernels; looked for {_ncu.wanted(key)}"
        for key, count in sorted(counts.items())
    ]


def profile_table(result: dict[str, Any]) -> str:
    """The kernels as fixed-width text; everything but the time is in %."""
    head = f"{'case':18s} {'kernel':24s} {'us':>9s} {'SMs':>4s}"
    lines = [head + "".join(f" {name:>6s}" for name in COLUMNS) + "  top stalls"]
    for row in result["rows"]:
        for kernel in row["kernels"]:
            us = "-" if kernel["us"] is None else f"{kernel['us']:.1f}"
            cells = f"{row['case']:18s} {kernel['name']:24s} {us:>9s} {percent(kernel['sm_share']):>4s}"
            cells += "".join(f" {percent(kernel[key]):>6s}" for key in COLUMNS)
            lines.append(f"{cells}  {stall_words(kernel)}")
        if not row["kernels"]:
            lines.append(f"{row['case']:18s} not profiled")
    return "\n".join(lines)


def publish(result: dict[str, Any], path: Path | None) -> None:
    """Print the table and write the file, unless nothing was profiled: an older file stays then."""
    if any(row["kernels"] for row in result["rows"]):
        machine = f"{result['device']}, {result['sms']} SMs, driver {result['driver']}"
        print(f"{machine}, torch {result['torch']}, ncu {result['ncu']}")
        print(profile_table(result))
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    elif path:
        print(f"no kernel was profiled: {path} is not written")
    for line in missing_lines(result):
        print(line)
    for problem in result["problems"]:
        print(f"PROBLEM {problem}")


def profile(args: argparse.Namespace) -> int:
    """Profile what was asked for; the exit code is 1 when something of it went wrong."""
    cases = choose(args.suite)
    ncu = find_ncu(args.ncu)
    scratch = Path(tempfile.mkdtemp(prefix="profile_kda_"))
    try:
        ours_path = args.ours_path and args.ours_path.resolve()
        run = Run(scratch, "cuda", args.seed, cases, [], {}, ours_path, args.timeout)
        facts = {**gather_facts(run, args.wheel), "ncu": ncu_version(ncu)}
        result = build(run, facts, *profile_all(run, ncu))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    publish(result, args.json)
    return 1 if result["problems"] else 0


def main(argv: list[str] | None = None) -> int:
    try:
        return profile(parse_args(argv))
    except ValueError as error:
        print(f"profile_rows: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
