"""Time that counts: a process that stood still (stopped, starved, its machine suspended) has waited for nobody."""

from __future__ import annotations


class AwakeClock:
    """Seconds since its first reading, of which no two readings lie more than ``most_s`` apart.

    It is read at least that often while the process runs; a longer gap tells that it did not.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._awake_s = 0.0
        self._read_s: float | None = None

    def read(self, now_s: float) -> float:
        """``now_s``: monotonic seconds. One that is before the last reading changes nothing."""
        if self._read_s is None:
            self._read_s = now_s
        elif now_s > self._read_s:
            self._awake_s += min(now_s - self._read_s, self._most_s)
            self._read_s = now_s
        return self._awake_s
