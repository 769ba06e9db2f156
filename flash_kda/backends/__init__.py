"""One module a backend; each has ``run`` with the operator's arguments and knows nothing of the others."""
