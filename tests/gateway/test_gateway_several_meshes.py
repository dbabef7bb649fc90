"""A gateway that joins two meshes, over HTTP: streams go on, nobody is refused whom one of them takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
from gateway_mesh import FakeMesh, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES

from gateway import service
from gateway.mesh_choice import Candidate, choose, content_of
from shared.messages import Outcome, SubmitReply

ASK = {"prompt": "the cat", "max_tokens": 12, "ignore_eos": True, "seed": 7}


@pytest.fixture
def two(tokenizer_folder: Path) -> Iterator[RunningGateway]:
    with running_gateway(
        tokenizer_folder, mesh="east,west", mesh_away_s=0.4, scheduler_stale_s=1.0, drain_grace_s=0.1
    ) as gateway:
        gateway.until(lambda: all(view.served(time.monotonic()) for view in gateway.gateway.dispatch.mesh._views))
        yield gateway


def submitted(two: RunningGateway) -> dict[str, int]:
    return {name: len(mesh.submits) for name, mesh in two.meshes.items()}


def other(two: RunningGateway, mesh: FakeMesh) -> FakeMesh:
    return next(one for one in two.meshes.values() if one is not mesh)


def test_equal_prompts_meet_and_others_are_shared_out(two: RunningGateway) -> None:
    with httpx.Client(verify=NO_AUTHORITIES, base_url=two.url, timeout=20) as client:
        for _ in range(4):
            assert client.post("/v1/completions", json=ASK).status_code == 200
        assert sorted(submitted(two).values()) == [0, 4]
        for number in range(24):
            assert client.post("/v1/completions", json={**ASK, "prompt": f"the {number}"}).status_code == 200
    assert min(submitted(two).values()) > 0
    for name, mesh in two.meshes.items():
        for submit in mesh.submits:
            best = choose([Candidate("east", 1), Candidate("west", 1)], content_of(submit))
            assert best is not None and best.name == name


def test_who_is_refused_by_one_is_taken_by_the_other_and_a_429_is_the_last_word(two: RunningGateway) -> None:
    east, west = two.meshes.values()
    with httpx.Client(verify=NO_AUTHORITIES, base_url=two.url, timeout=20) as client:
        east.refuse = lambda submit: SubmitReply(Outcome.QUEUE_FULL, 7)
        for number in range(6):
            assert client.post("/v1/completions", json={**ASK, "prompt": f"the {number}"}).status_code == 200
        assert len(west.submits) == 6 and east.offers < 6
        west.refuse = east.refuse
        assert client.post("/v1/completions", json=ASK).status_code == 429


def test_a_stream_goes_on_in_the_other_mesh_when_its_own_stays_away(two: RunningGateway) -> None:
    for mesh in two.meshes.values():
        mesh.step_s = 0.02
    with (
        httpx.Client(verify=NO_AUTHORITIES, base_url=two.url, timeout=20) as client,
        client.stream("POST", "/v1/completions", json={**ASK, "max_tokens": 60, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        pieces = [_text(next(line for line in lines if line))]
        first = next(mesh for mesh in two.meshes.values() if mesh.submits)
        first.beating = first.stepping = False
        pieces += [_text(line) for line in lines if line and "[DONE]" not in line]
    (submit,) = first.submits
    (resumed,) = other(two, first).submits
    assert resumed.attempt > 1 and resumed.request_id == submit.request_id
    assert "".join(pieces) == two.decode(two.expected(submit))
    two.until(lambda: not other(two, first).running)
    assert any((cancel.request_id, cancel.attempt) == (submit.request_id, 1) for cancel in first.cancels)


def _text(line: str) -> str:
    text: str = json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def test_a_drain_ends_what_is_open_in_any_mesh(two: RunningGateway) -> None:
    for mesh in two.meshes.values():
        mesh.stepping = False
    prompts = [f"the {number}" for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(httpx.post, f"{two.url}/v1/completions", json={**ASK, "prompt": one}) for one in prompts]
        two.until(lambda: sum(submitted(two).values()) == len(prompts))
        assert min(submitted(two).values()) > 0
        two.stop()
        assert {answer.result(20).status_code for answer in answers} == {503}
    assert two.join(10)


def test_a_new_gateway_answers_nobody_before_it_has_heard_each_mesh(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it knows neither workers nor adapters, and refuses what the gateway that it replaces still answers."""
    monkeypatch.setattr(service, "HEAR_S", 60.0)
    gateway = RunningGateway(tokenizer_folder, mesh="east,west")
    for mesh in gateway.meshes.values():
        mesh.beating = False
    west = gateway.meshes["west"]
    west.adapters = {"tiny": ["poems"]}
    with gateway, ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(httpx.post, f"{gateway.url}/v1/completions", json={**ASK, "model": model}, timeout=60)
            for model in ("tiny", "poems")
        ]
        gateway.mesh.beating = True
        gateway.until(lambda: gateway.gateway.why_not_ready() is None)
        assert not wait(asked, timeout=0.3).done, "one of the meshes has told nothing yet"
        west.beating = True
        assert [answer.result().status_code for answer in asked] == [200, 200]
    assert [submit.adapter for submit in west.submits if submit.adapter] == ["poems"]


def test_a_mesh_that_stays_silent_holds_a_new_gateway_up_for_a_moment_only(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HEAR_S", 0.1)
    gateway = RunningGateway(tokenizer_folder, mesh="east,west")
    gateway.meshes["west"].beating = False
    with gateway:
        assert httpx.post(f"{gateway.url}/v1/completions", json=ASK, timeout=60).status_code == 200
