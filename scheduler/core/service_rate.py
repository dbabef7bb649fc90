"""How fast a queue is served, measured while somebody waits: an idle queue says nothing of what the workers can do."""

from __future__ import annotations

WINDOW_S = 10.0
"""What lies so far back counts for half."""


class ServiceRate:
    """A mean whose past decays. Looked at some times a second, by whoever has the clock."""

    def __init__(self) -> None:
        self._left = 0
        self._count = 0.0  # sequences, decayed
        self._time_s = 0.0  # in which they left, decayed
        self._seen_ns = 0
        self._busy = False

    @property
    def per_s(self) -> float:
        """Sequences per second; 0 as long as nobody had to wait."""
        return self._count / self._time_s if self._time_s else 0.0

    def observe(self, left: int, waiting: bool, now: int) -> None:
        """``left`` sequences have left the queue in all; ``waiting``: somebody waits at ``now`` (ns)."""
        elapsed_s = (now - self._seen_ns) / 1e9
        if elapsed_s <= 0:
            return
        if self._busy and waiting:  # else the queue ran empty meanwhile, or began to fill
            kept = 0.5 ** (elapsed_s / WINDOW_S)
            self._count = self._count * kept + left - self._left
            self._time_s = self._time_s * kept + elapsed_s
        self._left, self._seen_ns, self._busy = left, now, waiting
