"""A worker that answers plans with results computed from the plan: lengths are known, tokens are only placeholders.

State is kept per sequence in numpy arrays, so that a decode step over hundreds of sequences costs some microseconds.
Semantics are those of ``worker.batch``: EOS and lengths are checked here, a row whose slot has ended yields -1, and
forks sample from their parent's last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.simulate.beams import SimulatedBeams
from headrace.simulate.step_time import StepTime, StepWork
from headrace.simulate.workload import Request
from shared.messages import Capacity, StepPlan, StepResult

OUTPUT_CONTENT = 1 << 30
"""Token ids from here on are outputs: one id for each sequence, so that no two outputs share a page by chance."""

VOCAB_SIZE = 1 << 31

Ints = npt.NDArray[np.int64]


class Population:
    """Every sequence (choice of a request) of a run, by number: true lengths, and when its tokens came."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        counts = [len(request.outputs) for request in requests]
        self.first_of = np.concatenate(([0], np.cumsum(counts))).astype(np.int64).tolist()
        self.size: int = self.first_of[-1]
        self.request_of: Ints = np.repeat(np.arange(len(requests)), counts)
        self.length: Ints = np.array([output for request in requests for output in request.outputs], np.int64)
        self.left = self.length.copy()  # tokens still to come, as the workers know
        self.first_ns: Ints = np.zeros(self.size, np.int64)
        self.last_ns: Ints = np.zeros(self.size, np.int64)
        self.widest_gap_ns: Ints = np.zeros(self.size, np.int64)

    def number(self, request_id: str, choice: int) -> int:
        """The beams of one search are one sequence here, whatever their choices are."""
        index = int(request_id)
        return int(self.first_of[index]) + (0 if self.requests[index].beam_width else choice)


@dataclass(slots=True)
class Executed:
    """What a step did: its result, its work and duration, and which sequences got a token."""

    result: StepResult
    work: StepWork
    duration_ns: int
    got_token: Ints
    occupied: int  # slots in the batch
    prefill_rows: int
    padding_rows: int
    decode_rows: int


class SimulatedWorker:
    def __init__(
        self, name: str, capacity: Capacity, step_time: StepTime, population: Population, incarnation: int = 1
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.incarnation = incarnation
        self._step_time = step_time
        self._population = population
        self._in_slot: Ints = np.full(64, -1, np.int64)
        self._context: Ints = np.zeros(population.size, np.int64)  # KV entries computed
        self._known: Ints = np.zeros(population.size, np.int64)  # tokens known when it joined
        self.beams = SimulatedBeams()

    def execute(self, plan: StepPlan) -> Executed:
        """Run a plan at once; the caller lets its duration pass."""
        left, context = self._population.left, self._context
        forks = self._join(plan)
        in_slot = self._in_slot
        work = StepWork()
        candidates: list[tuple[int, list[int], list[float]]] = []
        plain = plan.decodes
        if self.beams.in_slot:
            plain = [slot for slot in plan.decodes if slot not in self.beams.in_slot]
            for slot in plan.decodes:
                if slot in self.beams.in_slot:
                    candidates += self.beams.run(slot, 1, work)
        decodes = in_slot[plain] if plain else _NONE
        alive = left[decodes] > 0
        running = decodes if alive.all() else decodes[alive]
        if len(running):
            context[running] += 1
            attended = int(context[running].sum())
            work.rows += len(running)
            work.context += attended
            work.kv_tokens += attended
        decode_rows = work.rows
        sampled: list[int] = []
        of_chunks: list[int] = []  # tokens, in plan order
        for slot, count in plan.chunks:
            if slot in self.beams.in_slot:
                found = self.beams.run(slot, count, work)
                candidates += found
                of_chunks += [_BEAM] * len(found)
                continue
            number = int(in_slot[slot])
            before = int(context[number])
            context[number] = before + count
            work.add_rows(before, count)
            if before + count == self._known[number]:
                sampled.append(number)
                of_chunks.append(number + OUTPUT_CONTENT)
        prefill_rows = work.rows - decode_rows
        sampled += forks
        padding_rows = 0
        for slot, count in plan.padding:
            padding_rows += count
            work.kv_tokens += int(context[in_slot[slot]])
        work.rows += padding_rows
        work.context += padding_rows
        work.copied_tokens = len(plan.copies) * self.capacity.block_size
        work.swapped_tokens = (len(plan.swap_outs) + len(plan.swap_ins)) * self.capacity.block_size
        got = np.concatenate((running, np.array(sampled, np.int64))) if sampled else running
        left[got] -= 1
        tokens: list[int] = np.where(alive, decodes + OUTPUT_CONTENT, -1).tolist()
        if len(plain) < len(plan.decodes):
            of_plain = iter(tokens)
            tokens = [_BEAM if slot in self.beams.in_slot else next(of_plain) for slot in plan.decodes]
        tokens += of_chunks + [number + OUTPUT_CONTENT for number in forks]
        duration_ns = self._step_time.ns(work)
        result = StepResult(
            plan.epoch, self.name, self.incarnation, plan.step, tokens, self._ends(plan, got, sampled),
            forward_us=duration_ns // 1000, rows=work.rows, padding_rows=padding_rows, candidates=candidates,
            swap_us=self._step_time.swap_ns(work) // 1000,
        )  # fmt: skip
        chunked = {slot for slot, _ in plan.chunks}
        idle = sum(slot not in chunked for slot, _ in plan.padding)
        return Executed(
            result, work, duration_ns, got, len(plan.decodes) + len(plan.chunks) + len(forks) + idle, prefill_rows,
            padding_rows, decode_rows,
        )  # fmt: skip

    def _join(self, plan: StepPlan) -> list[int]:
        """Carry out the plan's drops and starts; returns the numbers of forks, which sample from their parents."""
        in_slot, population = self._in_slot, self._population
        for slot in plan.drops:
            in_slot[slot] = -1
            self.beams.in_slot.pop(slot, None)
        forks: list[int] = []
        for start in plan.starts:
            if start.slot >= len(in_slot):
                self._in_slot = in_slot = np.concatenate((in_slot, np.full(start.slot + 64, -1, np.int64)))
            if start.sampling.beam_width:
                in_slot[start.slot] = -1
                self.beams.start(start)
                continue
            self.beams.in_slot.pop(start.slot, None)
            number = population.number(start.request_id, start.choice)
            in_slot[start.slot] = number
            self._context[number] = start.computed
            known = len(start.tokens) // 4
            if start.parent >= 0:
                forks.append(number)
                known = start.computed
            self._known[number] = known
            population.left[number] = population.length[number] - (known - start.prompt_len)
        return forks

    def _ends(self, plan: StepPlan, got: Ints, sampled: list[int]) -> list[tuple[int, str]]:
        left = self._population.left
        finished = got[left[got] == 0]
        if not len(finished):
            return []
        ended = set(finished.tolist())
        slots = list(plan.decodes)
        if sampled:
            slots += [slot for slot, _ in plan.chunks] + [start.slot for start in plan.starts if start.parent >= 0]
        found = []
        for slot in slots:
            number = int(self._in_slot[slot])
            if number >= 0 and number in ended:
                whole = self._population.requests[self._population.request_of[number]]
                at_limit = self._population.length[number] >= whole.max_tokens
                found.append((slot, "length" if at_limit else "stop"))
        return found


_NONE: Ints = np.zeros(0, np.int64)
_BEAM = -2  # what a result says for a beam instead of a token
