"""How a transfer can fail."""

from __future__ import annotations


class TransferFailed(Exception):
    """The transfer is over and has failed; the message says why, in one line."""


class WayUnusable(Exception):
    """This way of reaching the source does not work here; another may."""
