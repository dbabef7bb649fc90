"""Pools of simulated workers, from ``chat=12,long=4``."""

from __future__ import annotations

from shared.config import ConfigError
from shared.pool_name import DEFAULT_POOL, is_pool_name


def parsed_pools(text: str) -> dict[str, int]:
    """How many workers each pool has, in the order given. ``/`` may stand for a comma that means something else there.

    Raises ConfigError.
    """
    counts: dict[str, int] = {}
    for part in text.replace("/", ",").split(",") if text else []:
        name, equals, count = (piece.strip() for piece in part.partition("="))
        if not equals or not name or is_pool_name(name) or not count.isdecimal() or name in counts:
            raise ConfigError(f"--worker-pools {text}: {part!r} is no NAME=COUNT, each pool once")
        counts[name] = int(count)
    return counts


def pools_of(workers: int, text: str) -> list[str]:
    """The pool of each worker; those that ``text`` does not name are in the default one.

    Raises ConfigError, also if it names more workers than there are.
    """
    counts = parsed_pools(text)
    named = sum(counts.values())
    if named > workers:
        raise ConfigError(f"--worker-pools {text}: names {named} workers, of {workers}")
    return [pool for pool, count in counts.items() for _ in range(count)] + [DEFAULT_POOL] * (workers - named)
