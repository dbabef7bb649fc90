"""SIGTERM with open streams, queued requests and a client that never reads (B23)."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import httpx
from gateway_mesh import FakeMesh, Running, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES
from test_gateway_faults import raw_request

from shared.messages import Submit

GRACE_S = 1.5
OPEN, QUEUED = 5, 3


def hold(mesh: FakeMesh) -> dict[str, bool]:
    """Requests with seed 2 are queued for ever: no token of them is made. Returns what to change that by."""
    released = {"now": False}
    step = mesh.step

    async def only_open() -> None:
        held: list[Running] = [] if released["now"] else [one for one in mesh.running if one.submit.sampling.seed == 2]
        mesh.running = [one for one in mesh.running if one not in held]
        await step()
        mesh.running += held

    mesh.step = only_open  # type: ignore[method-assign]
    return released


async def _traffic(gw: RunningGateway, release_queued: bool) -> tuple[list[str], list[httpx.Response], socket.socket]:
    """Everything under way, then the signal: (texts of the open streams, answers of the queued ones, the stuck one)."""
    released = hold(gw.mesh)
    gw.mesh.stepping = False
    async with httpx.AsyncClient(verify=NO_AUTHORITIES, base_url=gw.url, timeout=20) as client:

        def ask(seed: int, stream: bool) -> asyncio.Task[httpx.Response]:
            body: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": stream, "seed": seed}
            return asyncio.create_task(client.post("/v1/completions", json=body))

        stuck_body = {"prompt": "x" * 1000, "n": 16, "max_tokens": 1000, "ignore_eos": True, "stream": True, "seed": 1}
        stuck = await asyncio.to_thread(raw_request, gw, stuck_body, "/generate")
        streams = [ask(1, True) for _ in range(OPEN)]
        queued = [ask(2, stream=False) for _ in range(QUEUED)]
        await asyncio.to_thread(gw.until, lambda: len(gw.mesh.submits) == OPEN + QUEUED + 1)
        gw.stop()
        await asyncio.to_thread(gw.until, lambda: gw.gateway.draining)
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/ready")).status_code == 503
        gw.mesh.stepping = True
        released["now"] = release_queued
        return [(await one).text for one in streams], [await one for one in queued], stuck


def test_open_streams_finish_queued_requests_are_told_and_a_non_reader_holds_nothing_up(
    tokenizer_folder: Path,
) -> None:
    with running_gateway(tokenizer_folder, drain_grace_s=GRACE_S) as gw:
        began = time.monotonic()
        texts, answers, stuck = asyncio.run(_traffic(gw, release_queued=False))
        assert all(text.endswith("data: [DONE]\n\n") and "error" not in text for text in texts)
        for answer in answers:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining" and int(answer.headers["retry-after"]) >= 1
        assert gw.join(10) and time.monotonic() - began < GRACE_S + 8
        assert gw.error is None
        stuck.close()


def test_queued_requests_that_get_their_turn_within_the_grace_finish(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, drain_grace_s=GRACE_S) as gw:
        texts, answers, stuck = asyncio.run(_traffic(gw, release_queued=True))
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert [answer.status_code for answer in answers] == [200] * QUEUED
        assert gw.join(10) and gw.error is None
        stuck.close()


def test_what_was_queued_is_cancelled_at_the_scheduler(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, drain_grace_s=GRACE_S) as gw:
        _, _, stuck = asyncio.run(_traffic(gw, release_queued=False))
        assert gw.join(10)
        stuck.close()
        queued: list[Submit] = [submit for submit in gw.mesh.submits if submit.sampling.seed == 2]
        assert {submit.request_id for submit in queued} <= {cancel.request_id for cancel in gw.mesh.cancels}
