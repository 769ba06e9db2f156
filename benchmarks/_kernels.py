"""Which kernels one call really runs, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from _words import kernel_name
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def on_device(events: Iterable[Any]) -> list[Any]:
    """The kernels, copies and fills among a profiler's events, by their start."""
    found = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(found, key=lambda event: event.time_range.start)


def merge(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Name, count and total device time of each kernel, copy and fill, in the order of their first launch."""
    found: dict[str, dict[str, Any]] = {}
    for event in on_device(events):
        name = kernel_name(event.name)
        entry = found.setdefault(name, {"name": name, "count": 0, "us": 0.0})
        entry["count"] += 1
        entry["us"] += event.time_range.elapsed_us()
    return [{**entry, "us": round(entry["us"], 3)} for entry in found.values()]


def kernels_of(call: Callable[[], None]) -> list[dict[str, Any]]:
    """What one call runs on the GPU; empty when the profiler sees nothing there."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return merge(profiler.events() or [])
