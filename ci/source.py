"""The sources a wheel is built from: which files, which commit, which date; copied clean for each build."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ci.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
# What a build reads.  Tests, documents and benchmarks stay out, so that they cannot change a wheel.
SHIPPED = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "flash_kda", "csrc", "ci")
# What decides a wheel's code: the library's sources, and the files of the package as they are shipped.
_CODE = ("csrc/**/*", "flash_kda/**/*.py", "flash_kda/py.typed")
# What a copy outside git is told of its commit (``<sha>`` or ``<sha>+dirty``) and of that commit's time.
COMMIT, EPOCH = "FLASH_KDA_SOURCE_COMMIT", "SOURCE_DATE_EPOCH"
# The date of files in a wheel made outside git, for example from an sdist: 2020-01-01.
FALLBACK_EPOCH = 1577836800
_LEFTOVERS = shutil.ignore_patterns(
    "__pycache__", "*.py[cod]", "*.so", "*.o", "build_record.json", "build", "*.egg-info"
)


@dataclass(frozen=True)
class Revision:
    """Where the sources stand: ``commit`` is None outside git, ``epoch`` the commit's time in seconds."""

    commit: str | None
    dirty: bool
    epoch: int

    @property
    def label(self) -> str:
        """``<sha>``, ``<sha>+dirty``, or nothing outside git."""
        return f"{self.commit}{'+dirty' if self.dirty else ''}" if self.commit else ""


def revision(root: Path | None = None) -> Revision:
    """The state of the sources at `root`; uncommitted changes to files a build reads make it dirty.

    Outside git, as in a container, FLASH_KDA_SOURCE_COMMIT and SOURCE_DATE_EPOCH are believed.
    """
    root = root or ROOT
    if not _in_git(root):
        return told(os.environ)
    head = _git(root, "rev-parse", "HEAD").strip()
    epoch = int(_git(root, "log", "-1", "--format=%ct").strip())
    return Revision(head, bool(_git(root, "status", "--porcelain", "--", *_present(root))), epoch)


def told(environ: Mapping[str, str]) -> Revision:
    """What the environment says of the commit; ConfigError for a value that is none."""
    commit, epoch = environ.get(COMMIT), environ.get(EPOCH) or str(FALLBACK_EPOCH)
    match = re.fullmatch(r"([0-9a-f]{7,64})(\+dirty)?", commit) if commit else None
    if commit and match is None:
        raise ConfigError(f"{COMMIT}: expected <sha> or <sha>+dirty, got {commit!r}.\nNext: unset {COMMIT}")
    if not epoch.isdecimal():
        raise ConfigError(f"{EPOCH}: expected seconds since 1970, got {epoch!r}.\nNext: unset {EPOCH}")
    return Revision(match[1] if match else None, bool(match and match[2]), int(epoch))


def copy(target: Path, root: Path | None = None) -> Path:
    """Copy what a build reads from `root` to the new folder `target`.

    Inside git: tracked files as they are on disk, and new files git does not ignore, so that a change can be
    built before it is committed while no leftover of an earlier build gets in.  Raises ConfigError when
    `target` exists.
    """
    root = root or ROOT
    if target.exists():
        raise ConfigError(f"{target} exists; expected a new folder for the sources.\nNext: remove it")
    for name in files(root):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, place)
        place.chmod(0o644)
    return target


def files(root: Path | None = None) -> list[str]:
    """Sorted names, relative to `root`, of the files a build reads; ConfigError when there are none."""
    root = root or ROOT
    if _in_git(root):
        listed = _git(
            root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_present(root)
        )
        names = [name for name in listed.split("\0") if name and (root / name).is_file()]
    else:
        names = [str(path.relative_to(root)) for path in _walk(root)]
    if not names:
        raise ConfigError(
            f"{root} holds none of {', '.join(SHIPPED)}.\nNext: run from a checkout or an unpacked sdist"
        )
    return sorted(names)


def digests(root: Path) -> dict[str, str]:
    """sha256 of each C++, CUDA and Python source that makes the wheel, by its name relative to `root`."""
    paths = {path for pattern in _CODE for path in root.glob(pattern) if path.is_file()}
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    return {name: hashlib.sha256(found[name]).hexdigest() for name in sorted(found)}


def in_history(commit: str, root: Path | None = None) -> bool:
    """Whether the checkout at `root` stands on `commit` or after it."""
    return _ask_git(root or ROOT, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def digests_at(commit: str, root: Path | None = None) -> dict[str, str]:
    """The `digests` of the sources as they are in `commit`, which the checkout at `root` has."""
    homes = sorted({pattern.partition("/")[0] for pattern in _CODE})
    with tempfile.TemporaryDirectory(prefix="flash-kda-sources-") as scratch:
        packed, folder = Path(scratch, "sources.tar"), Path(scratch, "sources")
        _git(root or ROOT, "archive", "--format=tar", f"--output={packed}", commit, "--", *homes)
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        return digests(folder)


def combined(files: Mapping[str, str]) -> str:
    """One sha256 over the lines that ``sha256sum`` would print for `files`, sorted by name."""
    lines = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def kernels(files: Mapping[str, str]) -> str:
    """One sha256 over the library's sources among `files`: what decides how a GPU computes."""
    return combined({name: digest for name, digest in files.items() if name.startswith("csrc/")})


def _present(root: Path) -> list[str]:
    return [name for name in SHIPPED if (root / name).exists()]


def _walk(root: Path) -> list[Path]:
    found: list[Path] = []
    for name in _present(root):
        found += _under(root / name)
    return found


def _under(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    names = [entry.name for entry in path.iterdir()]
    left_out = _LEFTOVERS(str(path), names)
    return [file for name in sorted(set(names) - left_out) for file in _under(path / name)]


def _in_git(root: Path) -> bool:
    return (root / ".git").exists() and shutil.which("git") is not None


def _ask_git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # safe.directory: a checkout owned by another user (a container mount) is otherwise refused.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def _git(root: Path, *arguments: str) -> str:
    done = _ask_git(root, *arguments)
    if done.returncode != 0:
        raise ConfigError(
            f"git {arguments[0]} failed in {root}: {done.stderr.strip()}\nNext: commit once, or unset .git"
        )
    return done.stdout
