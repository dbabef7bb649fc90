"""Pools of simulated workers, from ``chat=12,long=4``."""

from __future__ import annotations

from shared.config import ConfigError
from shared.pool_name import DEFAULT_POOL, is_pool_name


def pools_of(workers: int, text: str) -> list[str]:
    """The pool of each worker; those that ``text`` does not name are in the default one. ``/`` stands for the comma
    where a comma means something else.

    Raises ConfigError, also if it names more workers than there are.
    """
    pools: list[str] = []
    for part in text.replace("/", ",").split(",") if text else []:
        name, equals, count = (piece.strip() for piece in part.partition("="))
        if not equals or not name or is_pool_name(name) or not count.isdecimal() or name in pools:
            raise ConfigError(f"--worker-pools {text}: {part!r} is no NAME=COUNT, each pool once")
        pools += [name] * min(int(count), workers + 1)
    if len(pools) > workers:
        raise ConfigError(f"--worker-pools {text}: names more than {workers} workers")
    return pools + [DEFAULT_POOL] * (workers - len(pools))
