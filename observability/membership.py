"""What scheduler and worker processes open when they join a mesh, and close when they leave it in good order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from observability.listener import InternalListener
from observability.tracing import Tracing
from shared.bus import BusUnavailable, NatsBus
from shared.config import MeshConfig
from shared.lifecycle import StartupError
from shared.ports import listen_problem

log = logging.getLogger("headrace.membership")


@dataclass(frozen=True, slots=True)
class Membership:
    """``step_bus`` carries plans and results only: nothing else of the process can hold them up."""

    listener: InternalListener
    tracing: Tracing
    step_bus: NatsBus
    bus: NatsBus


@asynccontextmanager
async def joined(
    kind: str, name: str, config: MeshConfig, registry: CollectorRegistry, host: str, port: int
) -> AsyncIterator[Membership]:
    """``host`` and ``port`` are those of the internal listener. Raises StartupError, one line, if one can't be had.

    After a fault nothing is closed: the process ends, and its supervisor starts another.
    """
    try:
        listener = InternalListener(registry, host, port)
    except OSError as error:
        raise StartupError(listen_problem(host, port, error, "--metrics-port")) from None
    log.info("metrics on http://%s:%d/metrics", host, listener.port)
    tracing = Tracing(kind, name, config.otlp_endpoint, config.trace_sampling)
    try:
        step_bus = await NatsBus.join(config, kind, f"{name}-step")
        bus = await NatsBus.join(config, kind, name)
    except BusUnavailable as error:
        raise StartupError(str(error)) from None
    yield Membership(listener, tracing, step_bus, bus)
    await step_bus.close()
    await bus.close()
    await asyncio.to_thread(tracing.shutdown)
    listener.close()
