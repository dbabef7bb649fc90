"""A gateway over an in-process bus, with a scheduler-and-worker that answers by a script. Real HTTP, in a thread.

The tests' clients run in the main thread (or in loops of their own); the gateway, its bus and the fake mesh share one
event loop in a thread, as they would share a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from in_process_bus import InProcessBus

from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from gateway.metrics import GatewayMetrics
from gateway.models import Models
from gateway.service import listen, make_dispatch, run_gateway
from observability.tracing import Tracing
from shared.messages import (
    Cancel,
    GatewayBeat,
    ModelInfo,
    Outcome,
    RequestEvent,
    SchedulerBeat,
    Submit,
    SubmitReply,
    TokenBatch,
    TokenEntry,
    TokenLogprob,
    decode,
    encode,
    unpack_tokens,
)
from shared.subjects import Subjects

VOCAB_SIZE = 320
MAX_MODEL_LEN = 2048
EOS_IDS = (0, 2)
MODEL = "tiny"

Script = Callable[[Submit, int, int], int]
"""(submit, choice, position) -> token."""


def pseudo_random(submit: Submit, choice: int, position: int) -> int:
    """Any token but the special ones; a function of the sampling key and the prompt's length."""
    key = (
        submit.sampling.seed * 31 + submit.prompt_index * 1009 + choice * 65537 + position + len(submit.prompt)
    ) % 2**64
    key = (key * 0x9E3779B97F4A7C15) % 2**64
    return 3 + (key >> 33) % (296 - 3)


def told_of(token: int, position: int, alternatives: int) -> TokenLogprob:
    """Log-probabilities that a test can foresee: a third of the tokens are not among the most probable ones, and the
    last of several alternatives is impossible."""
    ids = [3 + (token + 11 * index) % 290 for index in range(alternatives)]
    values = [-(1 + position % 5 + index) / 8 for index in range(alternatives)]
    if alternatives > 1:
        values[-1] = -math.inf
    if alternatives and token % 3:
        ids[0] = token
        return TokenLogprob(values[0], 1, ids, values)
    return TokenLogprob(-9.25, 77, ids, values)


@dataclasses.dataclass
class Running:
    submit: Submit
    choice: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    first: bool = True  # it has sent nothing yet


class FakeMesh:
    """Scheduler and worker in one: runs every sequence by ``script``, one token a step, and listens to cancels.

    A request that is submitted again takes the place of its older attempts, and goes on behind its resumed tokens.
    """

    def __init__(self, bus: InProcessBus, name: str = "default", models: Sequence[str] = ()) -> None:
        """``models``: those that it serves; empty: the one that the tests' gateway has."""
        self.bus = bus
        self.name = name
        self.models = list(models)
        self.adapters: dict[str, list[str]] = {}  # by model
        self.subjects = Subjects(name)
        self.epoch = 7
        self.workers = 1
        self.script: Script = pseudo_random
        self.refuse: Callable[[Submit], SubmitReply | None] = lambda submit: None
        self.queue: dict[str, Any] = {}  # of ModelInfo: what the beats tell of the queue
        self.beating = True
        self.stepping = True
        self.step_s = 0.0
        self.submits: list[Submit] = []  # those that were accepted
        self.offers = 0  # submissions that came, refused ones too
        self.cancels: list[Cancel] = []
        self.gateway_beats: list[GatewayBeat] = []
        self.running: list[Running] = []
        self.sent_tokens = 0
        self.cached = -1  # prompt tokens that the prefix cache is said to have held
        self.error: BaseException | None = None  # what ended it

    async def start(self) -> None:
        await self.listen()
        await self.bus.subscribe(self.subjects.beats("gateway"), self._on_gateway_beat)

    async def listen(self) -> None:
        await self.bus.subscribe(self.subjects.submit_all(self.epoch), self._on_submit)
        await self.bus.subscribe(self.subjects.cancel(self.epoch), self._on_cancel)

    async def succeed(self) -> None:
        """Another scheduler leads: it knows nothing of what ran, and nobody listens to the one before."""
        gone = (self.subjects.submit_all(self.epoch), self.subjects.cancel(self.epoch))
        self.bus._subscriptions[:] = [entry for entry in self.bus._subscriptions if entry[0] not in gone]
        self.running.clear()
        self.epoch += 1
        await self.listen()
        await self.beat()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat_forever())
                group.create_task(self._step_forever())
        except BaseExceptionGroup as error:
            self.error = error
            raise

    async def beat(self) -> None:
        models = [
            ModelInfo(name, MAX_MODEL_LEN, VOCAB_SIZE, self.workers, adapters=self.adapters.get(name, []), **self.queue)
            for name in self.models or [MODEL]
        ]
        beat = SchedulerBeat("sched", self.epoch, models)
        await self.bus.publish(self.subjects.beat("scheduler", "sched"), encode(beat))

    async def _beat_forever(self) -> None:
        while True:
            if self.beating:
                await self.beat()
            await asyncio.sleep(0.05)

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(self.step_s if self.running and self.stepping else max(self.step_s, 0.001))
            if self.running and self.stepping:
                await self.step()

    async def step(self) -> None:
        by_gateway: dict[str, list[TokenEntry]] = {}
        for sequence in list(self.running):
            submit = sequence.submit
            offset = len(sequence.tokens)
            token = self.script(submit, sequence.choice, offset)
            sequence.tokens.append(token)
            end = self._end(submit, token, len(sequence.tokens))
            if end:
                self.running.remove(sequence)
            wanted = submit.sampling.logprobs
            entries = by_gateway.setdefault(submit.gateway, [])
            if sequence.first and sequence.choice == 0:
                entries += self._prompt_entries(submit)
            entries.append(
                TokenEntry(
                    submit.request_id, submit.attempt, sequence.choice, offset, [token], end,
                    len(sequence.tokens) if end else 0, self.score(token) if submit.sampling.want_score else 0.0,
                    logprobs=[told_of(token, offset, wanted)] if wanted >= 0 else [],
                    cached=self.cached if sequence.first else -1,
                )
            )  # fmt: skip
            sequence.first = False
            self.sent_tokens += 1
        for gateway, entries in by_gateway.items():
            await self.send(gateway, entries)

    @staticmethod
    def score(token: int) -> float:
        return -(token % 17) / 4

    def _prompt_entries(self, submit: Submit) -> list[TokenEntry]:
        """The prompt's log-probabilities in pieces that overlap."""
        wanted = submit.sampling.prompt_logprobs
        if wanted < 0:
            return []
        told = [told_of(token, place, wanted) for place, token in enumerate(unpack_tokens(submit.prompt))]
        return [
            TokenEntry(
                submit.request_id, submit.attempt, 0, 0, [],
                prompt_logprobs=told[start : start + 5], prompt_offset=start,
            )
            for start in range(1, len(told), 3)
        ]  # fmt: skip

    async def send(self, gateway: str, entries: list[TokenEntry], epoch: int | None = None) -> None:
        batch = TokenBatch(self.epoch if epoch is None else epoch, "worker", 1, 1, entries)
        await self.bus.publish(self.subjects.tokens(gateway), encode(batch))

    async def event(self, submit: Submit, kind: str, reason: str, choice: int = -1) -> None:
        self.running = [
            sequence
            for sequence in self.running
            if sequence.submit is not submit or choice not in (-1, sequence.choice)
        ]
        event = RequestEvent(self.epoch, kind, submit.request_id, submit.attempt, choice, reason)
        await self.bus.publish(self.subjects.event(submit.gateway), encode(event))

    @staticmethod
    def _end(submit: Submit, token: int, count: int) -> str:
        sampling = submit.sampling
        if count > sampling.min_tokens and (
            (token in EOS_IDS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        ):
            return "stop"
        return "length" if count >= sampling.max_tokens else ""

    def _on_submit(self, payload: bytes, reply: str) -> None:
        submit = decode(payload)
        assert isinstance(submit, Submit)
        self.offers += 1
        answer = self.refuse(submit)
        if answer is None and any(
            (known.request_id, known.attempt) == (submit.request_id, submit.attempt) for known in self.submits
        ):
            answer = SubmitReply(Outcome.DUPLICATE, self.epoch)
        if answer is None:
            answer = SubmitReply(Outcome.ACCEPTED, self.epoch)
            self.submits.append(submit)
            if submit.attempt > 1:
                self.running = [
                    sequence for sequence in self.running if sequence.submit.request_id != submit.request_id
                ]
            resumed = [unpack_tokens(packed) for packed in submit.resumed] or [[] for _ in range(submit.n)]
            cancelled = (submit.request_id, submit.attempt) in [
                (cancel.request_id, cancel.attempt) for cancel in self.cancels if cancel.choice == -1
            ]
            self.running += [
                Running(submit, choice, resumed[choice])
                for choice in range(submit.n)
                if choice not in submit.done_choices and not cancelled
            ]
        # A reply goes straight back: publish() of an inbox never waits.
        with contextlib.suppress(StopIteration):
            self.bus.publish(reply, encode(answer)).send(None)

    def _on_cancel(self, payload: bytes, reply: str) -> None:
        cancel = decode(payload)
        assert isinstance(cancel, Cancel)
        self.cancels.append(cancel)
        self.running = [
            sequence
            for sequence in self.running
            if (sequence.submit.request_id, sequence.submit.attempt) != (cancel.request_id, cancel.attempt)
            or cancel.choice not in (-1, sequence.choice)
        ]

    def _on_gateway_beat(self, payload: bytes, reply: str) -> None:
        beat = decode(payload)
        assert isinstance(beat, GatewayBeat)
        self.gateway_beats.append(beat)


class RunningGateway:
    """A gateway that serves in a thread. ``mesh`` may be set from the test; coroutines go through ``call``.

    With a ``model`` or ``mesh`` among the options there may be several: ``meshes`` has those by name, ``mesh`` is the
    first one.
    """

    def __init__(
        self, folder: Path, tracing: Tracing | None = None, max_payload: int = 1 << 20, **options: Any
    ) -> None:
        options = {"model": f"{MODEL}={folder}", **options}
        self.config = GatewayConfig(port=0, metrics_port=0, **options)
        names = [source.name for source in self.config.sources]
        self.metrics = GatewayMetrics(*names)
        self.models = Models.load(self.config, self.metrics)
        self.tokenizer = self.models.first.tokenizer
        self.bus = InProcessBus(max_payload)
        served = [] if names == [MODEL] else names
        self.meshes = {name: FakeMesh(self.bus, name, served) for name in self.config.meshes}
        self.mesh = self.meshes[self.config.meshes[0]]
        self.losses = 0
        self.tracing = tracing or Tracing("gateway", "gw", "", 1.0)
        self.error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningGateway:
        self._thread.start()
        assert self._started.wait(10), self.error
        self.until(lambda: self.gateway.why_not_ready() is None or not self.mesh.beating)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(15)
        assert not self._thread.is_alive(), "the gateway did not stop"
        self.models.close()
        if self.error is not None:
            raise self.error

    def retire(self) -> None:
        """Another gateway has taken over."""
        self.loop.call_soon_threadsafe(self._retire.set)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # stopped already
            self.loop.call_soon_threadsafe(self._stop.set)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for error in (self.error, *(mesh.error for mesh in self.meshes.values())):
                if error is not None:
                    raise AssertionError("the gateway or its mesh has ended") from error
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def takes_grammars(self) -> bool:
        """As the mesh was last heard to say."""
        info = self.gateway.dispatch.mesh.model(MODEL, time.monotonic())
        return info is not None and info.grammars

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer._backend.decode(tokens, skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer._backend.encode(text).ids

    def expected(self, submit: Submit, choice: int = 0) -> list[int]:
        """The tokens of a choice, without the one that stops it."""
        tokens: list[int] = []
        while True:
            token = self.mesh.script(submit, choice, len(tokens))
            end = FakeMesh._end(submit, token, len(tokens) + 1)
            if end == "stop":
                return tokens
            tokens.append(token)
            if end:
                return tokens

    def prompt_of(self, submit: Submit) -> list[int]:
        return unpack_tokens(submit.prompt)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.error = error
            self._started.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop, self._retire = asyncio.Event(), asyncio.Event()
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        dispatch = make_dispatch(self.config, self.bus, "gw", self.metrics, lambda: self.losses, self.tracing)
        self.gateway = Gateway(self.config, dispatch, self.models, self.tracing, self.metrics)
        for mesh in self.meshes.values():
            await mesh.start()
        fakes = [asyncio.create_task(mesh.run()) for mesh in self.meshes.values()]
        self._started.set()
        try:
            await run_gateway(self.gateway, listener, self._stop, self.config.drain_grace_s, self._retire)
        finally:
            for fake in fakes:
                fake.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await fake


@contextlib.contextmanager
def running_gateway(folder: Path, **options: Any) -> Iterator[RunningGateway]:
    with RunningGateway(folder, **options) as gateway:
        yield gateway
