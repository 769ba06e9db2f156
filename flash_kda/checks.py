"""Argument checks: everything a bad call can be told before anything is launched.

They read metadata only (types, dtypes, shapes, strides, devices, addresses), so they run on CPU, CUDA and
meta tensors alike, never synchronise, and trace under ``torch.compile``. Three groups need more than metadata
and are left out while a graph is traced, when there are no addresses and no values: inference tensors that
are written, alignment/aliasing, and the contents of ``cu_seqlens``, read only when they are on the CPU.

TypeError: not a tensor, not a number, a wrong dtype. ValueError: everything else. Each message names the
argument, what it got and what it takes.
"""

from __future__ import annotations

import math
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

ROW_BYTES = 16  # one vector load of the kernels: eight bf16, four fp32

# Tokens of a segment; csrc/binding.cpp has the same limits, and a test compares them.
SEGMENT_STEP = 16
MIN_SEGMENT = 256
MAX_SEGMENT = 2**31 - 17

_SCALE_MAX = 2.0**64  # the kernels multiply it by 2^32, in fp32
_PLAIN = (Tensor, torch.nn.Parameter)

_TAKES_SCALE = "a number from -2^64 to 2^64, or None for K ** -0.5"
_TAKES_BOUND = "a float in [-5, 0), or None for the softplus gate"
_TAKES_SEGMENT = (
    f"None (the kernels choose), 0 (never cut), or a multiple of {SEGMENT_STEP} from {MIN_SEGMENT} to "
    f"{MAX_SEGMENT}"
)

_BF16 = (torch.bfloat16,)
_FP32 = (torch.float32,)
_STATE = (torch.float32, torch.bfloat16)
_INDEX = (torch.int64, torch.int32)
_INTEGERS: tuple[Any, ...] = (int, Integral, torch.SymInt)


class Sizes(NamedTuple):
    """Sizes of a call: batch, tokens, query/key heads, value heads, key dim, value dim, sequences."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def _type_error(name: str, got: str, takes: str) -> NoReturn:
    raise TypeError(f"flash_kda: argument '{name}': got {got}, takes {takes}.")


def _value_error(name: str, got: str, takes: str) -> NoReturn:
    raise ValueError(f"flash_kda: argument '{name}': got {got}, takes {takes}.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d) for d in dtypes)


def _check_number(name: str, value: Any, takes: str) -> None:
    # bool is an int to Python, and a 0-d tensor would synchronise when read. The operators are traced with
    # torch's symbolic numbers in the place of a float.
    if isinstance(value, bool) or not isinstance(value, (int, float, Real, torch.SymFloat, torch.SymInt)):
        _type_error(name, type(value).__name__, takes)


def _shown(value: Any) -> str:
    """A number in words: Python refuses to print an int of more than 4300 digits."""
    try:
        if isinstance(value, _INTEGERS) and abs(value) < 2**63:
            return f"{int(value)}"  # of a traced number, the one that it has now
        return f"{float(value)}"
    except OverflowError:
        return "an integer past every float"


def check_scale(scale: Any) -> None:
    """A real number from -2^64 to 2^64, or None for ``K ** -0.5``."""
    if scale is None:
        return
    _check_number("scale", scale, _TAKES_SCALE)
    if not -_SCALE_MAX <= scale <= _SCALE_MAX:  # NaN compares false
        _value_error("scale", _shown(scale), _TAKES_SCALE)


def check_lower_bound(lower_bound: Any) -> None:
    """A real number in [-5, 0), or None for the softplus gate."""
    if lower_bound is None:
        return
    _check_number("lower_bound", lower_bound, _TAKES_BOUND)
    if not -5.0 <= lower_bound < 0.0:  # NaN compares false, so it lands here as well
        _value_error("lower_bound", _shown(lower_bound), _TAKES_BOUND)


def check_segment_tokens(segment_tokens: Any) -> None:
    """A length that sequences can be cut into, 0 for no cuts, or None for the kernels' choice."""
    if segment_tokens is None:
        return
    if isinstance(segment_tokens, bool) or not isinstance(segment_tokens, _INTEGERS):
        _type_error("segment_tokens", type(segment_tokens).__name__, _TAKES_SEGMENT)
    if segment_tokens == 0:
        return
    if not MIN_SEGMENT <= segment_tokens <= MAX_SEGMENT or segment_tokens % SEGMENT_STEP != 0:
        _value_error("segment_tokens", _shown(segment_tokens), _TAKES_SEGMENT)


def check_head_size(name: str, size: Any) -> None:
    """A number of channels."""
    takes = "a number of channels, 1 or more"
    if type(size) is not int:  # bool is an int to Python
        _type_error(name, type(size).__name__, takes)
    if size < 1:
        _value_error(name, _shown(size), takes)


def check_backend(backend: Any) -> None:
    """A name; which names there are is for the decision to say."""
    if not isinstance(backend, str):
        _type_error("backend", type(backend).__name__, "the name of a backend, or 'auto'")


def _check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...], rank: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor):
        _type_error(name, type(value).__name__, f"a torch.Tensor of {_names(dtypes)}")
    if value.dtype not in dtypes:
        _type_error(name, f"dtype {value.dtype}", _names(dtypes))
    if value.layout is not torch.strided or value.is_nested:
        _value_error(name, "a sparse or nested tensor", "a dense strided tensor")
    if value.dim() not in rank:
        want = " or ".join(str(r) for r in rank)
        _value_error(name, f"{value.dim()} dimensions (shape {tuple(value.shape)})", f"{want} dimensions")


class _Call(NamedTuple):
    """The tensors of one call, by name, in positional order."""

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


def _check_kinds(call: _Call) -> None:
    for name in ("q", "k", "v", "g", "out"):
        _check_tensor(name, getattr(call, name), _BF16, (4,))
    _check_tensor("beta", call.beta, _BF16, (3,))
    if call.A_log is not None:
        _check_tensor("A_log", call.A_log, _FP32, (1,))
    if call.dt_bias is not None:
        _check_tensor("dt_bias", call.dt_bias, _FP32, (1, 2))
    if call.initial_state is not None:
        _check_tensor("initial_state", call.initial_state, _STATE, (4,))
    if call.final_state is not None:
        _check_tensor("final_state", call.final_state, _STATE, (4,))
    if call.cu_seqlens is not None:
        _check_tensor("cu_seqlens", call.cu_seqlens, _INDEX, (1,))


_Named = list[tuple[str, Tensor]]


def _present(call: _Call) -> _Named:
    return [(name, t) for name, t in zip(call._fields, call, strict=True) if t is not None]


def _check_devices(call: _Call, present: _Named) -> None:
    device = call.q.device
    for name, tensor in present:
        if tensor.device != device:
            _value_error(name, f"a tensor on {tensor.device}", f"a tensor on {device}, the device of q")


def _check_sizes(call: _Call) -> Sizes:
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2], call.v.shape[3]
    if H < 1 or K < 1:
        _value_error("q", f"shape {tuple(call.q.shape)}", "[B, T, H, K] with H >= 1 and K >= 1")
    if HV < 1 or V < 1 or HV % H != 0:
        _value_error(
            "v",
            f"shape {tuple(call.v.shape)}",
            f"[B, T, HV, V] with HV a positive multiple of H = {H} and V >= 1",
        )
    if call.cu_seqlens is None:
        return Sizes(B, T, H, HV, K, V, B)
    entries = call.cu_seqlens.shape[0]
    if entries < 2:
        _value_error("cu_seqlens", f"{entries} entries", "N + 1 >= 2 entries, one sequence or more")
    if B != 1:
        _value_error("q", f"batch {B} together with cu_seqlens", "batch 1 (sequences packed along T)")
    return Sizes(B, T, H, HV, K, V, entries - 1)


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...], letters: str) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        _value_error(name, f"shape {tuple(tensor.shape)}", f"{letters} = {shape}")


def _check_shapes(call: _Call, s: Sizes) -> None:
    _check_shape("k", call.k, (s.B, s.T, s.H, s.K), "[B, T, H, K]")
    _check_shape("v", call.v, (s.B, s.T, s.HV, s.V), "[B, T, HV, V]")
    _check_shape("g", call.g, (s.B, s.T, s.HV, s.K), "[B, T, HV, K]")
    _check_shape("beta", call.beta, (s.B, s.T, s.HV), "[B, T, HV]")
    _check_shape("out", call.out, (s.B, s.T, s.HV, s.V), "[B, T, HV, V]")
    _check_shape("A_log", call.A_log, (s.HV,), "[HV]")
    if call.dt_bias is not None and call.dt_bias.dim() == 1:
        _check_shape("dt_bias", call.dt_bias, (s.HV * s.K,), "[HV * K]")
    else:
        _check_shape("dt_bias", call.dt_bias, (s.HV, s.K), "[HV, K]")
    _check_shape("initial_state", call.initial_state, (s.N, s.HV, s.V, s.K), "[N, HV, V, K]")
    _check_shape("final_state", call.final_state, (s.N, s.HV, s.V, s.K), "[N, HV, V, K]")


def _vectorised(tensor: Tensor) -> bool:
    """Whether rows are read 16 bytes at a time; the CUDA kernels take no other head
    dimensions, and the other backends read element by element."""
    return tensor.dim() == 4 and (tensor.shape[-1] * tensor.element_size()) % ROW_BYTES == 0


def _check_strides(name: str, tensor: Tensor) -> None:
    if tensor.is_contiguous() or tensor.numel() == 0:
        return
    sizes, strides = tensor.shape, tensor.stride()
    if sizes[-1] > 1 and strides[-1] != 1:
        _value_error(name, f"strides {strides}", "stride 1 in the last dimension (call .contiguous())")
    if not _vectorised(tensor):
        return
    step = ROW_BYTES // tensor.element_size()
    for size, stride in zip(sizes[:-1], strides[:-1], strict=True):
        if size > 1 and stride % step != 0:
            _value_error(name, f"strides {strides}", f"strides that are multiples of {step} elements")


def _check_contiguous(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and not tensor.is_contiguous():
        _value_error(name, f"strides {tensor.stride()}", "a contiguous tensor (call .contiguous())")


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices may reach one element: an expanded or a sliding-window view."""
    extent = 1
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def _check_layouts(call: _Call) -> None:
    for name in ("q", "k", "v", "g", "beta", "out"):
        _check_strides(name, getattr(call, name))
    for name in ("A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens"):
        _check_contiguous(name, getattr(call, name))


def _check_gradients(present: _Named) -> None:
    """A result without a gradient where one was asked for is a silent wrong answer: refuse instead."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in present:
        if tensor.requires_grad:
            why = "only the forward is computed; call under torch.no_grad() or torch.inference_mode()"
            _value_error(name, "a tensor that requires grad", f"one that does not: {why}")


def _forward_ad() -> bool:
    """Whether forward-mode differentiation (``torch.func.jvp``, ``jacfwd``, dual tensors) is going on."""
    return forward_ad._current_level >= 0 and not torch.is_inference_mode_enabled()


def _check_tangents(present: _Named) -> None:
    """The derivative of forward mode. A dual tensor says requires_grad=False, and no_grad() changes nothing.
    The operators write in place below torch's derivatives, so that the result's tangent was zero."""
    if not _forward_ad():
        return
    takes = "one without a tangent: only the forward is computed; give it .detach()"
    unpack: Any = forward_ad.unpack_dual  # torch leaves it untyped
    for name, tensor in present:
        if not tensor.is_inference() and unpack(tensor).tangent is not None:
            _value_error(name, "a dual tensor", takes)


def _check_writable(call: _Call) -> None:
    if torch.is_inference_mode_enabled():
        return
    for name, tensor in (("out", call.out), ("final_state", call.final_state)):
        if tensor is not None and tensor.is_inference():
            takes = "one made outside, or a call under torch.inference_mode(): it is written in place"
            _value_error(name, "a tensor made under torch.inference_mode()", takes)


def _extent(tensor: Tensor, first: int = 0) -> int:
    """Bytes from the first to past the last element over the dimensions ``first`` and later."""
    size = tensor.element_size()
    for n, stride in zip(tensor.shape[first:], tensor.stride()[first:], strict=True):
        if n == 0:
            return 0
        size += (n - 1) * stride * tensor.element_size()
    return size


def _start(tensor: Tensor) -> int | None:
    """Address of the first element, None where there is none; meta tensors get one unique to their storage.

    What has no address does not show in its type: a subclass mostly has one, the wrappers of ``torch.func``
    are plain tensors without. A fake tensor has storage on another device than its own and only warns when
    asked, functional tensors and wrappers raise, wrapper subclasses say 0 (and so does an empty tensor).
    """
    try:
        if tensor.is_meta:
            storage: int = tensor.untyped_storage()._cdata
            return (storage << 64) + int(tensor.storage_offset()) * tensor.element_size()
        if type(tensor) not in _PLAIN and tensor.untyped_storage().device != tensor.device:
            return None
        return tensor.data_ptr() or None
    except RuntimeError:
        return None


class _Placed(NamedTuple):
    """A tensor and its bytes ``[start, stop)``."""

    name: str
    tensor: Tensor
    start: int
    stop: int


def _place(present: _Named) -> list[_Placed]:
    """The tensors that have an address."""
    placed = []
    for name, tensor in present:
        start = _start(tensor)
        if start is not None:
            size = tensor.nbytes if tensor.is_contiguous() else _extent(tensor)
            placed.append(_Placed(name, tensor, start, start + size))
    return placed


def _disjoint_at(a: _Placed, b: _Placed, level: int) -> bool:
    """Whether a and b stay apart inside one period of their first ``level`` dimensions.

    Cut from one buffer, out and q interleave: their byte ranges cross while no byte is shared. All outer
    strides are multiples of ``period``, so it is enough that the inner blocks are apart modulo the period.
    """
    outer = [
        stride * t.element_size()
        for t in (a.tensor, b.tensor)
        for size, stride in zip(t.shape[:level], t.stride()[:level], strict=True)
        if size > 1
    ]
    period = math.gcd(*outer)
    if period == 0:
        return False
    apart = (b.start - a.start) % period
    return apart >= _extent(a.tensor, level) and apart + _extent(b.tensor, level) <= period


def _share_bytes(a: _Placed, b: _Placed) -> bool:
    """Whether two tensors whose byte ranges cross share a byte."""
    if a.start == a.stop or b.start == b.stop:
        return False
    levels = range(1, min(a.tensor.dim(), b.tensor.dim()))
    return not any(_disjoint_at(a, b, level) for level in levels)


def _same_state(a: _Placed, b: _Placed) -> bool:
    """final_state may be initial_state itself: rows are read before the same rows are written."""
    states = ("initial_state", "final_state")
    return a.name in states and b.name in states and a.tensor.dtype == b.tensor.dtype and a[2:] == b[2:]


def _check_alignment(placed: _Placed) -> None:
    if placed.start != placed.stop and _vectorised(placed.tensor):
        got = f"a first element at address {placed.start % (1 << 64):#x}"
        _value_error(placed.name, got, f"an address divisible by {ROW_BYTES}")


def _check_alone(written: _Placed, others: list[_Placed]) -> None:
    start, stop = written.start, written.stop
    for other in others:
        if other.start >= stop or start >= other.stop or other is written:  # nearly always: keep it cheap
            continue
        if _share_bytes(written, other) and not _same_state(written, other):
            _value_error(written.name, f"memory that {other.name} uses too", "memory of its own")


def _check_addresses(call: _Call, present: _Named) -> None:
    if not call.out.is_contiguous() and _overlaps_itself(call.out):
        _value_error(
            "out", f"strides {call.out.stride()}, which reach one element twice", "distinct elements"
        )
    placed = _place(present)
    for one in placed:
        if one.start % ROW_BYTES:
            _check_alignment(one)
    for one in placed:
        if one.name in ("out", "final_state"):
            _check_alone(one, placed)


def _check_cu_seqlens_contents(cu_seqlens: Tensor | None, tokens: int) -> None:
    """Only on the CPU: reading a device tensor would make the host wait for the device."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu":
        return
    if _start(cu_seqlens) is not None:
        check_ends(cu_seqlens.tolist(), tokens)


def check_ends(values: list[int], tokens: int) -> None:
    """The contents of ``cu_seqlens``, read on the host: every token is of one sequence."""
    if values[0] != 0:
        _value_error("cu_seqlens", f"{values[0]} as first entry", "0 there")
    if values[-1] != tokens:
        _value_error("cu_seqlens", f"{values[-1]} as last entry", f"T = {tokens} there")
    for i, (a, z) in enumerate(pairwise(values), 1):
        if z < a:
            _value_error("cu_seqlens", f"{z} after {a} at entry {i}", "entries that never decrease")


def check_packed(name: str, value: Any, rank: int) -> None:
    """A bf16 tensor of ``rank`` dimensions, for the wrappers that reshape before they call ``fwd``."""
    _check_tensor(name, value, _BF16, (rank,))


def check_sources(q: Any, v: Any, cu_seqlens: Any) -> None:
    """What outputs are allocated from, for the wrappers that allocate before they call ``fwd``."""
    _check_tensor("q", q, _BF16, (4,))
    _check_tensor("v", v, _BF16, (4,))
    if cu_seqlens is not None:
        _check_tensor("cu_seqlens", cu_seqlens, _INDEX, (1,))
        if cu_seqlens.shape[0] < 2:
            _value_error(
                "cu_seqlens", f"{cu_seqlens.shape[0]} entries", "N + 1 >= 2 entries, one sequence or more"
            )


def check_fwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    out: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    final_state: Any,
    cu_seqlens: Any,
) -> Sizes:
    """Checks one call of :func:`flash_kda.fwd`; see there for shapes and dtypes.

    Returns:
        The sizes of the call.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong rank, shape, device, stride, alignment, range or content, a tensor that requires
            grad while gradients are recorded, a dual tensor, or ``out`` or ``final_state`` sharing memory
            with another argument (``final_state`` may be ``initial_state``).
    """
    call = _Call(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens)
    check_scale(scale)
    check_lower_bound(lower_bound)
    _check_kinds(call)
    present = _present(call)
    _check_devices(call, present)
    sizes = _check_sizes(call)
    _check_shapes(call, sizes)
    _check_layouts(call)
    _check_gradients(present)
    if not torch.compiler.is_compiling():
        _check_tangents(present)
        _check_writable(call)
        _check_addresses(call, present)
        _check_cu_seqlens_contents(cu_seqlens, sizes.T)
    return sizes


# ---- the short way -----------------------------------------------------------------------------------------
# check_fwd takes longer than the launch of a kernel, and the operator of the kernels checks CUDA tensors at a
# tenth of the price (csrc/binding.cpp). What it cannot see is asked here; what it refuses, check_fwd words.


def operator_checks_the_rest(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    cu_seqlens: Any,
    backend: Any,
) -> bool:
    """Whether a call on CUDA tensors has nothing wrong that the operator would not refuse: its tensors are
    plain ones without a gradient to lose, its numbers floats in range. ``outputs_are_plain`` says so of what
    is written. False where only ``check_fwd`` can tell. Not while tracing.
    """
    if not (type(q) is type(k) is type(v) is type(g) is type(beta) is Tensor) or type(backend) is not str:
        return False
    if not q.is_cuda or q.dim() != 4 or v.dim() != 4 or type(lower_bound) is not float:
        return False
    if scale is not None and not (type(scale) is float and -_SCALE_MAX <= scale <= _SCALE_MAX):
        return False
    optional = (A_log, dt_bias, initial_state, cu_seqlens)
    for t in optional:
        if t is not None and type(t) not in _PLAIN:
            return False
    if _forward_ad():
        return False
    if torch.is_grad_enabled():
        for t in (q, k, v, g, beta, *optional):
            if t is not None and t.requires_grad:
                return False
    return cu_seqlens is None or (cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 1)


def outputs_are_plain(out: Any, final_state: Any) -> bool:
    """See ``operator_checks_the_rest``."""
    if type(out) is not Tensor or (final_state is not None and type(final_state) is not Tensor):
        return False
    if torch.is_inference_mode_enabled():
        return True
    for t in (out, final_state):
        if t is not None and (t.is_inference() or (t.requires_grad and torch.is_grad_enabled())):
            return False
    return True
