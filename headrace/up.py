"""``headrace up``: a whole mesh on one machine, supervised, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from headrace.child_output import show
from headrace.launch import NATS_STAGE, Mesh, child_specs, with_api_key, with_ports
from headrace.models import ModelError, resolve_model
from headrace.nats_server import NatsServer, NatsServerError
from headrace.readiness import NotServing, base_url, curl_line, has_chat_template, wait_until_serving
from headrace.settings import DEFAULT_SCHEDULER, UpSettings, read_settings
from headrace.supervisor import CANNOT_START, ChildSpec, Supervisor
from headrace.up_checks import check
from shared.config import ConfigError

OK, FAULT, INTERRUPTED = 0, 1, 130


def main(argv: Sequence[str]) -> int:
    """Exit 0: asked to stop, and stopped. 1: a fault. 2: cannot start as configured. 130: stopped by force."""
    settings = read_settings(argv)
    try:
        check(settings)
        settings = with_api_key(with_ports(settings))  # before anything is fetched or started
        if settings.file is not None:
            say(f"configuration from {settings.file}")
        folder, name = resolve_model(settings.model, say)
        server = NatsServer(users=True) if settings.own_nats else None
    except (ConfigError, ModelError, NatsServerError) as error:
        say(str(error))
        return CANNOT_START
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        return asyncio.run(_run(settings, folder, settings.served_model_name or name, server))
    finally:
        if server is not None:
            server.close()


def say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)


async def _run(settings: UpSettings, folder: str, model: str, server: NatsServer | None) -> int:
    stop, forced = asyncio.Event(), False
    async with asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(tasks, show)

        def on_signal() -> None:
            nonlocal forced
            if stop.is_set():
                forced = True
                supervisor.kill()
            stop.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, on_signal)

        code = OK
        try:
            up = _bring_up(settings, folder, model, server, supervisor)
            if await _unless(up, stop, supervisor.failed):
                await _unless(_forever(), stop, supervisor.failed)
        except (NotServing, NatsServerError) as error:
            say(str(error))
            code = FAULT
        if supervisor.failure is not None:
            reason = supervisor.failure.reason.removeprefix("headrace: ")
            say(f"{supervisor.failure.name} cannot start: {reason}")
            code = CANNOT_START if supervisor.failure.code == CANNOT_START else FAULT
        elif code == OK:
            say("stopping: open requests are finished first; Ctrl-C again stops at once")
        await supervisor.stop()
    return INTERRUPTED if forced else code


async def _bring_up(
    settings: UpSettings, folder: str, model: str, server: NatsServer | None, supervisor: Supervisor
) -> None:
    gateway: Any = settings.services["gateway"]
    if server is not None:
        supervisor.start(ChildSpec("nats", server.command, NATS_STAGE, grace_s=5.0))
        await asyncio.to_thread(server.wait_ready, lambda: not supervisor.failed.is_set())
        mesh = Mesh(folder, model, server.url, server.token, server.passwords)
    else:
        mesh = Mesh(folder, model, gateway.nats, gateway.nats_token)
    for spec in child_specs(settings, mesh):
        supervisor.start(spec)
    url = base_url(gateway.host, gateway.port, bool(gateway.tls_cert))
    say(f"starting {model} on {settings.workers} worker{'s' if settings.workers > 1 else ''}")
    await wait_until_serving(url, model, say, gateway.api_key, gateway.tls_cert)
    supervisor.settled()
    print(f"\n{model} is served at {url}\n", flush=True)
    line = curl_line(url, model, has_chat_template(Path(folder)), bool(gateway.api_key), gateway.tls_cert)
    print(f"  {line}\n", flush=True)
    scheduler: Any = settings.services["scheduler"]
    print("\n".join(look_inside(base_url(scheduler.metrics_host, scheduler.metrics_port))), flush=True)
    print("Ctrl-C stops everything.", flush=True)


def look_inside(scheduler: str) -> list[str]:
    """Where the dashboard is, and how to ask why; ``scheduler`` is the URL of its internal listener."""
    where = "" if scheduler == DEFAULT_SCHEDULER else f" --scheduler {scheduler}"
    return [f"Dashboard: {scheduler}/dashboard", f"Why a request took its time: headrace explain ID{where}"]


async def _unless(work: Coroutine[Any, Any, None], *events: asyncio.Event) -> bool:
    """Run ``work`` to its end, or give it up once an event is set. True if it ended; its exceptions are raised."""
    task = asyncio.ensure_future(work)
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        for future in (task, *waits):
            future.cancel()
        await asyncio.gather(task, *waits, return_exceptions=True)


async def _forever() -> None:
    await asyncio.Event().wait()
