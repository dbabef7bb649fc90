"""No orphans: a child started here is killed by the kernel when its parent dies, however the parent dies (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> Callable[[], None] | None:
    """What to give ``subprocess`` as ``preexec_fn``; None where the system has no such thing.

    The signal is tied to the *thread* that forks: start children from the main thread.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: little may be done after the fork
    parent = os.getpid()

    def preexec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return preexec
