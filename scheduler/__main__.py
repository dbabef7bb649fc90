"""``python -m scheduler``: take the lead of a mesh and schedule until told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from observability.listener import InternalListener
from observability.logs import setup_logging
from observability.tracing import Tracing
from scheduler.config import SchedulerConfig
from scheduler.metrics import SchedulerMetrics
from scheduler.pages import add_pages
from scheduler.recording import TraceWriter
from scheduler.service import SchedulerService
from shared.bus import BusUnavailable, NatsBus
from shared.config import parse_service
from shared.ids import new_process_id
from shared.lifecycle import StartupError, run

log = logging.getLogger("headrace.scheduler")


async def serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
    name = config.scheduler_id or new_process_id("scheduler")
    try:
        config.limits()
    except ValueError as error:
        raise StartupError(str(error)) from None
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    try:
        listener = InternalListener(registry, config.metrics_host, config.metrics_port)
    except OSError as error:
        raise StartupError(f"metrics port {config.metrics_port}: {error.strerror}") from None
    try:
        trace = TraceWriter(Path(config.record)) if config.record else None
    except OSError as error:
        raise StartupError(f"--record {config.record}: {error.strerror}") from None
    log.info("metrics on http://%s:%d/metrics", config.metrics_host, listener.port)
    tracing = Tracing("scheduler", name, config.otlp_endpoint, config.trace_sampling)
    try:
        step_bus = await NatsBus.join(config, "scheduler", f"{name}-step")
        bus = await NatsBus.join(config, "scheduler", name)
    except BusUnavailable as error:
        raise StartupError(str(error)) from None
    service = SchedulerService(config, name, step_bus, bus, metrics, tracing, trace)
    add_pages(listener, service)
    await service.run(stop)
    if trace is not None:
        await asyncio.to_thread(trace.close)
    await step_bus.close()
    await bus.close()
    await asyncio.to_thread(tracing.shutdown)
    listener.close()


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_service(SchedulerConfig, "scheduler", "headrace scheduler", argv)
    setup_logging("scheduler", config.log_level)
    return run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    sys.exit(main())
