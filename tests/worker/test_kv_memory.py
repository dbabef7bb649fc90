"""A KV pool that the machine's memory cannot hold is refused at start, in one line."""

from __future__ import annotations

import pytest
import torch

from shared.lifecycle import StartupError
from worker import kv_cache
from worker.kv_cache import budget_bytes

CPU = torch.device("cpu")


def test_more_than_is_available_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_available_bytes", lambda: 3 << 30)
    assert budget_bytes(CPU, 3 << 30, 0.9) == 3 << 30
    with pytest.raises(StartupError, match=r"^kv-cache-memory is 4\.0 GiB; 3\.0 GiB are available$"):
        budget_bytes(CPU, 4 << 30, 0.9)


def test_the_machine_says_what_is_available() -> None:
    with pytest.raises(StartupError, match="kv-cache-memory"):
        budget_bytes(CPU, 1 << 60, 0.9)


def test_where_nobody_says_what_is_asked_for_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_available_bytes", lambda: None)
    assert budget_bytes(CPU, 1 << 60, 0.9) == 1 << 60
