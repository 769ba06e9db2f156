"""Builds ``flash_kda/_C.abi3.so``: flags, a ninja file, the ``build_ext`` command, the build record.

Part of ``setup.py``, in pieces that can be read and tested: standard library and setuptools only, shipped in
the sdist with the rest of ``ci``.
"""
