"""The lossy mesh with sequences that move: workers fetch each other's KV blocks, off the steps, and may fail at it.

A fetch does its worst: until it is over its target pages hold rubbish, which is written anew whenever anything else
happens, and what its source's pages hold is read at the last moment. So tokens are right only if the scheduler keeps
both sides' blocks for as long as it must, and no longer than the workers tell.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import msgspec
from lossy_mesh import LossyBox

from scheduler.core.events import Moved, NotMoved
from shared.messages import Capacity, Fetch, Fetched, Need, PageSnapshot, Role, StepPlan, StepResult
from worker.simulated import chain, first_state

RUBBISH = 0xDEAD_BEEF_DEAD_BEEF


@dataclass
class Under:
    """A fetch under way."""

    fetch: Fetch
    epoch: int
    incarnation: int  # of the worker that fetches


class MovingBox(LossyBox):
    """``roles``: of the workers, in order. ``us_per_block``: what a fetch says that it took."""

    def __init__(self, *args: object, roles: tuple[Role, ...] = (), us_per_block: int = 50, **kwargs: object) -> None:
        self.roles = roles
        self.us_per_block = us_per_block
        self.fetching: dict[str, list[Under]] = defaultdict(list)
        self.unheard: dict[str, dict[int, Fetched]] = defaultdict(dict)  # answers that no plan has dropped
        self.asked: set[tuple[int, int]] = set()  # (epoch, fetch)
        super().__init__(*args, workers=len(roles), **kwargs)  # type: ignore[arg-type]

    def add_worker(self, name: str, cap: Capacity, incarnation: int = 1) -> None:
        role = self.roles[len(self.batches)] if len(self.batches) < len(self.roles) else Role.MIXED
        cap = msgspec.structs.replace(cap, role=role, transfer=[f"box://{name}/key"], kv_bytes_per_token=8)
        super().add_worker(name, cap, incarnation)

    # --- the worker -------------------------------------------------------------------------------------------------

    def run_plan(self, plan: StepPlan) -> StepResult:
        for number in plan.drop_fetches:
            self.unheard[plan.worker].pop(number, None)
        result = super().run_plan(plan)
        for fetch in plan.fetches:
            assert (plan.epoch, fetch.fetch) not in self.asked, "a number that was used before"
            self.asked.add((plan.epoch, fetch.fetch))
            self.fetching[plan.worker].append(Under(fetch, plan.epoch, plan.incarnation))
        self.scribble()
        return result

    def scribble(self) -> None:
        """What is being fetched may be written at any time."""
        for worker, under in self.fetching.items():
            for one in under:
                for _, page in one.fetch.pages:
                    self.runners[worker]._kv[page] = RUBBISH

    def finish(self, worker: str, place: int = 0, reason: str = "") -> None:
        """One of the worker's fetches is over: as it should, or for ``reason``."""
        under = self.fetching[worker]
        if not under:
            return
        one = under.pop(place % len(under))
        reason = reason or self.refusal(one)
        if not reason:
            source, target = self.runners[one.fetch.source], self.runners[worker]
            for there, here in one.fetch.pages:
                target._kv[here] = source._kv[there]
            self.check_fetched(worker, one)
        self.seen["failed fetches" if reason else "fetches"] += 1
        count = len(one.fetch.pages)
        answer = Fetched(
            one.epoch, worker, one.incarnation, one.fetch.fetch, reason, 0 if reason else 32 * count,
            self.us_per_block * count, "box",
        )  # fmt: skip
        self.unheard[worker][one.fetch.fetch] = answer
        self.wires[worker].results.append(answer)  # type: ignore[arg-type]

    def check_fetched(self, worker: str, one: Under) -> None:
        """What came is what the sequence's tokens give, in each block: its next token shows the last one alone."""
        state = self.core.workers.get(worker)
        fetching = None
        if state is not None and (self.core.epoch, state.incarnation) == (one.epoch, one.incarnation):
            fetching = state.fetching.get(one.fetch.fetch)
        if fetching is None or fetching.move.over:
            return
        sequence, size = fetching.move.sequence, fetching.move.block_size
        value, first = first_state(sequence.submit.adapter), sequence.pages.index(fetching.there[0])
        blocks = range(first, first + len(fetching.there))
        for position, token in enumerate(sequence.tokens[: sequence.scheduled]):
            value = chain(value, token)
            if position // size in blocks:
                held = self.runners[worker]._kv[fetching.here[position // size - first], position % size]
                assert held == value, f"{sequence.request_id}: token {position} came before it was computed"

    def refusal(self, one: Under) -> str:
        """Why the source does not give its pages away, or no longer."""
        fetch = one.fetch
        ledger = self.wires[fetch.source].ledger
        if ledger.incarnation != fetch.incarnation or ledger.epoch != one.epoch:
            return "another process, or another epoch"
        if not 0 < ledger._began <= fetch.after:
            return "it was reset"
        assert fetch.after < ledger.expected, "its source has not run that step"
        return ""

    def forget_batch(self, worker: str) -> None:
        super().forget_batch(worker)
        self.fetching[worker].clear()
        self.unheard[worker].clear()

    def crash(self, worker: str) -> None:
        super().crash(worker)
        self.fetching[worker].clear()
        self.unheard[worker].clear()

    # --- the scheduler's driver -------------------------------------------------------------------------------------

    def beat(self, worker: str) -> None:
        super().beat(worker)
        for answer in list(self.unheard[worker].values()):
            self.take(worker, answer)  # type: ignore[arg-type]

    def take(self, worker: str, message: StepResult | Need | PageSnapshot) -> None:
        if not isinstance(message, Fetched):
            super().take(worker, message)
            return
        state = self.core.workers.get(worker)
        current = (message.epoch, message.incarnation) == (self.core.epoch, state.incarnation if state else 0)
        if state is None or not current or message.fetch not in state.fetching:
            self.seen["answers repeated or of a lost batch"] += 1
            assert self.core.fetched(message, self.now) == []
            self.core.check()
            return
        self.events += self.core.fetched(message, self.now)
        self.core.check()

    def check_nothing_could_run(self, worker_name: str) -> None:
        """What is on its way to a worker may have its place; it comes, or fails, by what its source does."""
        worker = self.core.workers[worker_name]
        if worker.arriving or not worker.takes_new:
            assert worker.transferring or not (len(worker.running) or worker.preempted), "nothing of it has a row"
        elif not worker.transferring:
            super().check_nothing_could_run(worker_name)

    def _exchange(self, worker: str) -> None:
        before = list(self.fetching[worker])
        super()._exchange(worker)
        for one in before:
            if one in self.fetching[worker]:
                self.finish(worker, self.fetching[worker].index(one))
        while self.wires[worker].results:
            self.deliver(worker)
        self.observe()

    def heal(self) -> None:
        super().heal()
        for _ in range(4):
            for worker in self.wires:
                self.beat(worker)
                self.round(worker)
        super().heal()

    def most_rounds(self) -> int:
        """A move takes some rounds, in which its sequence pauses, and a sequence makes a few of them."""
        choices = sum(self.submits[request_id].n for request_id in self.core.live_requests())
        return super().most_rounds() + 40 * choices

    @property
    def told(self) -> set[str]:
        """Why sequences moved, or did not."""
        moves = {one.why for one in self.events if isinstance(one, Moved)}
        failed = {one.reason for one in self.events if isinstance(one, NotMoved)}
        named = {"its blocks were needed": "gave way", "it took more than 5 s": "timed out"}
        return moves | {named[reason] for reason in failed if reason in named}

    def assert_idle(self) -> None:
        super().assert_idle()
        for worker in self.core.workers.values():
            assert not (worker.arriving or worker.departing or worker.fetching or worker.lent)
