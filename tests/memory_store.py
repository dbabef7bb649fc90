"""The scheduler's lease without a NATS server: one key with compare-and-swap in memory, which can be lost and away."""

from __future__ import annotations

from shared.jetstream import Conflict, StoreUnavailable


class MemoryStore:
    """Shared by all schedulers of a test. While it is ``down`` nothing is read or written."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.revision = 0
        self.down = False

    def lose(self) -> None:
        """As if JetStream's files were deleted: revisions begin anew."""
        self.value, self.revision = None, 0

    async def open(self) -> None: ...

    async def read(self) -> tuple[bytes, int] | None:
        self._reach()
        return None if self.value is None else (self.value, self.revision)

    async def write(self, value: bytes, expected: int) -> int:
        self._reach()
        if expected != (self.revision if self.value is not None else 0):
            raise Conflict(f"at {self.revision}, not {expected}")
        self.value = value
        self.revision += 1
        return self.revision

    def _reach(self) -> None:
        if self.down:
            raise StoreUnavailable("no answer")
