"""When silence proves nothing: while this process stood still, or had no connection, it could hear nobody. Pure."""

from __future__ import annotations

LATE_S = 0.5  # a tick that comes so much later tells that this process stood still, e.g. stopped or starved
RECONNECT_GRACE_S = 2.5  # others may find the bus again so much later than this process


class Patience:
    """Asked at each tick; ``tick_s`` lie between two."""

    def __init__(self, tick_s: float) -> None:
        self._longest_s = tick_s + LATE_S
        self._ticked_s: float | None = None
        self._reconnects = 0
        self.reconnected = False  # at the last tick: messages may have been lost either way

    def excused(self, now_s: float, connected: bool, reconnects: int) -> float | None:
        """The time from which everybody's silence counts anew, or None: it counts as it is."""
        late = self._ticked_s is not None and now_s - self._ticked_s > self._longest_s
        self.reconnected = self._ticked_s is not None and reconnects != self._reconnects
        self._ticked_s, self._reconnects = now_s, reconnects
        if self.reconnected or not connected:
            return now_s + RECONNECT_GRACE_S
        return now_s if late else None
