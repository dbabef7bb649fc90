"""How KV blocks move from worker to worker: asked of the one that wants them, and answered by it."""

from __future__ import annotations

from shared.message import Message


class Fetch(Message, frozen=True):
    """Copy KV blocks of another worker into pages of this one, off the step stream. Answered with :class:`Fetched`.

    The scheduler holds both sides' blocks until the answer has come. A source of another incarnation or epoch than the
    plan's, or one that has been reset since step ``after``, refuses.
    """

    fetch: int  # its number, never used again within an epoch
    source: str  # worker
    incarnation: int  # of the source
    addresses: list[str]  # the source's ``Capacity.transfer``
    pages: list[tuple[int, int]]  # (page there, page here)
    after: int  # the source's step that wrote the last of them


class Fetched(Message, frozen=True, tag="fetched"):
    """A :class:`Fetch` is over and writes nothing more. Told at once, and in each beat until a plan drops it."""

    epoch: int
    worker: str
    incarnation: int
    fetch: int
    reason: str = ""  # why it failed; empty: every page is here
    bytes: int = 0
    us: int = 0
    transport: str = ""  # the scheme of the address that served
