"""The implementations that are compared, behind one signature.

Each runs in a process of its own: this package and tokenspeed-flashkda's share the import name `flash_kda`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _inputs import Inputs

Run = Callable[[Inputs], None]


def _flash_kda(require_under: Path | None, **extra: str | int) -> Run:
    module = importlib.import_module("flash_kda")
    where = Path(str(module.__file__)).resolve()
    if require_under is not None and require_under.resolve() not in where.parents:
        raise RuntimeError(f"flash_kda was imported from {where}, expected a module under {require_under}")

    def run(x: Inputs) -> None:
        module.fwd(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            x.scale,
            x.out,
            x.A_log,
            x.dt_bias,
            x.lower_bound,
            initial_state=x.initial_state,
            final_state=x.final_state,
            cu_seqlens=x.cu_seqlens,
            **extra,
        )

    return run


def _fla(safe_gate: bool) -> Run:
    chunk_kda: Any = importlib.import_module("fla.ops.kda").chunk_kda

    def run(x: Inputs) -> None:
        # FLA allocates its outputs; keeping a reference instead of copying leaves the copy out of the time.
        x.out, x.final_state = chunk_kda(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            scale=x.scale,
            initial_state=x.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=safe_gate,
            lower_bound=x.lower_bound,
            state_v_first=True,
            cu_seqlens=x.cu_seqlens,
            A_log=x.A_log,
            dt_bias=x.dt_bias.reshape(-1),
        )

    return run


def load(name: str, device: str, require_under: Path | None = None, **extra: int) -> Run:
    """The implementation's call. `require_under`: the folder a `flash_kda` must be imported from; `extra`:
    more arguments of ours."""
    if name == "ours":
        # Named: a library that did not load is an error here, not a time of the slow reference backend.
        return _flash_kda(require_under, backend="cuda" if device == "cuda" else "auto", **extra)
    if name == "flashkda":
        return _flash_kda(require_under)
    if name == "fla":
        return _fla(safe_gate=True)
    if name == "fla_no_safe_gate":
        return _fla(safe_gate=False)
    raise ValueError(f"no implementation named {name!r}; known: ours, flashkda, fla, fla_no_safe_gate")


def compile_only(share: int, shares: int) -> None:
    """Make Triton's autotuner run each of its configurations once, untimed, and only every `shares`-th.

    Several such processes fill Triton's on-disk kernel cache side by side, so that the process that is timed
    tunes for real but compiles nothing: FLA's ~100 configurations per shape take over a minute one by one.
    """
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs

    def pruned(self: Any, kwargs: Any) -> Any:
        configs = prune(self, kwargs)
        return configs[share::shares] or configs[:1]

    def run_once(kernel_call: Callable[[], None], quantiles: Any = None, **_: Any) -> list[float]:
        kernel_call()
        torch.cuda.synchronize()
        return [0.0, 0.0, 0.0]

    autotuner.prune_configs = pruned
    autotuner.do_bench = property(lambda self: run_once)
