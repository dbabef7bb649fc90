"""The gateways of a mesh, as its leading scheduler hears them: what is theirs, and who is gone."""

from __future__ import annotations

import logging
import time

from scheduler.context import LeadContext
from shared.messages import GatewayBeat, RequestEvent, encode

log = logging.getLogger("headrace.scheduler")

ORPHAN_AGE_NS = 3_000_000_000  # a request that its gateway's beats still lack after so long is an orphan
UNKNOWN_AGE_NS = 900_000_000  # one that a gateway's beats still list after so long, and nobody here knows, is lost


class Gateways:
    def __init__(self, context: LeadContext) -> None:
        self._context = context
        self._means = context.means
        self._seen_s: dict[str, float] = {}
        # Per gateway: requests that it waits for and nobody here knows -> since when (monotonic ns).
        self._unknown: dict[str, dict[tuple[str, int], int]] = {}

    def submitted(self, gateway: str) -> None:
        """A request came from there: its silence counts from now on."""
        self._seen_s.setdefault(gateway, time.monotonic())

    def meet(self, beat: GatewayBeat) -> None:
        """Reconcile both ways: end what the gateway no longer waits for, and tell it what nobody here will ever end.

        The second also holds for what this scheduler ended itself, if the end was lost, or the gateway declared gone.
        What is just being submitted (attempt 0) may be on its way here.
        """
        context, now = self._context, time.monotonic_ns()
        self._seen_s[beat.gateway] = time.monotonic()
        if not beat.partial:
            live = [request_id for request_id, _ in beat.live]
            context.carry_out(context.core.reconcile(beat.gateway, live, now - ORPHAN_AGE_NS, now))
        since = self._unknown.get(beat.gateway, {})
        unknown = {key: since.get(key, now) for key in beat.live if key[1] > 0 and not context.core.knows(*key)}
        self._unknown[beat.gateway] = unknown
        for (request_id, attempt), first in unknown.items():
            if now - first >= UNKNOWN_AGE_NS:
                reason = "the scheduler does not know it any more"
                event = RequestEvent(context.core.epoch, "lost", request_id, attempt, -1, reason)
                self._means.post(self._means.subjects.event(beat.gateway), encode(event))

    def excuse(self, since_s: float) -> None:
        """Count everybody's silence from then on."""
        self._seen_s = {gateway: max(seen_s, since_s) for gateway, seen_s in self._seen_s.items()}

    def tick(self, now_s: float) -> None:
        context = self._context
        for gateway, seen_s in list(self._seen_s.items()):
            if now_s - seen_s > self._means.config.gateway_timeout_s:
                log.warning("gateway %s is gone; its requests are cancelled", gateway)
                del self._seen_s[gateway]
                self._unknown.pop(gateway, None)
                now = time.monotonic_ns()
                context.carry_out(context.core.reconcile(gateway, [], now, now))
