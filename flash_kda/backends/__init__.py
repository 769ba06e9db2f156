"""One module a backend; each has ``run`` with the arguments of the operator and knows nothing of the others."""
