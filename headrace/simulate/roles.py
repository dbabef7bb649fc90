"""Roles of simulated workers, from ``prefill=4,decode=12``."""

from __future__ import annotations

from shared.capacity import Role
from shared.config import ConfigError


def parsed_roles(text: str) -> dict[Role, int]:
    """How many workers of each role, in the order given. ``/`` stands for the comma where a comma means something else.

    Raises ConfigError.
    """
    counts: dict[Role, int] = {}
    for part in text.replace("/", ",").split(",") if text else []:
        name, equals, count = part.partition("=")
        try:
            role, number = Role(name.strip()), int(count)
        except ValueError:
            role, number = Role.MIXED, 0
        if not equals or number < 1 or role in counts:
            raise ConfigError(f"--roles {text}: {part!r} is no ROLE=COUNT, each of {', '.join(Role)} once")
        counts[role] = number
    return counts


def workers_of(workers: int | None, text: str, in_pools: int = 0) -> int:
    """How many there are: as said, or as many as ``text`` gives a role to or as pools name (``in_pools``), whichever is
    more. Raises ConfigError if ``text`` names more.
    """
    named = sum(parsed_roles(text).values())
    if workers is not None and named > workers:
        raise ConfigError(f"--roles {text}: names {named} workers, of {workers}")
    return max(1, named, in_pools) if workers is None else workers


def roles_of(workers: int, text: str) -> list[Role]:
    """The role of each worker; those that ``text`` does not name are mixed ones."""
    roles = [role for role, count in parsed_roles(text).items() for _ in range(count)]
    return roles + [Role.MIXED] * (workers - len(roles))
