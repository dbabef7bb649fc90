"""Whether a source may give its pages away: asked before they are read, and again after. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.messages import BadMessage, unpack_tokens
from worker.ledger import Standing
from worker.transfer.pages import Form


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What a source is asked for: pages as the batch left them that has run step ``after`` in ``epoch``."""

    by: str  # how the bytes are to travel: the scheme of the address
    incarnation: int  # of the source
    epoch: int
    after: int
    form: Form
    pages: bytes  # packed uint32, see shared.messages.pack_tokens


class Gate:
    """``standing`` is asked anew each time; from any thread."""

    def __init__(self, incarnation: int, form: Form, num_blocks: int, standing: Callable[[], Standing]) -> None:
        self._incarnation = incarnation
        self._form = form
        self._num_blocks = num_blocks
        self._standing = standing

    def refusal(self, request: Request) -> str:
        """Why the pages are not (or no longer) what was asked for; empty if they are."""
        if request.incarnation != self._incarnation:
            return "the process that had them is gone"
        now = self._standing()
        if request.epoch != now.epoch:
            return f"its epoch is {now.epoch}, not {request.epoch}"
        if not now.began or request.after < now.began:
            return f"it was reset after step {request.after}"
        if request.after > now.executed:
            return f"step {request.after} has not run there yet"
        if different := self._form.difference(request.form):
            return f"its KV blocks are of another form: {different}"
        return ""

    def pages(self, request: Request) -> list[int]:
        """The pages asked for. Raises ValueError if there are none such."""
        try:
            pages = unpack_tokens(request.pages)
        except BadMessage as error:
            raise ValueError(str(error)) from None
        if not pages or not all(0 < page <= self._num_blocks for page in pages):
            raise ValueError(f"a page outside 1..{self._num_blocks}, or none")
        return pages
