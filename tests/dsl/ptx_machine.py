"""Runs a kernel's PTX on the CPU, for kernels made where there is no GPU: every address is checked.

Knows the instructions that the recurrent kernel is made of and no others (KeyError else). The lanes of a warp
run together, those furthest behind first, which brings them together again after a branch; warps take turns
at ``bar.sync``. Shared memory is poisoned with NaN, global memory is the arrays handed in: an access outside
of them, or not aligned to its size, is an AssertionError. Arithmetic is numpy's in fp32; a fused multiply-add
is computed in float64 and rounded once; approximations are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WARP = 32
_TYPES = {
    "b16": "u2",
    "u16": "u2",
    "b32": "u4",
    "u32": "u4",
    "s32": "i4",
    "f32": "f4",
    "b64": "u8",
    "u64": "u8",
}
_TYPES |= {"s64": "i8", "bf16": "u2", "pred": "?", "b8": "u1"}
_LINE = re.compile(r"^(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);$")


@dataclass(frozen=True)
class Instruction:
    """One line: guard (negated, register) or None, dotted name, operands."""

    guard: tuple[bool, str] | None
    name: tuple[str, ...]
    operands: tuple[Any, ...]


@dataclass
class Program:
    """A kernel: instructions, where labels point, parameters in order, its array in shared memory."""

    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    shared: tuple[str, int] = ("", 0)  # name and bytes


def _operands(text: str) -> tuple[Any, ...]:
    """``%r1``, numbers, ``{a, b}`` as tuples, ``[base+offset]`` as (base, offset) in a list."""
    found: list[Any] = []
    for vector, address, plain in re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,\s\[\]{}]+)", text):
        if vector:
            found.append(tuple(word.strip() for word in vector.split(",")))
        elif address:
            base, _, offset = address.partition("+")
            found.append([base, int(offset or 0)])
        else:
            found.append(plain)
    return tuple(found)


def parse(text: str) -> Program:
    """The one kernel of a PTX file."""
    program = Program()
    for line in text.splitlines():
        line = line.split("//")[0].strip()
        if match := re.match(r"\.param \.\w+ (\w+),?", line):
            program.parameters.append(match.group(1))
        elif match := re.match(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\];", line):
            assert program.shared[1] == 0, "more than one array in shared memory"
            program.shared = match.group(1), int(match.group(2))
        elif match := re.match(r"(\$\w+):", line):
            program.labels[match.group(1)] = len(program.code)
        elif not line.startswith(".") and (match := _LINE.match(line)):
            negated, guard, name, rest = match.groups()
            parts = tuple(name.split("."))
            program.code.append(
                Instruction((negated == "!", guard) if guard else None, parts, _operands(rest))
            )
    return program


class Memory:
    """Arrays at invented addresses, far apart; address 0 is nobody's."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, np.ndarray]] = []

    def add(self, data: np.ndarray, offset: int = 0) -> int:
        """The address of an array of bytes; ``offset`` past a 256-byte boundary."""
        address = (len(self.blocks) + 1 << 36) + offset
        self.blocks.append((address, data))
        return address

    def find(self, address: int, size: int) -> np.ndarray:
        """The bytes of one access."""
        assert address % size == 0, f"{size} bytes at {address:#x} are not aligned"
        for start, data in self.blocks:
            if start <= address and address + size <= start + data.size:
                return data[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} are outside of every array")


def _bits(x: np.ndarray, kind: str) -> np.ndarray:
    return x.astype("u8").astype(f"u{np.dtype(kind).itemsize}").view(kind) if kind != "?" else x.astype(bool)


def _to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to the nearest bf16, ties to even; NaN as the hardware has it."""
    bits = x.view("u4").astype("u8")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("u2")
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "abs": np.abs,
    "neg": np.negative,
    "not": np.invert,
    "mov": lambda x: x,
}


class Warp:
    """One warp: registers as bit patterns, a program counter for each lane."""

    def __init__(self, program: Program, values: dict[str, Any], memory: Memory, shared: Memory) -> None:
        self.program, self.memory, self.shared = program, memory, shared
        self.registers: dict[str, np.ndarray] = {}
        self.constants = values
        self.pc = np.zeros(WARP, int)
        self.steps = 0

    def read(self, operand: str, kind: str) -> np.ndarray:
        """An operand as an array of WARP values of a numpy type."""
        if operand in self.registers:
            return _bits(self.registers[operand], kind)
        if operand in self.constants:
            return _bits(np.broadcast_to(np.asarray(self.constants[operand], "u8"), WARP), kind)
        if operand.startswith("0f"):
            return np.full(WARP, int(operand[2:], 16), "u4").view("f4")
        number = int(operand, 0)
        return np.full(WARP, number % (1 << 64), "u8").astype(f"u{np.dtype(kind).itemsize}").view(kind)

    def write(self, operand: str, value: np.ndarray, mask: np.ndarray) -> None:
        """Sets the register of the lanes in ``mask``."""
        value = np.asarray(value)
        bits = value if value.dtype == bool else value.view(f"u{value.dtype.itemsize}")
        old = self.registers.setdefault(operand, np.zeros(WARP, "u8"))
        self.registers[operand] = np.where(mask, bits.astype("u8"), old)

    def _access(self, op: Instruction, mask: np.ndarray) -> None:
        space, kind = op.name[1], _TYPES[op.name[-1]]
        load = op.name[0] == "ld"
        target, place = op.operands if load else op.operands[::-1]
        names = target if isinstance(target, tuple) else (target,)
        size = np.dtype(kind).itemsize
        memory = self.shared if space == "shared" else self.memory
        addresses = self.read(place[0], "i8" if space == "global" else "i4").astype("i8") + place[1]
        values = [np.zeros(WARP, kind) if load else self.read(name, kind) for name in names]
        for lane in np.flatnonzero(mask):
            data = memory.find(int(addresses[lane]), size * len(names)).view(kind)
            for i, value in enumerate(values):
                if load:
                    value[lane] = data[i]
                else:
                    data[i] = value[lane]
        for name, value in zip(names, values, strict=True):
            if load:
                self.write(name, value, mask)

    def _shuffle(self, op: Instruction, mask: np.ndarray) -> None:
        assert mask.all(), "a shuffle without some of the warp's lanes"
        target, source, offset = op.operands[:3]
        lanes = np.arange(WARP)
        value, move = self.read(source, "u4"), self.read(offset, "i4")
        self.write(target, value[lanes ^ move if op.name[2] == "bfly" else move], mask)

    def _convert(self, op: Instruction, mask: np.ndarray) -> None:
        *_, to, source = op.name
        target, operand = op.operands[:2]
        if source == "bf16":
            value = (self.read(operand, "u2").astype("u4") << 16).view("f4")
        elif to == "bf16x2":
            high, low = (_to_bf16(self.read(x, "f4")).astype("u4") for x in op.operands[1:])
            value = high << 16 | low
        elif to == "bf16":
            value = _to_bf16(self.read(operand, "f4"))
        else:
            value = self.read(operand, _TYPES[source]).astype(_TYPES[to])
        self.write(target, value, mask)

    def _multiply_add(self, op: Instruction, mask: np.ndarray) -> None:
        kind = _TYPES[op.name[-1]]
        a, b, c = (self.read(x, kind) for x in op.operands[1:])
        if kind == "f4":
            value = (a.astype("f8") * b + c).astype("f4")
        elif op.name[1] == "wide":
            value = a.astype(f"{kind[0]}8") * b + self.read(op.operands[3], f"{kind[0]}8")
        else:
            value = a * b + c
        self.write(op.operands[0], value, mask)

    def _split(self, op: Instruction, mask: np.ndarray) -> None:
        parts = op.operands[0]
        value, bits = self.read(op.operands[1], _TYPES[op.name[1]]), np.dtype(_TYPES[op.name[1]]).itemsize * 8
        for i, part in enumerate(parts):
            self.write(part, value >> (bits // len(parts) * i) & (1 << bits // len(parts)) - 1, mask)

    def _arithmetic(self, op: Instruction, mask: np.ndarray) -> None:
        name, kind = op.name[0], _TYPES[op.name[-1]]
        target = op.operands[0]
        if name == "setp":
            a, b = (self.read(x, kind) for x in op.operands[1:])
            value = _COMPARE[op.name[1]](a, b)
        elif name == "selp":
            a, b = (self.read(x, kind) for x in op.operands[1:3])
            value = np.where(self.read(op.operands[3], "?"), a, b)
        elif name == "div":
            a, b = (self.read(x, kind).astype("f8") for x in op.operands[1:])
            value = np.trunc(a / b).astype(kind)
        elif name in _UNARY:
            value = np.asarray(_UNARY[name](self.read(op.operands[1], kind)), kind)
        else:
            a = self.read(op.operands[1], kind)
            b = self.read(op.operands[2], "u4").astype(kind) if name in ("shl", "shr") else None
            b = self.read(op.operands[2], kind) if b is None else b
            if len(op.name) > 2 and op.name[1] == "wide":
                a, b = a.astype(f"{kind[0]}8"), b.astype(f"{kind[0]}8")
            value = _BINARY[name](a, b)
        self.write(target, value, mask)

    def run(self) -> Iterator[None]:
        """To the end; pauses at each barrier."""
        end = len(self.program.code)
        while True:
            at = int(self.pc.min())
            if at >= end:
                return
            op = self.program.code[at]
            here = self.pc == at
            mask = here
            if op.guard is not None:
                mask = here & (self.read(op.guard[1], "?") ^ op.guard[0])
            self.steps += 1
            self.pc = np.where(here, at + 1, self.pc)
            name = op.name[0]
            if name == "bra":
                self.pc = np.where(mask, self.program.labels[op.operands[0]], self.pc)
            elif name == "ret":
                self.pc = np.where(mask, end, self.pc)
            elif name == "bar":
                assert mask.all(), "a barrier without some of the warp's lanes"
                yield
            elif name in ("ld", "st") and op.name[1] != "param":
                self._access(op, mask)
            elif name == "ld":
                self.write(op.operands[0], self.read(op.operands[1][0], _TYPES[op.name[-1]]), mask)
            elif name == "mov" and isinstance(op.operands[0], tuple):
                self._split(op, mask)
            elif name == "shfl":
                self._shuffle(op, mask)
            elif name == "cvt":
                self._convert(op, mask)
            elif name in ("fma", "mad"):
                self._multiply_add(op, mask)
            else:
                self._arithmetic(op, mask)


def run_block(
    program: Program,
    values: list[int],
    memory: Memory,
    block: tuple[int, int, int],
    grid: tuple[int, int, int],
    warps: int,
    backwards: bool = False,
) -> None:
    """Runs one block; ``values`` are the bits of the kernel's parameters in order.

    Between two barriers each warp runs alone, the first one first, or ``backwards``: where that changes a
    result, warps race.
    """
    shared = Memory()
    base = 4096
    name, size = program.shared
    shared.blocks.append((base, np.full(size, 0xFF, "u1")))
    lanes = np.arange(WARP)
    running = []
    for warp in range(warps):
        constants: dict[str, Any] = {"%tid.x": lanes + warp * WARP, name: base}
        for i, letter in enumerate("xyz"):
            constants[f"%ctaid.{letter}"], constants[f"%nctaid.{letter}"] = block[i], grid[i]
        constants |= dict(zip(program.parameters, values, strict=True))
        running.append(Warp(program, constants, memory, shared).run())
    if backwards:
        running.reverse()
    while running:
        with np.errstate(all="ignore"):
            going = [warp for warp in running if next(warp, StopIteration) is None]
        assert len(going) in (0, len(running)), "some warps have ended, others wait at a barrier"
        running = going
