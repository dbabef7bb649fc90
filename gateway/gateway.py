"""What every request of this process shares: configuration, meshes, models, keys; who is in flight, who may come in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.access import Access
from gateway.config import GatewayConfig
from gateway.context_length import default_answer, max_model_len
from gateway.dispatch import Dispatch
from gateway.errors import ApiError, unavailable
from gateway.keys import Keyring
from gateway.mesh_view import MOST_NAMED, PATIENCE_S
from gateway.metrics import GatewayMetrics
from gateway.models import Models, ServedModel, Target
from gateway.router import Router
from observability.tracing import Tracing
from shared.messages import ModelInfo, Outcome


@dataclass(slots=True)
class Gateway:
    """``dispatch``: into its mesh, or a router over several."""

    config: GatewayConfig
    dispatch: Dispatch | Router
    models: Models
    tracing: Tracing
    metrics: GatewayMetrics
    keys: Keyring = field(init=False)  # those that the configuration names
    draining: bool = False
    in_flight: int = 0
    working: int = 0  # of those in flight, the ones whose last bytes have not been handed to their connection
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever nothing is in flight

    def __post_init__(self) -> None:
        self.keys = Keyring(self.config.api_keys, self.config.api_key)
        self.idle.set()
        self.metrics.ready.set_function(lambda: float(self.why_not_ready() is None))

    def enter(self, access: Access) -> None:
        """A request has come."""
        self.in_flight += 1
        self.working += 1
        access.counted = True
        self.idle.clear()
        self.metrics.in_flight.inc()

    def give_back(self, access: Access, used_tokens: int = 0) -> None:
        """What limits the requests at once is free again: before the last bytes are handed to the connection, since
        whoever has them may ask again at once. Idempotent.
        """
        if access.counted:
            access.counted = False
            self.working -= 1
        access.leave(used_tokens)

    def leave(self) -> None:
        """A request has ended, whichever way, and given back what it had."""
        self.in_flight -= 1
        self.metrics.in_flight.dec()
        if not self.in_flight:
            self.idle.set()

    def check_open(self) -> None:
        """A 503 while the gateway drains, a 429 with too many requests in flight. The caller has entered."""
        if self.draining:
            raise unavailable("the gateway is draining", Outcome.DRAINING.value)
        if self.working > self.config.max_concurrent_requests:
            raise ApiError(
                429, f"more than {self.config.max_concurrent_requests} requests at once (--max-concurrent-requests)",
                "rate_limit_error", code="too_many_requests", retry_after_s=1.0, outcome=Outcome.QUEUE_FULL.value,
            )  # fmt: skip

    def why_not_ready(self) -> str | None:
        """None if a completion by some model can succeed now, else why none by the first one can."""
        if self.draining:
            return "the gateway is draining"
        now_s = time.monotonic()
        reasons = [self.dispatch.mesh.why_not_ready(name, now_s) for name in self.models.names]
        return None if None in reasons else reasons[0]

    def check_some_room(self, key: str) -> None:
        """A 429 if the queue of every model is full, as last told: one of a request is not known yet."""
        full: ApiError | None = None
        for served in self.models:
            try:
                self.check_room(served.name, 1, 0, key)
            except ApiError as error:
                full = error
            else:
                return
        assert full is not None
        raise full

    def check_room(self, model: str, sequences: int, tokens: int, key: str) -> None:
        """A 429 if the model's queue, as last told, has no room for so many; nothing is left half admitted."""
        self.dispatch.mesh.check_room(model, time.monotonic(), sequences, tokens, key)

    def find(self, name: str) -> tuple[ServedModel, str]:
        """The model and the adapter (empty: none) that a request's ``model`` names; a 404 for neither, or a
        503 as long as no worker was there to tell its adapters.

        A model's own name comes first, then the adapters of the models in their order.
        """
        if not name:
            return self.models.first, ""
        served = self.models.get(name)
        if served is not None:
            return served, ""
        now_s = time.monotonic()
        for served in self.models:
            if self.dispatch.mesh.knows_adapter(served.name, name, now_s):
                return served, name
        if not any(map(self.dispatch.mesh.has_known, self.models.names)):  # a 404 would tell a client to give up
            reason = f"no worker has been ready yet to tell whether it has an adapter {name[:256]!r}"
            raise unavailable(reason, Outcome.NO_WORKER.value)
        names = list(self.listed())
        listed = ", ".join(map(repr, names[:MOST_NAMED])) + (", ..." if len(names) > MOST_NAMED else "")
        raise ApiError(
            404, f"the model {name[:256]!r} does not exist; {listed} {'is' if len(names) == 1 else 'are'} served",
            param="model", code="model_not_found", outcome=Outcome.UNKNOWN_MODEL.value,
        )  # fmt: skip

    def listed(self) -> dict[str, tuple[str, str]]:
        """What clients may name now, in order: the models, then the adapters that their workers offer, each with its
        model and its adapter (empty: none). A name stands for the first that has it.
        """
        names = {name: (name, "") for name in self.models.names}
        now_s = time.monotonic()
        for model in self.models.names:
            for adapter in self.dispatch.mesh.adapters(model, now_s):
                names.setdefault(adapter, (model, adapter))
        return names

    async def target(self, name: str) -> Target:
        """What a request's ``model`` means, as the mesh describes it now; 404 for an unknown one, 503 while it cannot
        be served. A mesh that was ready a moment ago is given a moment to be so again.
        """
        served, adapter = self.find(name)
        mesh = self.dispatch.mesh
        now_s = time.monotonic()
        until_s = now_s + PATIENCE_S
        while True:
            reason = mesh.why_not_ready(served.name, now_s, adapter)
            if self.draining:
                raise unavailable("the gateway is draining", Outcome.DRAINING.value)
            if reason is None:
                break
            if now_s >= until_s or not mesh.lately_ready(served.name, now_s, adapter):
                raise unavailable(reason, Outcome.NO_WORKER.value)
            await self.dispatch.next_beat(until_s - now_s)
            now_s = time.monotonic()
        info = self.describe(served.name, adapter, now_s)
        assert info is not None
        return Target(served, info, adapter)

    def describe(self, model: str, adapter: str, now_s: float) -> ModelInfo | None:
        """A model as the mesh describes it now, with the context of the adapter; None while no scheduler is heard."""
        mesh = self.dispatch.mesh
        info = mesh.model(model, now_s)
        if info is None or not adapter:
            return info
        longest = max((max_model_len(one, adapter) for one in mesh.ready(model, now_s, adapter)), default=0)
        return msgspec.structs.replace(info, max_model_len=longest or info.max_model_len)

    def default_answer(self, target: Target, prompts: Sequence[Sequence[int]], pool: str, most: int) -> int:
        """The limit of answers for which the client names none: ``most`` tokens, less where the request will run in
        less."""
        infos = self.dispatch.mesh.ready(target.served.name, time.monotonic(), target.adapter)
        return default_answer(infos, map(len, prompts), pool, target.adapter, most)
