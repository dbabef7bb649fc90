"""When a refused client should come back: one computation, for the scheduler's refusals and for the gateways' own."""

from __future__ import annotations

import zlib

UNKNOWN_RATE_S = 4.0
"""Before any service was measured."""

MIN_RETRY_S, MAX_RETRY_S = 1, 60


def retry_after_s(waiting: int, service_rate: float, key: str) -> int:
    """Whole seconds, 1 to 60, after which to try again: the time in which what waits now is served, spread a little.

    ``waiting`` sequences are ahead and ``service_rate`` of them leave the queue per second (0: not measured yet). The
    spread, up to a quarter and at least up to one second, is a function of ``key`` (the request's id), so that
    clients that were refused together do not come back together, and the scheduler's core stays free of randomness.
    """
    ahead_s = waiting / service_rate if service_rate > 0 else UNKNOWN_RATE_S
    base_s = min(max(ahead_s, MIN_RETRY_S), MAX_RETRY_S / 1.25)
    spread = zlib.crc32(key.encode("utf-8", "surrogatepass")) / 2**32
    return round(base_s + spread * max(1.0, base_s / 4))
