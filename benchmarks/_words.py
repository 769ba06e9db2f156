"""Cases, implementations, kernels and machines in words: for ci/docs.py, the scripts and the picture."""

from __future__ import annotations

import re
from typing import Any

# tokenspeed-flashkda calls itself FlashKDA, as this project is called.
NAMES = {"ours": "flash-kda", "flashkda": "tokenspeed-flashkda", "fla": "FLA"}

# Of what a profiled kernel's share of the peak is shown, by the key of the result file.
LIMITS = {"issue": "issue", "tensor": "tensor", "shared": "shared", "l2": "L2", "dram": "DRAM"}

LONGEST = 160  # template arguments of CUTLASS kernels fill pages


def shape(row: dict[str, Any]) -> str:
    """A row of the result file: ``1 x 8192, 96 heads`` or the packed lengths."""
    if row["lens"] is None:
        return f"{row['batch']} x {row['seqlen']}, {row['nheads']} heads"
    return f"packed {_lengths(row['lens'])}, {row['nheads']} heads"


def _lengths(lens: list[int] | str) -> str:
    """Packed lengths; text is a generator's, see cases.toml."""
    if isinstance(lens, list):
        return " + ".join(map(str, lens))
    if lens.startswith("random:"):
        _, count, low, high, _ = lens.split(":")
        return f"{count} of {low} to {high}"
    return lens.replace("x", " x ")


def machine(result: dict[str, Any]) -> str:
    """What a result was measured on, and when."""
    return f"{result['device']}, driver {result['driver']}, torch {result['torch']}, {result['date']}"


def versions(result: dict[str, Any]) -> str:
    """The versions of every implementation that took part."""
    found = sorted(result.get("versions", {}).items())
    return ", ".join(f"{name} {text}" for name, text in found if text)


def percent(value: float | None) -> str:
    """A share in whole percent, with a digit more below 10; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def cells(kernel: dict[str, Any]) -> tuple[str, ...]:
    """A profiled kernel: its time in us, what LIMITS names in %, and what its warps waited for (``barrier 41,
    long scoreboard 20``)."""
    us = "-" if kernel["us"] is None else f"{kernel['us']:.1f}"
    found = [f"{stall['reason'].replace('_', ' ')} {percent(stall['share'])}" for stall in kernel["stalls"]]
    return (us, *(percent(kernel[key]) for key in LIMITS), ", ".join(found) or "-")


def _without_parameters(name: str) -> str:
    """The name without the parameter list that ends it; other brackets, as of ``operator()``, stay."""
    if not name.endswith(")"):
        return name
    depth = 0
    for index in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[index], 0)
        if depth == 0:
            return name[:index].rstrip()
    return name


def _without_templates(name: str) -> str:
    """The name with each outermost list of template arguments as ``<...>``."""
    name, before = name.replace("->", "."), ""
    while name != before:
        before, name = name, re.sub(r"<[^<>]*>", "\0", name)  # the innermost lists first
    return name.replace("\0", "<...>")


def kernel_name(name: str) -> str:
    """A demangled name, short enough for a table: no return type, no parameters, no pages of templates."""
    short = _without_parameters(name).removeprefix("void ")
    return short if len(short) <= LONGEST else _without_templates(short)[:LONGEST]
