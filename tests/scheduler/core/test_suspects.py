"""After a crash: who ran is tried in halves, one culprit is found and failed, and nobody else loses anything."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from lossy_mesh import LossyBox
from mesh_in_a_box import MS, VOCAB, Box, capacity, prompt_of, request

from scheduler.core.events import Failed
from scheduler.core.limits import Limits
from scheduler.core.sequence import Lack
from scheduler.core.state import KEPT_WHOLE_NS
from shared.messages import EndReason, Outcome, Role, StepPlan, StepResult, encode, unpack_tokens
from worker.simulated import expected_tokens

LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=256, prefill_chunk_limit=64, max_num_queued_reqs=64)


class Ended(Exception):
    """The worker died, or its step failed."""


class DeadlyBox(LossyBox):
    """The worker ends whenever ``deadly`` says so of a plan; ``dies``: its process, else the step alone."""

    def __init__(self, deadly: Callable[[DeadlyBox, StepPlan], bool], dies: bool, limits: Limits = LIMITS,
                 policy: str = "continuous", workers: int = 1, **cap: int) -> None:  # fmt: skip
        self.deadly = deadly
        self.dies = dies
        self.crashes = 0
        super().__init__(limits, policy, workers, **{"num_blocks": 400, "max_model_len": 64, **cap})

    def run_plan(self, plan: StepPlan) -> StepResult:
        if self.deadly(self, plan):
            raise Ended
        return super().run_plan(plan)

    def work(self, worker: str) -> None:
        try:
            super().work(worker)
        except Ended:
            self.crashes += 1
            self.batches[worker].clear()
            self.wires[worker].inbox.clear()  # what follows a failed step does not run
            if self.dies:
                self.crash(worker)
                self.beat(worker)
            else:
                self.restart_batch(worker)

    def serve(self, rounds: int = 2000) -> None:
        """Until everything has ended; gateways resume at once."""
        for _ in range(rounds):
            for worker in self.wires:
                if not self.knows(worker):
                    self.beat(worker)
                self.round(worker)
            self.resume()
            if not self.core.live_requests() and not self.lost:
                return
        raise AssertionError(f"live after {rounds} rounds: {self.core.live_requests()}")

    def rows(self, plan: StepPlan) -> list[tuple[str, int]]:
        """(request, generated tokens that it has) of the rows that the plan is about to run."""
        started = {start.slot: start for start in plan.starts}
        found = []
        forks = [start.slot for start in plan.starts if start.parent >= 0]
        for index in [*plan.decodes, *(slot for slot, _ in plan.chunks), *forks]:
            if index in started:
                start = started[index]
                found.append((start.request_id, max(0, len(start.tokens) // 4 - start.prompt_len)))
            elif not self.batches[plan.worker].slots[index].ended:
                slot = self.batches[plan.worker].slots[index]
                found.append((slot.request_id, slot.generated))
        return found

    def failed(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for event in self.events:
            if isinstance(event, Failed) and event.kind == "failed":
                found.setdefault(event.sequence.request_id, set()).add(event.reason)
        return found

    def assert_others_right(self, culprit: str) -> None:
        for request_id, submit in self.submits.items():
            if request_id == culprit:
                continue
            for choice in range(submit.n):
                want = expected_tokens(
                    unpack_tokens(submit.prompt), submit.sampling.seed, submit.sampling.max_tokens, VOCAB, choice
                )
                assert self.delivered[request_id, choice] == want, request_id
        self.assert_idle()


def in_batch(culprit: str) -> Callable[[DeadlyBox, StepPlan], bool]:
    return lambda box, plan: any(request_id == culprit for request_id, _ in box.rows(plan))


def at_token(culprit: str, count: int) -> Callable[[DeadlyBox, StepPlan], bool]:
    """Kills when its output token number ``count`` is computed, from 1."""
    return lambda box, plan: (culprit, count - 1) in box.rows(plan)


def fill(box: DeadlyBox, count: int) -> None:
    for index in range(count):
        n = 3 if index % 5 == 2 else 1
        reply = box.submit(request(f"r{index}", 4 + index % 7, 6 + index % 9, n=n, seed=index, arrival_ns=index))
        assert reply.outcome is Outcome.ACCEPTED
    box.now += MS


def most_crashes(requests: int) -> int:
    return math.ceil(math.log2(requests)) + 2


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("culprit", range(24))
def test_a_request_that_ends_its_worker_every_time_is_failed_and_its_neighbours_finish(
    culprit: int, dies: bool
) -> None:
    box = DeadlyBox(in_batch(f"r{culprit}"), dies, Limits(**{**vars(LIMITS), "max_num_seqs": 48}))
    fill(box, 24)
    box.serve()
    ((request_id, reasons),) = box.failed().items()
    assert request_id == f"r{culprit}"
    assert all("twice ended the worker that ran it alone" in reason for reason in reasons)
    assert 2 <= box.crashes <= most_crashes(24)
    box.assert_others_right(request_id)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("culprit", [0, 7, 12, 23])
def test_one_that_kills_at_a_later_token_is_found_as_well(culprit: int, count: int) -> None:
    box = DeadlyBox(at_token(f"r{culprit}", count), True, Limits(**{**vars(LIMITS), "max_num_seqs": 48}))
    for index in range(24):
        box.submit(request(f"r{index}", 4 + index % 7, 12, seed=index, arrival_ns=index))
    box.serve()
    assert list(box.failed()) == [f"r{culprit}"]
    assert box.crashes <= most_crashes(24)
    assert len(box.delivered.get((f"r{culprit}", 0), [])) == count - 1, "it keeps what came before"
    box.assert_others_right(f"r{culprit}")


@pytest.mark.parametrize(("one", "other"), [("r0", "r1"), ("r2", "r13"), ("r14", "r15")])
def test_two_culprits_are_both_found(one: str, other: str) -> None:
    box = DeadlyBox(lambda box, plan: bool({one, other} & {name for name, _ in box.rows(plan)}), True)
    for index in range(16):
        box.submit(request(f"r{index}", 4 + index % 7, 12, seed=index, arrival_ns=index))
    box.serve()
    assert set(box.failed()) == {one, other}
    assert box.crashes <= 2 * most_crashes(16)
    del box.submits[other]
    box.assert_others_right(one)


def test_what_other_requests_wait_for_a_poison_one_is_bounded() -> None:
    """Each crash costs a restart and two tokens of each half: a few rounds."""
    calm, struck = DeadlyBox(lambda box, plan: False, True), DeadlyBox(in_batch("r5"), True)
    rounds = []
    for box in (calm, struck):
        for index in range(16):
            box.submit(request(f"r{index}", 5, 40, seed=index, arrival_ns=index))
        count = 0
        while box.core.live_requests() or box.lost or not box.ends:
            count += 1
            if not box.knows("w0"):
                box.beat("w0")
            box.round("w0")
            box.resume()
        rounds.append(count)
    assert rounds[1] <= rounds[0] + 10 * most_crashes(16)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_held_batches_are_tried_too(policy: str) -> None:
    box = DeadlyBox(in_batch("r3"), True, policy=policy)
    for index in range(8):
        box.submit(request(f"r{index}", 4 + index % 7, 5 + index % 3, seed=index, arrival_ns=index))
    box.now += 10**9
    box.serve()
    assert list(box.failed()) == ["r3"]
    box.assert_others_right("r3")


@pytest.mark.parametrize("beams", [0, 3])
def test_a_single_request_is_failed_at_its_second_crash(beams: int) -> None:
    box = DeadlyBox(in_batch("r"), False)
    box.submit(request("r", 5, 6, beams=beams))
    box.serve()
    assert list(box.failed()) == ["r"] and box.crashes == 2
    box.assert_idle()


def test_a_worker_that_dies_once_fails_nobody() -> None:
    box = DeadlyBox(lambda one, plan: one.crashes == 0 and plan.step == 4, True)
    fill(box, 12)
    box.serve()
    assert box.crashes == 1 and not box.failed() and box.trials > 0
    box.assert_others_right("")
    assert not box.core._suspects and not box.core._suspects.on_trial


def test_crashes_with_progress_between_them_are_not_added_up() -> None:
    """Alone both times, but the second time after it was cleared."""
    box = DeadlyBox(lambda one, plan: one.rows(plan) == [("r", (2, 9)[min(one.crashes, 1)])] and one.crashes < 2, True)
    box.submit(request("r", 5, 14))
    box.serve()
    assert box.crashes == 2 and not box.failed()
    box.assert_tokens_right()


def test_newcomers_wait_only_for_the_trials() -> None:
    """Nobody runs beside a suspect; who came meanwhile runs right after, suspects that do not come back stop nobody."""
    box = DeadlyBox(in_batch("r1"), True)
    fill(box, 4)
    for _ in range(3):
        box.round("w0")
    box.lost.remove("r2")  # its gateway is gone
    box.submit(request("new", 4, 3, seed=77, arrival_ns=99))
    box.serve()
    assert list(box.failed()) == ["r1"]
    assert box.delivered["new", 0] == expected_tokens(prompt_of("new", 4), 77, 3, VOCAB)
    assert "r2" in box.core._suspects
    box.now += LIMITS.tombstone_ns + 1
    box.core.tick(box.now)
    assert not box.core._suspects


def test_a_suspect_that_does_not_fit_waits_like_everybody() -> None:
    small = Limits(max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_limit=32, growth_aware_admission=False)
    box = DeadlyBox(lambda one, plan: one.crashes == 0 and plan.step == 3, True, small, num_blocks=16, block_size=4)
    for index in range(2):
        box.submit(request(f"r{index}", 24, 8, seed=index, arrival_ns=index))
    for _ in range(3):
        box.round("w0")
    assert box.crashes == 1
    for index in range(3):
        box.submit(request(f"late{index}", 20, 20, seed=9 + index, arrival_ns=50 + index))
    for _ in range(4):
        box.beat("w0")
        box.round("w0")
    box.serve()
    assert not box.failed()
    box.assert_others_right("")


def test_why_a_suspect_waits_is_told() -> None:
    box = DeadlyBox(lambda one, plan: one.crashes == 0 and plan.step == 3, True)
    fill(box, 6)
    box.serve()
    causes = {lack for one in box.core.sequences_of("r5") for _, lack, _ in one.causes}
    assert Lack.SUSPECT in causes


def test_different_workers_try_different_groups_at_once() -> None:
    box = DeadlyBox(lambda one, plan: one.crashes == 0 and plan.worker == "w0" and plan.step == 4, True, workers=2)
    fill(box, 16)
    both = 0
    for _ in range(400):
        for worker in box.wires:
            if not box.knows(worker):
                box.beat(worker)
            box.round(worker)
        both += len(box.core._suspects.on_trial) == 2
        box.resume()
        if not box.core.live_requests() and not box.lost:
            break
    assert both and not box.failed()
    box.assert_others_right("")


def test_a_loss_that_nobody_can_have_caused_makes_no_suspects() -> None:
    box = DeadlyBox(lambda one, plan: False, True)
    fill(box, 6)
    for _ in range(3):
        box.round("w0")
    box.lose("w0", suspect=False)
    assert not box.core._suspects
    box.observe()
    box.serve()
    assert box.trials == 0
    box.assert_others_right("")


@pytest.mark.parametrize("pool_blocks", [14, 20, 40])
@pytest.mark.parametrize("caching", [False, True])
def test_trials_end_in_tight_memory(pool_blocks: int, caching: bool) -> None:
    tight = Limits(
        max_num_seqs=6, max_num_batched_tokens=32, prefill_chunk_limit=16, growth_aware_admission=False,
        admission_watermark=0.0, enable_prefix_caching=caching,
    )  # fmt: skip
    box = DeadlyBox(in_batch("r4"), True, tight, num_blocks=pool_blocks, block_size=4)
    for index in range(9):
        box.submit(request(f"r{index}", 5 + 3 * index, 20, seed=index, n=1 + index % 3, arrival_ns=index))
    box.serve(5000)
    assert list(box.failed()) == ["r4"]
    assert box.crashes <= most_crashes(6) + 1
    box.assert_others_right("r4")


def test_the_same_crashes_give_the_same_plans() -> None:
    runs = []
    for _ in range(2):
        box = DeadlyBox(in_batch("r3"), True)
        fill(box, 9)
        box.serve()
        runs.append([encode(plan) for plan in box.plans])
    assert runs[0] == runs[1]


def test_a_trial_goes_to_another_worker_when_its_own_takes_no_prompts_any_more() -> None:
    box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=8), workers=0)
    cap = capacity(transfer=["box://x/key"])
    box.add_worker("w0", cap)
    box.submit(request("bad"))
    box.plan("w0")
    box.events += box.core.worker_lost("w0", "it crashed", box.now)
    box.add_worker("w0", cap, 2)
    box.submit(request("beside", 5, 2, arrival_ns=1))
    box.plan("w0")
    box.apply(box.execute("w0"))
    box.submit(request("bad", attempt=2))
    box.plan("w0")
    assert box.core.workers["w0"].trial and len(box.core.workers["w0"].running) == 1
    box.add_worker("w1", msgspec.structs.replace(cap, role=Role.PREFILL))
    box.events += box.core.set_role("w0", Role.DECODE, box.now)
    box.apply(box.execute("w0"))
    box.run(200)
    assert box.ends == {("beside", 0): "length", ("bad", 0): "length"}
    box.assert_tokens_right()


def test_what_was_lost_is_known_to_be_lost_for_as_long_as_it_may_come_back() -> None:
    """Of other requests only the ids are kept; a suspect that was seen to end as it should would be cleared."""
    box = Box()
    box.submit(request("r", max_tokens=60))
    box.step()
    box.core.worker_lost("w0", "gone", box.now)
    box.now += KEPT_WHOLE_NS + MS
    box.core.tick(box.now)
    (sequence,) = box.core.sequences_of("r")
    assert sequence.end_reason == EndReason.FAILED.value and not sequence.tokens and "r" in box.core._suspects
