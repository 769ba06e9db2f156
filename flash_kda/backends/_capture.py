"""What a backend that reads on the host says to a CUDA graph, before torch breaks off the capture."""

from __future__ import annotations

import torch

from ..dispatch import Refusal, Unavailable
from ..reasons import CAPTURE


def refuse_capture(backend: str, device: torch.device, reads: str) -> None:
    """Raises Unavailable while the current stream is being captured.

    Args:
        reads: what the backend reads on the host, in words.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    text = (
        f"it reads {reads} on the host, which a CUDA graph cannot hold; capture a call that backend cuda or "
        "cute_dsl runs (print(flash_kda.explain()) says why they do not), or leave this one out of the graph"
    )
    capability = torch.cuda.get_device_capability(device)
    raise Unavailable(backend, str(device), (Refusal(backend, CAPTURE, text),), capability)
