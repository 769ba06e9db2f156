"""One ninja file that compiles the sources and links the library; paths are relative to the source folder.

torch's own ninja file is not used: it passes absolute paths, takes flags from sysconfig, and (with a CPU
build of torch) does not see that a header changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.extension.toolset import Toolset


@dataclass(frozen=True)
class Commands:
    """Arguments of the three tools; ``threads`` is how many architectures nvcc compiles at once."""

    cxx: Sequence[str]
    nvcc: Sequence[str]
    link: Sequence[str]
    threads: int


# nvcc writes ptxas's report to stderr: it goes to a log beside the object, and to the screen.  --keep needs a
# folder of its own for each source, since intermediate files are named after the source's last part.
_RULES = """\
ninja_required_version = 1.5
builddir = {folder}
rule cxx
  command = {cache}{cxx} -MMD -MF $out.d {cxx_flags} -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = g++ $in
rule nvcc
  command = mkdir -p $out.keep && {{ {cache}{nvcc} -MD -MF $out.d {nvcc_flags} --threads {threads} $
      --keep --keep-dir $out.keep -c $in -o $out > $out.log 2>&1; code=$$?; cat $out.log; exit $$code; }}
  depfile = $out.d
  deps = gcc
  description = nvcc $in
rule link
  command = {cxx} -shared -o $out $in {link_flags}
  description = link $out
"""


def _words(arguments: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in arguments).replace("$", "$$")


def _path(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def object_of(source: str, folder: str) -> str:
    """Where the object of `source` goes below `folder`; the same for every place the sources lie."""
    return f"{folder}/{source}.o"


def write(
    toolset: Toolset,
    commands: Commands,
    sources: Sequence[str],
    folder: str,
    library: str,
    depends: str,
    cache: Path | None = None,
) -> str:
    """The ninja file's text: objects go below `folder`; `depends` is linked anew when it changes.

    `cache` is the program that compiles what it does not have.
    """
    text = _RULES.format(
        folder=_path(folder),
        cache=f"{_words([str(cache)])} " if cache else "",
        cxx=_words(toolset.cxx),
        cxx_flags=_words(commands.cxx),
        nvcc=_words([str(toolset.nvcc.path)]),
        nvcc_flags=_words(commands.nvcc),
        threads=commands.threads,
        link_flags=_words(commands.link),
    )
    objects = []
    for source in sources:
        rule = "nvcc" if source.endswith(".cu") else "cxx"
        objects.append(_path(object_of(source, folder)))
        text += f"build {objects[-1]}: {rule} {_path(source)}\n"
    return (
        text
        + f"build {_path(library)}: link {' '.join(objects)} | {_path(depends)}\ndefault {_path(library)}\n"
    )
