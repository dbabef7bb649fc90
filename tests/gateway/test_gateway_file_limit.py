"""Connections and the limit on open files, against a limit that is made up."""

from __future__ import annotations

import resource

import pytest

from gateway.file_limit import OTHER_FILES, allow_connections


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed", "raised_to"),
    [
        (1024, 1_000_000, 16384, 16384, 16384 + OTHER_FILES),
        (1024, 4096, 16384, 4096 - OTHER_FILES, 4096),
        (1024, resource.RLIM_INFINITY, 16384, 16384, 16384 + OTHER_FILES),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 16384, 16384, None),
        (1024, 1024, 100, 100, None),
        (64, 64, 100, 1, 64),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, allowed: int, raised_to: int | None
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    assert allow_connections(wanted) == allowed
    assert limits[-1] == ((raised_to if raised_to is not None else soft), hard)
