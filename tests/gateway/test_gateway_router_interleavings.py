"""Two meshes that fall silent, refuse, lose and come back in any order: a request runs in one of them at last, and
its tokens come in order from wherever they are."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import pytest
from one_request_scheduler import CHOICES, MAX_TOKENS, NumbersAsText, Scheduler, token
from this_thread import patch_here

from gateway import offering
from gateway.choice_text import ChoiceText
from gateway.config import GatewayConfig
from gateway.detokenizer import Detokenizer
from gateway.errors import ApiError
from gateway.flight import Flight
from gateway.metrics import GatewayMetrics
from gateway.offering import Part
from gateway.router import Router
from gateway.service import make_dispatch
from observability.tracing import Tracing
from shared.bus import BusTimeout, Handler
from shared.messages import (
    Cancel,
    ModelInfo,
    Outcome,
    RequestEvent,
    Sampling,
    SchedulerBeat,
    Submit,
    SubmitReply,
    TokenBatch,
    decode,
    encode,
    pack_tokens,
)

SCHEDULES = 60
AWAY_S = 4.0
OFF = Tracing("test", "test", "", 0.0)
MESHES = ("a", "b")
Sent = tuple[str, Any, "asyncio.Future[bytes] | None"]  # (mesh, message, its reply)


class World:
    """The bus too: whatever is sent is on its way until the test delivers it, or loses it."""

    max_payload = 1 << 20

    def __init__(self, rng: random.Random, seconds: list[float]) -> None:
        self.rng, self.seconds = rng, seconds
        self.metrics = GatewayMetrics("m")
        config = GatewayConfig(model="m", mesh=",".join(MESHES), mesh_away_s=AWAY_S, resume_timeout_s=3600.0)
        router = make_dispatch(config, self, "g", self.metrics, lambda: 0, OFF)  # type: ignore[arg-type]
        assert isinstance(router, Router)
        self.router = router
        self.schedulers = {name: Scheduler(1) for name in MESHES}
        self.refuses = dict.fromkeys(MESHES, False)
        self.silent = dict.fromkeys(MESHES, False)
        self.on_the_way: list[Sent] = []
        self.asked: list[asyncio.Future[bytes]] = []
        for name in MESHES:
            self.beat(name)
        self.flight = Flight(time.monotonic(), self.metrics.of("m"))
        numbers: Detokenizer = NumbersAsText()
        choices = [
            self.flight.add_choice(ChoiceText(numbers, ("<203>",) if choice == 1 else (), False, 0))
            for choice in range(CHOICES)
        ]
        submit = Submit("r", 1, "g", "m", pack_tokens([1]), Sampling(1, MAX_TOKENS), 0, n=CHOICES)
        self.record = self.router.open(submit, Part(self.flight, choices))

    # --- the bus ----------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes) -> None:
        self.on_the_way.append((subject.split(".")[1], decode(payload), None))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.on_the_way.append((subject.split(".")[1], decode(payload), reply))
        self.asked.append(reply)
        return await reply

    async def subscribe(self, subject: str, handler: Handler) -> Any:
        raise NotImplementedError

    async def flush(self) -> None: ...

    async def close(self) -> None: ...

    def deliver(self, place: int) -> None:
        name, message, reply = self.on_the_way.pop(place)
        scheduler, dispatch = self.schedulers[name], self.router._meshes[name]
        if isinstance(message, Submit):
            full = self.refuses[name] and message.attempt == 1 and not scheduler.attempt
            answer = SubmitReply(Outcome.QUEUE_FULL, 1) if full else scheduler.submit(message)
            self.on_the_way.append((name, answer, reply))
        elif isinstance(message, Cancel):
            scheduler.cancel(message)
        elif isinstance(message, SubmitReply):
            if reply is not None and not reply.done():
                reply.set_result(encode(message))
        elif isinstance(message, TokenBatch):
            dispatch._on_tokens(message)
        else:
            dispatch._on_event(message)
        self.check()

    # --- what may happen --------------------------------------------------------------------------------------------

    def beat(self, name: str) -> None:
        info = ModelInfo("m", 100, 999, 1)
        self.router._meshes[name]._on_scheduler_beat(SchedulerBeat("s", 1, [info]))

    def second(self) -> None:
        """One passes."""
        self.seconds[0] += 1.0
        for name in MESHES:
            if not self.silent[name]:
                self.beat(name)
        for name in MESHES:
            self.router._meshes[name].tick(time.monotonic())

    def tokens(self) -> None:
        name = self.rng.choice(MESHES)
        scheduler = self.schedulers[name]
        if scheduler.running:
            entry = scheduler.step(self.rng.choice(list(scheduler.running)))
            self.on_the_way.append((name, TokenBatch(1, "w", 1, 1, [entry]), None))

    def lose(self) -> None:
        """A worker goes, with all that it runs."""
        name = self.rng.choice(MESHES)
        scheduler = self.schedulers[name]
        for choice in list(scheduler.running):
            del scheduler.running[choice]
            self.on_the_way.append((name, RequestEvent(1, "lost", "r", scheduler.attempt, choice, ""), None))

    def replies_time_out(self) -> None:
        for reply in self.asked:
            if not reply.done():
                reply.set_exception(BusTimeout("no reply"))
        self.asked.clear()

    def fall_silent(self) -> None:
        name = self.rng.choice(MESHES)
        self.silent[name] = not self.silent[name]

    def drop(self) -> None:
        places = [place for place, (_, one, _) in enumerate(self.on_the_way) if isinstance(one, TokenBatch)]
        if places:
            self.on_the_way.pop(self.rng.choice(places))

    async def turns(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """All are heard, nothing is lost, and schedulers and gateway say what they do not know; tokens stand still."""
        for _ in range(6):
            while self.on_the_way:
                self.deliver(self.rng.randrange(len(self.on_the_way)))
                await self.turns()
            for name in MESHES:
                scheduler, dispatch = self.schedulers[name], self.router._meshes[name]
                live = dict(dispatch.beat().live)
                if scheduler.running and "r" not in live:
                    scheduler.running.clear()
                if (attempt := live.get("r")) and (attempt != scheduler.attempt or not scheduler.running):
                    self.on_the_way.append((name, RequestEvent(1, "lost", "r", attempt, -1, "not known"), None))
            self.replies_time_out()
            self.second()
            await self.turns()

    def check(self) -> None:
        books = [name for name in MESHES if len(self.router._meshes[name].ledger)]
        assert books in ([], [self.record.owner.mesh])
        for mesh in self.router._meshes.values():
            mesh.ledger.check()
        for choice, one in enumerate(self.record.choices):
            assert list(one.tokens) == [token(choice, position) for position in range(len(one.tokens))]


async def schedule(seed: int, seconds: list[float]) -> int:
    """Plays one; how many times the request has gone on in another mesh."""
    rng = random.Random(seed)
    world = World(rng, seconds)
    world.refuses = {name: rng.random() < 0.3 for name in MESHES}
    if all(world.refuses.values()):
        world.refuses["a"] = False
    sending = asyncio.create_task(world.router.send_forever())
    offer = asyncio.create_task(world.router.offer(world.record))
    await world.turns()
    rare = (world.lose, world.drop, world.replies_time_out, world.fall_silent)
    for _ in range(rng.randrange(5, 120)):
        dice = rng.random()
        if dice < 0.4 and world.on_the_way:
            world.deliver(rng.randrange(len(world.on_the_way)))
        elif dice < 0.65:
            world.tokens()
        elif dice < 0.85:
            world.second()
        else:
            rng.choice(rare)()
        if rng.random() < 0.8:
            await world.turns()
        if offer.done() and offer.exception() is not None:
            break
    world.silent = dict.fromkeys(MESHES, False)
    refused = offer.exception() if offer.done() else None
    released = refused is not None or rng.random() < 0.4
    if refused is not None:
        assert isinstance(refused, ApiError) and world.record.attempt == 1 and not world.record.epoch
    if released:
        world.flight.abandon()
        world.router.release(world.record)
    await world.settle()
    if not released:
        assert world.flight.error is None
        waited_for = {choice for choice, one in enumerate(world.record.choices) if not one.closed}
        for name in MESHES:
            runs = set(world.schedulers[name].running)
            assert runs == (waited_for if name == world.record.owner.mesh else set()), name
        world.router.release(world.record)
        await world.settle()
    assert not any(scheduler.running for scheduler in world.schedulers.values()), "nobody waits for it"
    assert not list(world.router.records())
    with contextlib.suppress(ApiError):
        await asyncio.wait_for(offer, 5)
    sending.cancel()
    return int(world.metrics.registry.get_sample_value("headrace_gateway_resumes_total", {"cause": "mesh"}) or 0)


@pytest.mark.parametrize("part", range(3))
def test_it_runs_in_one_mesh_at_last(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "RETRY_PAUSE_S", 600.0)
    monkeypatch.setattr(offering, "MAX_BACKOFF_S", 0.0)
    real, seconds = time.monotonic, [0.0]
    patch_here(monkeypatch, time, "monotonic", lambda: real() + seconds[0])
    moves = 0
    for seed in range(part * SCHEDULES, (part + 1) * SCHEDULES):
        try:
            moves += asyncio.run(schedule(seed, seconds))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert moves > SCHEDULES / 10, "else too little of it is played"
