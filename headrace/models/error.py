"""What every part of model fetching raises."""

from __future__ import annotations


class ModelError(RuntimeError):
    """A model cannot be had; the message is one line for the person who asked for it."""
