"""Resumes: let in whatever the queue holds, exact whatever was lost, and moved off workers that stop."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from mesh_in_a_box import EOS, MS, VOCAB, Box, capacity, prompt_of, request

from scheduler.core.events import Failed
from scheduler.core.limits import Limits
from shared.messages import Outcome, StepPlan, StepResult, Submit, pack_tokens
from shared.pool_name import DEFAULT_POOL
from worker.simulated import expected_tokens


def again(submit: Submit, tokens: list[list[int]], done: list[int] | None = None) -> Submit:
    return msgspec.structs.replace(
        submit, attempt=submit.attempt + 1, resumed=[pack_tokens(one) for one in tokens], done_choices=done or []
    )


def wanted(submit: Submit, choice: int = 0) -> list[int]:
    prompt = prompt_of(submit.request_id, len(submit.prompt) // 4)
    return expected_tokens(prompt, submit.sampling.seed, submit.sampling.max_tokens, VOCAB, choice)


# --- whom the queue takes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_num_queued_reqs": 3}, {"max_num_queued_tokens": 40}])
def test_a_resume_enters_a_full_queue_and_takes_its_old_place(limit: dict[str, int]) -> None:
    box = Box(Limits(max_num_seqs=1, max_num_batched_tokens=16, **limit))  # type: ignore[arg-type]
    first = request("first", arrival_ns=1)
    index = 0
    while box.submit(request(f"r{index}", arrival_ns=10 + index)).outcome is Outcome.ACCEPTED:
        index += 1
    assert box.submit(first).outcome is Outcome.QUEUE_FULL
    reply = box.submit(again(first, [wanted(first)[:2]]))
    assert (reply.outcome, reply.queue_position) == (Outcome.ACCEPTED, 0)


def test_two_thousand_resumes_enter_a_queue_of_sixteen() -> None:
    box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=16, max_num_queued_reqs=16))
    for index in range(2000):
        reply = box.submit(again(request(f"r{index}", 3, 4, arrival_ns=index), []))
        assert reply.outcome is Outcome.ACCEPTED
    assert box.submit(request("new", arrival_ns=0)).outcome is Outcome.QUEUE_FULL
    assert [one.request_id for one in box.core.queues["m", DEFAULT_POOL].order(0)][:3] == ["r0", "r1", "r2"]


def test_a_resume_is_not_measured_against_its_deadline_like_a_newcomer() -> None:
    box = Box(Limits(max_num_seqs=1, max_num_batched_tokens=16))
    box.submit(request("r", 40, 40))
    box.run()  # steps are measured now
    late = request("late", 40, 40)
    soon = box.now + 2 * MS
    assert box.submit(late, soon).outcome is Outcome.DEADLINE
    assert box.submit(again(late, []), soon).outcome is Outcome.ACCEPTED


# --- from any point -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has", range(7))
def test_a_choice_resumes_from_any_number_of_tokens_and_ends_with_a_terminal_entry(has: int) -> None:
    """With max_tokens of them the last is computed again: its entry has the end, and an offset that is known."""
    submit = request("r", 5, 6)
    want = wanted(submit)
    box = Box()
    box.delivered["r", 0] = want[: min(has, 5)]
    assert box.submit(again(submit, [want[:has]])).outcome is Outcome.ACCEPTED
    box.run()
    assert box.delivered["r", 0] == want and box.ends["r", 0] == "length"


def test_a_choice_whose_last_token_ends_it_computes_that_one_again() -> None:
    seed, place = next(
        (seed, tokens.index(EOS))
        for seed in range(10_000)
        if EOS in (tokens := expected_tokens(prompt_of("r", 5), seed, 8, VOCAB))[1:]
    )
    submit = request("r", 5, 12, seed=seed, ignore_eos=False)
    want = wanted(submit)[: place + 1]
    box = Box()
    box.delivered["r", 0] = want[:-1]
    box.submit(again(submit, [want]))
    box.run()
    assert box.delivered["r", 0] == want and box.ends["r", 0] == "stop"


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    submit = request("r", 5, 6)
    assert Box().submit(again(submit, [[*wanted(submit), 1]])).outcome is Outcome.INVALID


def test_finished_choices_stay_finished() -> None:
    submit = request("r", 5, 6, n=3)
    box = Box()
    box.delivered["r", 1] = wanted(submit, 1)[:3]
    box.delivered["r", 2] = []
    box.submit(again(submit, [[], wanted(submit, 1)[:3], []], [0]))
    box.run()
    assert sorted(box.ends) == [("r", 1), ("r", 2)]
    box.assert_tokens_right()


def test_a_request_with_every_choice_done_ends_at_once() -> None:
    box = Box()
    assert box.submit(again(request("r", n=2), [[], []], [0, 1])).outcome is Outcome.ACCEPTED
    assert not box.core.live_requests()


# --- scores ---------------------------------------------------------------------------------------------------------


class ScoredBox(Box):
    """Adds up what entries say, as gateways do."""

    def __init__(self, limits: Limits, **cap: int) -> None:
        self.scores: dict[tuple[str, int], float] = {}
        super().__init__(limits, "continuous", 1, **cap)

    def run_plan(self, plan: StepPlan) -> StepResult:
        batch = self.batches[plan.worker]
        settle = batch.settle

        def watched(*args: object) -> object:
            settled = settle(*args)  # type: ignore[arg-type]
            for _, entry in settled.entries:
                key = (entry.request_id, entry.choice)
                self.scores[key] = self.scores.get(key, 0.0) + entry.log_prob
            return settled

        batch.settle = watched  # type: ignore[method-assign, assignment]
        try:
            return super().run_plan(plan)
        finally:
            batch.settle = settle  # type: ignore[method-assign]


def scored(index: int) -> Submit:
    submit = request(f"r{index}", 6, 14, n=4, seed=index, arrival_ns=index)
    return msgspec.structs.replace(submit, sampling=msgspec.structs.replace(submit.sampling, want_score=True))


def test_a_preempted_best_of_ranks_as_the_undisturbed_one() -> None:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=32, prefill_chunk_limit=8, growth_aware_admission=False)
    boxes = ScoredBox(limits, num_blocks=200), ScoredBox(limits, num_blocks=14)
    for box in boxes:
        for index in range(2):
            box.submit(scored(index))
        box.run()
    calm, tight = boxes
    assert tight.core.counters.preemptions > 0 and not calm.core.counters.preemptions
    assert len(calm.scores) == 8 and len(set(calm.scores.values())) == 8
    assert tight.scores == pytest.approx(calm.scores)


# --- off a worker that stops ----------------------------------------------------------------------------------------

TIGHT = Limits(max_num_seqs=6, max_num_batched_tokens=24, prefill_chunk_limit=8, growth_aware_admission=False)


def moved(box: Box, worker: str) -> list[tuple[str, int]]:
    box.core.worker_draining(worker)
    events = box.core.hand_over(worker, box.now)
    box.events += events
    box.core.check()
    assert all(isinstance(event, Failed) and event.kind == "moved" for event in events)
    return [(event.sequence.request_id, event.sequence.choice) for event in events if isinstance(event, Failed)]


def some_steps(box: Box, steps: int) -> None:
    for _ in range(steps):
        box.step("w0")


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("beams", [0, 3])
def test_what_runs_moves_whatever_it_is_about_and_its_tokens_stay_right(steps: int, beams: int) -> None:
    """Choices that have forked and those that have not, beams, what was preempted and what is settling."""
    box = Box(TIGHT, num_blocks=24, block_size=4, host_blocks=12)
    for index in range(4):
        box.submit(request(f"r{index}", 9, 10, n=1 + index % 3, seed=index, arrival_ns=index,
                           beams=beams if index == 1 else 0))  # fmt: skip
    some_steps(box, steps)
    running = {(one.request_id, one.choice) for one in box.core.workers["w0"].sequences()}
    box.add_worker("w1", capacity(24, 4, host_blocks=12))
    gone = moved(box, "w0")
    assert {request_id for request_id, _ in gone} == {request_id for request_id, _ in running}
    assert not list(box.core.workers["w0"].sequences()) and len(set(gone)) == len(gone)
    assert box.core.hand_over("w0", box.now) == []
    for request_id in sorted({request_id for request_id, _ in gone}):
        submit = box.submits[request_id]
        done = [choice for choice in range(submit.n) if (request_id, choice) in box.ends]
        has = [] if submit.sampling.beam_width else [box.delivered.get((request_id, c), []) for c in range(submit.n)]
        box.submit(again(submit, has, done))
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


def test_what_no_other_worker_can_hold_stays_and_ends_here() -> None:
    box = Box(TIGHT, num_blocks=40, max_model_len=160)
    box.submit(request("long", 60, 40))
    box.submit(request("short", 5, 12, arrival_ns=1))
    some_steps(box, 10)
    box.add_worker("w1", capacity(8, 4, 32))
    assert moved(box, "w0") == [("short", 0)]
    box.run()
    assert box.ends["long", 0] == "length"


@pytest.mark.parametrize("stop", [lambda box: None, lambda box: box.add_worker("w1", capacity(64))])
def test_nothing_moves_unless_its_worker_stops_and_another_serves(stop: Callable[[Box], None]) -> None:
    box = Box(TIGHT)
    box.submit(request("r", 5, 12))
    some_steps(box, 2)
    stop(box)
    if len(box.core.workers) > 1:
        assert box.core.hand_over("w0", box.now) == []  # it is not draining
    else:
        assert moved(box, "w0") == []
    assert box.core.hand_over("nobody", box.now) == []


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_held_batches_move_as_a_whole(policy: str) -> None:
    box = Box(TIGHT, policy=policy)
    for index in range(3):
        box.submit(request(f"r{index}", 5, 3 + 4 * index, seed=index, arrival_ns=index))
    box.now += 10**9
    some_steps(box, 5)
    assert box.core.workers["w0"].held, "one has ended and holds its slot"
    box.add_worker("w1", capacity(64))
    gone = moved(box, "w0")
    assert gone and not list(box.core.workers["w0"].sequences())
    for request_id, choice in gone:
        box.submit(again(box.submits[request_id], [box.delivered[request_id, choice]]))
    box.now += 10**9
    box.run()
    box.assert_tokens_right()
    box.assert_idle()
