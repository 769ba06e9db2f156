"""What changed between two wheels, say before and after a new toolkit: ``python -m ci.diff A.whl B.whl``.

Metadata, files, symbols, and of each kernel and architecture registers, memory and instructions.  With
``--sass KERNEL`` the instructions themselves, as a unified diff.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from ci import wheels
from ci.errors import ConfigError, missing_package, run_cli

try:
    from ci import matrix
    from ci.size import facts_of
    from ci.verify import default_cuobjdump
    from ci.verify.device import instructions
    from ci.verify.facts import Facts, Kernel, Library, Wheel
    from ci.verify.gather import extract
except ModuleNotFoundError as error:
    raise missing_package(error, ["ci", "verify"]) from error

_NUMBERS = tuple(item.name for item in fields(Kernel) if item.name not in ("symbol", "opcodes"))


def compare(one: Facts, two: Facts) -> list[str]:
    """Every difference, a line each; empty for wheels that say and hold the same."""
    if one.wheel is None or two.wheel is None:
        raise ConfigError("expected two wheels, got a library.\nNext: give the wheels around the libraries")
    lines = [*_wheel(one.wheel, two.wheel)]
    left, right = ({item.path: item for item in facts.libraries} for facts in (one, two))
    lines += _changed("library", dict.fromkeys(left, "there"), dict.fromkeys(right, "there"))
    for path in sorted(left.keys() & right.keys()):
        lines += _library(left[path], right[path])
    return lines


def _changed(what: str, one: Mapping[str, object], two: Mapping[str, object]) -> Iterator[str]:
    """A line for each key whose value differs."""
    for key in sorted(one.keys() | two.keys()):
        before, after = one.get(key, "none"), two.get(key, "none")
        if isinstance(before, list | tuple) and isinstance(after, list | tuple):
            words = [f"-{word}" for word in before if word not in after]
            words += [f"+{word}" for word in after if word not in before]
            if before != after:
                yield f"{what} {key}: {' '.join(words) or 'another order'}"
        elif before != after:
            yield f"{what} {key}: {before} -> {after}"


def _wheel(one: Wheel, two: Wheel) -> Iterator[str]:
    yield from _changed("wheel", {"bytes": one.size}, {"bytes": two.size})
    yield from _changed("METADATA", asdict(one.metadata), asdict(two.metadata))
    yield from _changed("tags", {"of the name": one.tags}, {"of the name": two.tags})
    yield from _changed("build record", _flat(one.build_record), _flat(two.build_record))
    # Below .dist-info, whose name has the version in it, by what stands there.
    before, after = ({name.replace(side.dist_info, ".dist-info"): side.members[name] for name in side.members}
                     for side in (one, two))  # fmt: skip
    yield from _changed("bytes of", before, after)


def _flat(record: Mapping[str, object] | None, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in (record or {}).items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _library(one: Library, two: Library) -> Iterator[str]:
    sides = (one, two)
    for what in ("needed", "exported"):
        left, right = (dict.fromkeys(getattr(side.elf, what), "there") for side in sides)
        yield from _changed(what, left, right)
    yield from _changed(
        "undefined", *({s.name: s.version or "there" for s in side.elf.undefined} for side in sides)
    )
    yield from _changed("compiled by CUDA", {"toolkit": one.toolkits}, {"toolkit": two.toolkits})
    before, after = _kernels(one), _kernels(two)
    yield from _changed("image", dict.fromkeys(_images(one), "there"), dict.fromkeys(_images(two), "there"))
    yield from _changed("kernel", dict.fromkeys(before, "there"), dict.fromkeys(after, "there"))
    for name in sorted(before.keys() & after.keys()):
        yield from _kernel(name, before[name], after[name])


def _images(library: Library) -> list[str]:
    return [f"{image.kind} {image.arch}" for image in library.images]


def _kernels(library: Library) -> dict[str, Kernel]:
    return {
        f"{kernel.symbol} sm_{image.arch}": kernel
        for image in library.images
        if image.kind == "elf"
        for kernel in image.kernels
    }


def _kernel(name: str, one: Kernel, two: Kernel) -> Iterator[str]:
    before, after = ({key: getattr(side, key) for key in _NUMBERS} for side in (one, two))
    yield from _changed(name, before, after)
    counts = [sum(side.opcodes.values()) for side in (one, two)]
    yield from _changed(name, {"instructions": counts[0]}, {"instructions": counts[1]})
    opcodes = [line.strip() for line in _changed("", one.opcodes, two.opcodes)]
    if opcodes:
        yield f"{name} opcodes: {'; '.join(opcodes)}"


def sass(one: Path, two: Path, kernel: str) -> list[str]:
    """A unified diff of a kernel's instructions for each architecture; ConfigError when neither has it."""
    left, right = (_listing(path, kernel) for path in (one, two))
    if not left and not right:
        raise ConfigError(f"no kernel {kernel} in either wheel.\nNext: nox -s size lists the kernels")
    lines: list[str] = []
    for name in sorted(left.keys() | right.keys()):
        title = f"{kernel} sm_{name}"
        pair = left.get(name, []), right.get(name, [])
        lines += difflib.unified_diff(*pair, f"{title} {one.name}", f"{title} {two.name}", lineterm="")
    return lines


def _listing(wheel: Path, kernel: str) -> dict[str, list[str]]:
    tool = default_cuobjdump(matrix.load(), None)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="flash-kda-diff-") as folder:
        for library in extract(wheel, Path(folder)).values():
            for (name, symbol), lines in instructions(library, tool).items():
                if symbol == kernel:
                    found.setdefault(name, []).extend(lines)
    return found


def main() -> int:
    """Command line: 0 whether or not the wheels differ."""
    parser = argparse.ArgumentParser(prog="python -m ci.diff", description="What changed between two wheels.")
    parser.add_argument("wheel", type=Path, nargs=2)
    parser.add_argument("--sass", metavar="KERNEL", help="show how the kernel's instructions changed")
    given = parser.parse_args()
    wheels.check_python()
    one, two = given.wheel
    lines = sass(one, two, given.sass) if given.sass else compare(facts_of(one), facts_of(two))
    print("\n".join(lines or ["no difference"]))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
