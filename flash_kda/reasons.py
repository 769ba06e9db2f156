"""Why a backend does not run a call: the stable codes, and one reason. Standard library only."""

from __future__ import annotations

from typing import NamedTuple

# capability
NO_DEVICE = "no_device"
NO_KERNEL = "no_kernel"
# availability (those of a library that is not loaded: _library.py)
NOT_IN_WHEEL = "not_in_wheel"
NO_PACKAGE = "no_package"
DSL_ARCH = "dsl_arch"
ENV_ARCH = "env_arch"
NATIVE_ONLY = "native_only"
PROBE_ERROR = "probe_error"
IMPORT_ERROR = "import_error"
# suitability
UNSUITABLE = "unsuitable"
CAPTURE = "capture"  # raised by the call itself: whether a stream is captured is no fact of a device
# none of the three
UNKNOWN_BACKEND = "unknown_backend"

_NOT_AVAILABILITY = frozenset({NO_DEVICE, NO_KERNEL, UNSUITABLE, CAPTURE, UNKNOWN_BACKEND})


def is_availability(code: str) -> bool:
    """Whether a code says that what was written for the device is not delivered by this install."""
    return code not in _NOT_AVAILABILITY


class Reason(NamedTuple):
    """A stable ``code``, a text that ends with what to do, and the exception it was made of, if any."""

    code: str
    text: str
    cause: Exception | None = None
