"""Which requests may have ended a worker, and how they are tried: in halves, each in plans of its own.

What had rows in the plans of a worker that crashed is suspect. When its gateway resumes it, it waits for its group's
turn, and the group runs with nobody beside it until each member has got ``PROOF`` tokens further. If the worker ends
again it was one of the group, which is halved, down to a single request: one that ends its worker ``STRIKES`` times in
a row while it is the only suspect is to be failed. So one culprit among n costs ceil(log2 n) + 2 crashes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scheduler.core.sequence import Sequence as Choice

PROOF = 2
"""Tokens that a suspect must get beyond what it was resumed with: one of its prompt, one of a decode."""

STRIKES = 2


@dataclass(slots=True)
class Suspicion:
    group: int  # from 1
    attempt: int  # in which it was there; later ones are tried
    since_ns: int
    strikes: int = 0  # workers that it has ended while it was the only suspect


class Suspects:
    def __init__(self) -> None:
        self._by_request: dict[str, Suspicion] = {}
        self._groups = 0  # made so far
        self.on_trial: set[int] = set()  # groups that run on some worker

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def group_of(self, choice: Choice) -> int:
        """The group with which the choice has to be tried; 0 if it may run beside anybody."""
        suspicion = self._by_request.get(choice.submit.request_id)
        if suspicion is None or choice.submit.attempt <= suspicion.attempt:
            return 0
        return suspicion.group if choice.generated - choice.began < PROOF else 0

    def members(self, group: int) -> list[tuple[str, int]]:
        """(request, attempt in which it was accused)."""
        return [(request, one.attempt) for request, one in self._by_request.items() if one.group == group]

    def accuse(self, requests: Sequence[tuple[str, int]], now: int) -> str:
        """These (request, attempt), in order of seniority, ran when a worker ended. Returns whom that convicts."""
        alone = len(requests) == 1
        half = (len(requests) + 1) // 2
        for part in (requests[:half], requests[half:]):
            self._groups += 1
            for request, attempt in part:
                known = self._by_request.pop(request, None)
                strikes = (known.strikes if known is not None else 0) + alone
                if strikes >= STRIKES:
                    return request
                self._by_request[request] = Suspicion(self._groups, attempt, now, strikes)
        return ""

    def clear(self, request: str) -> None:
        self._by_request.pop(request, None)

    def expire(self, horizon: int, live: Collection[str]) -> None:
        """Forget those accused before ``horizon`` that have not come back."""
        for request in [r for r, one in self._by_request.items() if one.since_ns < horizon and r not in live]:
            del self._by_request[request]
