"""The flight recorder: what the last steps did and what became of the last requests, in bounded memory.

It answers *why* a request took its time (``headrace explain``) without any tracing back end. Everything here is noted
from what the service has in hand anyway: a step costs some microseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.core.events import CoreEvent, Ended, Failed, Moved, Preempted
from scheduler.core.sequence import Sequence as CoreSequence
from shared.flight_record import AnswerTrace, ChoiceTrace, Interruption, Report, RequestTrace, Stay, StepTrace
from shared.messages import StepPlan, StepResult, Submit

MOST_STEPS_TOLD = 4096
"""Steps in one report: some hundred bytes each, well below a message's limit."""

MOST_REFUSED = 256
"""Refusals that are remembered, apart from requests: a flood of them must not push those out."""

MOST_FIRST_TOKENS = 8192

GATEWAY_ASKED = "lost: its gateway noticed first (tokens were missing, or its connection to NATS was interrupted)"


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits behind a plan, and for what."""

    waiting: int
    lack: str
    lack_of: str


class FlightRecorder:
    """The last ``requests`` requests and ``steps`` steps. Live requests are never dropped."""

    def __init__(self, requests: int = 2048, steps: int = 16_384) -> None:
        self._most = requests
        self._requests: dict[str, RequestTrace] = {}
        self._refused: dict[str, RequestTrace] = {}
        # Ids that clients know -> the requests of that call, one for each prompt, in order.
        self._names: dict[str, dict[str, None]] = {}
        self._ended: deque[str] = deque()  # in the order in which they ended
        self.steps: deque[StepTrace] = deque(maxlen=steps)
        self.settled_steps: deque[StepTrace] = deque(maxlen=steps)  # those with a result, in the order of results
        self.num_settled = 0  # since start
        self.first_tokens: deque[tuple[int, int]] = deque(maxlen=MOST_FIRST_TOKENS)  # (ns, ns since its submit)
        self._open: dict[tuple[str, int], StepTrace] = {}  # without a result
        self._firsts: dict[tuple[str, int], list[tuple[str, int]]] = {}  # open step -> choices with a first token in it
        self._nearly: dict[tuple[str, int], tuple[str, int]] = {}  # slots whose next row ends the prompt -> choice
        self._slots: dict[tuple[str, int], tuple[str, int]] = {}  # (worker, slot) -> (request, choice)

    # --- what happened ----------------------------------------------------------------------------------------------

    def submitted(self, submit: Submit, sequences: Iterable[CoreSequence], position: int, now: int) -> None:
        """A request was accepted; ``sequences`` are its choices, without those that are done. It may be resumed."""
        known = self._requests.get(submit.request_id)
        if known is not None:
            for sequence in sequences:
                self._resumed(known, sequence, submit.attempt, now)
            return
        choices = {one.choice: ChoiceTrace(one.choice, one.causes) for one in sequences}
        self._requests[submit.request_id] = record = _trace(submit, now, position, choices)
        record.pool = next((one.home.key.pool for one in sequences), submit.pool)
        self._name(record)
        self._trim()

    def _resumed(self, record: RequestTrace, sequence: CoreSequence, attempt: int, now: int) -> None:
        """Its life goes on. Its gateway may have noticed the loss before this scheduler did."""
        choice = record.choices.get(sequence.choice)
        if choice is None:  # a later choice of a request that came here half done
            record.choices[sequence.choice] = ChoiceTrace(sequence.choice, sequence.causes)
            return
        at, why = (choice.ended_ns, choice.end) if choice.interrupted else (now, GATEWAY_ASKED)
        if choice.stays and not choice.stays[-1].left_ns:
            choice.stays[-1].left_ns, choice.stays[-1].why_left = at, why
        choice.interruptions.append(Interruption(at, why, now, attempt, choice.causes))
        choice.causes, choice.end, choice.ended_ns = sequence.causes, "", 0

    def leads_no_more(self, now: int) -> None:
        """Another scheduler goes on with what was live."""
        for worker in {worker for worker, _ in (*self._open, *self._slots)}:
            self.worker_lost(worker)
        why = "lost: this scheduler stopped leading"
        for record in self._requests.values():
            if record.live:
                for choice in record.choices.values():
                    if not choice.end:
                        choice.end, choice.ended_ns = why, now
                        if choice.stays and not choice.stays[-1].left_ns:
                            choice.stays[-1].left_ns, choice.stays[-1].why_left = now, why
                self._ended.append(record.request_id)
        self._trim()

    def planned(self, plan: StepPlan, events: Sequence[CoreEvent], queue: Queue, now: int) -> None:
        """A plan goes out; ``events`` came with it."""
        worker, slots = plan.worker, self._slots
        preempted = []
        for event in events:
            if isinstance(event, Preempted):
                preempted.append((event.sequence.request_id, event.cause, event.by))
                self._left(event.sequence, event.cause, event.by, now)
            elif isinstance(event, Moved):
                self._moved(event)
        for slot in plan.drops:
            slots.pop((worker, slot), None)
            self._nearly.pop((worker, slot), None)
        firsts: list[tuple[str, int]] = []
        for start in plan.starts:
            key = slots[worker, start.slot] = (start.request_id, start.choice)
            choice = self._choice(*key)
            if choice is not None:
                known = len(start.tokens) // 4 if start.parent < 0 else start.computed
                choice.stays.append(Stay(worker, plan.step, now, start.computed, known))
                self._near_its_end(worker, start.slot, key, choice.stays[-1], firsts)
        if self._nearly:
            # The last token of a prompt runs as a decode does. Few are so far, many decode.
            decodes = plan.decodes
            ending = [key for key in self._nearly if key[0] == worker and key[1] in decodes]
            firsts += [self._nearly.pop(key) for key in ending]
        recompute = sum(self._chunk(worker, slot, tokens, firsts) for slot, tokens in plan.chunks)
        if firsts:
            self._firsts[worker, plan.step] = firsts
        nobody = ("", 0)
        trace = StepTrace(
            worker, plan.step, now, len(plan.decodes),
            [(*slots.get((worker, slot), nobody), tokens) for slot, tokens in plan.chunks],
            [(start.request_id, start.choice) for start in plan.starts], preempted,
            sum(rows for _, rows in plan.padding), queue.waiting, queue.lack, queue.lack_of, recompute=recompute,
        )  # fmt: skip
        self.steps.append(trace)
        self._open[worker, plan.step] = trace

    def settled(self, result: StepResult, now: int) -> None:
        """A plan's result was applied."""
        trace = self._open.pop((result.worker, result.step), None)
        if trace is not None:
            trace.result_ns, trace.forward_us, trace.wait_us = now, result.forward_us, result.wait_us
            trace.new_tokens = len(result.tokens) - result.tokens.count(-1)
            self.settled_steps.append(trace)
            self.num_settled += 1
            for request_id, number in self._firsts.pop((result.worker, result.step), ()):
                choice = self._choice(request_id, number)
                if choice is not None and not choice.first_token_ns:
                    choice.first_token_ns = now
                    self.first_tokens.append((now, now - self._requests[request_id].submitted_ns))
        for slot, _ in result.ended:
            self._slots.pop((result.worker, slot), None)

    def refused(self, submit: Submit, reason: str, now: int) -> None:
        """A request was not accepted."""
        choices = {0: ChoiceTrace(0, [], end=f"refused: {reason}", ended_ns=now)}
        self._refused[submit.request_id] = record = _trace(submit, now, 0, choices)
        self._name(record)
        if len(self._refused) > MOST_REFUSED:
            self._unname(self._refused.pop(next(iter(self._refused))))

    def told(self, events: Iterable[CoreEvent]) -> None:
        """Ends of sequences, whichever way."""
        for event in events:
            if isinstance(event, Ended | Failed):
                reason = event.reason if isinstance(event, Ended) else f"{event.kind}: {event.reason}"
                sequence = event.sequence
                self._left(sequence, reason, "", event.now_ns)
                record = self._requests.get(sequence.request_id)
                if record is None:
                    continue
                told = record.choices.values() if sequence.group is not None else [record.choices.get(sequence.choice)]
                for choice in told:
                    if choice is not None and not choice.end:
                        choice.end, choice.ended_ns, choice.generated = reason, event.now_ns, sequence.generated
                if not record.live:
                    self._ended.append(record.request_id)
        self._trim()

    def answered(self, answer: AnswerTrace) -> None:
        """A gateway tells how its answer went: once for each prompt that the call carried."""
        record = self._remembered(answer.request_id)
        if record is None:
            return
        record.answer = answer
        if not record.names:  # its gateway is of a version that does not tell them with the submission
            record.answer_id, record.client_id = answer.answer_id, answer.client_id
            self._name(record)

    def worker_lost(self, worker: str) -> None:
        """Its plans get no results any more."""
        for key in [key for key in self._open if key[0] == worker]:
            del self._open[key]
            self._firsts.pop(key, None)
        for known in (self._slots, self._nearly):
            for slot in [slot for slot in known if slot[0] == worker]:
                del known[slot]

    # --- questions --------------------------------------------------------------------------------------------------

    def report(self, scheduler: str, epoch: int, unix_offset_ns: int, request_id: str, now: int) -> Report:
        """Everything that explains the request; without a request if it is not remembered."""
        request, siblings = self._find(request_id)
        if request is None:
            return Report(scheduler, epoch, unix_offset_ns, None)
        workers = {stay.worker for choice in request.choices.values() for stay in choice.stays}
        end_ns = now if request.live else request.ended_ns
        steps = [
            one for one in self.steps_between(request.submitted_ns, end_ns) if one.worker in workers or not workers
        ]
        left_out = max(0, len(steps) - MOST_STEPS_TOLD)
        if left_out:
            telling = sorted(steps, key=lambda one: (not (one.chunks or one.preempted), -one.forward_us))
            steps = sorted(telling[:MOST_STEPS_TOLD], key=lambda one: one.planned_ns)
        return Report(scheduler, epoch, unix_offset_ns, request, steps, left_out, siblings, now)

    def slowest(self, count: int) -> list[RequestTrace]:
        """Ended requests, those first that took longest, as their clients or else the scheduler saw it."""
        return slowest(self.requests(), count)

    def requests(self) -> list[RequestTrace]:
        """All that are remembered, live ones too, but for refusals."""
        return list(self._requests.values())

    def steps_between(self, begin_ns: int, end_ns: int) -> list[StepTrace]:
        """Steps that were planned before ``end_ns`` and whose results came after ``begin_ns``, in order."""
        steps = list(self.steps)
        # Planned times rise, but a step of one worker may still run when another's have long come and gone.
        first = max(0, bisect_left(steps, begin_ns, key=lambda one: one.planned_ns) - 64)
        last = bisect_left(steps, end_ns, key=lambda one: one.planned_ns)
        return [one for one in steps[first:last] if not one.result_ns or one.result_ns > begin_ns]

    def _find(self, name: str) -> tuple[RequestTrace | None, list[str]]:
        """The request of that id (of a call with several prompts: the one that its client awaited), and the others."""
        calls = [name] if self._remembered(name) is not None else list(self._names.get(name, ()))
        found = [record for record in map(self._remembered, calls) if record is not None]
        if not found:
            return None, []
        last = max(found, key=lambda one: (one.live, one.ended_ns))
        if last.names:
            calls = list(self._names.get(last.names[0], calls))
        return last, [other for other in calls if other != last.request_id]

    def _remembered(self, request_id: str) -> RequestTrace | None:
        return self._requests.get(request_id) or self._refused.get(request_id)

    def _name(self, record: RequestTrace) -> None:
        """Find it by the ids that its client knows. Clients may use their ids again: then the last call is meant."""
        for name in record.names:
            calls = self._names.get(name)
            last = self._remembered(next(reversed(calls))) if calls else None
            if calls is None or last is None or last.arrival_ns != record.arrival_ns:
                calls = self._names[name] = {}
            calls[record.request_id] = None

    def _unname(self, record: RequestTrace) -> None:
        """It is forgotten."""
        for name in record.names:
            calls = self._names.get(name)
            if calls is not None and self._remembered(record.request_id) is None:
                calls.pop(record.request_id, None)
                if not calls:
                    del self._names[name]

    def _chunk(self, worker: str, slot: int, tokens: int, firsts: list[tuple[str, int]]) -> int:
        """Prompt tokens of a slot are planned: how many of them had been computed before."""
        key = self._slots.get((worker, slot))
        choice = self._choice(*key) if key is not None else None
        if key is None or choice is None or not choice.stays:
            return 0
        stay = choice.stays[-1]
        lost = choice.stays[-2].lost if len(choice.stays) > 1 else 0
        again = min(tokens, max(0, lost - stay.cached - stay.done))
        stay.done += tokens
        self._near_its_end(worker, slot, key, stay, firsts)
        return again

    def _near_its_end(
        self, worker: str, slot: int, key: tuple[str, int], stay: Stay, firsts: list[tuple[str, int]]
    ) -> None:
        """Note who samples in this step, and who does with its next row."""
        if stay.todo <= 0:
            self._nearly.pop((worker, slot), None)
            firsts.append(key)
        elif stay.todo == 1:
            self._nearly[worker, slot] = key

    def choice_of(self, request_id: str, choice: int) -> ChoiceTrace | None:
        """What is remembered of one choice."""
        return self._choice(request_id, choice)

    def _choice(self, request_id: str, choice: int) -> ChoiceTrace | None:
        record = self._requests.get(request_id)
        return record.choices.get(choice) if record is not None else None

    def _left(self, sequence: CoreSequence, why: str, by: str, now: int) -> None:
        choice = self._choice(sequence.request_id, sequence.choice)
        if choice is not None and choice.stays and not choice.stays[-1].left_ns:
            stay = choice.stays[-1]
            stay.left_ns, stay.why_left, stay.by, stay.lost = now, why, by, sequence.computed_before

    def _moved(self, event: Moved) -> None:
        sequence = event.sequence
        choice = self._choice(sequence.request_id, sequence.choice)
        if choice is not None and choice.stays and not choice.stays[-1].left_ns:
            stay = choice.stays[-1]
            stay.left_ns, stay.why_left = event.now_ns - event.paused_ns, str(event.why)
            stay.moved_to, stay.moved_bytes = sequence.worker, event.bytes
            stay.fetch_us, stay.transport = event.fetch_us, event.transport

    def _trim(self) -> None:
        """Forget the oldest that have ended. Live ones stay: there are no more than the queue and batches hold."""
        while len(self._requests) > self._most and self._ended:
            record = self._requests.get(self._ended.popleft())
            if record is not None and not record.live:  # (else it was resumed under its id)
                del self._requests[record.request_id]
                self._unname(record)


def _trace(submit: Submit, now: int, position: int, choices: dict[int, ChoiceTrace]) -> RequestTrace:
    return RequestTrace(
        submit.request_id, submit.gateway, submit.tenant, submit.priority, len(submit.prompt) // 4,
        submit.sampling.max_tokens, now, position, choices, submit.traceparent, arrival_ns=submit.arrival_ns,
        client_id=submit.client_id, answer_id=submit.answer_id, attempt=submit.attempt, pool=submit.pool,
        adapter=submit.adapter,
    )  # fmt: skip


def slowest(requests: Iterable[RequestTrace], count: int) -> list[RequestTrace]:
    """Of those that have ended the ``count`` that took longest."""
    return heapq.nlargest(count, (one for one in requests if not one.live), key=lambda one: one.took_ns)
