"""The worker's NATS shell: plans in, results and tokens out, beats. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from observability.tracing import Tracing
from shared.bus import Bus
from shared.lifecycle import ServiceFault, end
from shared.messages import (
    BadMessage,
    Capacity,
    Fetched,
    PageSnapshot,
    Reset,
    Role,
    RollCall,
    StepPlan,
    TokenBatch,
    TokenEntry,
    WorkerBeat,
    WorkerFault,
    WorkerState,
    decode,
    encode,
)
from shared.outbox import Outbox
from shared.subjects import Subjects
from shared.supervision import SERVES, STARTED, tell
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.ledger import StepLedger
from worker.metrics import WorkerMetrics
from worker.page_book import PageBook
from worker.runner import OnDevice, Runner
from worker.spans import WorkerSpans
from worker.step_loop import Executed, StepLoop
from worker.transfer.exchange import Exchange, Listening
from worker.transfer.pages import HasPages

if TYPE_CHECKING:
    from worker.parallel.followers import Followers

log = logging.getLogger("headrace.worker")

BEAT_S = 0.5

LINGER_S = 1.0
"""How long a worker that stops stays after a sequence was taken from it, and after the last fetch from it: another
worker may be about to go on there with what is here."""


class WorkerService:
    """``step_bus`` carries plans and results only, ``bus`` tokens and beats."""

    def __init__(
        self, config: WorkerConfig, name: str, incarnation: int, step_bus: Bus, bus: Bus,
        metrics: WorkerMetrics, tracing: Tracing,
    ) -> None:  # fmt: skip
        self._config = config
        self._name = name
        self._incarnation = incarnation
        self._step_bus = step_bus
        self._bus = bus
        self._metrics = metrics
        self._tracing = tracing
        self._spans = WorkerSpans(tracing, name)
        self._subjects = Subjects(config.mesh)
        self._step_out = Outbox(step_bus)
        self._out = Outbox(bus)
        self._ledger = StepLedger(name, incarnation)
        self._runner: Runner | None = None
        self._on_device: OnDevice | None = None  # the runner, where it is
        self._loop: StepLoop | None = None
        self._capacity: Capacity | None = None
        self._followers: Followers | None = None
        self._listening: Listening | None = None
        self._exchange: Exchange | None = None
        self._left_at = -math.inf  # monotonic s: when a sequence last left, and not by an end of its own
        self._event_loop = asyncio.get_running_loop()
        self._quiet = asyncio.Event()  # set by each step that leaves the batch empty
        self.draining = False

    @property
    def ready(self) -> bool:
        """The model is loaded, and the worker is not stopping. From any thread."""
        return self._loop is not None and not self.draining

    async def listen(self) -> None:
        """Subscribe and show up, before the model is loaded: the mesh sees a worker that is loading.

        Raises StartupError if others are to fetch KV blocks where it can't listen.
        """
        self._listening = Listening(self._config)
        await self._step_bus.subscribe(self._subjects.step(self._name), self._on_plan)
        await self._bus.subscribe(self._subjects.roll_call, self._on_roll_call)
        await self._step_bus.flush()
        self._beat()

    def attach(self, runner: Runner, followers: Followers | None = None) -> None:
        """The model is loaded: from now on plans can be run. ``followers`` run them too, where it is divided."""
        capacity = runner.capacity
        if followers is not None:
            batch: Batch = followers.batch(capacity)
        else:
            batch = Batch(
                capacity.block_size, capacity.num_blocks, capacity.max_model_len, frozenset(capacity.eos_token_ids)
            )
        self._runner = runner
        self._on_device = runner if isinstance(runner, OnDevice) else None
        self._followers = followers
        self._exchange = self._open_exchange(runner)
        self._capacity = msgspec.structs.replace(
            capacity, pool=self._config.pool, role=Role(self._config.role), transfer=self._exchange.addresses
        )  # fmt: skip
        self._loop = StepLoop(
            runner, batch, self._ledger.current, self._deliver, self._answer_reset, self._exchange.fetches
        )  # fmt: skip
        self._loop.start()
        tell(STARTED)
        self._beat()

    def _open_exchange(self, runner: Runner) -> Exchange:
        # Of a model that is divided, each rank has its own heads' part of a page.
        memory = runner.page_memory() if isinstance(runner, HasPages) and self._followers is None else None
        listening = self._listening or Listening(self._config)
        return Exchange(
            self._name, self._incarnation, memory, listening, lambda: self._ledger.standing, self._call_loop,
            self._answer_fetch, self._has_served,
        )  # fmt: skip

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then drain."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._step_out.run()),
                group.create_task(self._out.run()),
                group.create_task(self._beats()),
            ]
            await stop.wait()
            await self._drain()
            await end(tasks)
        await self._step_out.drain()
        await self._out.drain()
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)
        if self._exchange is not None:
            await asyncio.to_thread(self._exchange.close)
        elif self._listening is not None:  # it was told to stop while it loaded
            self._listening.close()
        if self._followers is not None:
            await asyncio.to_thread(self._followers.close)

    async def _drain(self) -> None:
        self.draining = True
        self._beat()
        if self._loop is None:
            return
        self._quiet.clear()
        try:
            async with asyncio.timeout(self._config.drain_grace_s):
                if self._loop.num_slots:
                    await self._quiet.wait()
                await self._linger()
        except TimeoutError:
            log.warning("stopped with %d sequences unfinished", self._loop.num_slots)

    async def _linger(self) -> None:
        """Whoever has taken over a sequence may still be fetching its KV blocks, or be about to."""
        while self._exchange is not None and (idle_s := self._exchange.idle_s()) is not None:
            quiet_s = min(idle_s, time.monotonic() - self._left_at)
            if quiet_s >= LINGER_S:
                return
            await asyncio.sleep(LINGER_S - quiet_s)

    # --- in ---------------------------------------------------------------------------------------------------------

    def _on_plan(self, payload: bytes, _: str) -> None:
        try:
            message = decode(payload)
        except BadMessage:
            self._metrics.bad_messages.inc()
            return
        if isinstance(message, RollCall):  # a scheduler that doubts whether this worker is there
            self._beat()
            return
        if not isinstance(message, StepPlan | Reset):
            self._metrics.bad_messages.inc()
            return
        if self._loop is None:
            return  # it was for the process before this one, which is still loading
        verdict = self._ledger.offer(message)
        if verdict.stale:
            self._metrics.stale_plans.inc()
        if verdict.reset and isinstance(message, Reset):
            self._loop.reset(message)
            tell(SERVES)  # a scheduler knows it
        if verdict.execute is not None:
            self._loop.put(verdict.execute)
        elif verdict.resend is not None:
            self._metrics.results_resent.inc()
            self._step_out.post(self._subjects.result(message.epoch), verdict.resend)
        elif verdict.need is not None:
            self._metrics.plan_gaps.inc()
            self._step_out.post(self._subjects.result(message.epoch), encode(verdict.need))

    def _on_roll_call(self, payload: bytes, _: str) -> None:
        try:
            if isinstance(decode(payload), RollCall):
                self._beat()
        except BadMessage:
            self._metrics.bad_messages.inc()

    # --- out --------------------------------------------------------------------------------------------------------

    def _deliver(self, executed: Executed) -> None:
        """On the step loop's thread: encode, then hand over to the event loop."""
        plan = executed.plan
        if executed.fault:
            if self._followers is not None and self._followers.ended_by(plan.epoch, plan.step, executed.fault):
                return  # the worker ends: one loss, not a fault and then another
            fault = WorkerFault(plan.epoch, self._name, self._incarnation, plan.step, executed.fault)
            self._event_loop.call_soon_threadsafe(self._send_fault, executed, encode(fault))
            return
        result = encode(executed.result)
        batches = [
            (gateway, encode(TokenBatch(plan.epoch, self._name, self._incarnation, plan.step, part)))
            for gateway, entries in executed.entries.items()
            for part in split_entries(entries, self._bus.max_payload)
        ]
        self._event_loop.call_soon_threadsafe(self._send, executed, result, batches)

    def _answer_reset(self, reset: Reset, pages: PageBook) -> None:
        """On the step loop's thread: what the pages hold now that the batch is gone."""
        packed = pages.packed(self._bus.max_payload // 2)
        snapshot = encode(PageSnapshot(reset.epoch, self._name, self._incarnation, reset.step, *packed))
        self._event_loop.call_soon_threadsafe(self._send_snapshot, self._subjects.result(reset.epoch), snapshot)

    def _call_loop(self, work: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call(work)

    def _answer_fetch(self, fetched: Fetched) -> None:
        """On the thread of the fetch."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the worker has stopped
            self._event_loop.call_soon_threadsafe(self._send_fetched, fetched)

    def _send_fetched(self, fetched: Fetched) -> None:
        self._step_out.post(self._subjects.result(fetched.epoch), encode(fetched))
        transport = fetched.transport or "none"
        if fetched.reason:
            self._metrics.fetch_failures.labels(transport).inc()
        else:
            self._metrics.fetched_bytes.labels(transport).inc(fetched.bytes)
            self._metrics.fetch_seconds.labels(transport).observe(fetched.us / 1e6)

    def _has_served(self, transport: str, count: int, refusal: str) -> None:
        """On the thread of a connection."""
        if refusal:
            self._metrics.fetches_refused.inc()
        else:
            self._metrics.served_bytes.labels(transport).inc(count)

    def _send_snapshot(self, subject: str, snapshot: bytes) -> None:
        self._step_out.post(subject, snapshot)
        self._quiet.set()  # the batch is gone: whoever waits for its end need not any more

    def _send(self, executed: Executed, result: bytes, batches: list[tuple[str, bytes]]) -> None:
        self._ledger.record(executed.plan, result)
        self._step_out.post(self._subjects.result(executed.plan.epoch), result)
        for gateway, payload in batches:
            self._out.post(self._subjects.tokens(gateway), payload)
        self._observe(executed)

    def _send_fault(self, executed: Executed, payload: bytes) -> None:
        plan = executed.plan
        if not executed.skipped:
            self._metrics.faults.inc()
        self._ledger.record(plan, payload)  # the plan again gets the fault again: this message may be lost
        self._step_out.post(self._subjects.result(plan.epoch), payload)

    def _observe(self, executed: Executed) -> None:
        result = executed.result
        self._metrics.step_seconds.observe(result.forward_us / 1e6)
        self._metrics.busy_seconds.value += result.forward_us / 1e6
        if executed.plan.backlog:
            self._metrics.idle_gap_seconds.observe(result.gap_us / 1e6)
        prefill = sum(count for _, count in executed.plan.chunks)
        rows = self._metrics.rows
        rows["prefill"].value += prefill
        rows["decode"].value += result.rows - prefill - result.padding_rows
        rows["padding"].value += result.padding_rows
        self._metrics.batch_size.observe(len(executed.rows))
        self._metrics.iteration_tokens.observe(result.rows)
        self._metrics.kv_bytes_copied.value = result.kv_bytes_copied
        if self._on_device is not None:
            self._metrics.lacked_memory.value = self._on_device.lacked_memory
        if executed.dropped:
            self._left_at = time.monotonic()
        if self._loop is not None:
            self._metrics.slots.value = self._loop.num_slots
            if not self._loop.num_slots:
                self._quiet.set()
        if self._tracing.enabled:
            self._spans.executed(executed)

    # --- presence ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        loop = self._loop
        state = WorkerState.LOADING
        if self._runner is not None:
            state = WorkerState.DRAINING if self.draining else WorkerState.READY
        executing = loop.executing if loop is not None else 0
        beat = WorkerBeat(
            worker=self._name,
            incarnation=self._incarnation,
            epoch=self._ledger.epoch,
            state=state,
            capacity=self._capacity,
            step=loop.last_step if loop is not None else 0,
            executing=executing,
            executing_us=(time.monotonic_ns() - loop.executing_since_ns) // 1000 if loop and executing else 0,
            slots=loop.num_slots if loop is not None else 0,
            fetched=self._exchange.fetches.unheard if self._exchange is not None else [],
        )
        self._out.post(self._subjects.beat("worker", self._name), encode(beat))

    async def _beats(self) -> None:
        while True:
            self._beat()
            if self._loop is not None and not self._loop.alive:
                raise ServiceFault("the step loop ended")
            if self._followers is not None:
                self._followers.check()
            await asyncio.sleep(BEAT_S)


def split_entries(entries: list[TokenEntry], max_payload: int) -> list[list[TokenEntry]]:
    """Cut a gateway's entries so that each part surely stays under ``max_payload`` bytes."""
    room = max_payload // 2
    parts: list[list[TokenEntry]] = [[]]
    size = 0
    for entry in entries:
        weight = 64 + len(entry.request_id.encode()) + 5 * len(entry.tokens) + 4 * len(entry.reason)
        if entry.logprobs or entry.prompt_logprobs:
            weight += sum(20 + 14 * len(one.top_ids) for one in (*entry.logprobs, *entry.prompt_logprobs))
        if size + weight > room and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += weight
    return parts
