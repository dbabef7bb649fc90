"""How long a process took to start, stage after stage: one line of its log, once it is ready.

The time of the first stage counts from the creation of the process, so that the interpreter and the imports are in it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartUp:
    """Stages in the order in which they ended. One a process: :data:`start_up`."""

    def __init__(self) -> None:
        self._began_s = self._last_s = _created_s()
        self._stages: list[tuple[str, float]] = []

    def ended(self, stage: str) -> None:
        """The stage that began where the one before ended is over; of the same name, times add up."""
        now = time.monotonic()
        took = now - self._last_s
        self._last_s = now
        if self._stages and self._stages[-1][0] == stage:
            took += self._stages.pop()[1]
        self._stages.append((stage, took))

    def line(self) -> str:
        """``ready after 4.10 s: imports 0.61, bus 0.10, ...``."""
        stages = ", ".join(f"{name} {took:.2f}" for name, took in self._stages)
        return f"ready after {self._last_s - self._began_s:.2f} s: {stages}"


def _created_s() -> float:
    """When this process was made, on the monotonic clock; now, where the system does not say (it does on Linux)."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        created = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22: clock ticks since boot
        return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - created)
    except (OSError, ValueError, IndexError, AttributeError):
        return now


start_up = StartUp()
