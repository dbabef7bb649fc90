"""What one API key may use: requests and tokens per minute, requests at once. Pure: the time comes in as an argument.

The limits hold for one gateway process. Token buckets hold a minute's worth, so that a key may spend a quiet minute's
allowance at once; a request that needs more tokens than a minute brings is let in by a full bucket, which it overdraws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import rate_limited


class Bounds(Protocol):
    """What a key allows; 0 is no bound."""

    @property
    def requests_per_minute(self) -> int: ...
    @property
    def tokens_per_minute(self) -> int: ...
    @property
    def max_concurrency(self) -> int: ...


@dataclass(slots=True)
class TokenBucket:
    """Holds ``per_minute`` at most and fills at that rate. ``level`` is as of ``at_s`` (monotonic seconds)."""

    per_minute: int
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        if now_s > self.at_s:
            self.level = min(float(self.per_minute), self.level + (now_s - self.at_s) * self.per_minute / 60)
            self.at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until ``amount`` may be taken; 0: now."""
        self.fill(now_s)
        return max(0.0, min(amount, self.per_minute) - self.level) * 60 / self.per_minute

    def full_in_s(self, now_s: float) -> float:
        self.fill(now_s)
        return (self.per_minute - self.level) * 60 / self.per_minute


class Allowance:
    """What is left to one key in this process."""

    def __init__(self, bounds: Bounds, now_s: float) -> None:
        self.in_flight = 0
        self._concurrency = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.adopt(bounds, now_s)

    def adopt(self, bounds: Bounds, now_s: float) -> None:
        """New bounds. What was spent under the old ones stays spent."""
        self._concurrency = bounds.max_concurrency
        self._requests = _adopted(self._requests, bounds.requests_per_minute, now_s)
        self._tokens = _adopted(self._tokens, bounds.tokens_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """One request begins; a 429 that says when to come back, and nothing is counted, if it may not."""
        if 0 < self._concurrency <= self.in_flight:
            raise rate_limited(f"{self.in_flight} requests of this key are open; it may have {self._concurrency}", 1.0)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now_s)
            if wait_s > 0:
                raise rate_limited(f"this key may make {self._requests.per_minute} requests per minute", wait_s)
            self._requests.level -= 1
        self.in_flight += 1

    def leave(self) -> None:
        """A request that had entered has ended."""
        self.in_flight -= 1

    def charge(self, tokens: int, now_s: float) -> None:
        """Take the most that a request can use, prompts and max_tokens of all choices; a 429 if that is not there."""
        if self._tokens is None:
            return
        wait_s = self._tokens.wait_s(tokens, now_s)
        if wait_s > 0:
            raise rate_limited(
                f"this key may use {self._tokens.per_minute} tokens per minute; this request can use {tokens}", wait_s
            )
        self._tokens.level -= tokens

    def refund(self, tokens: int, now_s: float) -> None:
        """Give back what a request was charged for and did not use."""
        if self._tokens is not None:
            self._tokens.fill(now_s)
            self._tokens.level = min(float(self._tokens.per_minute), self._tokens.level + tokens)

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's ``x-ratelimit-*`` of the bounds that there are."""
        found: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                full_in_s = bucket.full_in_s(now_s)
                found += [
                    (f"x-ratelimit-limit-{name}".encode(), str(bucket.per_minute).encode()),
                    (f"x-ratelimit-remaining-{name}".encode(), str(max(0, int(bucket.level))).encode()),
                    (f"x-ratelimit-reset-{name}".encode(), _duration(full_in_s).encode()),
                ]
        return found


class Allowances:
    """One allowance per key id, for as long as the process lives: a reload of the keys refills nobody's bucket."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[str, tuple[Bounds, Allowance]] = {}

    def of(self, key_id: str, bounds: Bounds) -> Allowance:
        known = self._of.get(key_id)
        if known is None:
            known = self._of[key_id] = (bounds, Allowance(bounds, self._clock()))
        elif known[0] != bounds:
            known[1].adopt(bounds, self._clock())
            self._of[key_id] = (bounds, known[1])
        return known[1]


def _adopted(bucket: TokenBucket | None, per_minute: int, now_s: float) -> TokenBucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return TokenBucket(per_minute, float(per_minute), now_s)
    bucket.fill(now_s)
    return TokenBucket(per_minute, min(bucket.level, float(per_minute)), now_s)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``250ms``, ``8.64s``, ``6m0s``."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    return f"{int(seconds) // 60}m{int(seconds) % 60}s"
