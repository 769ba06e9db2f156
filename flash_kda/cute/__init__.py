"""Kernels in NVIDIA's CuTe DSL, compiled when a call first needs them.

``recurrent`` holds the kernel and imports the DSL (seconds, hundreds of megabytes); nothing here imports it
before a kernel is asked for. ``arguments`` is what a kernel is compiled for and called with, ``compiled``
compiles, remembers and launches.
"""
