"""Compiles CUDA text with an NVRTC that is loaded from a folder.

By ctypes: six calls of a C library.  The package cuda-bindings would be a compiled one for each Python, and
looks for an NVRTC of its own choice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path


class Refused(Exception):
    """NVRTC did not compile the text; the message is its log."""


class Nvrtc:
    """One libnvrtc: `home` is the folder ``nvidia`` with the packages of a toolkit below it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        folder = home / "cuda_nvrtc" / "lib"
        for name in ("libnvrtc-builtins.so.*.*", "libnvrtc.so.*"):  # the second looks for the first by name
            (path,) = (path for path in folder.glob(name) if ".alt." not in path.name)
            self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    def version(self) -> tuple[int, int]:
        """Its CUDA version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def includes(self) -> list[str]:
        """The folders with the toolkit's headers."""
        return [f"-I{folder}" for folder in sorted(self.home.glob("*/include"))]

    def cubin(self, text: str, name: str, options: Sequence[str]) -> bytes:
        """Compile `text`, which messages call `name`; Refused with the log when that fails."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = self._library.nvrtcCompileProgram(program, len(options), words)
        log = self._bytes("nvrtcGetProgramLog", program).decode(errors="replace").rstrip("\0\n")
        if code != 0:
            raise Refused(f"code {code}\n{log}")
        return self._bytes("nvrtcGetCUBIN", program)

    def _bytes(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(function, program, data)
        return data.raw

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        assert code == 0, f"{function}: expected 0, got {code}"
