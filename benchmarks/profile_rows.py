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
import re
import shutil
import sys
import time
from collections import Counter
from typing import Any

import _ncu
from _cases import Case, cases_of
from _report import about, of_kind, read_lines, shape_of
from _run import (
    Run,
    add_options,
    check_device,
    command_output,
    gather_facts,
    log_end,
    prepared,
    publish,
    publish_nothing,
    spawn,
    wait,
)
from _words import LIMITS, cells, machine, percent


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--suite", default="h200", help="a suite, or case names (a,b); default h200")
    parser.add_argument("--ncu", default="ncu", metavar="PROGRAM", help="Nsight Compute's command line")
    add_options(parser, timeout_s=300)
    return parser.parse_args(argv)


def find_ncu(program: str) -> str:
    """The path of ncu; ValueError without it."""
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
    seen: dict[str, Any] = {}
    kernels, problems = {}, []
    for case in run.cases:
        start = time.perf_counter()
        try:
            seen, kernels[case.name] = profile_case(case, run, ncu)
        except ValueError as error:
            problems.append(str(error))
        print(f"{case.name:20s} {time.perf_counter() - start:6.1f} s", file=sys.stderr, flush=True)
    return seen, kernels, problems


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
    seen: dict[str, Any],
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
        **about(seen, facts),
        "ncu": facts["ncu"],
        "sms": seen.get("sms"),
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
    lines = [head + "".join(f" {name:>6s}" for name in LIMITS.values()) + "  top stalls"]
    for row in result["rows"]:
        for kernel in row["kernels"]:
            us, *limits, stalls = cells(kernel)
            line = f"{row['case']:18s} {kernel['name']:24s} {us:>9s} {percent(kernel['sm_share']):>4s}"
            lines.append(line + "".join(f" {limit:>6s}" for limit in limits) + f"  {stalls}")
        if not row["kernels"]:
            lines.append(f"{row['case']:18s} not profiled")
    return "\n".join(lines)


def tables(result: dict[str, Any]) -> str:
    """What was profiled as text."""
    head = f"{machine(result)}, ncu {result['ncu']}, {result['sms']} SMs"
    return "\n".join([head, profile_table(result), *missing_lines(result)])


def profile(args: argparse.Namespace) -> int:
    """Profile what was asked for; the exit code is 1 when something of it went wrong."""
    cases = cases_of(args.suite)
    check_device("cuda")
    ncu = find_ncu(args.ncu)
    with prepared(args, cases) as run:
        facts = {**gather_facts(run, args.wheel), "ncu": ncu_version(ncu)}
        result = build(run, facts, *profile_all(run, ncu))
    if any(row["kernels"] for row in result["rows"]):
        return publish(result, args.json, tables(result))
    return publish_nothing("no kernel was profiled", result["problems"], args.json)


def main(argv: list[str] | None = None) -> int:
    try:
        return profile(parse_args(argv))
    except ValueError as error:
        print(f"profile_rows: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
