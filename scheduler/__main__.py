"""``python -m scheduler``: lead a mesh, or stand by until its leader is gone, until told to stop."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from observability.logs import setup_logging
from observability.membership import joined
from scheduler.config import SchedulerConfig
from scheduler.metrics import SchedulerMetrics
from scheduler.pages import add_pages
from scheduler.recording import Recording
from scheduler.service import SchedulerService
from shared.config import parse_service
from shared.ids import new_process_id
from shared.jetstream import NoStore
from shared.lifecycle import StartupError, run
from shared.subjects import LEASE_BUCKET, Subjects

COLLECT_EVERY = (20_000, 20, 50)
"""Python's cycle collector, less often than by default: nearly nothing here is in a cycle, and walking over what runs
took half of the longest iterations of 64 workers."""


async def serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
    name = config.scheduler_id or new_process_id("scheduler")
    try:
        config.limits()
        config.scaling()
    except ValueError as error:
        raise StartupError(str(error)) from None
    try:
        recording = Recording(Path(config.record)) if config.record else None
    except OSError as error:
        raise StartupError(f"--record {config.record}: {error.strerror}") from None
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    async with joined("scheduler", name, config, registry, config.metrics_host, config.metrics_port) as member:
        store = member.bus.key(LEASE_BUCKET, Subjects(config.mesh).lease_key, config.lease_s / 2)
        service = SchedulerService(
            config, name, member.step_bus, member.bus, store, metrics, member.tracing, recording
        )  # fmt: skip
        add_pages(member.listener, service)
        gc.collect()
        gc.freeze()  # what was loaded stays: a full collection need not walk it
        gc.set_threshold(*COLLECT_EVERY)
        try:
            await service.run(stop)
        except NoStore as error:
            raise StartupError(str(error)) from None
        if recording is not None:
            await asyncio.to_thread(recording.close)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_service(SchedulerConfig, "scheduler", "headrace scheduler", argv)
    setup_logging("scheduler", config.log_level)
    return run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    sys.exit(main())
