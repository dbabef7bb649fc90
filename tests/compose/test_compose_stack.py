"""The compose files: what is reachable, what is secret, and that NATS accepts its configuration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.nats_server import find_nats_server
from shared.bus import BusUnavailable, NatsBus
from shared.config import MeshConfig
from shared.subjects import OBSERVER, SERVICE_KINDS, Subjects, permissions

COMPOSE = Path(__file__).parents[2] / "compose"
STACK: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]


def test_the_root_file_includes_the_stack() -> None:
    root = yaml.safe_load((COMPOSE.parent / "compose.yaml").read_text())
    assert root["include"] == ["compose/compose.yaml", "compose/monitoring.yaml"]


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"gateway": ["127.0.0.1:${HEADRACE_PORT:-8000}:8000"]}


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_may_write_outside_its_volumes_or_gain_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_no_image_runs_as_root() -> None:
    stages = (COMPOSE / "Dockerfile").read_text().split("\nFROM ")
    images = [stage for stage in stages if "\nCMD " in stage]
    assert len(images) == 3
    assert all("\nUSER headrace\n" in stage for stage in images)
    assert SERVICES["nats"]["user"] == "10001:10001"


KINDS = (*SERVICE_KINDS, OBSERVER)


def make_passwords(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    environ = {f"HEADRACE_NATS_PASSWORD_{kind.upper()}": password for kind, password in given.items()}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run([COMPOSE / "make-passwords.sh", folder], env=environ, capture_output=True, text=True)


def passwords_in(folder: Path) -> dict[str, str]:
    return {kind: (folder / kind / "nats-password").read_text().strip() for kind in KINDS}


def test_passwords_are_made_once_all_differ_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    assert make_passwords(tmp_path).returncode == 0
    passwords = passwords_in(tmp_path)
    assert len(set(passwords.values())) == 4 and min(map(len, passwords.values())) >= 32
    assert make_passwords(tmp_path).returncode == 0
    assert passwords_in(tmp_path) == passwords
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 5 and {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_given_password_wins(tmp_path: Path) -> None:
    make_passwords(tmp_path)
    assert make_passwords(tmp_path, worker="my-password").returncode == 0
    assert passwords_in(tmp_path)["worker"] == "my-password"
    assert 'WORKER_PASSWORD: "my-password"' in (tmp_path / "nats" / "passwords.conf").read_text()


def test_a_password_that_would_break_the_configuration_is_refused(tmp_path: Path) -> None:
    refused = make_passwords(tmp_path, scheduler='a" }')
    assert refused.returncode == 2
    assert "HEADRACE_NATS_PASSWORD_SCHEDULER" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_each_service_sees_its_own_secret_only() -> None:
    mounts = {
        name: {volume.split(":")[0] for volume in service.get("volumes", []) if "secret" in volume}
        for name, service in SERVICES.items()
    }
    every = {"nats-secret", *(f"{kind}-secret" for kind in KINDS)}
    assert mounts.pop("passwords") == every
    assert mounts == {
        "nats": {"nats-secret"}, "gateway": {"gateway-secret"}, "scheduler": {"scheduler-secret"},
        "worker": {"worker-secret"}, "model": set(),
    }  # fmt: skip


def placed(root: Path, **given: str) -> Path:
    """NATS's configuration and passwords under ``root``, as the stack places them; returns the configuration's path."""
    config = next(volume for volume in SERVICES["nats"]["volumes"] if "nats.conf" in volume).split(":")[1]
    target, secrets = root / config.lstrip("/"), root / "run" / "headrace"
    target.parent.mkdir(parents=True)
    secrets.mkdir(parents=True)
    target.write_text((COMPOSE / "nats.conf").read_text().replace("0.0.0.0:4222", "127.0.0.1:-1"))
    target.write_text(target.read_text().replace("http: 127.0.0.1:8222", f"ports_file_dir: {json.dumps(str(root))}"))
    target.write_text(target.read_text().replace("store_dir: /data", f"store_dir: {json.dumps(str(root / 'data'))}"))
    if given:
        made = root / "made"
        made.mkdir()
        make_passwords(made, **given)
        (secrets / "passwords.conf").write_text((made / "nats" / "passwords.conf").read_text())
    return target


def test_nats_does_not_start_without_passwords(tmp_path: Path) -> None:
    command = [find_nats_server(), "-t", "--config", placed(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode != 0  # it would be open to all


def test_nats_allows_each_service_what_the_code_says_that_it_needs(tmp_path: Path) -> None:
    """The shipped file is written by hand, to be read; what it says must be what ``permissions`` says."""
    users = re.findall(
        r"user: (\w+), password: \$(\w+).*?permissions: \{(.*?)\n    \}", (COMPOSE / "nats.conf").read_text(), re.S
    )
    assert [kind for kind, _, _ in users] == list(KINDS)
    for kind, variable, text in users:
        assert variable == f"{kind.upper()}_PASSWORD"
        said, heard = text.split("subscribe:")
        expected = permissions(kind)
        assert tuple(re.findall(r'"([^"]+)"', heard)) == expected.subscribe
        if expected.publish:
            assert "allow" in said and tuple(re.findall(r'"([^"]+)"', said)) == expected.publish
        else:
            assert re.search(r'deny: \[">"\]', said)


def test_the_services_come_in_with_their_passwords(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {kind: f"{kind}-pw" for kind in KINDS}
    command = [find_nats_server(), "--config", placed(tmp_path, **given)]
    nats = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def scenario(url: str) -> None:
        for kind in KINDS:
            bus = await NatsBus.join(MeshConfig(nats=url, nats_password=given[kind]), kind, "test")
            if kind == "worker":
                await bus.subscribe(Subjects().step("w"), lambda payload, reply: None)
                await bus.publish(Subjects().result(1), b"x")
            await bus.flush()
            await bus.close()
        with pytest.raises(BusUnavailable):
            await NatsBus.connect(url, "test", timeout_s=0.5)

    try:
        asyncio.run(scenario(announced(tmp_path)))
    finally:
        nats.terminate()
        nats.wait(10)
    assert "permissions" not in caplog.text.lower()


def announced(folder: Path) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for path in folder.glob("*.ports"):
            with contextlib.suppress(ValueError, KeyError):  # being written just now
                return str(json.loads(path.read_text())["nats"][0])
        time.sleep(0.01)
    raise AssertionError("the server did not start")


def test_the_entrypoint_brings_the_password_unless_one_was_given(tmp_path: Path) -> None:
    script = (COMPOSE / "entrypoint.sh").read_text().replace("/run/headrace", str(tmp_path / "worker"))
    (tmp_path / "entrypoint.sh").write_text(script)
    (tmp_path / "headrace").write_text('#!/bin/sh\necho "${HEADRACE_NATS_PASSWORD:-} $*"\n')
    (tmp_path / "headrace").chmod(0o755)
    make_passwords(tmp_path, worker="of-the-stack")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", tmp_path / "entrypoint.sh", "worker", "--simulate"]
    for given, expected in (
        ({}, "of-the-stack"), ({"HEADRACE_NATS_PASSWORD": "mine"}, "mine"), ({"HEADRACE_NATS_TOKEN": "t"}, ""),
    ):  # fmt: skip
        done = subprocess.run(command, env=environ | given, capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected} worker --simulate\n"


def test_requirements_are_those_of_pyproject(tmp_path: Path) -> None:
    for file in (COMPOSE / "requirements.py", COMPOSE.parent / "pyproject.toml"):
        (tmp_path / file.name).write_text(file.read_text())
    command = [sys.executable, tmp_path / "requirements.py"]
    base = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    gateway = subprocess.run([*command, "gateway"], capture_output=True, text=True, check=True).stdout
    assert "nats-py" in base
    assert gateway.startswith(base)
    assert "torch" not in gateway
