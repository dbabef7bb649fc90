"""Names of pools of workers: one rule for workers that are in one, schedulers that rule them, and clients that ask."""

from __future__ import annotations

import re

DEFAULT_POOL = "default"
"""Of workers that name none."""

POOL_NAME = r"[A-Za-z0-9._-]{1,64}"
_NAME = re.compile(POOL_NAME)


def is_pool_name(name: str) -> str | None:
    """A check of an option: what is wrong with the name of a pool, or None. Empty stands for none."""
    fits = not name or _NAME.fullmatch(name)
    return None if fits else "is no pool's name: it has 1 to 64 of A-Z a-z 0-9 . _ -"
