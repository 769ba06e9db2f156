"""The sdist, from a clean copy of the sources: ``python -m ci.sdist [--out DIR]``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from ci import source, venv, wheels
from ci.errors import BuildError, run_cli
from ci.process import run

_BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def build(out: Path) -> Path:
    """Make the sdist in `out`; BuildError shows what failed.

    The variables of a wheel's build are left out: a label would get into the sdist's version.
    """
    caller = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_KDA_")}
    tools = venv.locked("build")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flash-kda-sdist-") as scratch:
        folder = source.copy(Path(scratch, "source"))
        made = Path(scratch, "made")
        made.mkdir()
        run(
            [tools.python, "-c", _BUILD, made],
            title="making the sdist",
            error=BuildError,
            hint="read the output above",
            cwd=folder,
            env={**caller, source.EPOCH: str(source.revision().epoch)},
        )
        (path,) = made.glob("*.tar.gz")
        done = out.resolve() / path.name
        done.write_bytes(path.read_bytes())
    return done


def main() -> int:
    """Command line; prints the path."""
    parser = argparse.ArgumentParser(prog="python -m ci.sdist", description="Make the sdist.")
    parser.add_argument("--out", type=Path, default=wheels.FOLDER / "sdist", help="default: wheels/sdist")
    print(build(parser.parse_args().out))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
