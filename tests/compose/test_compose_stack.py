"""The compose files: what is reachable, what is secret, and that NATS accepts its configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.nats_server import find_nats_server

COMPOSE = Path(__file__).parents[2] / "compose"
STACK: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]


def test_the_root_file_includes_the_stack() -> None:
    root = yaml.safe_load((COMPOSE.parent / "compose.yaml").read_text())
    assert root["include"] == ["compose/compose.yaml"]


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


def make_token(folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"HEADRACE_NATS_TOKEN": given, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run([COMPOSE / "make-token.sh", folder], env=environ, capture_output=True, text=True)


def token_in(folder: Path) -> str:
    return (folder / "nats-token").read_text().strip()


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    assert make_token(tmp_path).returncode == 0
    token = token_in(tmp_path)
    assert len(token) >= 32
    assert make_token(tmp_path).returncode == 0
    assert token_in(tmp_path) == token
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_a_given_token_wins(tmp_path: Path) -> None:
    make_token(tmp_path)
    assert make_token(tmp_path, "my-token").returncode == 0
    assert token_in(tmp_path) == "my-token"
    assert 'token: "my-token"' in (tmp_path / "nats-auth.conf").read_text()


def test_a_token_that_would_break_the_configuration_is_refused(tmp_path: Path) -> None:
    refused = make_token(tmp_path, 'a" }')
    assert refused.returncode == 2
    assert "HEADRACE_NATS_TOKEN" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_nats_accepts_its_configuration_where_the_stack_puts_it(tmp_path: Path) -> None:
    config = next(volume for volume in SERVICES["nats"]["volumes"] if "nats.conf" in volume).split(":")[1]
    target, secrets = tmp_path / config.lstrip("/"), tmp_path / "run" / "headrace"
    target.parent.mkdir(parents=True)
    secrets.mkdir(parents=True)
    target.write_text((COMPOSE / "nats.conf").read_text())
    command = [find_nats_server(), "-t", "--config", target]
    assert subprocess.run(command, capture_output=True).returncode != 0  # without the token it would be open to all
    make_token(secrets)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_entrypoint_brings_the_token_unless_one_was_given(tmp_path: Path) -> None:
    script = (COMPOSE / "entrypoint.sh").read_text().replace("/run/headrace", str(tmp_path))
    (tmp_path / "entrypoint.sh").write_text(script)
    (tmp_path / "headrace").write_text('#!/bin/sh\necho "$HEADRACE_NATS_TOKEN $*"\n')
    (tmp_path / "headrace").chmod(0o755)
    make_token(tmp_path, "of-the-stack")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", tmp_path / "entrypoint.sh", "worker", "--simulate"]
    for given, expected in (({}, "of-the-stack"), ({"HEADRACE_NATS_TOKEN": "mine"}, "mine")):
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
