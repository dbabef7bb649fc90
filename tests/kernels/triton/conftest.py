from __future__ import annotations

from collections.abc import Iterator

import interpreted  # noqa: F401  makes the interpreter compute as GPUs do
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def numbers_without_comment() -> Iterator[None]:
    """A GPU says nothing of an overflow; numpy warns, and a warning is an error here."""
    with np.errstate(all="ignore"):
        yield
