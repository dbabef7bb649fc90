"""Runs one gateway process: sockets first, then tokenizer, bus and HTTP server; and the drain at its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from gateway.access import KeyGate
from gateway.app import make_app
from gateway.config import GatewayConfig
from gateway.config_files import check_files
from gateway.direct_routes import DirectRoutes
from gateway.dispatch import Dispatch, awake_clock
from gateway.errors import UNAUTHORIZED, unavailable
from gateway.file_limit import allow_connections
from gateway.gateway import Gateway
from gateway.http_protocol import HttpLimits, http_protocol
from gateway.keys import KeysError
from gateway.metrics import GatewayMetrics
from gateway.models import Models
from gateway.router import Router
from observability.listener import InternalListener
from observability.loop_lag import watch_loop_lag
from observability.startup import start_up
from observability.tracing import Tracing
from shared.bus import Bus, BusUnavailable, NatsBus
from shared.ids import new_process_id
from shared.lifecycle import ServiceFault, StartupError, end
from shared.messages import Outcome
from shared.ports import accept_no_more, listen_problem
from shared.ports import listen as bound_socket
from shared.supervision import RETIRE, SERVES, STARTED, inherited_socket, tell

log = logging.getLogger("headrace.gateway")

LAST_WORDS_S = 1  # how long uvicorn waits for connections once every answer has ended, before it cuts them
POLL_S = 0.05
HEAR_S = 1.5  # a scheduler at rest beats each second


class Server(uvicorn.Server):
    """uvicorn without signal handlers: the process's life cycle is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; :class:`StartupError` naming the port if it is taken or may not be used."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise StartupError(listen_problem(host, port, error, "--port")) from None


def listen_metrics(metrics: GatewayMetrics, host: str, port: int) -> InternalListener:
    try:
        return InternalListener(metrics.registry, host, port)
    except OSError as error:
        raise StartupError(listen_problem(host, port, error, "--metrics-port")) from None


async def run_gateway(
    gateway: Gateway, listener: socket.socket, stop: asyncio.Event, drain_grace_s: float,
    retire: asyncio.Event | None = None, on_retired: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Serve until ``stop`` is set, then drain: no new requests, open ones finish within the grace.

    With ``retire`` another gateway serves at the same socket from now on: this one accepts no connection any more, and
    ends once those that it has are gone. ``on_retired`` is called then, on a thread.
    """
    config = gateway.config
    retire = retire or asyncio.Event()
    protocol = http_protocol(HttpLimits(allow_connections(config.max_connections), config.slow_reader_timeout_s))
    server = Server(
        uvicorn.Config(
            KeyGate(
                DirectRoutes(make_app(gateway)),
                gateway.keys,
                gateway.metrics.requests.labels("any", UNAUTHORIZED).inc,
            ),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
            ssl_certfile=config.tls_cert or None,
            ssl_keyfile=config.tls_key or None,
        )
    )
    await gateway.dispatch.start()
    async with asyncio.TaskGroup() as group:
        background = [
            group.create_task(gateway.dispatch.beat_forever()),
            group.create_task(gateway.dispatch.send_forever()),
            group.create_task(gateway.keys.watch_forever()),
            group.create_task(watch_loop_lag(gateway.metrics.loop_lag_seconds.observe)),
            group.create_task(_tell_when_ready(server, gateway)),
        ]
        # Until then nobody is known to serve anything: it would refuse what the gateway that it replaces still answers.
        # Connections wait in the socket's queue meanwhile.
        await gateway.dispatch.hear(HEAR_S)
        http = group.create_task(server.serve(sockets=[listener]))
        stopping, retiring = group.create_task(stop.wait()), group.create_task(retire.wait())
        await asyncio.wait([http, stopping, retiring], return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            raise ServiceFault("the HTTP server has ended")
        if not stop.is_set():
            protocol.retiring = True
            await asyncio.to_thread(on_retired)
            await _retired(server, listener, stop, config.retire_grace_s)
        for waiting in (stopping, retiring):
            waiting.cancel()
        await drain(gateway, drain_grace_s if stop.is_set() else 0.0)
        if gateway.in_flight:  # by clients that do not take their last words
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await _idle(gateway, LAST_WORDS_S)
        server.should_exit = True
        await http
        await gateway.dispatch.sent()
        await end(background)


async def _tell_when_ready(server: Server, gateway: Gateway) -> None:
    await _until(lambda: server.started)
    tell(STARTED)
    await _until(lambda: gateway.why_not_ready() is None)
    tell(SERVES)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  of what tells nobody when it changes
        await asyncio.sleep(POLL_S)


async def _retired(server: Server, listener: socket.socket, stop: asyncio.Event, grace_s: float) -> None:
    """Accept nothing more, and return once every connection is gone; on ``stop``, or after the grace, before."""
    await accept_no_more([listener.fileno()])
    for listening in server.servers:
        listening.close()
    connections = server.server_state.connections
    log.info("replaced: the connections still open are served to their end: %d", len(connections))
    for connection in list(connections):
        connection.retire()  # type: ignore[union-attr]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await _until(lambda: not connections or stop.is_set())


async def drain(gateway: Gateway, grace_s: float) -> None:
    """Refuse new requests and wait for the open ones; after the grace, end them with an error."""
    gateway.draining = True
    log.info("draining: requests in flight: %d; %g s of grace", gateway.in_flight, grace_s)
    if await _idle(gateway, grace_s):
        return
    log.warning("the grace is over: %d requests end with an error", gateway.in_flight)
    for record in list(gateway.dispatch.records()):
        record.owner.flight.fail(unavailable("the gateway is shutting down", Outcome.DRAINING.value))
    await _idle(gateway, LAST_WORDS_S)


async def _idle(gateway: Gateway, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await gateway.idle.wait()
    except TimeoutError:
        return False
    return True


def make_dispatch(
    config: GatewayConfig, bus: Bus, gateway_id: str, metrics: GatewayMetrics, losses: Callable[[], int],
    tracing: Tracing,
) -> Dispatch | Router:  # fmt: skip
    """Into the mesh of ``config``, or over its meshes if it has several. ``losses``: as :class:`Dispatch` wants it."""
    clock = awake_clock()
    meshes = [
        Dispatch(config.in_mesh(name), bus, gateway_id, metrics, losses, tracing, clock) for name in config.meshes
    ]
    return meshes[0] if len(meshes) == 1 else Router(meshes)


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """The gateway process, from its configuration to its end."""
    start_up.ended("imports")
    check_files(config)  # before anything is loaded
    listener = inherited_socket(metrics=False) or listen(config.host, config.port)
    retire = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(RETIRE, retire.set)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        metrics = GatewayMetrics(*(source.name for source in config.sources))
        metrics_listener = listen_metrics(metrics, config.metrics_host, config.metrics_port)
        stack.callback(metrics_listener.close)
        models = await asyncio.to_thread(Models.load, config, metrics)
        stack.callback(models.close)
        start_up.ended("tokenizer")
        gateway_id = new_process_id("gateway")
        tracing = Tracing("gateway", gateway_id, config.otlp_endpoint, config.trace_sampling)
        try:
            bus = await NatsBus.join(config, "gateway", gateway_id)
        except BusUnavailable as error:
            raise StartupError(str(error)) from None
        try:
            dispatch = make_dispatch(
                config, bus, gateway_id, metrics, lambda: bus.reconnects + bus.slow_consumer_drops, tracing
            )
            bus.on_reconnect = dispatch.look_for_losses
            try:
                gateway = Gateway(config, dispatch, models, tracing, metrics)
            except KeysError as error:  # the file has changed meanwhile
                raise StartupError(f"--api-keys {error}") from None
            port = listener.getsockname()[1]
            log.info(
                "%s serves %s on %s://%s:%d, metrics on http://%s:%d/metrics",
                gateway_id, ", ".join(models.names), "https" if config.tls_cert else "http", config.host, port,
                config.metrics_host, metrics_listener.port,
            )  # fmt: skip
            gc.collect()
            gc.freeze()  # what was loaded stays: a full collection that walks it stops every stream for 0.1 s and more
            start_up.ended("bus")
            log.info("%s", start_up.line())
            await run_gateway(gateway, listener, stop, config.drain_grace_s, retire, metrics_listener.close)
        finally:
            await _close(bus, tracing)


async def _close(bus: Bus, tracing: Tracing) -> None:
    await bus.close()
    await asyncio.to_thread(tracing.shutdown)
