"""Server-sent events with ids, each of which tells how many events of every choice came up to it.

The events of a choice are a function of its tokens alone, in whatever groups they come and however choices interleave.
So a client's last id says which events of each choice it has, and exactly these are left out.
"""

from __future__ import annotations

from gateway.errors import ApiError
from gateway.flight import Flight
from gateway.idempotency import Place, beyond_the_end
from gateway.writers import Progress, StreamWriter

_END = b"\n\n"  # of an event, and nowhere in one
_COMMENT = b":\n"  # no event: nothing is dispatched


class NumberedWriter:
    """Writes what ``writer`` does, one step of a choice at a time, from ``place`` on."""

    def __init__(self, writer: StreamWriter, flight: Flight, place: Place) -> None:
        self.stream_media_type = writer.stream_media_type
        self._writer = writer
        self._flight = flight
        self._head = b"id: %b-%d-" % (place.digest.encode(), place.created_s)
        self._seen = place.seen
        self._written = [0] * len(place.seen)
        self._counts = [b"%d" % count for count in place.seen]  # as the next id has them

    def opening(self) -> bytes:
        """The writer's opening has one event for each choice, or none."""
        frames = _frames(self._writer.opening())
        return b"".join(self._numbered(place, frame) for place, frame in enumerate(frames))

    def progress(self, progress: Progress) -> bytes:
        """Where all of it was seen, a comment in its place, so that nobody takes the stream for dead."""
        frames: list[bytes] = []
        for choice, _ in progress:
            assert choice.steps is not None
            while (text := choice.steps.show()) is not None:
                written = _frames(self._writer.progress([(choice, text)]))
                frames += [self._numbered(choice.index, frame) for frame in written]
            if choice.finish_reason is not None and self._written[choice.index] < self._seen[choice.index]:
                self._flight.error = beyond_the_end()  # even if nothing more is to come: there is no whole answer
        return b"".join(frames) or (_COMMENT if frames else b"")

    def closing(self) -> bytes:
        return b"".join(self._numbered(-1, frame) for frame in _frames(self._writer.closing()))

    def error(self, error: ApiError) -> bytes:
        """Without an id: a client that comes back goes on behind the last good event."""
        return self._writer.error(error)

    def _numbered(self, place: int, frame: bytes) -> bytes:
        """``frame`` with its id; nothing if the client has seen it."""
        count = self._written[place] = self._written[place] + 1
        if count <= self._seen[place]:
            return b""
        self._counts[place] = b"%d" % count
        return self._head + b".".join(self._counts) + b"\n" + frame


def _frames(written: bytes) -> list[bytes]:
    return [frame + _END for frame in written.split(_END)[:-1]]
