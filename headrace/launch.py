"""From settings to child processes: their ports, and the command line and environment of each.

A child gets its whole configuration by flags (they show in ``ps`` what runs) and its secrets by environment (which
only its owner can read). It inherits no other ``HEADRACE_*`` variable and no file: what ``up`` resolved is what holds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headrace.gpus import shares
from headrace.models.cache import CACHE_ENV
from headrace.models.default import DEFAULT_MODEL_ID, DEFAULT_VOCAB_SIZE
from headrace.settings import UpSettings
from headrace.sockets import CLIENTS, PortTaken, Sockets
from headrace.supervisor import ChildSpec
from kernels.cpu.library import ISA_ENV
from shared.config import ENV_PREFIX, MeshConfig, options_of
from shared.supervision import METRICS

GATEWAY_STAGE, MESH_STAGE, NATS_STAGE = 0, 1, 2
"""Stopping order: no new work and open streams finished first, the bus last."""

MESH_GRACE_S = 10.0
"""For scheduler and workers, which have nothing left to do once the gateway has drained."""

LOOPBACK = "127.0.0.1"

OTHER_NAME = "-b"
"""Behind the name on the bus of every second process of a row: two that follow one another run side by side."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """What ``up`` decided itself."""

    model_folder: str
    served_model_name: str
    nats_url: str
    nats_token: str
    nats_passwords: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the embedded server, by service
    # A lasting name, numbered where there are several: one that is started again is known for the one that was lost.
    scheduler_id: str = ""


def with_ports(settings: UpSettings, sockets: Sockets) -> UpSettings:
    """``settings`` with every port bound in ``sockets``, and port 0 made a real one.

    Raises ConfigError naming a port that was asked for and is taken. A *default* metrics port that is taken gives way
    to a free one, so that a second mesh needs no more than another ``--port``. Of several schedulers the first has
    the port that was asked for.
    """
    services = dict(settings.services)
    gateway: Any = services["gateway"]
    port = sockets.listen("gateway", CLIENTS, gateway.host, gateway.port, "--port")
    taken = {port}
    services["gateway"] = dataclasses.replace(gateway, port=port)
    for name in services:
        config: Any = services[name]
        children = children_of(name, settings)
        for child in children:
            asked = config.metrics_port
            if asked in taken or (name == "worker" and settings.workers > 1) or child != children[0]:
                asked = 0
            flag = "--metrics-port" if asked else "--metrics-host"
            try:
                port = sockets.listen(child, METRICS, config.metrics_host, asked, flag)
            except PortTaken:
                if asked != type(config).metrics_port:
                    raise
                port = sockets.listen(child, METRICS, config.metrics_host, 0, "--metrics-host")
            taken.add(port)
        services[name] = dataclasses.replace(config, metrics_port=sockets.metrics_port(children[0]))
    return dataclasses.replace(settings, services=services)


def children_of(service: str, settings: UpSettings) -> list[str]:
    """The names of a service's processes."""
    count = {"worker": settings.workers, "scheduler": settings.schedulers}.get(service, 1)
    return [service] if count == 1 else [f"{service}-{index}" for index in range(count)]


def with_api_key(settings: UpSettings) -> UpSettings:
    """``settings`` with an API key for ``up`` itself, where a keys file is in force: it tries a first completion."""
    gateway: Any = settings.services["gateway"]
    if not gateway.api_keys or gateway.api_key:
        return settings
    gateway = dataclasses.replace(gateway, api_key=secrets.token_urlsafe(32))
    return dataclasses.replace(settings, services=settings.services | {"gateway": gateway})


def child_specs(
    settings: UpSettings, mesh: Mesh, environ: Mapping[str, str] | None = None, sockets: Sockets | None = None,
    others: Collection[str] = (),
) -> list[ChildSpec]:  # fmt: skip
    """One spec per service process. Those in ``others`` have their other name on the bus. Raises ConfigError if there
    are too few GPUs."""
    environ = os.environ if environ is None else environ
    sockets = sockets or Sockets()

    def spec(
        name: str, service: str, config: MeshConfig, stage: int, grace_s: float, more: Mapping[str, str] | None = None
    ) -> ChildSpec:
        if port := sockets.metrics_port(name):
            config = dataclasses.replace(config, metrics_port=port)  # type: ignore[call-arg]  # every service has it
        # -P: a folder of the same name where `up` is run must not be taken for the service.
        command = [sys.executable, "-P", "-m", service, *service_flags(config)]
        given = {**service_environ(config, environ), **(more or {})}
        return ChildSpec(name, command, stage, grace_s, given, sockets.of(name))

    def decided(service: str) -> dict[str, Any]:
        found: dict[str, Any] = {"nats": mesh.nats_url, "nats_token": mesh.nats_token}
        if mesh.nats_passwords:
            found |= {"nats_user": "", "nats_password": mesh.nats_passwords[service], "nats_ca": ""}
        return found

    model: dict[str, Any] = {"model": mesh.model_folder, "served_model_name": mesh.served_model_name}
    gateway: Any = dataclasses.replace(settings.services["gateway"], **decided("gateway"), **model)
    specs = []
    for index, name in enumerate(children_of("scheduler", settings)):
        scheduler: Any = dataclasses.replace(settings.services["scheduler"], **decided("scheduler"))
        number = f"-{index}" if settings.schedulers > 1 else ""
        if scheduler_id := scheduler.scheduler_id or mesh.scheduler_id:
            scheduler_id += number + (OTHER_NAME if name in others else "")
            scheduler = dataclasses.replace(scheduler, scheduler_id=scheduler_id)
        if scheduler.record:  # one that stands by writes a file too, which must not be another's
            scheduler = dataclasses.replace(scheduler, record=scheduler.record + number)
        specs.append(spec(name, "scheduler", scheduler, MESH_STAGE, MESH_GRACE_S))
    specs.append(spec("gateway", "gateway", gateway, GATEWAY_STAGE, gateway.drain_grace_s + MESH_GRACE_S))
    gpus = shares(settings.services["worker"], settings.workers, environ)
    for index, name in enumerate(children_of("worker", settings)):
        worker: Any = dataclasses.replace(settings.services["worker"], **decided("worker"), **model)
        if worker.simulate:
            worker = dataclasses.replace(worker, simulate_vocab_size=_vocab_size(worker))
        # A lasting name: a worker that is started again is known at once for the one that was lost.
        worker_id = worker.worker_id or "worker"
        if settings.workers > 1 or not worker.worker_id:
            worker_id = f"{worker_id}-{index}"
        worker = dataclasses.replace(worker, worker_id=worker_id + (OTHER_NAME if name in others else ""))
        if settings.own_nats and not worker.transfer_host:  # one goes on with what another has to leave
            worker = dataclasses.replace(worker, transfer_host=LOOPBACK)
        if name in others:  # the one that it replaces, or that replaces it, has the port
            worker = dataclasses.replace(worker, transfer_port=0)
        if settings.workers > 1 and worker.threads == 0:  # else all would fight over the cores
            worker = dataclasses.replace(worker, threads=max(1, _cores() // settings.workers))
        specs.append(spec(name, "worker", worker, MESH_STAGE, MESH_GRACE_S, gpus[index]))
    return specs


def service_flags(config: MeshConfig) -> list[str]:
    """The flags that make a service's loader arrive at ``config``, secrets left out."""
    flags: list[str] = []
    for option in options_of(type(config)):
        value = getattr(config, option.name)
        if option.secret or value == option.default or value is None:
            continue
        if isinstance(value, bool):
            flags.append(option.flag if value else f"--no-{option.key}")
        else:
            flags.append(f"{option.flag}={value}")  # one word: a value may begin with a dash
    return flags


def service_environ(config: MeshConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service: ours without ``HEADRACE_*`` that are options, and its secrets."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(ENV_PREFIX) or name in (CACHE_ENV, ISA_ENV)
    }
    secret = {
        option.env: str(getattr(config, option.name))
        for option in options_of(type(config))
        if option.secret and getattr(config, option.name) != option.default
    }
    return kept | secret


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """False if somebody listens on ``port``. Raises ConfigError if nobody could."""
    sockets = Sockets()
    try:
        sockets.listen("", "", host, port, "")
    except PortTaken:
        return False
    finally:
        sockets.close()
    return True


def simulated_flags(worker: Any) -> list[str]:
    """Flags by which a simulated worker on its own is met by gateways of the same ``--model``; nothing is fetched."""
    flags = ["--simulate-vocab-size", str(_vocab_size(worker))]
    if worker.model == "default" and not worker.served_model_name:
        flags += ["--served-model-name", DEFAULT_MODEL_ID]
    return flags


def _vocab_size(worker: Any) -> int:
    """The gateway tokenises with the real model's tokenizer: a simulated worker must take all its ids."""
    if worker.simulate_vocab_size != type(worker).simulate_vocab_size:
        return int(worker.simulate_vocab_size)
    if worker.model == "default":
        return DEFAULT_VOCAB_SIZE
    try:
        config = json.loads((Path(worker.model).expanduser() / "config.json").read_text("utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return int(worker.simulate_vocab_size)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
