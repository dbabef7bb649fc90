from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(family, **config)``: the folder of a tiny model, made once a session."""

    made: dict[str, Path] = {}

    def make(family: str, **config: Any) -> Path:
        key = f"{family} {config}"
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family), family, **config)
        return made[key]

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Where threads of so small a model would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
