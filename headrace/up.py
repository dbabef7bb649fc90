"""``headrace up``: a whole mesh on one machine, supervised, until Ctrl-C; and ``headrace restart`` answered."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from headrace.child_output import show
from headrace.control import ControlServer
from headrace.launch import NATS_STAGE, Mesh, child_specs, children_of, with_api_key, with_ports
from headrace.models import ModelError, resolve_model
from headrace.nats_server import FOLDER_PREFIX, NatsServer, NatsServerError
from headrace.notices import Notices
from headrace.readiness import NotServing, base_url, curl_line, has_chat_template, wait_until_serving
from headrace.rolling import NATS_GRACE_S, Rolling
from headrace.runtime_folder import CONTROL, NOTIFY, control_socket, removed_if_stale, runtime_folder
from headrace.settings import DEFAULT_SCHEDULER, UpSettings, read_settings
from headrace.sockets import Sockets
from headrace.stale_folders import delete_stale
from headrace.supervisor import CANNOT_START, ChildSpec, Supervisor
from headrace.up_checks import check
from shared.config import ConfigError
from shared.ids import new_process_id
from shared.supervision import LEADS

OK, FAULT, INTERRUPTED = 0, 1, 130


def main(argv: Sequence[str]) -> int:
    """Exit 0: asked to stop, and stopped. 1: a fault. 2: cannot start as configured. 130: stopped by force."""
    settings = read_settings(argv)
    sockets = Sockets()
    server: NatsServer | None = None
    try:
        try:
            check(settings)
            settings = with_api_key(with_ports(settings, sockets))  # before anything is fetched or started
            if settings.file is not None:
                say(f"configuration from {settings.file}")
            delete_stale(FOLDER_PREFIX)
            folder, name = resolve_model(settings.model, say)
            if settings.own_nats:
                server = NatsServer(users=True)
        except (ConfigError, ModelError, NatsServerError) as error:
            say(str(error))
            return CANNOT_START
        except KeyboardInterrupt:
            return INTERRUPTED
        return asyncio.run(_run(settings, folder, settings.served_model_name or name, server, sockets))
    finally:
        sockets.close()
        if server is not None:
            server.close()


def say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)


async def _run(settings: UpSettings, folder: str, model: str, server: NatsServer | None, sockets: Sockets) -> int:
    stop, forced = asyncio.Event(), False
    async with asyncio.TaskGroup() as tasks:
        up = _Up(settings, folder, model, server, sockets, tasks)
        supervisor = up.supervisor

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
            if await _unless(up.bring_up(), stop, supervisor.failed):
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
        await up.stop()
    return INTERRUPTED if forced else code


class _Up:
    """The mesh from its start to its end, and whoever asks for a restart of its processes meanwhile."""

    def __init__(
        self, settings: UpSettings, folder: str, model: str, server: NatsServer | None, sockets: Sockets,
        tasks: asyncio.TaskGroup,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._folder = folder
        self._model = model
        self._server = server
        self._sockets = sockets
        self._tasks = tasks
        gateway: Any = settings.services["gateway"]
        self._gateway = gateway
        self._url = base_url(gateway.host, gateway.port, bool(gateway.tls_cert))
        self._notices: Notices | None = None
        self._control: ControlServer | None = None
        try:
            where = control_socket(runtime_folder(), gateway.port)
            if not removed_if_stale(where):
                raise FileExistsError(f"another mesh answers at {where}")
            self._notices = Notices(where.with_suffix(NOTIFY))
        except OSError as error:
            say(f"`headrace restart` will not find this mesh: {error}")
        self.supervisor = Supervisor(tasks, show, notices=self._notices)

    async def bring_up(self) -> None:
        settings, gateway, url, model, server = self._settings, self._gateway, self._url, self._model, self._server
        scheduler_id = new_process_id("scheduler")
        if server is not None:
            self.supervisor.start(ChildSpec("nats", server.command, NATS_STAGE, NATS_GRACE_S))
            await asyncio.to_thread(server.wait_ready, lambda: not self.supervisor.failed.is_set())
            mesh = Mesh(self._folder, model, server.url, server.token, server.passwords, scheduler_id)
        else:
            mesh = Mesh(self._folder, model, gateway.nats, gateway.nats_token, scheduler_id=scheduler_id)
        for spec in child_specs(settings, mesh, sockets=self._sockets):
            self.supervisor.start(spec)
        say(f"starting {model} on {settings.workers} worker{'s' if settings.workers > 1 else ''}")
        await wait_until_serving(url, model, say, gateway.api_key, gateway.tls_cert)
        self.supervisor.settled()
        await self._take_requests(mesh)
        print(f"\n{model} is served at {url}\n", flush=True)
        line = curl_line(url, model, has_chat_template(Path(self._folder)), bool(gateway.api_key), gateway.tls_cert)
        print(f"  {line}\n", flush=True)
        print("\n".join(look_inside(*self._listeners())), flush=True)
        print("Ctrl-C stops everything.", flush=True)

    def _listeners(self) -> list[str]:
        """URLs of the schedulers' internal listeners; that of the one that leads comes first."""
        scheduler: Any = self._settings.services["scheduler"]
        names = children_of("scheduler", self._settings)
        names.sort(key=lambda name: self.supervisor.status(name) != LEADS)
        return [base_url(scheduler.metrics_host, self._sockets.metrics_port(name)) for name in names]

    async def stop(self) -> None:
        if self._control is not None:
            await self._control.close()
        self._sockets.close()  # so that nobody waits at a port behind which no gateway will be any more
        await self.supervisor.stop()
        if self._control is not None:
            await self._control.closed()
        if self._notices is not None:
            self._notices.close()

    async def _take_requests(self, mesh: Mesh) -> None:
        if self._notices is None:
            return

        async def serving() -> None:
            gateway = self._gateway
            await wait_until_serving(self._url, self._model, say, gateway.api_key, gateway.tls_cert, loaded=True)

        rolling = Rolling(self._settings, mesh, self._sockets, self._server, self.supervisor, self._tasks, serving)
        control = ControlServer(self._notices.path.with_suffix(CONTROL), rolling.restart)
        try:
            await control.start()
        except OSError as error:
            say(f"`headrace restart` will not find this mesh: {error}")
            return
        self._control = control


def look_inside(leader: str, *standbys: str) -> list[str]:
    """Where the dashboard is, and how to ask why; URLs of the schedulers' internal listeners."""
    urls = [leader, *standbys]
    where = "" if urls == [DEFAULT_SCHEDULER] else f" --scheduler {','.join(urls)}"
    lines = [f"Dashboard: {leader}/dashboard"]
    if standbys:
        lines.append(f"Once another scheduler leads it is there: {' '.join(f'{url}/dashboard' for url in standbys)}")
    return [*lines, f"Why a request took its time: headrace explain ID{where}"]


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
