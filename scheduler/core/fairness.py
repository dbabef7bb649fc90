"""Service received per tenant: virtual token counters (VTC; Sheng et al., OSDI 2024).

The tenant with the least service, by weight, is next. A tenant that had nothing waiting starts level with the least
counter of those that do (of the last one that did, if none does), so that idleness saves up no claim, nor does a
trickle that never waits. Integers, in micro-tokens, so that replays agree.
"""

from __future__ import annotations

INPUT_WEIGHT = 1  # w_p: an input token
OUTPUT_WEIGHT = 2  # w_q: an output token
_SCALE = 1_000_000


class VirtualTokenCounters:
    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._weights: dict[str, int] = {}  # percent
        self._active: dict[str, int] = {}  # live sequences per tenant
        self._waiting: dict[str, int] = {}  # of those, in a queue
        self._floor = 0  # the level when it was last noted; it never falls
        self._last_waited = ""  # the last tenant of which nothing waited any more

    def arrive(self, tenant: str, sequences: int, weight_percent: int = 100) -> None:
        """``sequences`` of a tenant become live. The last weight given holds."""
        self._weights[tenant] = max(1, weight_percent)
        self._counters.setdefault(tenant, 0)
        self._active[tenant] = self._active.get(tenant, 0) + sequences

    def fork(self, tenant: str) -> None:
        """A live sequence of the tenant has split in two."""
        self._active[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One live sequence of the tenant ended."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            if not self._active:
                self._counters.clear()
                self._weights.clear()
                self._floor = 0
                return
            # Only an active tenant's counter is compared with; a passive one's matters until the level passes it.
            self._floor = self._level()
            for other in [t for t, c in self._counters.items() if t not in self._active and c <= self._floor]:
                del self._counters[other]
                del self._weights[other]

    def starts_level(self, tenant: str) -> bool:
        """True if the tenant, once it waits, is lifted to the others, whose counters must be up to date then."""
        return tenant not in self._waiting and len(self._active) > (tenant in self._active)

    def queued(self, tenant: str) -> None:
        """One sequence of the tenant waits in a queue. If none did before, the tenant starts level."""
        if tenant not in self._waiting:
            self._counters[tenant] = max(self.counter(tenant), self._level())
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def unqueued(self, tenant: str) -> None:
        """One that waited was admitted, or left."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            if not self._waiting:
                self._last_waited = tenant
                self._floor = self._level()

    def _level(self) -> int:
        """The least counter of those that wait; while none does, that of the last one that did."""
        return min(map(self.counter, self._waiting), default=max(self._floor, self.counter(self._last_waited)))

    def lead(self, tenant: str, other: str) -> float:
        """Service that ``tenant`` has had more than ``other``, by weight, in tokens of a tenant of normal weight."""
        return (self.counter(tenant) - self.counter(other)) / _SCALE

    @property
    def contended(self) -> bool:
        """True if more than one tenant is active: else counters need not be kept (an arrival starts level)."""
        return len(self._active) > 1

    def charge_input(self, tenant: str, tokens: int) -> None:
        """At first admission only: a preemption is the system's decision and charges nobody again."""
        self._charge(tenant, tokens * INPUT_WEIGHT)

    def charge_output(self, tenant: str, tokens: int) -> None:
        self._charge(tenant, tokens * OUTPUT_WEIGHT)

    def _charge(self, tenant: str, cost: int) -> None:
        if tenant in self._active:
            self._counters[tenant] += cost * _SCALE * 100 // self._weights[tenant]

    def counter(self, tenant: str) -> int:
        return self._counters.get(tenant, 0)

    def input_cost(self, tenant: str, tokens: int) -> int:
        """What admitting so many input tokens would add to the counter."""
        return tokens * INPUT_WEIGHT * _SCALE * 100 // self._weights.get(tenant, 100)
