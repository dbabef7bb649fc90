"""Giving memory that was freed back to the system.

A model's own weights, freed piece by piece while they are packed, lie between what lives on, and glibc gives such pages
back only when it is asked. Where there is another C library nothing is done.
"""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Let go of the pages that hold nothing but freed memory. Takes some milliseconds."""
    if _trim is not None:
        _trim(0)
