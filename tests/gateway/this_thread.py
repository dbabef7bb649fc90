"""Patches that hold for the calling thread only: a gateway that tests share runs on in another one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest


def patch_here(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let ``module.name`` be ``replacement`` where this thread calls it."""
    original = getattr(module, name)
    here = threading.get_ident()

    def chosen(*args: Any) -> Any:
        return (replacement if threading.get_ident() == here else original)(*args)

    monkeypatch.setattr(module, name, chosen)
