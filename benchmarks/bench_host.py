#!/usr/bin/env python3
"""What the package costs the host: of a call, beyond the raw operator; of an import, beyond torch's.

    python benchmarks/bench_host.py --json benchmarks/results/host_h200.json
    python benchmarks/bench_host.py --ours-path . --device cpu --tiny        # a dry run

Small calls, so that the GPU is never what the host waits for. Microseconds of the host, medians:

    raw     torch.ops.flash_kda.fwd, the operator of the compiled library
    alloc   the same with an output and a state that are allocated for it
    named   flash_kda.fwd(..., backend="cuda")
    auto    flash_kda.fwd(...)
    func    flash_kda.flash_kda_func(...), which allocates both: compared with alloc

The import is timed in fresh processes that have imported torch, by the CPU time that it takes; it must bring
in no package of a backend. Exit code 1: a call takes over 15 us more than the operator, or the
import over 50 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from _cases import Case
from _report import about, errors, number, of_kind, read_lines, shape_of
from _run import (
    Run,
    add_dry_run,
    add_options,
    check_device,
    environment,
    gather_facts,
    prepared,
    publish,
    publish_nothing,
    spawn,
    wait,
)
from _words import machine

CALL_US = 15.0
IMPORT_MS = 50.0
IMPORTS = 7
OVER = {"named": "raw", "auto": "raw", "func": "alloc"}
PACKAGES = ("cutlass", "triton", "fla", "torch._dynamo")
CASES = (
    Case("decode_h8", 1, 1, 8),
    Case("prefill_t64_h8", 1, 64, 8),
    Case("packed_4x16_h8", 1, 64, 8, (16, 16, 16, 16)),
)

IMPORT = """
import json, sys, time
start = time.process_time()
import torch
middle = time.process_time()
before = set(sys.modules)
import flash_kda
end = time.process_time()
assert flash_kda.fwd
new = [name for name in {packages!r} if name in sys.modules and name not in before]
print(json.dumps(dict(torch_ms=1e3 * (middle - start), ours_ms=1e3 * (end - middle), new=new)))
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_options(parser, timeout_s=300)
    add_dry_run(parser)
    return parser.parse_args(argv)


def time_import(run: Run) -> dict[str, Any]:
    """One fresh process; ValueError with what it said when it failed."""
    # -P and the scratch folder as cwd keep the checkout's own flash_kda off the path.
    command = [sys.executable, "-P", "-c", IMPORT.format(packages=PACKAGES)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=run.scratch, env=environment("ours", run), timeout=120
    )
    if done.returncode != 0:
        raise ValueError(f"flash_kda cannot be imported:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def time_imports(run: Run, count: int) -> dict[str, Any]:
    """Medians over processes of CPU time in ms, and packages that only a backend needs and one brought in."""
    found = [time_import(run) for _ in range(count)]
    times = {key: statistics.median(one[key] for one in found) for key in ("torch_ms", "ours_ms")}
    return {**times, "processes": count, "new": sorted({name for one in found for name in one["new"]})}


def row_of(case: Case, lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One row of the result file; None where there is no time."""
    line = lines.get(case.name, {})
    times = {f"{name}_us": line.get(name) for name in ("raw", "alloc", "named", "auto", "func")}
    over = {f"{name}_over_us": line[name] - line[base] if line else None for name, base in OVER.items()}
    return {**shape_of(case), **times, **over}


def too_much(result: dict[str, Any]) -> list[str]:
    """What costs more than it may; nothing is asked of a dry run's calls."""
    found = []
    for row in result["rows"]:
        over = {name: row[f"{name}_over_us"] for name in OVER}
        found += [
            f"{row['case']}: {name} takes {us:.1f} us more than the operator, at most {CALL_US:.0f} allowed"
            for name, us in over.items()
            if us is not None and not us <= CALL_US and not str(result["device"]).startswith("cpu")
        ]
    ms, new = result["import"]["ours_ms"], result["import"]["new"]
    if not ms <= IMPORT_MS:
        found.append(f"the import takes {ms:.0f} ms beyond torch's, at most {IMPORT_MS:.0f} allowed")
    return found + [f"the import brings in {name}, expected not before it is needed" for name in new]


def build(
    run: Run, lines: list[dict[str, Any]], imports: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    """The result file; see `about` for `facts`."""
    seen = next(iter(of_kind(lines, "machine")), {})
    by_case = {line["case"]: line for line in of_kind(lines, "host")}
    result = {
        **about(seen, facts),
        "rows": [row_of(case, by_case) for case in run.cases],
        "import": imports,
        "limits": {"call_us": CALL_US, "import_ms": IMPORT_MS},
    }
    return {**result, "problems": facts["problems"] + errors({"ours": lines}) + too_much(result)}


def table(result: dict[str, Any]) -> str:
    """What was measured as text."""
    names = (
        "raw_us",
        "alloc_us",
        "named_us",
        "auto_us",
        "func_us",
        "named_over_us",
        "auto_over_us",
        "func_over_us",
    )
    lines = [machine(result), f"{'case':18s}" + "".join(f" {name:>14s}" for name in names)]
    for row in result["rows"]:
        lines.append(f"{row['case']:18s}" + "".join(f" {number(row[name], 1):>14s}" for name in names))
    found = result["import"]
    said = f"{number(found['ours_ms'], 1)} ms beyond torch's {number(found['torch_ms'], 0)} ms"
    return "\n".join([*lines, f"import, CPU time, median of {found['processes']}: {said}"])


def benchmark(args: argparse.Namespace) -> int:
    """Measure, compare, publish; the exit code is 1 when something costs too much or went wrong."""
    check_device(args.device)
    cases = CASES[:1] if args.tiny else CASES
    with prepared(args, cases, device=args.device) as run:
        facts = gather_facts(run, args.wheel)
        imports = time_imports(run, 3 if args.tiny else IMPORTS)
        job = {"cases": [case.to_json() for case in run.cases]}
        process = spawn("_host_worker.py", "host", "ours", job, run)
        facts["problems"] = wait(process, "host", run, args.timeout)
        result = build(run, read_lines(run.scratch / "host.jsonl"), imports, facts)
    if all(row["raw_us"] is None for row in result["rows"]):
        return publish_nothing("nothing was measured", result["problems"], args.json)
    return publish(result, args.json, table(result))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        return benchmark(args)
    except (OSError, ValueError) as error:
        print(f"bench_host: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
