"""A tokenizer folder, and a gateway over a fake mesh that is put back in its first state after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_mesh import RunningGateway, pseudo_random, running_gateway
from loopback_http import NO_AUTHORITIES
from tiny_models import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shared_gateway(tokenizer_folder: Path) -> Iterator[RunningGateway]:
    with running_gateway(tokenizer_folder) as gateway:
        yield gateway


@pytest.fixture
def gw(shared_gateway: RunningGateway) -> Iterator[RunningGateway]:
    yield shared_gateway
    mesh = shared_gateway.mesh
    mesh.script = pseudo_random
    mesh.refuse = lambda submit: None
    mesh.step_s = 0.0
    mesh.stepping = mesh.beating = True
    mesh.workers = 1
    mesh.queue = {}
    mesh.cached = -1
    shared_gateway.call(mesh.beat())  # a gateway goes by what it was told last
    shared_gateway.until(lambda: shared_gateway.gateway.why_not_ready() is None)
    mesh.running.clear()
    mesh.submits.clear()
    mesh.cancels.clear()


@pytest.fixture
def http(gw: RunningGateway) -> Iterator[httpx.Client]:
    with httpx.Client(verify=NO_AUTHORITIES, base_url=gw.url, timeout=20) as client:
        yield client
