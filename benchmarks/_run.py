"""What every process of a run shares, how one is run, and what the scripts share: options, facts, output."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _peers
from _cases import AccuracyLine, Case
from _report import finite
from _words import shape

HERE = Path(__file__).resolve().parent
REPO = HERE.parent


@dataclass(frozen=True)
class Run:
    """What every process of this run shares. A peer without a path is the installed one."""

    scratch: Path
    device: str
    seed: int
    cases: list[Case]
    accuracy: list[AccuracyLine]
    peer_paths: dict[str, Path | None]
    ours_path: Path | None
    timeout_s: int


def add_options(parser: argparse.ArgumentParser, timeout_s: int) -> None:
    """The options of every script that runs one package of ours."""
    parser.add_argument("--ours-path", type=Path, help="folder of our flash_kda (default: the installed one)")
    parser.add_argument("--wheel", type=Path, help="our wheel, for its sha256 in the result")
    add_run_options(parser, timeout_s)


def add_run_options(parser: argparse.ArgumentParser, timeout_s: int) -> None:
    """The options of every script."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--timeout",
        type=int,
        default=timeout_s,
        help="seconds that one process may take (default %(default)s)",
    )


def dry_run_lines(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """Said before the tables of a dry run, which look like any others: that it is one, and the sizes that
    really ran. Nothing for any other run."""
    found = []
    if args.device == "cpu":
        found.append("DRY RUN on the CPU: no time below says anything about a GPU")
    if args.tiny:
        found.append("DRY RUN with shrunk sizes (--tiny); what really ran under each name:")
        found += [f"  {row['case']:18s} {shape(row)}" for row in result["rows"]]
        if setup := result.get("accuracy_setup"):
            found.append(
                f"  {'relative error':18s} {setup['batch']} draws of {setup['seqlen']} tokens, "
                f"{setup['nheads']} heads"
            )
    return found


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """The options of a run without a GPU."""
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run that times nothing real")
    parser.add_argument("--tiny", action="store_true", help="shrink every case, for a dry run of the scripts")


@contextmanager
def prepared(
    args: argparse.Namespace,
    cases: Sequence[Case] = (),
    *,
    accuracy: Sequence[AccuracyLine] = (),
    peer_paths: dict[str, Path | None] | None = None,
    device: str = "cuda",
) -> Iterator[Run]:
    """A run with these options, and its scratch folder for as long as it lasts."""
    check_writable(args.json)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    ours_path = args.ours_path and args.ours_path.resolve()
    with tempfile.TemporaryDirectory(prefix="bench_kda_", dir=base, ignore_cleanup_errors=True) as scratch:
        yield Run(
            Path(scratch),
            device,
            args.seed,
            list(cases),
            list(accuracy),
            peer_paths or {},
            ours_path,
            args.timeout,
        )


def check_writable(path: Path | None) -> None:
    """ValueError when a file could not be written there: said before a run, not after."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; give a file in a folder of yours"
        ) from error


def write(path: Path, text: str) -> list[str]:
    """Write a file that could be written when the run began; returns what went wrong since."""
    try:
        path.write_text(text)
    except OSError as error:
        return [f"{path} is not written: {error.strerror}"]
    return []


def publish(result: dict[str, Any], path: Path | None, text: str, csv: tuple[Path, str] | None = None) -> int:
    """Print the tables and the problems, write the result file and the CSV file where they are asked for;
    returns the exit code: 1 with a problem."""
    problems = list(result["problems"])
    print(text)
    if path:
        problems += write(path, json.dumps(finite(result), indent=1, allow_nan=False) + "\n")
    if csv:
        problems += write(*csv)
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


def publish_nothing(what: str, problems: list[str], path: Path | None) -> int:
    """Print what did not happen and the problems; the result file stays as it is. Returns the exit code."""
    return publish({"problems": problems}, None, what + (f": {path} is not written" if path else ""))


def folder_of(name: str, run: Run) -> Path | None:
    """Where a process has its package from; None for the installed one."""
    return run.ours_path if name in ("ours", "judge") else run.peer_paths[name]


def environment(name: str, run: Run) -> dict[str, str]:
    """The process's environment: its own package's folder comes first on the path."""
    env = dict(os.environ)
    folder = folder_of(name, run)
    if folder is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [env.get("PYTHONPATH")])])
    if name == "fla":
        env["FLA_FLASH_KDA"] = "0"
    return env


def spawn(
    script: str,
    tag: str,
    name: str,
    job: dict[str, Any],
    run: Run,
    under: Sequence[str] = (),
    **extra: str,
) -> subprocess.Popen[bytes]:
    """Start one process, under another program where one is given; its output goes to a log beside its
    results. What it starts is of its group, and ends with it: see `end`."""
    folder = folder_of(name, run)
    job = {
        "device": run.device,
        "seed": run.seed,
        "scratch": str(run.scratch),
        "require_under": None if folder is None else str(folder),
        **job,
        "results": str(run.scratch / f"{tag}.jsonl"),
    }
    job_file = run.scratch / f"{tag}.job.json"
    job_file.write_text(json.dumps(job))
    with (run.scratch / f"{tag}.log").open("wb") as log:
        return subprocess.Popen(
            [*under, sys.executable, str(HERE / script), str(job_file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment(name, run), **extra},
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it started, which would go on on the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait(process: subprocess.Popen[bytes], tag: str, run: Run, timeout_s: float) -> list[str]:
    """Wait for a process, end it at the time limit; returns what went wrong, with the end of its log."""
    try:
        code: int | None = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process)
    if code == 0:
        return []
    what = f"ran past {timeout_s:.0f} s" if code is None else f"exit code {code}"
    return [f"{tag}: {what}{log_end(tag, run)}"]


def log_end(tag: str, run: Run) -> str:
    """The last lines of a process's log, and of Nsight Compute's but for its table."""
    logs = [log for kind in ("log", "csv") if (log := run.scratch / f"{tag}.{kind}").exists()]
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    last = [f"\n    {line[:400]}" for line in lines[-12:] if not line.startswith('"')]
    return "; end of its log:" + "".join(last)


def command_output(*command: str) -> str | None:
    """What a command prints; None when it fails, prints nothing or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def installed_facts(run: Run) -> dict[str, Any]:
    """Commit and sha256 of the installed package, as its build record and pip's own record state them;
    ValueError when they cannot be read or there is no package."""
    code = (
        "import importlib.metadata as m, json, pathlib, importlib.util as u\n"
        "facts = {}\n"
        "try:\n"
        "    d = m.distribution('flash-kda'); facts['version'] = d.version\n"
        "    facts['direct'] = json.loads(d.read_text('direct_url.json') or '{}')\n"
        "except m.PackageNotFoundError: pass\n"
        "spec = u.find_spec('flash_kda')\n"
        "facts['found'] = bool(spec and spec.origin)\n"
        "file = pathlib.Path(spec.origin).with_name('build_record.json') if facts['found'] else None\n"
        "if file and file.exists(): facts['record'] = json.loads(file.read_text())\n"
        "print(json.dumps(facts))\n"
    )
    # -P and the scratch folder as cwd keep the checkout's own flash_kda off the path.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=run.scratch,
        env=environment("ours", run),
        timeout=60,
    )
    if done.returncode != 0:
        raise ValueError(f"what is installed cannot be read; expected facts, got:\n{done.stderr}")
    facts = dict(json.loads(done.stdout))
    if not facts.pop("found"):
        where = f"not in {run.ours_path}" if run.ours_path else "not installed"
        raise ValueError(f"flash_kda is {where}: pip install a wheel, or give --ours-path .")
    return facts


def check_device(device: str) -> None:
    """ValueError without torch, or when the run is to be on a GPU and torch sees none."""
    try:
        import torch  # here alone: --help and --plot-from do without it
    except ImportError as error:
        raise ValueError(f"a run needs torch ({error}); run: pip install 'torch>=2.10'") from error
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            "torch sees no GPU: use a machine with one; bench_prefill.py and bench_steps.py have a dry run: "
            "--device cpu --tiny"
        )


def sha256_of(wheel: Path) -> str:
    """Of a wheel; ValueError when it cannot be read."""
    try:
        return hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{wheel} cannot be read: {error.strerror}; expected our wheel") from error


def gather_facts(run: Run, wheel: Path | None) -> dict[str, Any]:
    """Everything about the run that no worker knows."""
    installed = installed_facts(run)
    archive = installed.get("direct", {}).get("archive_info", {})
    sha256 = archive.get("hashes", {}).get("sha256")
    if wheel:
        given = sha256_of(wheel)
        if sha256 not in (None, given):
            raise ValueError(f"installed flash-kda: sha256 {sha256}, expected {given}; install {wheel}")
        sha256 = given
    line = run.accuracy[0] if run.accuracy else None
    peers = {name: _peers.version(folder) for name, folder in run.peer_paths.items()}
    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "driver": driver.splitlines()[0] if driver else None,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": source_commit(installed.get("record", {})),
        "wheel_sha256": sha256,
        "accuracy_setup": line and {"batch": line.batch, "seqlen": line.seqlen, "nheads": line.nheads},
        "versions": {"flash_kda": installed.get("version"), **peers},
    }


def source_commit(record: Any) -> str | None:
    """The build record's commit of the installed package ("+dirty" where it was); None without one.
    ValueError for a record that no build of ours writes."""
    source = record.get("source", {}) if isinstance(record, dict) else None
    commit = source.get("commit") if isinstance(source, dict) else 0
    if commit is not None and not isinstance(commit, str):
        raise ValueError(
            f"build_record.json: source is {source!r}, expected an object with a commit; reinstall"
        )
    if not commit:
        return None
    return commit + ("+dirty" if source.get("dirty") else "")
