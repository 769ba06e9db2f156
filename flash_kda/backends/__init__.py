"""One module a backend; each has ``run`` with the operator's arguments and knows nothing of the others."""

from . import cuda, cute_dsl, fla, reference

__all__ = ["cuda", "cute_dsl", "fla", "reference"]
