"""Several meshes as one: a :class:`Dispatch` for each, and a choice for each request.

Each mesh has a scheduler, workers and subjects of its own, so that more of them carry more. A request that one refuses,
or that finds nobody there, is offered to the others before its client is refused; one that was accepted stays where it
is, and goes on elsewhere only if its mesh stays away. Its tokens are the same wherever it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from gateway.dispatch import Dispatch
from gateway.errors import ApiError
from gateway.ledger import RequestRecord
from gateway.mesh_choice import Candidate, candidate, choose, content_of
from gateway.mesh_view import MeshView
from gateway.offering import Part
from shared.flight_record import AnswerTrace
from shared.messages import ModelInfo, Outcome, Submit

ONLY_HERE = frozenset(
    {
        Outcome.QUEUE_FULL, Outcome.TOO_LONG, Outcome.NEVER_FITS, Outcome.NO_WORKER, Outcome.UNKNOWN_MODEL,
        Outcome.DRAINING, Outcome.STALE_EPOCH, Outcome.DEADLINE,
    }
)  # fmt: skip
"""Refusals that another mesh need not repeat. What is invalid is so everywhere, but for a pool that is not there."""


class Router:
    """Does for several meshes what a :class:`Dispatch` does for one."""

    def __init__(self, meshes: Sequence[Dispatch]) -> None:
        self._meshes = {mesh.name: mesh for mesh in meshes}
        self._first = meshes[0]
        self.gateway_id = self._first.gateway_id
        self.mesh = MeshesView([mesh.mesh for mesh in meshes])
        for mesh in meshes:
            mesh.offers.elsewhere = self._elsewhere
            mesh.offers.has_alternative = lambda record: self._alternative(record) is not None

    async def start(self) -> None:
        for mesh in self._meshes.values():
            await mesh.start()

    # --- requests -------------------------------------------------------------------------------------------------

    def check_size(self, submit: Submit) -> None:
        """As :meth:`Dispatch.check_size`: they share one bus."""
        self._first.check_size(submit)

    def open(self, submit: Submit, part: Part) -> RequestRecord[Part]:
        return (self._best(submit) or self._awaited(submit)).open(submit, part)

    async def offer(self, record: RequestRecord[Part]) -> None:
        """Submit a request and return once a scheduler has accepted it; an ``ApiError`` says why none will."""
        part = record.owner
        refusals: list[ApiError] = []
        while True:
            name = part.mesh
            try:
                await self._meshes[name].offer(record)
            except ApiError as error:
                refusals.append(error)
                part.refused_by += (name,)
                other = self._alternative(record) if _only_here(error, record.submit) else None
                if other is None or part.flight.over:
                    raise _most_hopeful(refusals) from None
                self._meshes[name].hand_over(record, other)
            else:
                if part.mesh == name:  # else its mesh has gone away meanwhile
                    part.refused_by = ()
                    return

    def release(self, record: RequestRecord[Part]) -> None:
        self._mesh_of(record).release(record)

    def tell(self, record: RequestRecord[Part], answer: AnswerTrace) -> None:
        self._mesh_of(record).tell(record, answer)

    def records(self) -> Iterator[RequestRecord[Part]]:
        """All that are open, in any mesh."""
        for mesh in self._meshes.values():
            yield from mesh.records()

    def _mesh_of(self, record: RequestRecord[Part]) -> Dispatch:
        return self._meshes[record.owner.mesh]

    # --- the choice -----------------------------------------------------------------------------------------------

    def _best(self, submit: Submit, besides: Collection[str] = ()) -> Dispatch | None:
        """Of the meshes that could run it now."""
        now_s = time.monotonic()
        candidates: list[Candidate] = []
        for name, mesh in self._meshes.items():
            info = mesh.mesh.model(submit.model, now_s)
            if name in besides or info is None:
                continue
            if mesh.mesh.why_not_ready(submit.model, now_s, submit.adapter) is None:
                candidates.append(candidate(name, info, submit))
        best = choose(candidates, content_of(submit)) if len(candidates) > 1 else next(iter(candidates), None)
        return None if best is None else self._meshes[best.name]

    def _awaited(self, submit: Submit) -> Dispatch:
        """Where it may soon be possible to run it, while it is nowhere."""
        now_s = time.monotonic()
        for mesh in self._meshes.values():
            if mesh.mesh.lately_ready(submit.model, now_s, submit.adapter):
                return mesh
        return self._first

    def _alternative(self, record: RequestRecord[Part]) -> Dispatch | None:
        part = record.owner
        return self._best(record.submit, (part.mesh, *part.refused_by))

    def _elsewhere(self, record: RequestRecord[Part]) -> bool:
        """Give an open request to another mesh than its own; False if there is none."""
        other = self._alternative(record)
        if other is None or record.owner.flight.over:
            return False
        self._mesh_of(record).hand_over(record, other)
        return True

    # --- presence -------------------------------------------------------------------------------------------------

    async def next_beat(self, within_s: float) -> None:
        """Return at the next beat of any scheduler, or after so long."""
        waits = [asyncio.ensure_future(mesh.next_beat(within_s)) for mesh in self._meshes.values()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def hear(self, within_s: float) -> None:
        """Return once a scheduler of each mesh is heard, or after so long."""
        await asyncio.gather(*(mesh.hear(within_s) for mesh in self._meshes.values()))

    def look_for_losses(self) -> None:
        for mesh in self._meshes.values():
            mesh.look_for_losses()

    async def beat_forever(self) -> None:
        async with asyncio.TaskGroup() as group:
            for mesh in self._meshes.values():
                group.create_task(mesh.beat_forever())

    async def send_forever(self) -> None:
        async with asyncio.TaskGroup() as group:
            for mesh in self._meshes.values():
                group.create_task(mesh.send_forever())

    async def sent(self) -> None:
        for mesh in self._meshes.values():
            await mesh.sent()


class MeshesView:
    """What is known of several meshes together: a :class:`MeshView` of all of them."""

    def __init__(self, views: Iterable[MeshView]) -> None:
        self._views = list(views)

    def why_not_ready(self, name: str, now_s: float, adapter: str = "") -> str | None:
        """None if some mesh can complete now, else why not: by one that has a scheduler if there is one."""
        views = sorted(self._views, key=lambda view: not view.has_scheduler(now_s))
        reasons = [view.why_not_ready(name, now_s, adapter) for view in views]
        return None if None in reasons else reasons[0]

    def lately_ready(self, name: str, now_s: float, adapter: str = "") -> bool:
        return any(view.lately_ready(name, now_s, adapter) for view in self._views)

    def model(self, name: str, now_s: float) -> ModelInfo | None:
        """Limits that some mesh meets, and what every one of them can; no queues."""
        infos = [info for view in self._views if (info := view.model(name, now_s)) is not None and info.workers > 0]
        if not infos:
            return next((info for view in self._views if (info := view.model(name, now_s)) is not None), None)
        return ModelInfo(
            name,
            max(info.max_model_len for info in infos),
            min(info.vocab_size for info in infos),
            sum(info.workers for info in infos),
            grammars=all(info.grammars for info in infos),
            adapters=self.adapters(name, now_s),
        )

    def ready(self, name: str, now_s: float, adapter: str = "") -> list[ModelInfo]:
        return [info for view in self._views for info in view.ready(name, now_s, adapter)]

    def adapters(self, model: str, now_s: float) -> list[str]:
        return sorted({adapter for view in self._views for adapter in view.adapters(model, now_s)})

    def knows_adapter(self, model: str, adapter: str, now_s: float) -> bool:
        return any(view.knows_adapter(model, adapter, now_s) for view in self._views)

    def has_known(self, model: str) -> bool:
        return any(view.has_known(model) for view in self._views)

    def check_room(self, name: str, now_s: float, sequences: int, tokens: int, key: str) -> None:
        """The 429 that comes first in time, if the queue of every mesh that serves the model is full."""
        refusals: list[ApiError] = []
        for view in self._views:
            if view.why_not_ready(name, now_s) is not None:
                continue
            try:
                view.check_room(name, now_s, sequences, tokens, key)
            except ApiError as error:
                refusals.append(error)
            else:
                return
        if refusals:
            raise _most_hopeful(refusals)


def _only_here(error: ApiError, submit: Submit) -> bool:
    return error.outcome in ONLY_HERE or (error.outcome == Outcome.INVALID and submit.pool != "")


def _most_hopeful(refusals: Sequence[ApiError]) -> ApiError:
    """The one that says to come back soonest; the first one if none says so."""
    return min(refusals, key=lambda error: float("inf") if error.retry_after_s is None else error.retry_after_s)
