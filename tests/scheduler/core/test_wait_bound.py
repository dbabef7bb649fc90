"""The bound on a blocked head's wait (docs/architecture.md, "Bounds"), under loads that are made to stretch it.

The bound is computed from what runs when the head's reservation begins, then held against what happened.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from mesh_in_a_box import MS, VOCAB, Box, request

from scheduler.core.limits import Limits
from scheduler.core.sequence import Sequence
from shared.messages import StepPlan
from shared.pool_name import DEFAULT_POOL

CHUNK = 8


@dataclass
class Reservation:
    """A head's, from the plan in which it begins. ``within`` plans are the bound if nobody is delayed."""

    head: Sequence
    first_plan: int
    within: int
    delays: int = 0  # steps that sure ends moved away, since somebody was preempted or got less than a chunk


class WatchedBox(Box):
    """Computes the bound when a reservation begins, and asserts it in every plan until the head is admitted.

    Asserts too that only so many pass a head before it holds one as the limits say, to the very one.
    """

    def __init__(self, limits: Limits, **cap: int) -> None:
        super().__init__(limits, **cap)
        self.reservation: Reservation | None = None
        self.heads: list[Sequence] = []
        self.kept: list[Reservation] = []
        self.reached = 0  # plans in which a bypass was the last one without a reservation
        self.entered: set[tuple[str, int]] = set()

    def plan(self, worker: str = "w0") -> StepPlan | None:
        state, queue = self.core.workers[worker], self.core.queues["m", DEFAULT_POOL]
        before = {id(s): (s.scheduled, s.remaining) for s in state.running}
        end = self.last_sure_end()
        self._begin_reservation(queue.blocked)
        last = queue.blocked
        passed = last.bypasses if last is not None else 0
        plan = super().plan(worker)
        if plan is not None:
            self._check_passes(plan, end, passed if queue.blocked is last else 0)
        head, held = queue.blocked, self.reservation
        if head is not None and head not in self.heads[-1:]:
            self.heads.append(head)
        if plan is None or held is None:
            return plan
        if head is not held.head:
            self.kept.append(held)
            self.reservation = None
            return plan
        granted = True
        for sequence in state.running:
            at, left = before.get(id(sequence), (0, len(sequence.tokens)))
            granted = granted and sequence.scheduled - at >= min(left, CHUNK)
        delay = max(0, self.last_sure_end() - max(0, end - 1))
        if granted and not state.preempted:
            assert not delay, f"what passed {held.head.request_id} put the last sure end off by {delay}"
        held.delays += delay
        waited = len(self.plans) - held.first_plan
        assert waited <= held.within + held.delays, (
            f"{held.head.request_id} holds a reservation for {waited} plans; its bound is {held.within} + {held.delays}"
        )
        return plan

    def _check_passes(self, plan: StepPlan, end: int, before: int) -> None:
        """Those that passed the head in this plan. ``before``: bypasses that it had, ``end``: the last sure one."""
        state, head = self.core.workers["w0"], self.core.queues["m", DEFAULT_POOL].blocked
        keys = [(start.request_id, start.choice) for start in plan.starts if start.parent < 0]
        fresh = [key for key in keys if key not in self.entered]
        self.entered.update((start.request_id, start.choice) for start in plan.starts)
        if head is None:
            return
        sequences = {(one.request_id, one.choice): one for one in state.running}
        within = self.limits.max_bypasses - before
        if self.now - head.blocked_since >= self.limits.max_bypass_wait_ns:
            within = 0
        in_order = len(fresh) - (head.bypasses - before)
        self.reached += 0 < within < len(fresh) - in_order
        for place, key in enumerate(fresh):
            one = sequences[key]
            ends = one.submit.sampling.max_tokens + -(-len(one.tokens) // CHUNK)
            if place < in_order + max(0, within):
                end = max(end, ends)
            assert ends <= end, f"{key} passes a reservation, and would end after all that run"

    def last_sure_end(self) -> int:
        state = self.core.workers["w0"]
        return max((steps_to_end(sequence) for sequence in (*state.running, *state.preempted)), default=0)

    def _begin_reservation(self, head: Sequence | None) -> None:
        if head is None or (self.reservation is not None and self.reservation.head is head):
            return
        self.reservation = None
        waited = self.now - head.blocked_since
        if head.bypasses >= self.limits.max_bypasses or waited >= self.limits.max_bypass_wait_ns:
            within = self.last_sure_end() + self.limits.run_ahead
            self.reservation = Reservation(head, len(self.plans), within)


def steps_to_end(sequence: Sequence) -> int:
    """Iterations until it is sure to have ended, by its max_tokens, if it gets a chunk or a token in each."""
    left = sequence.submit.sampling.max_tokens - sequence.generated - sequence.pending
    prompt = len(sequence.tokens) - sequence.scheduled
    return left + -(-max(0, prompt) // CHUNK)


def unique_prompt(number: int, length: int) -> list[int]:
    return [number % VOCAB, number // VOCAB, *((number + 3 * i) % VOCAB for i in range(length))][:length]


def press(box: WatchedBox, seed: int, steps: int = 500) -> None:
    """Small ones without pause, of all lengths, and again and again one that needs most of the pool."""
    rng = random.Random(seed)
    pool = box.core.workers["w0"].pool.num_blocks * 4
    for _ in range(steps):
        while box.core.num_waiting < 12:
            order = len(box.submits)
            large = rng.random() < 0.15
            length = rng.randint(pool // 2, pool - 24) if large else rng.randint(2, 20)
            longest = rng.choice([2, 6]) if large else rng.choice([1, 3, 8, 40])
            n = 1 if large else rng.choice([1, 1, 2])
            box.submit(
                request(
                    f"r{order:05}", max_tokens=longest, arrival_ns=order, prompt=unique_prompt(order, length),
                    ignore_eos=rng.random() < 0.7, tenant=rng.choice(["", "a"]), n=n,
                )
            )  # fmt: skip
        box.step()
    box.run()
    box.assert_idle()


def limits(**more: object) -> Limits:
    base: dict[str, object] = {"max_num_seqs": 10, "max_num_batched_tokens": 100, "prefill_chunk_limit": CHUNK}
    base["length_quantile"] = 0.95  # few preemptions
    return Limits(**base | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bound",
    [
        {"max_bypasses": 0},
        {"max_bypasses": 3},
        {"max_bypasses": 6, "admission_watermark": 0.0},
        {"max_bypasses": 1 << 20, "max_bypass_wait_ns": 15 * MS},
    ],
    ids=["strict order", "after 3", "after 6", "after 15 ms"],
)
def test_a_reservation_lasts_no_longer_than_those_that_run_by_their_max_tokens(bound: dict[str, int]) -> None:
    """The budget gives every prompt its chunk, so that only a preemption delays anybody."""
    kept = []
    for seed in (1, 2, 3):
        box = WatchedBox(limits(**bound), num_blocks=40, max_model_len=400)
        press(box, seed)
        kept += box.kept
    assert sum(not held.delays for held in kept) >= 5, "too few heads were put to the test"


def test_delays_by_a_small_budget_and_by_preemption_are_all_that_is_added() -> None:
    tight = limits(
        max_num_batched_tokens=14, max_bypasses=3, growth_aware_admission=False, admission_watermark=0.0
    )  # fmt: skip
    kept, preemptions = [], 0
    for seed in (4, 5, 6):
        box = WatchedBox(tight, num_blocks=40, max_model_len=400)
        press(box, seed)
        kept += box.kept
        preemptions += box.core.counters.preemptions
    assert len(kept) >= 5 and preemptions and any(held.delays for held in kept)


def test_the_reservation_begins_in_the_middle_of_a_plan() -> None:
    """That only those that are sure to end in time pass beyond the bound is asserted in every plan."""
    reached = 0
    for seed in (5, 6):
        made = limits(max_bypasses=1, max_bypass_wait_ns=1 << 60, length_quantile=0.55)
        box = WatchedBox(made, num_blocks=60, max_model_len=400)
        press(box, seed)
        reached += box.reached
    assert reached >= 3
