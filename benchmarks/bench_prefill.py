#!/usr/bin/env python3
"""Time KDA prefill and compare with peers in one run.

    python benchmarks/bench_prefill.py --batch 1 --seqlen 8192 --nheads 96
    python benchmarks/bench_prefill.py --varlen 1300,547,2048 --nheads 96
    python benchmarks/bench_prefill.py --suite h200 --peers flashkda,fla --flashkda-path DIR --json FILE
    python benchmarks/bench_prefill.py --plot-from FILE --plot FILE.png

Each implementation runs in a process of its own on the same seeded inputs. Times are medians of CUDA events;
`floor` is the bytes that must move at the rate of a device-to-device copy measured in the same run. After all
timing, the profiler names the kernels of one more call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _peers
import _plot
from _cases import AccuracyLine, Case, choose_suite, load_accuracy, load_cases, make_case, select, shrink
from _report import accuracy_table, build_result, kernel_table, read_lines, time_table, to_csv
from _run import (
    Run,
    add_dry_run,
    add_options,
    check_device,
    check_writable,
    dry_run_lines,
    end,
    gather_facts,
    prepared,
    publish,
    spawn,
    wait,
)
from _words import machine

# Accuracy also runs FLA's other intra-chunk path (safe_gate off): same formula, other kernel.
ACCURACY_ONLY = {"fla_no_safe_gate": "fla"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--batch", type=int, help="batch of a custom fixed-length case (default 1)")
    parser.add_argument("--seqlen", type=int, help="tokens per sequence of a custom case")
    parser.add_argument("--nheads", type=int, help="heads of a custom case (default 96)")
    parser.add_argument(
        "--varlen", metavar="LENS", help="lengths of a custom packed case: 1300,547 or 8x1024"
    )
    parser.add_argument("--suite", help="h200, peers, accuracy, all, or case names (a,b); default peers")
    parser.add_argument("--peers", default="", help="flashkda,fla (default: those whose path is given)")
    parser.add_argument("--flashkda-path", type=Path, help="folder with tokenspeed-flashkda's flash_kda")
    parser.add_argument(
        "--fla-path", type=Path, help="folder of the fla package (default: the installed one)"
    )
    parser.add_argument("--csv", nargs="?", const="-", metavar="FILE", help="write CSV (to standard output)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times (needs matplotlib)")
    parser.add_argument("--plot-from", type=Path, metavar="FILE", help="run nothing: --plot this result file")
    add_options(parser, timeout_s=400)
    add_dry_run(parser)
    return parser.parse_args(argv)


def choose(args: argparse.Namespace, peers: Iterable[str]) -> tuple[list[Case], list[AccuracyLine]]:
    """What to time and to judge: the custom case when a shape is given, else the suite's."""
    custom = args.seqlen is not None or args.varlen is not None
    if custom and args.suite:
        raise ValueError("give either a shape (--seqlen/--varlen) or --suite, not both")
    if not custom:
        suite = choose_suite(args.suite or "peers")
        return select(suite.cases, load_cases()), load_accuracy() if suite.accuracy else []
    heads = 96 if args.nheads is None else args.nheads
    batch = 1 if args.batch is None else args.batch
    name = f"varlen_h{heads}" if args.varlen else f"b{batch}_t{args.seqlen}_h{heads}"
    return [make_case(name, heads, batch, args.seqlen or 0, args.varlen, peers)], []


def accuracy_names(owner: str) -> list[str]:
    """The variants that the process of `owner` runs for the accuracy table, itself first."""
    return [owner, *(name for name, process in ACCURACY_ONLY.items() if process == owner)]


def worker_job(name: str, run: Run) -> dict[str, Any]:
    """The job of one implementation's process."""
    cases = run.cases if name == "ours" else [case for case in run.cases if name in case.peers]
    impls = accuracy_names(name) if run.accuracy else [name]
    return {
        "impl": name,
        "impls": impls,
        "cases": [case.to_json() for case in cases],
        "accuracy": [line.to_json() for line in run.accuracy],
        "ceilings": name == "ours",
    }


def compile_jobs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """FLA compiles per (heads, varlen): one small job for each such pair, timing and accuracy alike."""
    firsts: dict[tuple[int, bool], dict[str, Any]] = {}
    for case in job["cases"]:
        firsts.setdefault((case["nheads"], case["lens"] is not None), case)
    jobs = [{**job, "impls": ["fla"], "cases": [case], "accuracy": []} for case in firsts.values()]
    jobs += [{**job, "impl": "", "impls": [impl], "cases": []} for impl in job["impls"] if job["accuracy"]]
    return [{**one, "accuracy": one["accuracy"][:1]} for one in jobs]


def compile_fla(job: dict[str, Any], run: Run) -> None:
    """Fill Triton's kernel cache from several processes at once. Only saves time: a failure is no problem."""
    jobs = compile_jobs(job)
    shares = max(1, min(4, (os.cpu_count() or 1) // max(1, len(jobs))))
    if run.device != "cuda" or not jobs:
        return
    processes = {}
    deadline = time.monotonic() + 150
    try:
        for index, one in enumerate(jobs):
            for share in range(shares):
                tag = f"compile-{index}-{share}"
                scratch = run.scratch / tag
                scratch.mkdir()
                data = {**one, "compile_only": [share, shares], "scratch": str(scratch)}
                processes[tag] = spawn("_worker.py", tag, "fla", data, run, FLA_CACHE_RESULTS="0")
        for tag, process in processes.items():
            for problem in wait(process, tag, run, max(1.0, deadline - time.monotonic())):
                print(problem, file=sys.stderr)
    finally:
        for process in processes.values():
            if process.poll() is None:
                end(process)


def run_all(run: Run) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Run every implementation, one after the other, then judge the accuracy; returns lines and problems."""
    results, problems = {}, []
    for name in ("ours", *run.peer_paths):
        print(f"running {name} ...", file=sys.stderr, flush=True)
        job = worker_job(name, run)
        if name == "fla":
            compile_fla(job, run)
        problems += wait(spawn("_worker.py", name, name, job, run), name, run, run.timeout_s)
        results[name] = read_lines(run.scratch / f"{name}.jsonl")
    if run.accuracy:
        names = [name for owner in results for name in accuracy_names(owner)]
        job = {"accuracy": [line.to_json() for line in run.accuracy], "names": names}
        problems += wait(spawn("_judge.py", "judge", "judge", job, run), "judge", run, run.timeout_s)
        results["judge"] = read_lines(run.scratch / "judge.jsonl")
    return results, problems


def tables(result: dict[str, Any], csv: bool) -> str:
    """What was measured as text; the times as CSV where that is asked for."""
    found = [f"{machine(result)}, copy {result['copy_gbps']:.0f} GB/s"]
    if result["rows"]:
        found.append(to_csv(result) if csv else time_table(result) + "\n\n" + kernel_table(result))
    if result["accuracy"]:
        found.append(accuracy_table(result))
    return "\n".join(found)


def draw_only(args: argparse.Namespace) -> int:
    """Draw an existing result file; nothing runs."""
    if not args.plot:
        raise ValueError("--plot-from has nothing to write; give --plot FILE.png as well")
    result = _plot.load_result(args.plot_from)
    try:
        draw(result, args.plot)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{args.plot_from} is no result: {error!r}; expected a file that --json wrote"
        ) from error
    return 0


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a result; ValueError when the picture cannot be written."""
    try:
        _plot.plot(result, path)
    except OSError as error:
        raise ValueError(f"{path} is not written: {error.strerror or error}") from error


def benchmark(args: argparse.Namespace) -> int:
    """Run what was asked for; the exit code is 1 when something of it went wrong."""
    paths = _peers.choose(args.peers, {"flashkda": args.flashkda_path, "fla": args.fla_path})
    cases, accuracy = choose(args, paths)
    check_device(args.device)
    csv = Path(args.csv) if args.csv not in (None, "-") else None
    check_writable(csv)
    check_writable(args.plot)
    if args.tiny:
        cases = [shrink(case) for case in cases]
        accuracy = [replace(line, batch=2, seqlen=40, nheads=1) for line in accuracy]
    with prepared(args, cases, accuracy=accuracy, peer_paths=paths, device=args.device) as run:
        facts = gather_facts(run, args.wheel)
        results, problems = run_all(run)
    result = build_result(cases, results, {**facts, "problems": problems})
    measured = any(row["ours_ms"] for row in result["rows"]) or result["accuracy"]
    text = "\n".join([*dry_run_lines(args, result), tables(result, csv=args.csv == "-")])
    if not measured:
        return publish(result, None, f"{text}\nnothing of ours was measured: no file is written")
    code = publish(result, args.json, text, csv and (csv, to_csv(result)))
    if args.plot:
        draw(result, args.plot)
    return code


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.plot:
            _plot.check(args.plot)
        return draw_only(args) if args.plot_from else benchmark(args)
    except ValueError as error:
        print(f"bench_prefill: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
