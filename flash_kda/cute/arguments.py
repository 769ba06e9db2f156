"""What the recurrent kernel is compiled for, and what a launch hands to it. Imports nothing of the DSL."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
INT32 = "int32"
INT64 = "int64"

MAX_GRID_Y = 65535  # of z too
MAX_SEQUENCES = MAX_GRID_Y**2
MAX_TOKENS = 2**31 - 17  # of a batch row; counted in 32 bits, a few past the end
MAX_HEADS = 2**29 - 1  # value heads; dimension x of a grid holds four blocks for each


@dataclass(frozen=True)
class Variant:
    """What is compiled in; everything else is an argument of the launch.

    Attributes:
        initial_state, final_state: ``float32``, ``bfloat16``, or None when the call has no such state.
        cu_seqlens: ``int32``, ``int64``, or None when each batch row is one sequence.
        has_rate: whether ``A_log`` is given.
        has_bias: whether ``dt_bias`` is given.
        softplus: the softplus gate; else the bounded one.
    """

    initial_state: str | None
    final_state: str | None
    cu_seqlens: str | None
    has_rate: bool
    has_bias: bool
    softplus: bool


@dataclass
class Arguments:
    """One launch. Names with ``_batch``, ``_token``, ``_head`` are strides in elements, of the dimensions
    0, 1 and 2 of that tensor; names of tensors alone are addresses, 0 for an absent one.

    Integers on the host and 64-bit values of the DSL in a kernel, except the two fp32 at the end. The head
    stride of beta is 1 by the operator's contract.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    out: Any
    A_log: Any
    dt_bias: Any
    initial_state: Any
    final_state: Any
    cu_seqlens: Any
    q_batch: Any
    q_token: Any
    q_head: Any
    k_batch: Any
    k_token: Any
    k_head: Any
    v_batch: Any
    v_token: Any
    v_head: Any
    g_batch: Any
    g_token: Any
    g_head: Any
    beta_batch: Any
    beta_token: Any
    out_batch: Any
    out_token: Any
    out_head: Any
    sequences: Any  # N
    tokens: Any  # T, of a batch row
    value_heads: Any  # HV
    group: Any  # HV // H, value heads that share a query/key head
    scale: Any  # fp32
    lower_bound: Any  # fp32, natural logarithm; not read with the softplus gate


FLOATS = ("scale", "lower_bound")
WORDS = tuple(field.name for field in fields(Arguments) if field.name not in FLOATS)


class Block(ctypes.Structure):
    """``Arguments`` in host memory: int64 words, then fp32. The launch code reads it from its address."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in WORDS),
        *((name, ctypes.c_float) for name in FLOATS),
    )
