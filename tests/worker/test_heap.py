"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from worker.heap import give_back


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc only")
def test_freed_pieces_between_used_ones_are_given_back() -> None:
    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c.free.restype, c.free.argtypes = None, [ctypes.c_void_p]
    size, count = 100 << 10, 1000  # below the size from which malloc maps pages of their own
    pieces = [c.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[::2]:
        c.free(piece)
    before = resident_kib()
    give_back()
    given = before - resident_kib()
    for piece in pieces[1::2]:
        c.free(piece)
    assert given > 0.8 * (count // 2) * size / 1024
