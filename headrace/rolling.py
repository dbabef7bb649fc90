"""A rolling restart: every process of a running mesh, one after another, while it serves.

A replacement runs beside the process that it replaces until it has said that it is up; only then is the old one told
to leave: a gateway to serve its connections to their end, a scheduler to hand over its lease, a worker its sequences.
NATS, and workers without memory for two of them, are stopped first; requests wait meanwhile.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

from headrace.control import KINDS, Wish
from headrace.launch import MESH_GRACE_S, Mesh, child_specs, children_of
from headrace.nats_server import NatsServer, NatsServerError
from headrace.readiness import NotServing
from headrace.settings import UpSettings
from headrace.sockets import Sockets
from headrace.supervisor import ChildSpec, ReplacementFailed, Supervisor
from shared.supervision import LEADS, RETIRE, SERVES, STANDS_BY

COMES_UP_S = 1800.0
"""A model may take long to load. Whoever waits may give up before."""

TAKES_OVER_S = 30.0
WELL_AGAIN_S = 120.0
NATS_GRACE_S = 5.0


class Rolling:
    """Of one running mesh. ``serving`` returns once a completion has succeeded."""

    def __init__(
        self, settings: UpSettings, mesh: Mesh, sockets: Sockets, server: NatsServer | None, supervisor: Supervisor,
        tasks: asyncio.TaskGroup, serving: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._mesh = mesh
        self._sockets = sockets
        self._server = server
        self._supervisor = supervisor
        self._tasks = tasks
        self._serving = serving
        self._others: set[str] = set()  # children that run under their other name on the bus

    async def restart(self, wish: Wish) -> bool:
        """True once all that is wished for has been restarted; else ``wish.say`` has heard why not."""
        loop = asyncio.get_running_loop()
        for kind, name in self._processes(wish):
            if wish.given_up.is_set():
                return False
            began = loop.time()
            wish.say(f"{name}: restarting")
            try:
                how = await self._one(kind, name, wish)
                async with asyncio.timeout(WELL_AGAIN_S):
                    await self._serving()
            except (ReplacementFailed, NatsServerError) as error:
                wish.say(f"{name} could not be restarted: {error}")
                return False
            except (NotServing, TimeoutError) as error:
                wish.say(f"the mesh does not serve after the restart of {name}: {str(error) or 'no answer'}")
                return False
            wish.say(f"{name}: {how} in {loop.time() - began:.1f} s")
        return True

    def _processes(self, wish: Wish) -> Iterator[tuple[str, str]]:
        """(kind, name), one after the other. Who leads is restarted behind those that stand by, so that the lease
        changes hands once: asked when it is their turn."""
        for kind in KINDS:
            if kind not in wish.kinds:
                continue
            if kind == "nats" and self._server is None:
                wish.say("nats: not restarted; it was not started by headrace up")
                continue
            names = children_of(kind, self._settings)
            if kind == "scheduler":
                names.sort(key=lambda name: self._supervisor.status(name) == LEADS)
            for name in names:
                yield kind, name

    async def _one(self, kind: str, name: str, wish: Wish) -> str:
        if kind == "nats":
            return await self._nats()
        if kind == "gateway":
            return await self._gateway(wish)
        if kind == "scheduler":
            return await self._scheduler(name, wish)
        return await self._worker(name, wish)

    async def _nats(self) -> str:
        assert self._server is not None
        await self._supervisor.restart("nats", NATS_GRACE_S)
        # A crash is the supervisor's to mend: the server has its time.
        await asyncio.to_thread(self._server.wait_ready, lambda: True)
        return "restarted"

    async def _scheduler(self, name: str, wish: Wish) -> str:
        retire = await self._replacement(name, (STANDS_BY, LEADS), wish)
        await retire(signal.SIGTERM, MESH_GRACE_S)
        await self._supervisor.until_some(children_of("scheduler", self._settings), (LEADS,), TAKES_OVER_S)
        return "replaced"

    async def _worker(self, name: str, wish: Wish) -> str:
        worker: Any = self._settings.services["worker"]
        grace_s = worker.drain_grace_s + MESH_GRACE_S
        if wish.surge:
            retire = await self._replacement(name, (SERVES,), wish)
            await retire(signal.SIGTERM, grace_s)
            return "replaced"
        await self._supervisor.restart(name, grace_s)
        await self._supervisor.until(name, (SERVES,), COMES_UP_S)
        return "restarted"

    async def _gateway(self, wish: Wish) -> str:
        gateway: Any = self._settings.services["gateway"]
        retire = await self._replacement("gateway", (SERVES,), wish)
        grace_s = gateway.retire_grace_s + MESH_GRACE_S
        self._tasks.create_task(_whole(retire(RETIRE, grace_s)), name="retire gateway")
        return "replaced; the old one serves its connections to their end,"

    async def _replacement(
        self, name: str, told: Collection[str], wish: Wish
    ) -> Callable[[int, float], Awaitable[None]]:
        others = self._others ^ {name}
        spec = self._spec(name, others)
        retire = await self._supervisor.replace(spec, told, lambda: not wish.given_up.is_set(), COMES_UP_S)
        self._others = others
        return retire

    def _spec(self, name: str, others: Collection[str]) -> ChildSpec:
        specs = child_specs(self._settings, self._mesh, sockets=self._sockets, others=others)
        return next(spec for spec in specs if spec.name == name)


async def _whole(work: Awaitable[None]) -> None:
    await work
