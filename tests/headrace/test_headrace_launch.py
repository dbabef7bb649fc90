"""How ``headrace up`` configures its children: flags that give back the same configuration, secrets by environment."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.launch import (
    GATEWAY_STAGE,
    MESH_STAGE,
    NATS_STAGE,
    Mesh,
    child_specs,
    free_port,
    with_api_key,
    with_ports,
)
from headrace.services import SERVICES
from headrace.settings import read_settings
from headrace.sockets import Sockets
from headrace.supervisor import ChildSpec
from headrace.up_checks import check
from shared.config import ConfigError, Parser, add_flags, resolve
from shared.supervision import METRICS

MESH = Mesh("/models/m", "m", "nats://127.0.0.1:5555", "t0ken")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


def launched(argv: Sequence[str], environ: dict[str, str] | None = None) -> dict[str, ChildSpec]:
    environ = environ or {}
    return {spec.name: spec for spec in child_specs(read_settings(argv, environ), MESH, environ)}


def as_read_by(service: str, spec: ChildSpec) -> Any:
    """The configuration that the child's own loader arrives at."""
    parser = Parser(prog=service)
    declaration = SERVICES[service].declaration()
    add_flags(parser, declaration)
    flags = spec.command[spec.command.index("-m") + 2 :]
    assert spec.env is not None
    return resolve(declaration, service, vars(parser.parse_args(flags)), environ=spec.env)


def test_one_process_for_each_service() -> None:
    specs = launched([])
    assert list(specs) == ["scheduler", "gateway", "worker"]
    assert (specs["gateway"].stage, specs["scheduler"].stage, specs["worker"].stage) == (
        GATEWAY_STAGE, MESH_STAGE, MESH_STAGE,
    )  # fmt: skip
    assert GATEWAY_STAGE < MESH_STAGE < NATS_STAGE


def test_a_child_arrives_at_the_configuration_that_up_resolved() -> None:
    argv = ["--no-enable-chunked-prefill", "--simulate", "--simulate-eos=-1", "--max-model-len", "99", "--port", "81"]
    specs = launched([*argv, "--drain-grace-s", "3"], {"HEADRACE_TRACE_SAMPLING": "0.5"})
    scheduler, worker, gateway = (as_read_by(name, specs[name]) for name in ("scheduler", "worker", "gateway"))
    assert not scheduler.enable_chunked_prefill
    assert (worker.simulate, worker.simulate_eos, worker.max_model_len) == (True, -1, 99)
    assert (worker.model, worker.served_model_name) == ("/models/m", "m")
    assert (gateway.model, gateway.served_model_name, gateway.port) == ("/models/m", "m", 81)
    for config in (scheduler, worker, gateway):
        assert (config.nats, config.nats_token, config.trace_sampling) == (MESH.nats_url, MESH.nats_token, 0.5)
    assert specs["gateway"].grace_s > 3


def test_secrets_are_on_no_command_line() -> None:
    for spec in launched(["--nats-token", "s3cret"]).values():
        assert not any("t0ken" in word or "s3cret" in word for word in spec.command)
        assert spec.env is not None
        assert spec.env["HEADRACE_NATS_TOKEN"] == "t0ken"


def test_children_inherit_no_other_setting() -> None:
    spec = launched([], {"HEADRACE_LOG_LEVEL": "debug", "HOME": "/h"})["worker"]
    assert spec.env == {"HOME": "/h", "HEADRACE_NATS_TOKEN": "t0ken"}
    assert as_read_by("worker", spec).log_level == "debug"


def test_children_inherit_what_is_no_option() -> None:
    given = {"HEADRACE_CACHE": "/c", "HEADRACE_CPU_ISA": "generic"}
    assert launched([], given)["worker"].env == given | {"HEADRACE_NATS_TOKEN": "t0ken"}


def test_several_workers_share_the_cores_and_no_port(monkeypatch: pytest.MonkeyPatch, sockets: Sockets) -> None:
    monkeypatch.setattr("headrace.launch._cores", lambda: 8)
    settings = with_ports(read_settings(["--workers", "3", "--port", "0", "--worker-id", "w"], {}), sockets)
    specs = {spec.name: spec for spec in child_specs(settings, MESH, {}, sockets)}
    workers = [as_read_by("worker", specs[f"worker-{index}"]) for index in range(3)]
    assert [worker.worker_id for worker in workers] == ["w-0", "w-1", "w-2"]
    assert [worker.threads for worker in workers] == [2, 2, 2]
    assert len({0, *(worker.metrics_port for worker in workers)}) == 4
    inherited = [specs[f"worker-{index}"].sockets[METRICS].getsockname()[1] for index in range(3)]
    assert [worker.metrics_port for worker in workers] == inherited


def test_several_schedulers_have_names_ports_and_recordings_of_their_own(sockets: Sockets) -> None:
    mesh = dataclasses.replace(MESH, scheduler_id="s1")
    port = free_port("127.0.0.1")
    argv = ["--schedulers", "3", "--port", "0", "--record", "trace"]
    settings = read_settings(argv, {})
    scheduler: Any = settings.services["scheduler"]
    services = settings.services | {"scheduler": dataclasses.replace(scheduler, metrics_port=port)}
    settings = with_ports(dataclasses.replace(settings, services=services), sockets)
    told: Any = settings.services["scheduler"]
    assert told.metrics_port == port
    specs = {spec.name: spec for spec in child_specs(settings, mesh, {}, sockets, {"scheduler-1"})}
    assert list(specs) == ["scheduler-0", "scheduler-1", "scheduler-2", "gateway", "worker"]
    made = [as_read_by("scheduler", specs[f"scheduler-{index}"]) for index in range(3)]
    assert [one.scheduler_id for one in made] == ["s1-0", "s1-1-b", "s1-2"]
    assert [one.record for one in made] == ["trace-0", "trace-1", "trace-2"]
    assert made[0].metrics_port == port and len({0, *(one.metrics_port for one in made)}) == 4
    inherited = [specs[f"scheduler-{index}"].sockets[METRICS].getsockname()[1] for index in range(3)]
    assert [one.metrics_port for one in made] == inherited
    named = launched([*argv, "--scheduler-id", "mine"])
    assert as_read_by("scheduler", named["scheduler-2"]).scheduler_id == "mine-2"


def test_workers_of_one_machine_fetch_from_one_another_and_others_as_they_are_told() -> None:
    for argv, host in (
        (["--workers", "2"], "127.0.0.1"),
        ([], "127.0.0.1"),
        (["--transfer-host", "off"], "off"),
        (["--nats", "nats://elsewhere:4222"], ""),
    ):
        workers = [as_read_by("worker", spec) for name, spec in launched(argv).items() if name.startswith("worker")]
        assert {worker.transfer_host for worker in workers} == {host}
        assert {worker.transfer_port for worker in workers} == {0}


def test_a_worker_that_replaces_another_listens_for_fetches_beside_it(sockets: Sockets) -> None:
    argv = ["--port", "0", "--metrics-port", "0", "--transfer-port", "7000"]
    settings = with_ports(read_settings(argv, {}), sockets)
    for others, port in ((set(), 7000), ({"worker"}, 0)):
        specs = {spec.name: spec for spec in child_specs(settings, MESH, {}, sockets, others)}
        assert as_read_by("worker", specs["worker"]).transfer_port == port


def test_one_port_for_fetches_is_not_for_several_workers() -> None:
    check(read_settings(["--transfer-port", "7000"], {}))
    with pytest.raises(ConfigError, match=r"--transfer-port 7000: .* 2 workers"):
        check(read_settings(["--workers", "2", "--transfer-port", "7000"], {}))


def test_a_simulated_worker_takes_every_id_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 49152}')
    mesh = Mesh(str(tmp_path), "m", "nats://127.0.0.1:5555", "")
    for argv, expected in ((["--simulate"], 49152), (["--simulate", "--simulate-vocab-size", "99"], 99)):
        specs = {spec.name: spec for spec in child_specs(read_settings(argv, {}), mesh, {})}
        assert as_read_by("worker", specs["worker"]).simulate_vocab_size == expected


def ports(argv: Sequence[str], sockets: Sockets) -> Any:
    return with_ports(read_settings(argv, {}), sockets).services


def test_port_0_is_made_a_real_one_that_is_held(sockets: Sockets) -> None:
    services = ports(["--port", "0", "--metrics-port", "0"], sockets)
    numbers = [services["gateway"].port, *(services[name].metrics_port for name in services)]
    assert len({0, *numbers}) == 5
    for number in numbers:
        socket.create_connection(("127.0.0.1", number), timeout=5).close()  # it waits for whoever will accept


def test_a_taken_port_is_named_with_its_flag(sockets: Sockets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken.*--port"):
            ports(["--port", str(port)], sockets)
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken.*--metrics-port"):
            ports(["--port", "0", "--metrics-port", str(port)], sockets)


def test_one_metrics_port_for_all_goes_to_the_gateway(sockets: Sockets) -> None:
    port = free_port("127.0.0.1")
    services = ports(["--port", "0", "--metrics-port", str(port)], sockets)
    assert services["gateway"].metrics_port == port
    assert len({0, *(services[name].metrics_port for name in services)}) == 4


def test_a_taken_default_metrics_port_gives_way(monkeypatch: pytest.MonkeyPatch, sockets: Sockets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for service in SERVICES.values():
            monkeypatch.setattr(service.declaration(), "metrics_port", port)
        settings = read_settings(["--port", "0"], {})
        services = {name: dataclasses.replace(config, metrics_port=port) for name, config in settings.services.items()}  # type: ignore[call-arg]
        given: Any = with_ports(dataclasses.replace(settings, services=services), sockets).services
    assert len({0, port, *(given[name].metrics_port for name in given)}) == 5  # up says where the dashboard is


def test_an_address_that_is_not_ours_is_named(sockets: Sockets) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on port \d+ of 203\.0\.113\.1"):
        ports(["--port", "8000", "--host", "203.0.113.1"], sockets)


def test_two_that_follow_one_another_have_different_names_on_the_bus_and_the_same_sockets(sockets: Sockets) -> None:
    mesh = dataclasses.replace(MESH, scheduler_id="s1")
    settings = with_ports(read_settings(["--port", "0", "--metrics-port", "0"], {}), sockets)
    first = {spec.name: spec for spec in child_specs(settings, mesh, {}, sockets)}
    second = {spec.name: spec for spec in child_specs(settings, mesh, {}, sockets, {"scheduler", "worker", "gateway"})}
    names = [
        (as_read_by("scheduler", specs["scheduler"]).scheduler_id, as_read_by("worker", specs["worker"]).worker_id)
        for specs in (first, second)
    ]
    assert names == [("s1", "worker-0"), ("s1-b", "worker-0-b")]
    for name, spec in first.items():
        assert spec.sockets == second[name].sockets
    assert sorted(first["gateway"].sockets) == ["http", "metrics"]


def test_each_child_gets_its_own_password_of_the_embedded_server() -> None:
    mesh = dataclasses.replace(
        MESH, nats_token="", nats_passwords={"gateway": "g-pw", "scheduler": "s-pw", "worker": "w-pw"}
    )
    settings = read_settings(["--nats-user", "somebody"], {"HEADRACE_NATS_PASSWORD": "elsewhere"})
    for spec in child_specs(settings, mesh, {}):
        config = as_read_by(spec.name, spec)
        assert (config.nats_user, config.nats_password, config.nats_token) == ("", f"{spec.name[0]}-pw", "")
        assert spec.env == {"HEADRACE_NATS_PASSWORD": f"{spec.name[0]}-pw"}
        assert not any("-pw" in word for word in spec.command)


def test_passwords_for_somebody_elses_server_are_handed_on() -> None:
    environ = {"HEADRACE_NATS": "tls://nats.example:4222", "HEADRACE_NATS_PASSWORD": "mine"}
    settings = read_settings(["--nats-user", "me", "--nats-ca", "/ca.pem"], environ)
    for spec in child_specs(settings, dataclasses.replace(MESH, nats_token=""), {}):
        config = as_read_by(spec.name, spec)
        assert (config.nats_user, config.nats_password, config.nats_ca) == ("me", "mine", "/ca.pem")


def test_up_makes_a_key_for_itself_where_a_keys_file_is_in_force() -> None:
    def key_of(argv: list[str]) -> str:
        gateway: Any = with_api_key(read_settings(argv, {})).services["gateway"]
        return str(gateway.api_key)

    made = key_of(["--api-keys", "keys.toml"])
    assert len(made) >= 32 and made != key_of(["--api-keys", "keys.toml"])
    assert key_of(["--api-keys", "keys.toml", "--api-key", "mine"]) == "mine"
    assert key_of([]) == ""
