"""Resumes, stop strings, cancels and releases in any order, over a bus that delays, reorders and loses.

A scheduler by the core's rules: what it runs in the end is what the gateway waits for, in the gateway's attempt; and
nothing once nobody waits.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from one_request_scheduler import CHOICES, MAX_TOKENS, NumbersAsText, Scheduler, token

from gateway import offering
from gateway.choice_text import ChoiceText
from gateway.config import GatewayConfig
from gateway.detokenizer import Detokenizer
from gateway.dispatch import Dispatch
from gateway.flight import Flight
from gateway.ledger import RequestRecord
from gateway.metrics import GatewayMetrics
from gateway.offering import Part
from shared.bus import BusTimeout, Handler
from shared.messages import (
    Cancel,
    ModelInfo,
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

SCHEDULES = 50


class World:
    """The bus too: whatever is sent is on its way until the test delivers or loses it."""

    max_payload = 1 << 20

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.metrics = GatewayMetrics("m")
        self.losses = 0
        self.dispatch = Dispatch(GatewayConfig(model="m"), self, "g", self.metrics, lambda: self.losses)
        self.scheduler = Scheduler(1)
        self.on_the_way: list[tuple[int, Any, asyncio.Future[bytes] | None]] = []  # (epoch, message, its reply)
        self.beat()
        self.flight = Flight(time.monotonic(), self.metrics.of("m"))
        choices = []
        for choice in range(CHOICES):
            stops = ("<203>",) if choice == 1 else ()
            numbers: Detokenizer = NumbersAsText()
            choices.append(self.flight.add_choice(ChoiceText(numbers, stops, False, 0)))
        submit = Submit("r", 1, "g", "m", pack_tokens([1]), Sampling(1, MAX_TOKENS), 0, n=CHOICES)
        self.record: RequestRecord[Part] = self.dispatch.open(submit, Part(self.flight, choices))
        self.released = False

    # --- the bus ----------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes) -> None:
        self.on_the_way.append((int(subject.rsplit(".", 1)[-1]), decode(payload), None))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.on_the_way.append((int(subject.rsplit(".", 1)[-1]), decode(payload), reply))
        self.asked = reply
        return await reply

    async def subscribe(self, subject: str, handler: Handler) -> Any:
        raise NotImplementedError

    async def flush(self) -> None: ...

    async def close(self) -> None: ...

    def deliver(self, place: int) -> None:
        epoch, message, reply = self.on_the_way.pop(place)
        if isinstance(message, Submit | Cancel) and epoch != self.scheduler.epoch:
            return  # nobody listens there any more
        if isinstance(message, Submit):
            self.on_the_way.append((epoch, self.scheduler.submit(message), reply))
        elif isinstance(message, Cancel):
            self.scheduler.cancel(message)
        elif isinstance(message, SubmitReply):
            if reply is not None and not reply.done():
                reply.set_result(encode(message))
        elif isinstance(message, TokenBatch):
            self.dispatch._on_tokens(message)
        else:
            self.dispatch._on_event(message)
        self.dispatch.ledger.check()

    # --- what may happen --------------------------------------------------------------------------------------------

    def beat(self) -> None:
        self.dispatch._on_scheduler_beat(SchedulerBeat("s", self.scheduler.epoch, [ModelInfo("m", 100, 999, 1)]))

    def tokens(self) -> None:
        if self.scheduler.running:
            entry = self.scheduler.step(self.rng.choice(list(self.scheduler.running)))
            epoch = self.scheduler.epoch
            self.on_the_way.append((epoch, TokenBatch(epoch, "w", 1, 1, [entry]), None))

    def lose(self) -> None:
        """A worker goes, with some of the choices, or all."""
        scheduler = self.scheduler
        lost = [choice for choice in scheduler.running if self.rng.random() < 0.7]
        for choice in lost:
            del scheduler.running[choice]
            kind = self.rng.choice(("lost", "moved"))
            event = RequestEvent(scheduler.epoch, kind, "r", scheduler.attempt, choice, "")
            self.on_the_way.append((scheduler.epoch, event, None))

    def reply_times_out(self) -> None:
        if not self.asked.done():
            self.asked.set_exception(BusTimeout("no reply"))

    def drop(self) -> None:
        """Tokens or an event; a cancel that is lost is made good by the beats, which are not played here."""
        places = [
            place
            for place, (_, message, _) in enumerate(self.on_the_way)
            if isinstance(message, TokenBatch | RequestEvent)
        ]
        if places:
            self.on_the_way.pop(self.rng.choice(places))

    def succeed(self) -> None:
        self.scheduler = Scheduler(self.scheduler.epoch + 1)
        self.beat()

    def reconnect(self) -> None:
        self.losses += 1
        self.dispatch.look_for_losses()

    def release(self) -> None:
        self.released = True
        self.flight.abandon()
        self.dispatch.release(self.record)

    async def turns(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def settle(self, rounds: int = 5) -> None:
        """Nothing is lost any more, and what the scheduler does not know it says; tokens stand still."""
        for _ in range(rounds):
            while self.on_the_way:
                self.deliver(self.rng.randrange(len(self.on_the_way)))
                await self.turns()
            for _, attempt in self.dispatch.beat().live:
                if attempt and (attempt != self.scheduler.attempt or not self.scheduler.running):
                    event = RequestEvent(self.scheduler.epoch, "lost", "r", attempt, -1, "it is not known")
                    self.on_the_way.append((self.scheduler.epoch, event, None))
            self.reply_times_out()
            self.beat()
            await self.turns()

    def check(self) -> None:
        for choice, one in enumerate(self.record.choices):
            tokens = list(one.tokens)
            assert tokens == [token(choice, position) for position in range(len(tokens))]


async def schedule(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    sending = asyncio.create_task(world.dispatch.send_forever())
    offer = asyncio.create_task(world.dispatch.offer(world.record))
    await world.turns()
    rare = (world.succeed, world.reconnect, world.lose, world.drop, world.reply_times_out)
    for _ in range(rng.randrange(5, 80)):
        dice = rng.random()
        if dice < 0.5 and world.on_the_way:
            world.deliver(rng.randrange(len(world.on_the_way)))
        elif dice < 0.85:
            world.tokens()
        else:
            rng.choice(rare)()
        if rng.random() < 0.3:
            world.beat()
        if rng.random() < 0.7:
            await world.turns()
        world.check()
    if rng.random() < 0.5:
        world.release()
    await world.settle()
    if not world.released:
        assert world.flight.error is None
        waited_for = {choice for choice, one in enumerate(world.record.choices) if not one.closed}
        assert set(world.scheduler.running) == waited_for
        while world.record.open:
            world.tokens()
            await world.settle(1)
        assert [list(one.tokens) for one in world.record.choices] == [
            [token(choice, position) for position in range(4 if choice == 1 else MAX_TOKENS)]
            for choice in range(CHOICES)
        ]
        world.release()
        await world.settle()
    assert not world.scheduler.running, "nobody waits for it"
    assert not len(world.dispatch.ledger)
    await asyncio.wait_for(offer, 5)
    sending.cancel()


@pytest.mark.parametrize("part", range(3))
def test_what_runs_is_what_somebody_waits_for(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "RETRY_PAUSE_S", 600.0)
    monkeypatch.setattr(offering, "MAX_BACKOFF_S", 0.0)
    for seed in range(part * SCHEDULES, (part + 1) * SCHEDULES):
        try:
            asyncio.run(schedule(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
