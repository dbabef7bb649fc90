"""Each step once, in order, of the newest epoch."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.messages import Need, Reset, StepPlan
from worker.ledger import KEPT_RESULTS, StepLedger, Verdict


def plan(step: int, epoch: int = 1, worker: str = "w", incarnation: int = 7) -> StepPlan:
    return StepPlan(epoch, worker, incarnation, step)


def started(epoch: int = 1) -> StepLedger:
    ledger = StepLedger("w", 7)
    assert ledger.offer(Reset(epoch, "w", 7, 1)).reset
    return ledger


def test_plans_in_order_are_executed() -> None:
    ledger = started()
    for step in (1, 2, 3):
        verdict = ledger.offer(plan(step))
        assert verdict.execute is not None and verdict.execute.step == step


def test_a_gap_asks_for_the_missing_step() -> None:
    ledger = started()
    ledger.offer(plan(1))
    verdict = ledger.offer(plan(3))
    assert verdict.execute is None and verdict.need == Need(1, "w", 7, 2)
    assert ledger.offer(plan(2)).execute is not None
    assert ledger.offer(plan(3)).execute is not None


def test_a_plan_again_gets_its_result_again() -> None:
    ledger = started()
    ledger.offer(plan(1))
    assert ledger.offer(plan(1)).resend is None  # still being executed: the result will come
    ledger.record(plan(1), b"one")
    verdict = ledger.offer(plan(1))
    assert verdict.resend == b"one" and verdict.execute is None


def test_only_the_last_results_are_kept() -> None:
    ledger = started()
    for step in range(1, KEPT_RESULTS + 3):
        ledger.offer(plan(step))
        ledger.record(plan(step), b"%d" % step)
    assert ledger.offer(plan(1)).resend is None
    assert ledger.offer(plan(KEPT_RESULTS + 2)).resend is not None


def test_older_epochs_other_workers_and_other_incarnations_are_stale() -> None:
    ledger = started(epoch=5)
    assert ledger.offer(plan(1, epoch=4)).stale
    assert ledger.offer(plan(1, epoch=5, worker="x")).stale
    assert ledger.offer(plan(1, epoch=5, incarnation=8)).stale
    assert ledger.offer(Reset(4, "w", 7, 1)).stale
    assert ledger.offer(plan(1, epoch=5)).execute is not None


def test_a_new_epoch_starts_over_and_fences_queued_plans() -> None:
    ledger = started()
    queued = plan(1)
    ledger.offer(queued)
    assert ledger.current(queued)
    assert ledger.offer(Reset(2, "w", 7, 1)).reset
    assert not ledger.current(queued)
    ledger.record(queued, b"late")
    assert ledger.offer(plan(1, epoch=2)).execute is not None
    assert ledger.offer(plan(1, epoch=2)).resend is None  # the old epoch's result is not this one's


def test_a_reset_that_comes_again_does_not_empty_the_batch_that_it_began() -> None:
    ledger = started()
    assert ledger.offer(Reset(2, "w", 7, 5)).reset
    assert ledger.offer(Reset(2, "w", 7, 5)).reset  # its answer may be lost: it is given again
    assert ledger.offer(plan(5, epoch=2)).execute is not None
    assert ledger.offer(Reset(2, "w", 7, 5)) == Verdict()
    assert ledger.offer(plan(6, epoch=2)).execute is not None
    assert ledger.offer(Reset(2, "w", 7, 9)).reset


def test_the_reset_of_an_earlier_batch_that_comes_late_is_stale() -> None:
    ledger = started(epoch=2)
    ledger.offer(Reset(2, "w", 7, 9))
    assert ledger.offer(Reset(2, "w", 7, 1)).stale
    assert ledger.offer(plan(9, epoch=2)).execute is not None


def test_a_plan_of_a_new_leader_whose_reset_was_lost_asks_for_it_and_fences_the_old_one() -> None:
    ledger = started()
    queued = plan(1)
    ledger.offer(queued)
    for step in (1, 4):
        verdict = ledger.offer(plan(step, epoch=2))
        assert verdict.execute is None and not verdict.reset and verdict.need == Need(2, "w", 7, 0)
    assert not ledger.current(queued)
    assert ledger.offer(plan(2)).stale
    assert ledger.offer(Reset(2, "w", 7, 1)).reset
    assert ledger.offer(plan(1, epoch=2)).execute is not None


def test_nothing_runs_before_the_first_reset() -> None:
    assert StepLedger("w", 7).offer(plan(1)).need == Need(1, "w", 7, 0)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.booleans()), max_size=40))
def test_whatever_comes_each_step_of_an_epoch_runs_once_and_in_order(ops: list[tuple[int, int, bool]]) -> None:
    ledger = StepLedger("w", 7)
    ran: list[tuple[int, int]] = []
    for epoch, step, is_reset in ops:
        verdict = ledger.offer(Reset(epoch, "w", 7, 1) if is_reset and epoch > ledger.epoch else plan(step, epoch))
        if verdict.execute is not None:
            ran.append((verdict.execute.epoch, verdict.execute.step))
    assert ran == sorted(set(ran))
    for (epoch, step), (next_epoch, next_step) in itertools.pairwise(ran):
        assert next_step == step + 1 if next_epoch == epoch else next_step == 1
    assert all(any(is_reset and epoch == began for began, _, is_reset in ops) for epoch, _ in ran)
