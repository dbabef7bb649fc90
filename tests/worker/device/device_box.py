"""The scheduler's core and a worker's step loop with a device runner, in one thread: the test says who moves when."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import torch
from hash_model import ADAPTERS, EOS, GRAMMARS, HashModel, expected, logits_after
from mesh_in_a_box import MS, Box
from rehearsal_port import RehearsalPort

from scheduler.core.beams import BeamSearch, Hypothesis
from scheduler.core.events import Found
from scheduler.core.limits import Limits
from shared.beams import candidates_wanted
from shared.messages import Capacity, Reset, StepPlan, Submit, TokenEntry, pack_tokens, unpack_tokens
from worker.batch import Batch
from worker.device.runner import DeviceRunner
from worker.page_book import PageBook
from worker.step_loop import Executed, StepLoop

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=24, prefill_chunk_limit=8, growth_aware_admission=False)


def make_runner(port: RehearsalPort, capacity: Capacity, graph_rows: int = 8) -> DeviceRunner:
    model = HashModel(capacity.num_blocks, capacity.block_size)
    return DeviceRunner(model, port, capacity, GRAMMARS, graph_rows=graph_rows)


def searched(submit: Submit) -> list[Hypothesis]:
    """The search without batch, pages or forks."""
    prompt, sampling = unpack_tokens(submit.prompt), submit.sampling
    search = BeamSearch(sampling, [EOS])
    beams: list[list[int]] = [[]]
    while not search.done:
        seen = []
        for beam in beams:
            log_probs = torch.log_softmax(logits_after(prompt + beam, submit.adapter)[0].double(), dim=-1)
            best = log_probs.topk(candidates_wanted(sampling, [EOS]))
            seen.append((best.indices.tolist(), best.values.tolist()))
        beams = [[*beams[one.parent], one.token] for one in search.advance(beams, seen)]
    return search.hypotheses[: submit.n]


class DeviceBox(Box):
    """One worker, ``w0``. Its loop is the production one without its thread: :meth:`step` moves it."""

    def __init__(
        self, seed: int | None = None, limits: Limits = LIMITS, graph_rows: int = 8, num_blocks: int = 64,
        host_blocks: int = 0,
    ) -> None:  # fmt: skip
        self.port = RehearsalPort(seed)
        self.rng = random.Random(seed)
        self.graph_rows = graph_rows
        self.executed: list[Executed] = []  # delivered by the loop, not yet seen by the core
        self.seen: list[Executed] = []  # and seen by it
        self.answers: list[Reset] = []
        self.entries: list[TokenEntry] = []
        self.overlaps = 0  # steps that were launched before the one before them had landed
        super().__init__(limits, num_blocks=num_blocks, host_blocks=host_blocks, adapters=ADAPTERS)

    def add_worker(self, name: str, cap: Capacity, incarnation: int = 1) -> None:
        self.batch = self.batches[name] = Batch(cap.block_size, cap.num_blocks, cap.max_model_len, frozenset([EOS]))
        self.runner = make_runner(self.port, cap, self.graph_rows)
        self.queues[name] = deque()
        self.current = True
        self.loop = StepLoop(
            self.runner, self.batch, lambda _: self.current, self.executed.append, self._answered
        )  # fmt: skip
        self.events += self.core.worker_up(name, incarnation, cap, self.now)

    def _answered(self, reset: Reset, pages: PageBook) -> None:
        self.answers.append(reset)
        self.pages = pages

    def send(self, plan: StepPlan) -> None:
        self.queues[plan.worker].append(plan)

    def take(self) -> None:
        """The loop takes the next plan, if there is one."""
        if self.queues["w0"]:
            self.overlaps += bool(self.loop._in_flight)
            self.loop._take(self.queues["w0"].popleft())

    def land(self, wait: bool = True) -> None:
        """A result leaves, if a step is in flight (and done, if nobody is to wait for it)."""
        if self.loop._in_flight and (wait or self.loop._in_flight[0].flight.done()):
            self.loop._land()
            self._check_pages()

    def _check_pages(self) -> None:
        """Steps in flight behind a sequence's end give its pages to nobody: their plans were made before it was known.

        The row that it may have there in vain writes to them.
        """
        for index, _ in self.executed[-1].result.ended if self.executed else ():
            slot = self.batch.slots.get(index)
            if slot is None or not slot.ended:
                continue
            own = set(self.batch.tables[index, : slot.num_pages].tolist())
            for later in (flight.plan for flight in self.loop._in_flight):
                given = {page for other, pages in later.pages if other != index for page in pages}
                given |= {page for start in later.starts for page in start.pages[start.computed // 4 :]}
                given |= {page for _, page in [*later.copies, *later.swap_ins]}
                assert own.isdisjoint(given), (own & given, later)

    def hear(self) -> None:
        """The core hears of what was executed."""
        for executed in self.executed:
            assert not executed.fault, executed.fault
            for entry in (entry for entries in executed.entries.values() for entry in entries):
                self._keep(entry)
            self.apply(executed.result)
        self.seen += self.executed
        self.executed.clear()

    def step(self, worker: str = "w0") -> None:
        self.now += MS
        while self.plan(worker) is not None:
            if self.rng.random() < 0.3:
                break
        self.take()
        if not self.queues["w0"] or self.rng.random() < 0.3:
            self.land(wait=self.rng.random() < 0.5 or not self.queues["w0"])
        self.hear()

    def restart(self) -> None:
        """After a fault: the worker is reset, and what it ran is submitted again with the tokens that it has."""
        self.executed.clear()
        self.queues["w0"].clear()
        first_step = self.core.workers["w0"].next_step
        self.loop._take(Reset(1, "w0", 1, first_step))
        assert self.answers and not self.batch.slots
        self.events += self.core.worker_up("w0", 1, self.runner.capacity, self.now, first_step)
        for request_id, submit in list(self.submits.items()):
            got = [
                pack_tokens(self.delivered.get((request_id, choice), [])) for choice in range(submit.n)
            ]  # fmt: skip
            done = [choice for choice in range(submit.n) if (request_id, choice) in self.ends]
            again = msgspec.structs.replace(submit, attempt=submit.attempt + 1, resumed=got, done_choices=done)
            self.submit(again)

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.core.live_requests() and not any(self.queues.values()) and not self.loop._in_flight:
                return
            self.step()
        raise AssertionError(f"still live: {self.core.live_requests()}")

    def _keep(self, entry: TokenEntry) -> None:
        self.entries.append(entry)
        if entry.prompt_logprobs:
            return
        got = self.delivered.setdefault((entry.request_id, entry.choice), [])
        assert entry.offset == len(got), "in order, each once"
        got += entry.tokens
        if entry.end:
            assert (entry.request_id, entry.choice) not in self.ends
            assert entry.count == len(got)
            self.ends[entry.request_id, entry.choice] = entry.end

    def assert_tokens_right(self) -> None:
        for event in self.events:
            if isinstance(event, Found):
                assert event.hypotheses == searched(event.submit)
        for (request_id, choice), got in self.delivered.items():
            submit = self.submits[request_id]
            want = expected(unpack_tokens(submit.prompt), submit.sampling, choice, submit.adapter)
            assert got == want[: len(got)], (request_id, choice)
            if (request_id, choice) in self.ends:
                assert len(got) == len(want)
                ended = want[-1] == EOS and not submit.sampling.ignore_eos
                assert self.ends[request_id, choice] == ("stop" if ended else "length")
