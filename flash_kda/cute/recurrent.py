"""The recurrent KDA forward as a CuTe DSL kernel: one token after the other, the state in fp32 registers.

Made for calls of few tokens (decoding, verifying speculated tokens), whose time is that of reading and
writing the states once; right for any number. ``flash_kda/reference.py`` describes the computation.

The state of one (sequence, value head) is ``[128 rows (v), 128 channels (k)]``. A block of WARPS warps owns
BLOCK_ROWS rows of it, a warp ROWS of them, a lane CHANNELS neighbouring channels of each of the warp's rows::

    row(block, warp, r) = slice * BLOCK_ROWS + warp * ROWS + r        channel(lane, c) = lane * CHANNELS + c

Rows do not interact; only sums over channels cross lanes, and none cross warps. Per token, S' the decayed
state::

    S' = S diag(exp g)       e = b (v - S' k^)       S = S' + e k^T       o = S q^ = S' q^ + e (k^ . q^)

so that both products with the state are summed over the lanes together. What of a token needs no state
(norms, activations, ``k^ . q^``) is computed once a block: tokens go in groups of WARPS, each warp prepares
one of them and leaves it in shared memory for all. There are two places for a group. While a group advances
the state, the inputs of the next are on their way from memory; at its end they are prepared into the other
place, then comes the one barrier of a group. A place is overwritten a barrier after it was last read.

No block reads what another one writes, and a lane reads its part of ``initial_state`` before it writes the
same part of ``final_state``: they may be one tensor.

The decorators of the DSL read annotations as objects: no ``from __future__ import annotations`` here.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from ..reference import NORM_EPS
from .arguments import BFLOAT16, FLOATS, INT64, MAX_GRID_Y, WORDS, Arguments, Variant

DIM = 128  # K = V
WARP = 32
CHANNELS = DIM // WARP  # k channels of a lane
ROWS = 8  # state rows of a warp
WARPS = 4
BLOCK_ROWS = ROWS * WARPS  # a warp's lanes load the block's part of v, one row each
SLICES = DIM // BLOCK_ROWS  # blocks that share a state
ROW_LANES = WARP // ROWS  # lanes that end up with the same row's sum

LOG2_E = math.log2(math.e)
BF16_BYTES = 2
FP32_BYTES = 4

# log1p(e) = 2 atanh(s), s = e / (2 + e) <= 1/3 for e <= 1: s^14/15 < 2e-8 of the sum is left out. The
# hardware's logarithm has an absolute error of 2^-22 near 1, which a large exp(A_log) makes a wrong decay.
ATANH_TERMS = 7


# A prepared token in shared memory, in floats: k^, q^ and the decay, then v of the block's rows, b, k^ . q^.
READY_K, READY_Q, READY_DECAY, READY_V = 0, DIM, 2 * DIM, 3 * DIM
READY_BETA, READY_DOT = READY_V + BLOCK_ROWS, READY_V + BLOCK_ROWS + 1
READY = READY_V + BLOCK_ROWS + 4  # vectors of the next token on a 16-byte boundary


@dataclass(repr=False)  # a name of the kernel is made of what ``repr`` says of its arguments
class DeviceArguments(Arguments):
    """``Arguments`` that the DSL can hand to a kernel, each field one of its numbers."""

    def __repr__(self) -> str:
        return ""

    def __extract_mlir_values__(self) -> list[Any]:
        return [
            value
            for field in fields(self)
            for value in cutlass.extract_mlir_values(getattr(self, field.name))
        ]

    def __new_from_mlir_values__(self, values: list[Any]) -> "DeviceArguments":
        kinds = [Float32 if field.name in FLOATS else Int64 for field in fields(self)]
        return DeviceArguments(*(kind(value) for kind, value in zip(kinds, values, strict=True)))


def _vector(address: Any, dtype: Any, count: int, align: int) -> Any:
    """``count`` neighbouring elements in global memory, read or written at once where ``align`` allows."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def _scalar(address: Any, dtype: Any) -> Any:
    """One element in global memory, aligned to its own size and no more."""
    return _vector(address, dtype, 1, dtype.width // 8)


def _exp2(x: Any) -> Any:
    return cute.math.exp2(x, approx=True, ftz=True)


def _sigmoid_log2(x: Any) -> Any:
    """``1 / (1 + 2^-x)``. Both ends are right: 2^-x becomes infinite or 0."""
    return cute.arch.rcp_approx(Float32(1.0) + _exp2(-x))


def _softplus(z: Any) -> Any:
    """``log(1 + e^z)``, to a relative error of some 1e-7 for every z."""
    positive = cute.arch.fmax(z, Float32(0.0))
    small = _exp2(cute.arch.fmax(z, -z) * Float32(-LOG2_E))  # e^-|z| <= 1
    s = small * cute.arch.rcp_approx(Float32(2.0) + small)
    square = s * s
    series = Float32(1.0 / (2 * ATANH_TERMS - 1))
    for term in reversed(range(ATANH_TERMS - 1)):
        series = series * square + Float32(1.0 / (2 * term + 1))
    return positive + (s + s) * series


def _sum_lanes(x: Any) -> Any:
    """The sum over the warp, the same bits in every lane."""
    for mask in (16, 8, 4, 2, 1):
        x = x + cute.arch.shuffle_sync_bfly(x, mask)
    return x


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return Float32(cutlass.select_(condition, yes, no))


def _sum_rows(partial: list[Any], lane: Any) -> Any:
    """Sums ROWS values over the warp: lane l gets the sum of ``partial[l // ROW_LANES]``.

    Each step halves the rows that a lane still adds up: it sends the half that its partner keeps. ROWS sums
    cost ROWS - 1 + log2(ROW_LANES) shuffles instead of 5 ROWS.
    """
    mask = WARP // 2
    while len(partial) > 1:
        half = len(partial) // 2
        upper = (lane & mask) != 0
        partial = [
            _select(upper, partial[i + half], partial[i])
            + cute.arch.shuffle_sync_bfly(_select(upper, partial[i], partial[i + half]), mask)
            for i in range(half)
        ]
        mask //= 2
    (total,) = partial
    while mask > 0:
        total = total + cute.arch.shuffle_sync_bfly(total, mask)
        mask //= 2
    return total


class Inputs:
    """Where the lane finds its inputs of a token; fixed for a sequence.

    ``starts`` are the addresses of the sequence's first token, ``steps`` the bytes from token to token: the
    same in the whole block, which lets them live in uniform registers. ``offsets`` are the lane's bytes in a
    token: of q, k, g its CHANNELS channels, of v (prepared for the block) row ``lane`` of the block's, of out
    row ``lane // ROW_LANES`` of the warp's.
    """

    def __init__(self, a: Any, batch: Any, first: Any, place: "Place") -> None:
        key_head = Int64(place.head // Int32(a.group))
        value_head = Int64(place.head)
        heads = {
            "q": key_head * a.q_head,
            "k": key_head * a.k_head,
            "g": value_head * a.g_head,
            "v": value_head * a.v_head,
            "out": value_head * a.out_head,
            "beta": value_head,
        }
        self.starts: dict[str, Any] = {}
        self.steps: dict[str, Any] = {}
        for name, offset in heads.items():
            token = getattr(a, f"{name}_token")
            elements = batch * getattr(a, f"{name}_batch") + first * token + offset
            self.starts[name] = getattr(a, name) + elements * BF16_BYTES
            self.steps[name] = token * BF16_BYTES
        channels = place.lane * (CHANNELS * BF16_BYTES)
        self.offsets = {
            "q": channels,
            "k": channels,
            "g": channels,
            "v": (place.block_row + place.lane) * BF16_BYTES,
            "out": (place.warp_row + place.lane // ROW_LANES) * BF16_BYTES,
            "beta": Int32(0),
        }


def _address(inputs: Inputs, name: str, token: Any) -> Any:
    """Where the lane's part of an input (or of out) of a token of the sequence is."""
    return inputs.starts[name] + Int64(token) * inputs.steps[name] + Int64(inputs.offsets[name])


def _load(inputs: Inputs, token: Any) -> tuple[Any, ...]:
    """q, k, g (CHANNELS each), v and the logit of beta, as they lie in memory."""
    vectors = [_vector(_address(inputs, n, token), BFloat16, CHANNELS, 8).load() for n in ("q", "k", "g")]
    scalars = [_scalar(_address(inputs, n, token), BFloat16)[0] for n in ("v", "beta")]
    return (*vectors, *scalars)


class Gate:
    """The lane's constants of the gate."""

    def __init__(self, a: Any, place: "Place", variant: Variant) -> None:
        self.softplus = variant.softplus
        rate = Float32(1.0)
        if variant.has_rate:
            rate = _exp2(_scalar(a.A_log + Int64(place.head) * FP32_BYTES, Float32)[0] * Float32(LOG2_E))
        self.rate = rate * Float32(LOG2_E)
        self.bound = a.lower_bound * Float32(LOG2_E)
        self.bias = [Float32(0.0)] * CHANNELS
        if variant.has_bias:
            # Only 4-byte aligned: a view into a larger buffer of parameters is allowed.
            first = a.dt_bias + (Int64(place.head) * DIM + Int64(place.lane * CHANNELS)) * FP32_BYTES
            self.bias = [_scalar(first + c * FP32_BYTES, Float32)[0] for c in range(CHANNELS)]


def _decay(gate: Gate, g: Any, c: int) -> Any:
    """The factor of channel ``c``, in (0, 1], of a gate before activation."""
    z = g + gate.bias[c]
    if gate.softplus:
        return _exp2(-(gate.rate * _softplus(z)))
    return _exp2(gate.bound * _sigmoid_log2(gate.rate * z))


def _prepare(raw: tuple[Any, ...], gate: Gate, scale: Any, ready: Any, lane: Any) -> None:
    """Everything of a token that needs no state, into its floats ``ready`` in shared memory; a whole warp."""
    q, k, g = (vector.to(Float32) for vector in raw[:3])
    square_q = square_k = dot = Float32(0.0)
    for c in range(CHANNELS):
        square_q = square_q + q[c] * q[c]
        square_k = square_k + k[c] * k[c]
        dot = dot + q[c] * k[c]
    eps = Float32(NORM_EPS)
    scale_q = cute.math.rsqrt(_sum_lanes(square_q) + eps, approx=True, ftz=True) * scale
    scale_k = cute.math.rsqrt(_sum_lanes(square_k) + eps, approx=True, ftz=True)
    dot = _sum_lanes(dot) * scale_k * scale_q
    vectors = {
        READY_K: [k[c] * scale_k for c in range(CHANNELS)],
        READY_Q: [q[c] * scale_q for c in range(CHANNELS)],
        READY_DECAY: [_decay(gate, g[c], c) for c in range(CHANNELS)],
    }
    for first, values in vectors.items():
        _store_four(_shared_vector(ready, first, lane), values)
    ready[READY_V + lane] = raw[3].to(Float32)
    ready[READY_BETA] = _sigmoid_log2(raw[4].to(Float32) * Float32(LOG2_E))  # the same from every lane
    ready[READY_DOT] = dot


def _shared_vector(ready: Any, first: int, lane: Any) -> Any:
    """The lane's CHANNELS floats of one of a prepared token's vectors."""
    channel = cute.assume(lane * CHANNELS, divby=CHANNELS)  # lets the DSL see 16-byte accesses
    return cute.make_tensor(ready.iterator + first + channel, cute.make_layout(CHANNELS))


def _store_four(target: Any, values: list[Any]) -> None:
    registers = cute.make_rmem_tensor(CHANNELS, Float32)
    for c, value in enumerate(values):
        registers[c] = value
    target.store(registers.load())


def _dot(state: Any, r: int, vector: Any) -> Any:
    total = state[r, 0] * vector[0]
    for c in range(1, CHANNELS):
        total = total + state[r, c] * vector[c]
    return total


@cute.jit
def _advance(state: Any, ready: Any, place: cutlass.Constexpr, out: Int64) -> None:
    """One token: updates the lane's part of the state and writes the warp's ROWS outputs."""
    lane = place.lane
    decay = _shared_vector(ready, READY_DECAY, lane).load()
    k = _shared_vector(ready, READY_K, lane).load()
    q = _shared_vector(ready, READY_Q, lane).load()
    for r in cutlass.range_constexpr(ROWS):
        for c in cutlass.range_constexpr(CHANNELS):
            state[r, c] = state[r, c] * decay[c]
    seen = _sum_rows([_dot(state, r, k) for r in range(ROWS)], lane)
    output = _sum_rows([_dot(state, r, q) for r in range(ROWS)], lane)
    value = ready[READY_V + place.warp * ROWS + lane // ROW_LANES]
    error = ready[READY_BETA] * (value - seen)
    if lane % ROW_LANES == 0:
        _scalar(out, BFloat16)[0] = (output + error * ready[READY_DOT]).to(BFloat16)
    for r in cutlass.range_constexpr(ROWS):
        row_error = cute.arch.shuffle_sync(error, r * ROW_LANES)
        for c in cutlass.range_constexpr(CHANNELS):
            state[r, c] = state[r, c] + row_error * k[c]


def _state_rows(address: Any, dtype: str, place: "Place") -> list[Any]:
    """The lane's CHANNELS channels of each of its ROWS rows of a state in memory."""
    kind = BFloat16 if dtype == BFLOAT16 else Float32
    size = kind.width // 8
    first = address + ((place.pair * DIM + Int64(place.warp_row)) * DIM + Int64(place.lane * CHANNELS)) * size
    return [_vector(first + r * DIM * size, kind, CHANNELS, CHANNELS * size) for r in range(ROWS)]


def _load_state(a: Any, variant: Variant, place: "Place", state: Any) -> None:
    if variant.initial_state is None:
        state.fill(0.0)
        return
    vectors = [row.load() for row in _state_rows(a.initial_state, variant.initial_state, place)]
    for r, vector in enumerate(vectors):
        values = vector.to(Float32)
        for c in range(CHANNELS):
            state[r, c] = values[c]


def _store_state(a: Any, variant: Variant, place: "Place", state: Any) -> None:
    if variant.final_state is None:
        return
    for r, row in enumerate(_state_rows(a.final_state, variant.final_state, place)):
        row.store(state[r, None].load().to(row.element_type))


def _span(a: Any, variant: Variant, n: Any) -> tuple[Any, Any, Any]:
    """Batch row, first token and length of sequence n.

    Nothing has looked at the contents of cu_seqlens (the host would have to wait for them); clamping keeps
    a wrong one inside the tensors.
    """
    if variant.cu_seqlens is None:
        return n, Int64(0), Int32(a.tokens)
    kind = Int64 if variant.cu_seqlens == INT64 else Int32
    ends = []
    for i in range(2):
        end = Int64(_scalar(a.cu_seqlens + (n + i) * (kind.width // 8), kind)[0])
        ends.append(cutlass.max(cutlass.min(end, a.tokens), Int64(0)))
    return Int64(0), ends[0], Int32(cutlass.max(ends[1] - ends[0], Int64(0)))


class Place:
    """Which part of the work a lane has: warp and lane, value head, rows, and n * HV + head (64 bits)."""

    def __init__(self, a: Any, n: Any, x: Any, thread: Any) -> None:
        self.warp = cute.arch.make_warp_uniform(thread // WARP)
        self.lane = thread % WARP
        self.head = x // SLICES
        self.block_row = (x % SLICES) * BLOCK_ROWS
        self.warp_row = self.block_row + self.warp * ROWS
        self.pair = n * a.value_heads + Int64(self.head)


@cute.jit
def _sequence(a: Any, variant: cutlass.Constexpr, n: Int64, place: cutlass.Constexpr) -> None:
    """The warp's rows of one (sequence, value head), first token to last."""
    state = cute.make_rmem_tensor((ROWS, CHANNELS), Float32)
    _load_state(a, variant, place, state)
    batch, first, length = _span(a, variant, n)
    if length > 0:  # the same in the whole block, as everything that a barrier depends on
        # Not SmemAllocator, which has moved to another module and warns in its old place.
        shared = cute.arch.alloc_smem(Float32, 2 * WARPS * READY, 16)
        ready = cute.make_tensor(shared, cute.make_layout((READY, WARPS, 2)))
        inputs = Inputs(a, batch, first, place)
        gate = Gate(a, place, variant)
        last = length - 1
        if place.warp < length:
            _prepare(_load(inputs, place.warp), gate, a.scale, ready[None, place.warp, 0], place.lane)
        cute.arch.sync_threads()
        for group in cutlass.range((length + WARPS - 1) // WARPS, unroll=1):
            begin = group * WARPS
            mine = begin + WARPS + place.warp
            raw = _load(inputs, cutlass.min(mine, last))
            for token in cutlass.range(begin, cutlass.min(begin + WARPS, length), unroll=1):
                _advance(state, ready[None, token - begin, group % 2], place, _address(inputs, "out", token))
            if mine < length:
                _prepare(raw, gate, a.scale, ready[None, place.warp, (group + 1) % 2], place.lane)
            cute.arch.sync_threads()
    _store_state(a, variant, place, state)


@cute.kernel
def flash_kda_recurrent(a: DeviceArguments, variant: cutlass.Constexpr) -> None:
    """Grid (SLICES * HV, y, z): sequence ``y + z * gridDim.y``, where below N; WARPS warps a block."""
    x, y, z = cute.arch.block_idx()
    _, height, _ = cute.arch.grid_dim()
    thread, _, _ = cute.arch.thread_idx()
    n = Int64(z) * Int64(height) + Int64(y)
    if n < a.sequences:
        _sequence(a, variant, n, Place(a, n, x, thread))


@cute.jit
def launch(block: Int64, stream: cuda.CUstream, variant: cutlass.Constexpr) -> None:
    """Reads the arguments (``arguments.Block``) at the host address ``block`` and launches.

    Thirty-odd numbers by way of one address: the DSL takes a microsecond for each argument of its own.
    """
    words = cute.make_tensor(
        cute.make_ptr(Int64, block, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(len(WORDS))
    )
    floats = cute.make_tensor(
        cute.make_ptr(Float32, block + 8 * len(WORDS), cute.AddressSpace.generic, assumed_align=4),
        cute.make_layout(len(FLOATS)),
    )
    a = DeviceArguments(*[words[i] for i in range(len(WORDS))], *[floats[i] for i in range(len(FLOATS))])
    height = cutlass.min(a.sequences, Int64(MAX_GRID_Y))
    depth = (a.sequences + height - 1) // height
    flash_kda_recurrent(a, variant).launch(
        grid=(Int32(a.value_heads) * SLICES, Int32(height), Int32(depth)),
        block=(WARP * WARPS, 1, 1),
        min_blocks_per_mp=1,  # else ptxas spills for a fifth or sixth block; with it, 128 registers or fewer
        stream=stream,
    )
